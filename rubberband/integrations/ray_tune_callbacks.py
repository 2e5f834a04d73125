"""Callbacks of Ray Tune, called while RubberBand runs an experiment, and `fail_fast`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rubberband.errors import InputError
from rubberband.executor.journal.folder import ExperimentFolder
from rubberband.executor.journal.inbox import DriverRequest, Inbox
from rubberband.executor.result.result import Result
from rubberband.executor.run.callbacks import Callback, FailureInfo, ReportInfo, RunInfo, SyncInfo

_CALLED = ("on_trial_start", "on_trial_result", "on_trial_complete", "on_trial_error", "on_experiment_end")
_LOGGED = ("log_trial_start", "log_trial_result", "log_trial_end")
"""Methods that a LoggerCallback calls in the ones above."""


def check_tune_callbacks(callbacks: Sequence[Any]) -> None:
    """Raise InputError for an object that is no callback of Ray Tune, and for one that needs what is not called."""
    from ray.tune import Callback as TuneCallback

    for callback in callbacks:
        kind = type(callback)
        at = f"RunConfig(callbacks=[{kind.__name__}(...)])"
        if isinstance(callback, Callback):
            raise InputError(f"{at}: it is a callback of RubberBand; give it as Tuner(..., callbacks=[...])")
        if not isinstance(callback, TuneCallback):
            raise InputError(f"{at}: it is no ray.tune.Callback; inherit from that")
        if kind.__module__.partition(".")[0] == "ray":
            raise InputError(
                f"{at}: loggers of Ray Tune write into its own folders; use Tuner(..., track=[...]) with "
                "'tensorboard', 'mlflow', 'wandb' or 'csv'"
            )
        for hook in dir(kind):
            own = getattr(kind, hook)
            if hook.startswith(("on_", "log_")) and hook not in _CALLED + _LOGGED:
                if any(own is getattr(base, hook, None) for base in kind.__mro__ if base.__module__.startswith("ray.")):
                    continue
                raise InputError(f"{at}: {hook}() is not called; use {', '.join(_CALLED)}")


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

    def _call(self, hook: str, trial: TuneTrial | None = None, **words: Any) -> None:
        about = {} if trial is None else {"trials": list(self._trials.values()), "trial": trial}
        for callback in self._callbacks:
            getattr(callback, hook)(**about, **words)


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
