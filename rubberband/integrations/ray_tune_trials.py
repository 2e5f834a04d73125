"""Trainables of Ray Tune as trials: functions with bound arguments, classes, rules that end a trial, and callbacks.

A plain function stays as it is. Everything else becomes a function or a class of its own, which is sent to the workers
by value.
"""

from __future__ import annotations

import functools
import inspect
import sys
import tempfile
import time
import types
import uuid
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from rubberband.errors import InputError
from rubberband.executor.checkpoints.folders import FolderCheckpoint
from rubberband.executor.journal.folder import ExperimentFolder
from rubberband.executor.journal.inbox import DriverRequest, Inbox
from rubberband.executor.result.result import Result
from rubberband.executor.run.callbacks import Callback, FailureInfo, ReportInfo, RunInfo, SyncInfo
from rubberband.executor.training.reporting import current_session
from rubberband.executor.training.trial import Trial, TrialContext, TuneStop, flat, tune_session
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
            given = inspect.getclosurevars(trainable).nonlocals
            parameters = {**_registered(given), **parameters}
            trainable = given["trainable"]
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
    default: Any = tune.Trainable.default_resource_request
    has_own = trainable.default_resource_request.__func__ is not default.__func__
    resources = trainable.default_resource_request({}) if has_own else None
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


def _is_made_by(trainable: Any, wrapper: str, name: str) -> bool:
    made = (getattr(trainable, "__module__", None), getattr(trainable, "__qualname__", None))
    return made == (_UTIL, f"{wrapper}.<locals>.{name}")


def _registered(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `with_parameters` was given: by name, or in the object store of the script's own Ray cluster."""
    registry, prefix = given["parameter_registry"], given["prefix"]
    try:
        return {key: registry.get(prefix + key) for key in given["keys"]}
    except Exception as error:
        raise InputError(
            f"tune.with_parameters: the object store with its values is gone ({type(error).__name__}); call it "
            "again, and then make the Tuner"
        ) from error


def trial_of(trainable: Trainable, stop: TuneStop | None, checkpoint_every: int) -> Any:
    """Return the function or the class to train. A plain function without a rule that ends it stays as it is."""
    target, arguments, parameters = trainable.target, trainable.arguments, dict(trainable.parameters)
    if isinstance(target, type):
        attributes: dict[str, Any] = {
            "trainable": target,
            "parameters": parameters,
            "stop": None if stop is None else staticmethod(stop),
            "checkpoint_every": checkpoint_every,
        }
        trial: Any = type(target.__name__, (TrainableTrial,), attributes)
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
        with tempfile.TemporaryDirectory(prefix="rubberband-checkpoint-") as place:
            (folder := Path(place, "files")).mkdir()
            metrics = self._made.save(str(folder)).metrics
            counts = {name: value for name, value in metrics.items() if name in _COUNTS}
            return {"files": FolderCheckpoint.taking(folder), "counts": counts}

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


_CALLED = ("on_trial_start", "on_trial_result", "on_trial_complete", "on_trial_error", "on_experiment_end")
_LOGGED = ("log_trial_start", "log_trial_result", "log_trial_end")
"""Methods that a LoggerCallback calls in the ones above."""


def check_tune_callbacks(callbacks: Sequence[Any]) -> None:
    """Raise InputError for an object that is no callback of Ray Tune, and for one that needs what is not called."""
    from ray.tune import Callback as TuneCallback

    for callback in callbacks:
        kind = type(callback)
        where = f"RunConfig(callbacks=[{kind.__name__}(...)])"
        if isinstance(callback, Callback):
            raise InputError(f"{where}: it is a callback of RubberBand; give it as Tuner(..., callbacks=[...])")
        if not isinstance(callback, TuneCallback):
            raise InputError(f"{where}: it is no ray.tune.Callback; inherit from that")
        if kind.__module__.partition(".")[0] == "ray":
            raise InputError(
                f"{where}: loggers of Ray Tune write into its own folders; use Tuner(..., track=[...]) with "
                "'tensorboard', 'mlflow', 'wandb' or 'csv'"
            )
        for hook in dir(kind):
            own = getattr(kind, hook)
            if hook.startswith(("on_", "log_")) and hook not in _CALLED + _LOGGED:
                if any(own is getattr(base, hook, None) for base in kind.__mro__ if base.__module__.startswith("ray.")):
                    continue
                raise InputError(f"{where}: {hook}() is not called; use {', '.join(_CALLED)}")


@dataclass
class TuneTrial:
    """A trial with the attributes that callbacks of Ray Tune read."""

    trial_id: str
    config: Mapping[str, Any]
    trainable_name: str
    name_of: Callable[[Any], str] | None
    status: str = "RUNNING"
    last_result: dict[str, Any] = field(default_factory=dict)
    local_path: str = ""
    """Folder for files about the trial, on the driver's machine."""

    @property
    def evaluated_params(self) -> Mapping[str, Any]:
        """Its configuration."""
        return self.config

    @property
    def path(self) -> str:
        """The folder."""
        return self.local_path

    def __str__(self) -> str:
        return f"{self.trainable_name}_{self.trial_id}" if self.name_of is None else self.name_of(self)

    def __hash__(self) -> int:
        return hash(self.trial_id)


class TuneCallbacks(Callback):
    """Calls callbacks of Ray Tune: on a trial's first report, on each, and once it does not go on."""

    def __init__(
        self,
        callbacks: Sequence[Any],
        trainable: str,
        folder: Path,
        name_of: Callable[[Any], str] | None,
        folder_of: Callable[[Any], str] | None,
    ) -> None:
        self._callbacks, self._trainable, self._folder = callbacks, trainable, folder
        self._name_of, self._folder_of = name_of, folder_of
        self._trials: dict[int, TuneTrial] = {}

    def on_experiment_start(self, run: RunInfo) -> None:
        """Set them up."""
        self._call("setup", stop=None, num_samples=run.num_trials, total_num_samples=run.num_trials)

    def on_trial_report(self, report: ReportInfo) -> None:
        """A result of a trial, which is new at its first."""
        trial = self._trial(report.trial, report.config)
        trial.last_result = {
            **report.metrics,
            "training_iteration": report.iterations,
            "trial_id": trial.trial_id,
            "config": dict(report.config),
            "timestamp": int(report.reported_at),
            "done": bool(report.metrics.get("done", False)),
        }
        self._call("on_trial_result", trial, iteration=report.iterations, result=trial.last_result)

    def on_trial_failure(self, failure: FailureInfo) -> None:
        """A trial has failed."""
        trial = self._trial(failure.trial, failure.config)
        trial.status = "ERROR"
        self._call("on_trial_error", trial, iteration=failure.iterations)

    def on_sync(self, sync: SyncInfo) -> None:
        """A stage is over; trials that do not go on are complete."""
        self._complete({*sync.trials} - {*sync.promoted})

    def on_end(self, result: Result) -> None:
        """The experiment has ended, and with it the trials."""
        self._complete(set(self._trials))
        self._call("on_experiment_end", trials=list(self._trials.values()))

    def _complete(self, numbers: Set[int]) -> None:
        for number in sorted(numbers & self._trials.keys()):
            trial = self._trials[number]
            if trial.status == "RUNNING":
                trial.status = "TERMINATED"
                self._call("on_trial_complete", trial, iteration=trial.last_result["training_iteration"])

    def _trial(self, number: int, config: Mapping[str, Any]) -> TuneTrial:
        if number not in self._trials:
            trial = TuneTrial(f"{number:05d}", config, self._trainable, self._name_of)
            folder = self._folder / (str(trial) if self._folder_of is None else self._folder_of(trial))
            folder.mkdir(parents=True, exist_ok=True)
            trial.local_path = str(folder)
            self._trials[number] = trial
            self._call("on_trial_start", trial, iteration=0)
        return self._trials[number]

    def _call(self, hook: str, trial: TuneTrial | None = None, **arguments: Any) -> None:
        about = {} if trial is None else {"trials": list(self._trials.values()), "trial": trial}
        for callback in self._callbacks:
            getattr(callback, hook)(**about, **arguments)


class FailFast(Callback):
    """Cancels the experiment when a trial has failed."""

    def __init__(self, folder: ExperimentFolder) -> None:
        self._folder = folder
        self.failure: str | None = None
        """Why the first trial failed; None: none has."""

    def on_trial_failure(self, failure: FailureInfo) -> None:
        """Ask the driver for a clean end."""
        if self.failure is None:
            self.failure = f"trial {failure.trial} failed: {failure.failure}"
            request = DriverRequest(id=f"cancel-{uuid.uuid4()}", kind="cancel", asked_at=time.time())
            Inbox(self._folder.inbox).put(request)
