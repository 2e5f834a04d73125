"""The entry point: the trial's class or function, in a form that reaches a worker in another process."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import types
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rubberband.errors import EntrypointError
from rubberband.executor.training.hooks import FIXED, accepts, fault_of, fault_of_class, has_own_step, lacks_loss
from rubberband.executor.training.runner import one_line
from rubberband.executor.training.torch_trial import TorchTrial
from rubberband.executor.training.trial import TrainFunction, Trial
from rubberband.installation import remedy_of, require_readable

Target = type[TorchTrial] | type[Trial] | TrainFunction
"""Target of an entry point."""

_MOST_PICKLED_BYTES = 50 * 10**6
"""The journal and every worker hold what is sent by value; as much as code may have."""
_WHAT_A_TRIAL_IS = (
    "a subclass of rubberband.TorchTrial or rubberband.Trial, or a function train(config): docs/write-a-trial.md"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrypoint:
    """The trial's class or function, by name, or by value if a worker cannot import it."""

    module: str
    attribute: str
    """May be dotted."""
    search_path: tuple[str, ...] = ()
    """Absolute folders, searched before `sys.path`."""
    pickled: bytes | None = None
    """The object itself, by cloudpickle, if it is defined in `__main__`, a notebook or a function."""

    def __post_init__(self) -> None:
        require_readable(*self.search_path)

    @classmethod
    def parse(cls, text: str, search_path: Iterable[str | os.PathLike[str]] = ()) -> Entrypoint:
        """Parse `module:attribute`, as in the experiment file, without importing it. Raises EntrypointError."""
        module, separator, attribute = text.strip().partition(":")
        names = [*module.split("."), *attribute.split(".")]
        if not separator or not all(name.isidentifier() for name in names):
            raise EntrypointError(f"entrypoint {text!r} is not module:attribute, such as examples.digits:DigitsTrial")
        return cls(module=module, attribute=attribute, search_path=tuple(os.path.abspath(path) for path in search_path))

    @classmethod
    def from_object(cls, target: Target) -> Entrypoint:
        """Make it from a class or function: by name if a worker can import it, otherwise by value.

        Raises EntrypointError if it is no trial, cannot be pickled, or is too large for that.
        """
        _check_target(target, _name(target))
        module, attribute = target.__module__, target.__qualname__
        search_path = _search_path_of(module)
        if module != "__main__" and "<" not in attribute and search_path:
            return cls(module=module, attribute=attribute, search_path=search_path)
        import cloudpickle

        try:
            pickled = cloudpickle.dumps(target)
        except Exception as error:
            raise EntrypointError(
                f"{_name(target)} cannot be sent to the workers ({one_line(error)}); put it into a module of its own"
            ) from error
        if len(pickled) > _MOST_PICKLED_BYTES:
            raise EntrypointError(
                f"{_name(target)} takes {len(pickled) / 1e6:.0f} MB of data with it to the workers, more than "
                f"{_MOST_PICKLED_BYTES / 1e6:.0f}; load the data within it"
            )
        if module == "__main__" or not search_path:
            search_path = _script_folder()
        return cls(module=module, attribute=attribute, search_path=search_path, pickled=pickled)

    def load(self) -> Target:
        """Import the target; the search path stays on `sys.path`, for later imports. Raises EntrypointError."""
        sys.path[:0] = [folder for folder in self.search_path if folder not in sys.path]
        importlib.invalidate_caches()
        target = self._import() if self.pickled is None else self._unpickle(self.pickled)
        return _check_target(target, str(self))

    def check(self, max_gpus_per_trial: int, *, adaptive: bool = False, asynchronous: bool = False) -> None:
        """Raise EntrypointError if it cannot be loaded, run on `max_gpus_per_trial` GPUs, or trained as is asked."""
        target = self.load()
        if asynchronous:
            self._check_asynchronous(target)
        if adaptive and not (isinstance(target, type) and issubclass(target, TorchTrial)):
            kind = "rubberband.Trial" if isinstance(target, type) else "function"
            raise EntrypointError(
                f"{self} is a {kind}, whose training loop cannot be adapted from outside (batch.policy: goodput); "
                "write a rubberband.TorchTrial, or set batch.policy to fixed"
            )
        if adaptive and isinstance(target, type) and issubclass(target, TorchTrial) and has_own_step(target):
            raise EntrypointError(f"{self} {FIXED}")
        if not isinstance(target, type) and max_gpus_per_trial > 1:
            raise EntrypointError(
                f"{self} is a function, which trains in one process, but resources.gpus_per_trial.max is "
                f"{max_gpus_per_trial}; set it to 1, or write a rubberband.TorchTrial"
            )

    def _check_asynchronous(self, target: Target) -> None:
        if not (isinstance(target, type) and issubclass(target, TorchTrial)):
            kind = "rubberband.Trial" if isinstance(target, type) else "function"
            raise EntrypointError(
                f"{self} is a {kind}, whose gradients are not known from outside (training.mode: async); write a "
                "rubberband.TorchTrial, or set training.mode to sync"
            )
        if (asynchronous_fault := fault_of_class(target)) is not None:
            raise EntrypointError(f"{self} {asynchronous_fault}")

    def __str__(self) -> str:
        return f"{self.module}:{self.attribute}"

    def _import(self) -> Any:
        try:
            found: Any = importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{self.module}.".startswith(f"{error.name}."):
                raise self._broken(error) from error
            searched = ", ".join([*self.search_path, *(folder or os.getcwd() for folder in sys.path)][:6])
            raise EntrypointError(f"entrypoint {self}: no module {error.name!r} in {searched}, …") from error
        except (Exception, SystemExit) as error:
            raise self._broken(error) from error
        for name in self.attribute.split("."):
            if not hasattr(found, name):
                raise EntrypointError(self._missing(name, found))
            found = getattr(found, name)
        return found

    def _unpickle(self, pickled: bytes) -> Any:
        import cloudpickle

        try:
            return cloudpickle.loads(pickled)
        except Exception as error:
            raise self._broken(error) from error

    def _broken(self, error: BaseException) -> EntrypointError:
        remedy = remedy_of(error)
        hint = "" if remedy is None else f"; run {remedy}"
        return EntrypointError(f"entrypoint {self} cannot be imported: {one_line(error)}{hint}")

    def _missing(self, name: str, owner: Any) -> str:
        public = [other for other in dir(owner) if not other.startswith("_")]
        nearest = difflib.get_close_matches(name, public, n=1, cutoff=0.5)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        place = getattr(owner, "__file__", None) or self.module
        return f"entrypoint {self}: {place} has no {name!r}{hint}"


def _check_target(target: Any, name: str) -> Target:
    """Return the target.

    Raises EntrypointError unless it is a trial that can be made without arguments, or a function of a configuration.
    """
    if isinstance(target, type) and issubclass(target, (TorchTrial, Trial)):
        lacking = sorted([*getattr(target, "__abstractmethods__", ()), *(["loss"] if lacks_loss(target) else [])])
        if lacking:
            raise EntrypointError(f"{name} lacks {', '.join(f'{method}()' for method in lacking)}")
        if not accepts(target, 0):
            raise EntrypointError(f"{name} must be made without arguments; read the configuration in its methods")
        fault = fault_of(target) if issubclass(target, TorchTrial) else None
        if fault is not None:
            raise EntrypointError(f"{name}: {fault}")
    elif isinstance(target, type) or not callable(target):
        is_what = "a class of another kind" if isinstance(target, type) else f"of type {type(target).__name__}"
        raise EntrypointError(f"{name} is {is_what}; a trial is {_WHAT_A_TRIAL_IS}")
    elif not isinstance(target, types.FunctionType) or not accepts(target, 1):
        raise EntrypointError(f"{name} is not a function of one argument; a trial is {_WHAT_A_TRIAL_IS}")
    return cast("Target", target)


def _name(target: Any) -> str:
    module, qualname = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    return f"{module}:{qualname}" if module and qualname else repr(target)


def _search_path_of(module: str) -> tuple[str, ...]:
    """Return the folder from which `module` was imported, and the script's; empty without a file."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return ()
    path = Path(os.path.abspath(file))
    depth = len(module.split(".")) - (path.name != "__init__.py")
    return (str(path.parents[depth]), *_script_folder())


def _script_folder() -> tuple[str, ...]:
    """Return the folder of the driver's own modules: the script's, or else the current one; empty if it is not used.

    It is not always the first of `sys.path`: Ray, once imported, puts folders of its own there.
    """
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    is_script = file is not None and getattr(main, "__spec__", None) is None
    folder = os.path.dirname(os.path.abspath(file)) if is_script and file is not None else os.getcwd()
    return (folder,) if folder in map(os.path.abspath, sys.path) else ()
