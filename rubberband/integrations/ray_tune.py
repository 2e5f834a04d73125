"""`Tuner`: a script of Ray Tune on instances that are rented by a plan; two of its lines change.

The trainable, its space, the scheduler, the searcher and the configs stay objects of Ray Tune. `tune.report` and
`tune.get_checkpoint` work in every function trial, also in one that `rubberband run` starts.
"""

from __future__ import annotations

import datetime
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

import rubberband
from rubberband.errors import InputError
from rubberband.executor.checkpoints.folders import FolderCheckpoint
from rubberband.executor.journal.folder import ExperimentFolder, open_folder
from rubberband.executor.result.parts import TrialResult
from rubberband.executor.result.restoring import kept_state
from rubberband.executor.result.result import Result
from rubberband.installation import default_home
from rubberband.integrations.ray_tune_options import (
    check_fields,
    check_resources,
    most_instances,
    name_of,
    trials_per_gpu,
    words_of,
)
from rubberband.integrations.ray_tune_stops import refused
from rubberband.integrations.ray_tune_trials import FailFast, TuneCallbacks, check_tune_callbacks, trial_of, unwrapped
from rubberband.spec.fields import WordError, word_error
from rubberband.spec.resources import Resources
from rubberband.units import shown
from rubberband.values.ranking import Ranking

if TYPE_CHECKING:
    import pandas


class Tuner:
    """Takes the arguments of `ray.tune.Tuner`, and the words of an experiment: `constraints`, `resources` and others.

    ASHAScheduler becomes `asha`, HyperBandScheduler `hyperband`; without a scheduler each trial trains to its own end,
    at most for `RunConfig(stop={"training_iteration": N})` or as long as the limits allow. OptunaSearch becomes the
    sampler `optuna`. `num_samples=-1` is as many as the limits allow, and `time_budget_s` the deadline. Words that are
    given replace those that follow from Ray Tune's objects, key by key.

    Raises InputError, which names the remedy, for every word that has no counterpart.
    """

    def __init__(
        self,
        trainable: Any,
        *,
        param_space: Mapping[str, Any] | None = None,
        tune_config: Any = None,
        run_config: Any = None,
        **words: Any,
    ) -> None:
        plain = unwrapped(trainable)
        limits = words.get("constraints", {})
        translated = words_of(param_space or {}, tune_config, run_config, limits)
        self._notes = translated.notes
        shared = trials_per_gpu(plain.resources, plain.name)
        resources = {
            "gpus_per_trial": {"min": 1, "max": 1},
            **_keep(run_config, translated.search),
            **({"trials_per_gpu": shared} if shared > 1 else {}),
            **words.get("resources", {}),
        }
        checked = _resources(resources)
        if isinstance(plain.target, type) and (checked.gpus_per_trial.most or 2) > 1:
            raise InputError(f"{plain.name} trains on one GPU; leave resources.gpus_per_trial out")
        check_resources(plain.resources, plain.name, checked)
        self._trainable = trial_of(plain, translated.stop, _checkpoint_every(run_config, plain, self._notes))
        self._fail_fast = getattr(getattr(run_config, "failure_config", None), "fail_fast", False)
        name = name_of(run_config, plain.name, datetime.datetime.now(), translated.notes)
        self._words = {
            "name": name,
            "verbose": _verbose(run_config),
            **words,
            "search": {**translated.search, **words.get("search", {})},
            "constraints": {**translated.constraints, **limits},
            "resources": {**_with_tune(resources), **most_instances(translated.max_concurrent, checked)},
        }
        if "name" not in words and (free := self._folder().next_free()).name != name:
            self._notes.append(f"{name} is the name of an earlier experiment; this one is {free.name}")
            self._words["name"] = free.name
        self._add_callbacks(plain.name, tune_config, run_config)

    @classmethod
    def restore(cls, path: str, *_: Any, **__: Any) -> Tuner:
        """Raise InputError: experiments of RubberBand are resumed by name."""
        raise InputError(f"Tuner.restore({shown(str(path))}): resume an experiment with `rubberband resume NAME`")

    def fit(self) -> ResultGrid:
        """Tune, as `rubberband.tune` does, and return the results.

        Raises RuntimeError if a trial has failed, with FailureConfig(fail_fast="raise").
        """
        self._leave_ray()
        if self._words["verbose"]:
            for line in self._notes:
                print(line, file=sys.stderr)
        failing = [callback for callback in self._words.get("callbacks", ()) if isinstance(callback, FailFast)]
        result = rubberband.tune(self._trainable, **self._words)
        if str(self._fail_fast).lower() == "raise" and failing and failing[0].failure is not None:
            raise RuntimeError(failing[0].failure)
        return ResultGrid(result)

    def _leave_ray(self) -> None:
        """Shut down what `ray.init()` of the script started: a run has a cluster of its own."""
        ray = sys.modules.get("ray")
        if ray is None or not ray.is_initialized() or _resources(self._words["resources"]).kind.is_simulated:
            return
        self._notes.append("the script's ray.init() is undone: the run starts its own Ray cluster")
        ray.shutdown()

    def _add_callbacks(self, trainable: str, tune_config: Any, run_config: Any) -> None:
        """Add RunConfig's callbacks and `fail_fast` to those of RubberBand."""
        callbacks = list(getattr(run_config, "callbacks", None) or [])
        check_tune_callbacks(callbacks)
        names = {word: getattr(tune_config, word, None) for word in ("trial_name_creator", "trial_dirname_creator")}
        if not callbacks and (given := [word for word, value in names.items() if value is not None]):
            raise refused(f"TuneConfig({given[0]}=...) without callbacks")
        folder = self._folder()
        own: list[Any] = [FailFast(folder)] if self._fail_fast else []
        if callbacks:
            own.append(TuneCallbacks(callbacks, trainable, folder.path / "tune", *names.values()))
        if own:
            self._words["callbacks"] = [*self._words.get("callbacks", ()), *own]

    def _folder(self) -> ExperimentFolder:
        home = self._words.get("home")
        return open_folder(self._words["name"], Path(home).expanduser().resolve() if home else default_home())


def _resources(words: Mapping[str, Any]) -> Resources:
    try:
        return Resources(**words)
    except ValidationError as error:
        named = word_error(error)
        raise WordError(("resources", *named.path), named.reason) from None


def _with_tune(resources: Mapping[str, Any]) -> dict[str, Any]:
    """Return the resources; rented instances install what `ray.tune` imports, unless their image has everything."""
    aws = resources.get("aws", {})
    install = aws.get("install") or ""
    if resources.get("provider") != "aws" or install.strip() == "none" or "ray[" in install:
        return dict(resources)
    return {**resources, "aws": {**aws, "install": f"{install} ray[tune]".strip()}}


def _keep(run_config: Any, search: Mapping[str, Any]) -> dict[str, str]:
    """Return `resources.keep` of a score by which checkpoints are kept. Raises InputError for another one."""
    config = getattr(run_config, "checkpoint_config", None)
    score, order = (getattr(config, f"checkpoint_score_{word}", None) for word in ("attribute", "order"))
    if score is None:
        return {}
    if (score, order) != (search["metric"], search["mode"]):
        raise InputError(
            f"CheckpointConfig(checkpoint_score_attribute={score!r}, checkpoint_score_order={order!r}) is not the "
            f"{search['mode']} of {search['metric']}, by which the best checkpoint is kept; write these"
        )
    return {"keep": "best"}


def _checkpoint_every(run_config: Any, trainable: Any, notes: list[str]) -> int:
    """Return the iterations from one checkpoint to the next of a class trainable; add what is kept to `notes`.

    Raises InputError.
    """
    config: Any = getattr(run_config, "checkpoint_config", None)
    check_fields(config)
    if (kept := getattr(config, "num_to_keep", None)) not in (None, 1):
        best = " and the best one" if getattr(config, "checkpoint_score_attribute", None) is not None else ""
        notes.append(f"CheckpointConfig(num_to_keep={kept}): a trial keeps its latest two checkpoints{best}")
    every: int = getattr(config, "checkpoint_frequency", 0) or 0
    if not isinstance(trainable.target, type) and (every or getattr(config, "checkpoint_at_end", None)):
        raise refused("CheckpointConfig(checkpoint_frequency=..., checkpoint_at_end=...) of a function")
    return every or 1


def _verbose(run_config: Any) -> int:
    log = getattr(run_config, "log_to_file", False)
    if log not in (False, True):
        raise refused(f"RunConfig(log_to_file={shown(log)})")
    given = getattr(run_config, "_verbose", None)
    return 1 if given is None else min(2, int(given))


@dataclass(frozen=True)
class TuneResult:
    """One trial, with the names of Ray Tune."""

    trial: TrialResult
    """The trial as RubberBand reports it."""

    @property
    def config(self) -> Mapping[str, Any]:
        """Its configuration."""
        return self.trial.config

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics of its latest report, with `training_iteration`."""
        return {**self.trial.metrics, "training_iteration": self.trial.iterations}

    @property
    def metrics_dataframe(self) -> pandas.DataFrame:
        """The metrics of all its reports, a row for each, with `training_iteration`."""
        import pandas

        return pandas.DataFrame([{**metrics, "training_iteration": done} for _, done, metrics in self.trial.curve])

    @property
    def checkpoint(self) -> Any:
        """Its latest checkpoint, as one of Ray Tune's; None if it passed none."""
        from ray import tune

        kept = kept_state(self.trial)
        kept = kept["files"] if isinstance(kept, Mapping) and "files" in kept else kept
        if not isinstance(kept, FolderCheckpoint):
            return kept
        return tune.Checkpoint.from_directory(str(kept.to_directory(tempfile.mkdtemp(prefix="rubberband-best-"))))

    @property
    def error(self) -> str | None:
        """Why it failed; None if it did not."""
        return self.trial.failure if self.trial.status == "failed" else None


class ResultGrid:
    """The results of all trials, with the names of Ray Tune; `result` is RubberBand's own."""

    def __init__(self, result: Result) -> None:
        self.result = result
        self._trials = [TuneResult(trial) for trial in result.trials]

    def get_best_result(self, metric: str | None = None, mode: str | None = None, scope: str = "last") -> TuneResult:
        """Return the best trial: the winner of the search, or by the latest reports of another metric.

        Raises InputError if no trial has reported it.
        """
        if scope != "last":
            raise refused(f"scope={shown(scope)}")
        result = self.result
        metric, mode = metric or result.metric, mode or result.mode
        if (metric, mode) == (result.metric, result.mode) and result.best is not None:
            return self._trials[result.trials.index(result.best)]
        reporting = [outcome for outcome in self._trials if metric in outcome.trial.metrics]
        if not reporting:
            raise InputError(f"no trial has reported {metric!r}; see the metrics of the trials in get_dataframe()")
        ranking = Ranking(metric=metric, mode="min" if mode == "min" else "max")
        return min(reporting, key=lambda outcome: ranking.merit(outcome.trial.metrics))

    def get_dataframe(self) -> pandas.DataFrame:
        """Return a row for each trial: `Result.to_dataframe`."""
        return self.result.to_dataframe()

    @property
    def errors(self) -> list[str]:
        """Why trials failed."""
        return [outcome.error for outcome in self if outcome.error is not None]

    @property
    def num_errors(self) -> int:
        """Number of trials that failed."""
        return len(self.errors)

    @property
    def num_terminated(self) -> int:
        """Number of trials that did not fail."""
        return len(self) - self.num_errors

    def __iter__(self) -> Iterator[TuneResult]:
        return iter(self._trials)

    def __len__(self) -> int:
        return len(self._trials)

    def __getitem__(self, index: int) -> TuneResult:
        return self._trials[index]
