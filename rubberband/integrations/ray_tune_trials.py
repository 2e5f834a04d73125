"""Trainables of Ray Tune as trials: functions with bound arguments, classes, and rules that end a trial.

A plain function stays as it is. Everything else becomes a function or a class of its own, which is sent to the workers
by value.
"""

from __future__ import annotations

import functools
import inspect
import sys
import tempfile
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rubberband.errors import InputError
from rubberband.executor.training.trial import (
    FolderCheckpoint,
    Trial,
    TrialContext,
    TuneStop,
    current_session,
    flat,
    tune_session,
)
from rubberband.units import shown

_UTIL = "ray.tune.trainable.util"
"""Module of `with_parameters` and `with_resources`."""


@dataclass(frozen=True, slots=True)
class Trainable:
    """A trainable of Ray Tune without its wrappers."""

    target: Any
    """The user's function, method or class."""
    arguments: tuple[Any, ...] = ()
    """Arguments that `functools.partial` puts before the configuration."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function, or of `setup`."""
    resources: Any = None
    """The request of `with_resources` or `default_resource_request`; None: there is none."""

    @property
    def name(self) -> str:
        """Its name in Python."""
        return getattr(self.target, "__name__", type(self.target).__name__)


def unwrapped(trainable: Any) -> Trainable:
    """Return a trainable without `with_parameters`, `with_resources` and `functools.partial`. Raises InputError."""
    if isinstance(trainable, type):
        return _unwrapped_class(trainable)
    if isinstance(trainable, str) or not callable(trainable):
        what = f"the registered name {shown(trainable)}" if isinstance(trainable, str) else type(trainable).__name__
        raise InputError(f"Tuner got {what}; give the function train(config) or the subclass of tune.Trainable itself")
    arguments: tuple[Any, ...] = ()
    parameters: dict[str, Any] = {}
    resources = None
    while True:
        resources = resources or getattr(trainable, "_resources", None)
        if isinstance(trainable, functools.partial):
            arguments = (*trainable.args, *arguments)
            parameters = {**trainable.keywords, **parameters}
            trainable = trainable.func
        elif _is_made_by(trainable, "with_parameters", "inner"):
            found = inspect.getclosurevars(trainable).nonlocals
            parameters = {**_registered(found), **parameters}
            trainable = found["trainable"]
        elif _is_made_by(trainable, "with_resources", "_trainable"):  # around a method
            trainable = inspect.getclosurevars(trainable).nonlocals["trainable"]
        else:
            return Trainable(trainable, arguments, parameters, resources)


def _unwrapped_class(trainable: Any) -> Trainable:
    from ray import tune

    if not issubclass(trainable, tune.Trainable):
        raise InputError(
            f"{trainable.__name__} is no subclass of tune.Trainable; write one, a function train(config), or use "
            "rubberband.tune for a rubberband.Trial"
        )
    parameters: dict[str, Any] = {}
    resources = trainable.default_resource_request({}) if _asks(trainable) else None
    while (outer := trainable).__module__ == _UTIL:
        if _is_made_by(outer, "with_parameters", "_Inner"):
            parameters = {**_registered(inspect.getclosurevars(outer.setup).nonlocals), **parameters}
        trainable = outer.__mro__[1]
    for method in ("step", "save_checkpoint", "load_checkpoint"):
        if getattr(trainable, method) is getattr(tune.Trainable, method):
            raise InputError(
                f"{trainable.__name__} has no {method}(); write it: trials move between stages and instances"
            )
    return Trainable(trainable, (), parameters, resources)


def _asks(trainable: Any) -> bool:
    from ray import tune

    default: Any = tune.Trainable.default_resource_request
    return trainable.default_resource_request.__func__ is not default.__func__


def _is_made_by(trainable: Any, wrapper: str, name: str) -> bool:
    made = (getattr(trainable, "__module__", None), getattr(trainable, "__qualname__", None))
    return made == (_UTIL, f"{wrapper}.<locals>.{name}")


def _registered(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `with_parameters` was given: by name, or in the object store of the script's own Ray cluster."""
    registry, prefix = found["parameter_registry"], found["prefix"]
    try:
        return {key: registry.get(prefix + key) for key in found["keys"]}
    except Exception as error:
        raise InputError(
            f"tune.with_parameters: the object store with its values is gone ({type(error).__name__}); call it "
            "again, and then make the Tuner"
        ) from error


def trial_of(trainable: Trainable, stop: TuneStop | None, checkpoint_every: int) -> Any:
    """Return the function or the class to train. A plain function without a rule that ends it stays as it is."""
    target, arguments, parameters = trainable.target, trainable.arguments, dict(trainable.parameters)
    if isinstance(target, type):
        words: dict[str, Any] = {
            "trainable": target,
            "parameters": parameters,
            "stop": None if stop is None else staticmethod(stop),
            "checkpoint_every": checkpoint_every,
        }
        trial: Any = type(target.__name__, (TrainableTrial,), words)
    elif isinstance(target, types.FunctionType) and not arguments and not parameters and stop is None:
        return target
    else:

        def trial(config: dict[str, Any]) -> Any:
            return call_in_session(lambda: target(*arguments, config, **parameters), stop)

        trial.__name__ = trainable.name
    trial.__module__ = getattr(target, "__module__", __name__)
    # No module has it under this name, so it is sent by value.
    trial.__qualname__ = f"{getattr(target, '__qualname__', trainable.name)}.<trial>"
    return trial


def call_in_session(call: Callable[[], Any], stop: TuneStop | None) -> Any:
    """Call a function of Ray Tune within a trial, which `stop` may end."""
    import ray.tune  # noqa: F401 — the session is for its functions

    session: Any = current_session.get()
    with tune_session(session, session.segment, stop):
        return call()


class TrainableTrial(Trial):
    """A class trainable of Ray Tune as a trial on one worker."""

    trainable: ClassVar[Any]
    """The user's subclass of `tune.Trainable`."""
    parameters: ClassVar[Mapping[str, Any]]
    """Keyword arguments of its `setup`."""
    stop: ClassVar[Any]
    """The rule that ends a trial; None: it has none."""

    def setup(self, config: Mapping[str, Any], context: TrialContext) -> None:
        """Make the trainable, which calls its `setup`."""
        if context.num_workers > 1:
            raise ValueError("a class trainable of Ray Tune trains on one GPU; set resources.gpus_per_trial.max to 1")
        self._folder = tempfile.TemporaryDirectory(prefix="rubberband-trial-")
        self._id = f"{context.trial:05d}"
        about = types.SimpleNamespace(
            trial_id=self._id, trial_name=f"trial_{self._id}", trial_resources=None, experiment_name="rubberband"
        )
        made = _with_folder(self.trainable, self.parameters, self._folder.name)
        self._made = made(config={**config, _TRIAL_INFO: about})

    def iterate(self) -> Mapping[str, Any]:
        """Call `step`. The trial ends with `done` in the result, or by the rule."""
        result = self._made.train()
        self.ended = bool(result.get("done")) or (self.stop is not None and self.stop(self._id, flat(result)))
        return flat(self._made.reported)

    def save(self) -> Any:
        """Return the files of `save_checkpoint`, and what Ray Tune counts."""
        with tempfile.TemporaryDirectory(prefix="rubberband-checkpoint-") as folder:
            metrics = self._made.save(folder).metrics
            counts = {name: value for name, value in metrics.items() if name in _COUNTS}
            return {"files": FolderCheckpoint.from_directory(folder), "counts": counts}

    def load(self, state: Any) -> None:
        """Call `load_checkpoint` with the files."""
        from ray import tune
        from ray.train._internal import session as internals

        with tempfile.TemporaryDirectory(prefix="rubberband-checkpoint-") as folder:
            checkpoint = tune.Checkpoint.from_directory(str(state["files"].to_directory(folder)))
            made: Any = internals._TrainingResult
            self._made.restore(made(checkpoint=checkpoint, metrics=state["counts"]))

    def close(self) -> None:
        """Call `cleanup`."""
        if hasattr(self, "_made"):
            self._made.stop()
        if hasattr(self, "_folder"):
            self._folder.cleanup()


_TRIAL_INFO = "__trial_info__"
"""Key of the configuration in which Ray Tune hands over the trial's names."""
_COUNTS = ("training_iteration", "time_total_s", "timesteps_total", "episodes_total")


def _with_folder(trainable: Any, parameters: Mapping[str, Any], folder: str) -> Any:
    """Return the class with its parameters, a folder for its files, and the result of its latest step."""

    class Placed(trainable):  # type: ignore[misc]
        def _setup_logdir(self) -> None:
            self._logdir = folder

        def setup(self, config: dict[str, Any]) -> None:
            super().setup(config, **parameters)

        def step(self) -> Any:
            self.reported = super().step()
            return self.reported

    Placed.__name__, Placed.__qualname__ = trainable.__name__, trainable.__qualname__
    return Placed


# The rules of `RunConfig(stop=...)` that look at one trial.


@dataclass(frozen=True, slots=True)
class Stop:
    """Rule that ends a trial, as in Ray Tune: a metric has reached its threshold, or a function returns True."""

    thresholds: Mapping[str, Any]
    functions: Sequence[Callable[[str, Mapping[str, Any]], Any]] = ()

    def __call__(self, trial_id: str, result: Mapping[str, Any]) -> bool:
        """Return whether the trial ends with this result, whose nested metrics are named `a/b`."""
        for metric, threshold in self.thresholds.items():
            if metric not in result:
                _say_once(f"RunConfig(stop={{{metric!r}: ...}}) has no effect: {metric} is not among {list(result)}")
            elif result[metric] >= threshold:
                return True
        return any(function(trial_id, dict(result)) for function in self.functions)


@functools.cache
def _say_once(line: str) -> None:
    print(f"rubberband: {line}", file=sys.stderr, flush=True)
