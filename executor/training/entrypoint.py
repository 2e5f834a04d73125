"""The entry point: the trial's class or function, in a form that reaches another process; and its content."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, cast

import rubberband
from rubberband.errors import EntrypointError
from rubberband.executor.training.distributed import distributed, is_distributed
from rubberband.executor.training.failures import one_line
from rubberband.executor.training.kinds import kind_of
from rubberband.executor.training.torch_trial import (
    ASYNC_REFUSAL,
    DIVIDED,
    FIXED,
    TorchTrial,
    accepts,
    fault_of,
    has_override,
    lacks_loss,
)
from rubberband.executor.training.trial import TrainFunction, Trial
from rubberband.features import part
from rubberband.installation import remedy_of, require_readable
from rubberband.units import did_you_mean
from rubberband.values.command import ProgramCommand
from rubberband.values.environment import Environment

if TYPE_CHECKING:
    from rubberband.spec.experiment import Experiment
    from rubberband.values.memory import TrialMemory

Code = type[TorchTrial] | type[Trial] | TrainFunction
Target = Code | ProgramCommand

_MOST_PICKLED_BYTES = 50 * 10**6
"""The journal and every worker hold what is sent by value; as much as code may have."""
_WHAT_A_TRIAL_IS = (
    "a subclass of rubberband.TorchTrial or rubberband.Trial, or a function train(config): docs/write-a-trial.md"
)


class NotHereError(EntrypointError):
    """The path of a command's program is not on this machine; it may be on another."""


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
    command: ProgramCommand | None = None
    """The program that is run in place of a class or function; `module` is empty then."""
    environment: Environment = field(default_factory=Environment, compare=False)
    """Variables of the processes that load it. Not in the journal, which has the experiment's words."""

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
    def from_object(cls, target: Code) -> Entrypoint:
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
        """Import the target; the search path stays on `sys.path`, for later imports. Raises EntrypointError.

        Its module finds no arguments: this process's own ones are none of the trial's.
        """
        if self.command is not None:
            return self.command
        sys.path[:0] = [folder for folder in self.search_path if folder not in sys.path]
        importlib.invalidate_caches()
        arguments, sys.argv = sys.argv, sys.argv[:1]
        try:
            target = self._import() if self.pickled is None else self._unpickle(self.pickled)
        finally:
            sys.argv = arguments
        return _check_target(target, str(self))

    def check(
        self, max_gpus_per_trial: int, *, adaptive: bool = False, asynchronous: bool = False, elsewhere: bool = False
    ) -> None:
        """Raise EntrypointError if it cannot be loaded, run on `max_gpus_per_trial` GPUs, or trained as is asked.

        `elsewhere`: it runs on other machines, which may have a program whose path is not here.
        """
        try:
            with self.environment.within():
                target = self.load()
        except EntrypointError as error:
            error.args = (self.environment.masked(str(error)),)
            raise
        if isinstance(target, ProgramCommand):
            with suppress(NotHereError) if elsewhere else nullcontext():
                self._check_program(target)
        if adaptive or asynchronous:
            self._check_loop(target, adaptive=adaptive)
        if isinstance(target, ProgramCommand):
            return
        if not isinstance(target, type) and max_gpus_per_trial > 1 and not is_distributed(target):
            raise EntrypointError(
                f"{self} is a function, which trains in one process, but resources.gpus_per_trial.max is "
                f"{max_gpus_per_trial}; set it to 1, or write @rubberband.distributed above it, and train as under "
                "torchrun"
            )

    def _check_loop(self, target: Target, *, adaptive: bool) -> None:
        """Raise EntrypointError if its loop cannot be changed: to adaptive batches, or else to parameter servers."""
        if not (isinstance(target, type) and issubclass(target, TorchTrial)):
            key = "batch.policy: goodput" if adaptive else "training.mode: async"
            raise EntrypointError(
                f"{self} is a {kind_of(target).name}, whose training loop cannot be changed from outside; leave out "
                f"{key}, or write a rubberband.TorchTrial"
            )
        if adaptive and has_override(target, "step"):
            raise EntrypointError(f"{self} {FIXED}")
        if target.sharding is not None:
            raise EntrypointError(f"{self} has {DIVIDED[adaptive]}")
        for name in () if adaptive else ("step", "on_step"):
            if has_override(target, name):
                raise EntrypointError(f"{self} overrides {name}(), which {ASYNC_REFUSAL}")

    def _check_program(self, command: ProgramCommand) -> None:
        folder = self.search_path[0]
        for word in command.words:
            is_script = word.endswith((".py", ".sh")) and not word.startswith(("-", "/")) and "$" not in word
            if is_script and " " not in word and not os.path.exists(os.path.join(folder, word)):
                raise EntrypointError(f"entrypoint.command: there is no {word} in {folder}, where commands run")
        program = command.words[0]
        place = folder if "/" in program and not os.path.isabs(program) else None
        if "$" not in program and shutil.which(program, path=place) is None:
            error = NotHereError if os.path.isabs(program) else EntrypointError
            raise error(f"entrypoint.command: {program} is not here; install it, or give its path")

    def __str__(self) -> str:
        if self.command is not None:
            return str(self.command)
        return f"{self.module}:{self.attribute}"

    def _import(self) -> Any:
        try:
            found: Any = importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{self.module}.".startswith(f"{error.name}."):
                raise self._broken(error) from error
            raise EntrypointError(self._no_module(str(error.name))) from error
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

    def _no_module(self, name: str) -> str:
        folders = list(dict.fromkeys([*self.search_path, os.getcwd()]))
        package, _, last = name.rpartition(".")
        beside = [os.path.join(folder, *package.split(".")) if package else folder for folder in folders]
        files = [file.removesuffix(".py") for folder in beside if os.path.isdir(folder) for file in os.listdir(folder)]
        close = did_you_mean(last, filter(str.isidentifier, files))
        remedy = close or "; start in the folder that has it, or put it beside the experiment file"
        return f"entrypoint {self}: no module {name!r} in {', '.join(folders)}{remedy}"

    def _missing(self, name: str, owner: Any) -> str:
        public = {other: value for other, value in vars(owner).items() if not other.startswith("_")}
        own = [other for other, value in public.items() if getattr(value, "__module__", None) == self.module]
        has = f"; it has {', '.join(own[:9])}" if own else ""
        place = getattr(owner, "__file__", None) or self.module
        return f"entrypoint {self}: {place} has no {name!r}{did_you_mean(name, public) or has}"


def _check_target(target: Any, name: str) -> Target:
    """Return the target.

    Raises EntrypointError unless it is a trial that can be made without arguments, or a function of a configuration.
    """
    if isinstance(target, type) and issubclass(target, (TorchTrial, Trial)):
        lacking = sorted([*getattr(target, "__abstractmethods__", ()), *(["loss"] if lacks_loss(target) else [])])
        if lacking:
            raise EntrypointError(f"{name} lacks {', '.join(f'{method}()' for method in lacking)}; write each of them")
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


# The content of an entry point: the source that it is made of, and the packages that this imports. Findings about a
# trial (that it works, how fast it is) are kept by this content, so that a change of the code is seen. Nothing is
# imported here: the modules are found and their import statements read. Data files are not looked at.


def digest(*parts: Any) -> str:
    """Return the digest of JSON values, in any order of their keys."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def content_of(entrypoint: Entrypoint) -> Mapping[str, str] | None:
    """Return module -> digest of its source, for the user's own, and package -> version, for those that they import.

    None if that does not say what the trial is: it is defined in a notebook or in a function, or cannot be found. The
    content of a program is its command, and the files that this names with what they import; None if it names no file.
    """
    if entrypoint.command is not None:
        program = _walk_program(entrypoint, entrypoint.command, {})
        command = json.dumps(asdict(entrypoint.command))
        return program | {"command": command, "rubberband": rubberband.__version__} if program else None
    first = _first_file(entrypoint)
    if "<" in entrypoint.attribute or first is None:
        return None
    found = {"python": ".".join(map(str, sys.version_info[:2])), "rubberband": rubberband.__version__}
    return found | _walk(entrypoint.module, first, _Places(entrypoint.search_path), {})


def has_sets(entrypoint: Entrypoint) -> bool:
    """Whether its own source may depend on the order of a set, or on hash(); True if that is not known."""
    files: dict[str, str] = {}
    first = _first_file(entrypoint)
    if "<" in entrypoint.attribute or first is None:
        return True
    _walk(entrypoint.module, first, _Places(entrypoint.search_path), files)
    return any(_makes_sets(Path(file)) for file in files)


def _makes_sets(path: Path) -> bool:
    try:
        nodes = [*ast.walk(ast.parse(path.read_bytes()))]
    except (OSError, SyntaxError, ValueError):
        return True
    tests = {  # `x in {1, 2}` has no order
        id(other)
        for node in nodes
        if isinstance(node, ast.Compare) and all(isinstance(each, ast.In | ast.NotIn) for each in node.ops)
        for other in node.comparators
    }
    return any(
        (isinstance(node, ast.Set | ast.SetComp) and id(node) not in tests)
        or (isinstance(node, ast.Name) and node.id in ("set", "frozenset", "hash"))
        or (isinstance(node, ast.BinOp) and any(map(_is_view, (node.left, node.right))))
        for node in nodes
    )


def _is_view(node: ast.expr) -> bool:
    """Whether it is a call of keys() or items(), whose intersections and unions are sets."""
    function = node.func if isinstance(node, ast.Call) else None
    return isinstance(function, ast.Attribute) and function.attr in ("keys", "items")


def _walk_program(entrypoint: Entrypoint, command: ProgramCommand, files: dict[str, str]) -> dict[str, str]:
    """Return the content of the files that a command names; put the digests of the files into `files`."""
    found: dict[str, str] = {}
    for path in files_named(command.words, Path(entrypoint.search_path[0])):
        if path.suffix == ".py":
            found |= _walk(path.stem, path, _Places((str(path.parent), *entrypoint.search_path)), files)
        else:
            found[path.name] = files[str(path.absolute())] = _digest_of(path)
    return found


def files_named(words: Sequence[str], folder: Path) -> list[Path]:
    """Return the files below the folder that a command line names, as paths or as the module of `python -m`."""
    found = [path for word in words if "$" not in word and os.path.isfile(path := folder / word)]
    if not found and "-m" in words[:-1]:
        module = words[words.index("-m") + 1].replace(".", "/")
        found = [path for path in (folder / f"{module}.py", folder / module / "__main__.py") if path.is_file()][:1]
    return found


def entrypoint_of(experiment: Experiment, search_path: Sequence[str | os.PathLike[str]] = ()) -> Entrypoint:
    """Return the entry point that an experiment has, without its environment; a name is not imported."""
    from rubberband.spec.program import Program

    trial = experiment.entrypoint
    if isinstance(trial, Program):
        place = os.path.abspath(next(iter(search_path), os.getcwd()))
        return Entrypoint(module="", attribute="", search_path=(place,), command=trial.to_plain())
    if isinstance(trial, str):
        return Entrypoint.parse(trial, search_path=search_path or (os.getcwd(),))
    return Entrypoint.from_object(trial)


def with_trial(
    experiment: Experiment,
    search_path: Sequence[str | os.PathLike[str]] = (),
    *,
    memory: TrialMemory | str | None = None,
) -> Experiment:
    """Return the experiment as one of a function if its trial is one: then a trial has one GPU by default.

    Where its least gang is auto, the experiment also knows the memory of its trial's parameters: `memory`, or what is
    counted by running the trial's code.
    """
    trial = experiment.entrypoint
    if trial is None or experiment.resources.kind.is_simulated:
        found = False
    elif isinstance(trial, str):
        found = is_function(Entrypoint.parse(trial, search_path or (os.getcwd(),)))
    else:
        found = isinstance(trial, FunctionType) and not is_distributed(trial)
    if experiment.resources.gpus_per_trial.min == "auto":
        known = memory if memory is not None else part("memory")(experiment, search_path)
        experiment = experiment.with_memory(known)
    return experiment.of_function() if found else experiment


_MOST_IMPORTS = 8
"""Modules that may pass a trial on by their imports."""


def is_function(entrypoint: Entrypoint) -> bool:
    """Return whether its source says that it is a function of one worker; False where that is not said there."""
    path, module, name = _first_file(entrypoint), entrypoint.module, entrypoint.attribute
    places = _Places(entrypoint.search_path)
    for _ in range(_MOST_IMPORTS):
        if path is None:
            break
        bound = _bound(path, name)
        if not isinstance(bound, ast.ImportFrom):
            return isinstance(bound, ast.FunctionDef) and not any(map(_says_distributed, bound.decorator_list))
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        name = next(alias.name for alias in bound.names if name == (alias.asname or alias.name))
        module = _base(bound, package)
        path = places.file_of(module)
    return False


def _says_distributed(decorator: ast.expr) -> bool:
    name = decorator.attr if isinstance(decorator, ast.Attribute) else getattr(decorator, "id", "")
    return name == distributed.__name__


def _bound(path: Path, name: str) -> ast.stmt | None:
    """Return the last statement of a module that defines or imports a name, or assigns to it."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None

    def binds(node: ast.stmt) -> bool:
        match node:
            case ast.FunctionDef() | ast.ClassDef() | ast.AsyncFunctionDef():
                return node.name == name
            case ast.ImportFrom():
                return any(name == (alias.asname or alias.name) for alias in node.names)
            case ast.Assign():
                return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
        return False

    return next((node for node in reversed(tree.body) if binds(node)), None)


def _base(node: ast.ImportFrom, package: str) -> str:
    """Return the module that names are imported from, in a module of `package`."""
    above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
    return ".".join([*above, *([node.module] if node.module else [])])


def files_of(entrypoint: Entrypoint) -> dict[str, str]:
    """Return path -> digest of the user's files that it is made of, but for the one that it was pickled from.

    A resume takes those as they are then, and what was pickled as it was.
    """
    files = dict[str, str]()
    if entrypoint.command is not None:
        _walk_program(entrypoint, entrypoint.command, files)
    elif (first := _first_file(entrypoint)) is not None:
        _walk(entrypoint.module, first, _Places(entrypoint.search_path), files)
        if entrypoint.pickled is not None:
            del files[str(first.absolute())]
    return files


def changed_files(files: Mapping[str, str]) -> list[str]:
    """Return those of the `files_of` an entry point that are not as they were, by their paths."""
    return [path for path, before in sorted(files.items()) if _digest_of(Path(path)) != before]


def _digest_of(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _first_file(entrypoint: Entrypoint) -> Path | None:
    if entrypoint.module == "__main__":
        script = getattr(sys.modules.get("__main__"), "__file__", None)
        first = None if script is None else Path(script)
    else:
        first = _Places(entrypoint.search_path).file_of(entrypoint.module)
    return first if first is not None and first.is_file() else None


def _walk(name: str, first: Path, places: _Places, files: dict[str, str]) -> dict[str, str]:
    """Return the content of a module's file, and of all that it imports; put the digests of the files into `files`."""
    found: dict[str, str] = {}
    waiting = [(name, first)]
    while waiting:
        name, path = waiting.pop()
        if name in found:
            continue
        source = path.read_bytes()
        found[name] = files[str(path.absolute())] = hashlib.sha256(source).hexdigest()
        for imported in _imports(source, name, is_package=path.name == "__init__.py"):
            top = imported.partition(".")[0]
            if top in sys.stdlib_module_names or top == "rubberband" or imported in found:
                continue
            if places.is_installed(top):
                found.setdefault(top, places.version(top))
            elif (file := places.file_of(imported)) is not None:
                waiting.append((imported, file))
    return found


def _imports(source: bytes, name: str, *, is_package: bool) -> Iterator[str]:
    """Iterate over the modules that a source may import; some are attributes of modules instead."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    package = name if is_package else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _base(node, package)
            modules = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        else:
            continue
        for module in modules:
            parts = module.split(".")
            yield from (".".join(parts[:length]) for length in range(1, len(parts) + 1) if all(parts))


class _Places:
    """The places of modules, of which none is imported."""

    def __init__(self, search_path: Sequence[str]) -> None:
        self._path = [*search_path, *sys.path]
        self._specs: dict[str, ModuleSpec | None] = {}

    def _spec(self, top: str) -> ModuleSpec | None:
        if top not in self._specs:
            try:
                found = PathFinder.find_spec(top, self._path) or importlib.util.find_spec(top)
            except (ImportError, ValueError, AttributeError):
                found = None
            self._specs[top] = found
        return self._specs[top]

    def _folders(self, top: str) -> list[Path]:
        spec = self._spec(top)
        return [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []

    def is_installed(self, top: str) -> bool:
        """Whether a module belongs to an installed package, whose version stands for its source."""
        spec = self._spec(top)
        places = [Path(spec.origin)] if spec is not None and spec.origin else self._folders(top)
        return any(is_installed(place) for place in places)

    def version(self, top: str) -> str:
        """Return the version of an installed module, or when it was installed if its package has another name."""
        try:
            return importlib.metadata.version(top)
        except importlib.metadata.PackageNotFoundError:
            spec = self._spec(top)
            # Which package a module is from takes seconds to find out.
            origin = Path(spec.origin) if spec is not None and spec.origin else None
            return f"{origin.stat().st_mtime:.0f}" if origin is not None and origin.is_file() else ""

    def file_of(self, name: str) -> Path | None:
        """Return the source of a module; None if it has none, or is an attribute of a module."""
        top, _, rest = name.partition(".")
        spec = self._spec(top)
        if not rest:
            return Path(spec.origin) if spec is not None and spec.origin and spec.origin.endswith(".py") else None
        for folder in self._folders(top):
            below = folder.joinpath(*rest.split("."))
            for path in (below / "__init__.py", below.with_name(f"{below.name}.py")):
                if path.is_file():
                    return path
        return None


def is_installed(place: Path) -> bool:
    """Whether a file or folder is of an installed package or of Python itself."""
    if {"site-packages", "dist-packages"} & set(place.parts):
        return True
    return any(place.is_relative_to(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))
