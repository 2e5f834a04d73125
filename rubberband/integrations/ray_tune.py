"""`Tuner`: a script of Ray Tune on instances that are rented by a plan; two of its lines change.

The function, its space, the scheduler and the searcher stay objects of Ray Tune. `tune.report` and
`tune.get_checkpoint` work in every function trial, also in one that `rubberband run` starts.
"""

from __future__ import annotations

import datetime
import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import rubberband
from rubberband.errors import InputError
from rubberband.executor.result import Result, TrialResult
from rubberband.executor.training.folder import FolderCheckpoint
from rubberband.executor.training.restoring import restore_trial

if TYPE_CHECKING:
    import pandas


class Tuner:
    """Takes the arguments of `ray.tune.Tuner`, and the words of an experiment: `constraints`, `resources` and others.

    ASHAScheduler becomes `asha`, HyperBandScheduler `hyperband` (which counts its trials itself); without a scheduler
    all trials train for `RunConfig(stop={"training_iteration": N})`. OptunaSearch becomes the sampler `optuna`.
    `num_samples=-1` is as many as the limits allow, and `time_budget_s` the deadline. Words that are given replace
    those that follow from Ray Tune's objects.

    Raises InputError, which names the remedy, for what has no counterpart.
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
        self._trainable = trainable
        if isinstance(trainable, type):
            raise InputError(
                f"{trainable.__name__} is a class; write a rubberband.Trial: setup, iterate (step), save and load"
            )
        constraints: dict[str, Any] = {}
        if (budget := getattr(tune_config, "time_budget_s", None)) is not None:
            seconds = budget.total_seconds() if isinstance(budget, datetime.timedelta) else budget
            constraints["deadline"] = f"{seconds}s"
        name = getattr(run_config, "name", None) or f"{trainable.__name__}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
        self._words = {
            "name": name,
            "search": _search(param_space or {}, tune_config, getattr(run_config, "stop", None)),
            **words,
            "constraints": {**constraints, **words.get("constraints", {})},
            "resources": {"gpus_per_trial": {"min": 1, "max": 1}, **words.get("resources", {})},
        }

    def fit(self) -> ResultGrid:
        """Tune, as `rubberband.tune` does, and return the results."""
        return ResultGrid(rubberband.tune(self._trainable, **self._words), self._trainable)


@dataclass(frozen=True)
class TuneResult:
    """One trial, with the names of Ray Tune."""

    trial: TrialResult
    """The trial as RubberBand reports it."""
    trainable: Any

    @property
    def config(self) -> Mapping[str, Any]:
        """Its configuration."""
        return self.trial.config

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics of its latest report, with `training_iteration`."""
        return {**self.trial.metrics, "training_iteration": self.trial.iterations}

    @property
    def checkpoint(self) -> Any:
        """Its latest checkpoint, as one of Ray Tune's."""
        from ray import tune

        kept = restore_trial(self.trial, self.trainable, is_simulated=False)
        if not isinstance(kept, FolderCheckpoint):
            return kept
        return tune.Checkpoint.from_directory(str(kept.to_directory(tempfile.mkdtemp(prefix="rubberband-best-"))))

    @property
    def error(self) -> str | None:
        """Why it failed; None if it did not."""
        return self.trial.failure if self.trial.status == "failed" else None


class ResultGrid:
    """The results of all trials, with the names of Ray Tune; `result` is RubberBand's own."""

    def __init__(self, result: Result, trainable: Any) -> None:
        self.result = result
        self._trials = [TuneResult(trial, trainable) for trial in result.trials]

    def get_best_result(self, metric: str | None = None, mode: str | None = None) -> TuneResult:
        """Return the best trial: the winner of the search, or by the latest reports of another metric.

        Raises InputError if no trial has reported it.
        """
        result = self.result
        metric, mode = metric or result.metric, mode or result.mode
        if (metric, mode) == (result.metric, result.mode) and result.best is not None:
            return self._trials[result.trials.index(result.best)]
        found = [each for each in self._trials if metric in each.trial.metrics]
        if not found:
            raise InputError(f"no trial has reported {metric!r}; see the metrics of the trials in get_dataframe()")
        sign = 1 if mode == "min" else -1
        return min(found, key=lambda each: sign * each.trial.metrics[metric])

    def get_dataframe(self) -> pandas.DataFrame:
        """Return a row for each trial: `Result.to_dataframe`."""
        return self.result.to_dataframe()

    @property
    def errors(self) -> list[str]:
        """Why trials failed."""
        return [each.error for each in self if each.error is not None]

    def __iter__(self) -> Iterator[TuneResult]:
        return iter(self._trials)

    def __len__(self) -> int:
        return len(self._trials)

    def __getitem__(self, index: int) -> TuneResult:
        return self._trials[index]


def _search(space: Mapping[str, Any], config: Any, stop: Any) -> dict[str, Any]:
    """Return the words of `search` for a TuneConfig, which may be None. Raises InputError."""
    scheduler, searcher = getattr(config, "scheduler", None), getattr(config, "search_alg", None)
    searcher = getattr(searcher, "searcher", searcher)  # a ConcurrencyLimiter has one
    said = [getattr(config, "metric", None), getattr(scheduler, "_metric", None), getattr(searcher, "_metric", None)]
    modes = [getattr(config, "mode", None), getattr(scheduler, "_mode", None), getattr(searcher, "_mode", None)]
    metric, mode = next((each for each in said if each), None), next((each for each in modes if each), None)
    if metric is None or mode is None:
        raise InputError("the search has no metric or mode; write tune.TuneConfig(metric=..., mode='min' or 'max')")
    return {
        "space": dict(space),
        "metric": metric,
        "mode": mode,
        "scheduler": _scheduler(scheduler, _num_trials(space, getattr(config, "num_samples", 1)), stop),
        **_searcher(searcher),
    }


def _num_trials(space: Mapping[str, Any], num_samples: int) -> int | str:
    """Return the trials of a search: each sample has all points of the grid."""
    grids = [value["grid_search"] for value in space.values() if isinstance(value, Mapping) and "grid_search" in value]
    return "auto" if num_samples == -1 else num_samples * math.prod(len(values) for values in grids)


def _scheduler(scheduler: Any, num_trials: int | str, stop: Any) -> dict[str, Any]:
    kind = type(scheduler).__name__.replace("AsyncHyperBandScheduler", "ASHAScheduler")
    if getattr(scheduler, "_time_attr", "training_iteration") != "training_iteration":
        raise InputError(f"{kind} counts {scheduler._time_attr}; RubberBand counts iterations: leave time_attr out")
    if scheduler is None or kind == "FIFOScheduler":
        iterations = stop.get("training_iteration") if isinstance(stop, Mapping) else None
        if iterations is None:
            raise InputError(
                "without a scheduler the length of a trial is not known; give TuneConfig(scheduler=ASHAScheduler()) or "
                "RunConfig(stop={'training_iteration': N})"
            )
        return {"type": "stages", "stages": [{"trials": num_trials, "iterations": iterations}]}
    if kind == "ASHAScheduler":
        if len(scheduler._brackets) > 1:
            raise InputError(f"{kind} has {len(scheduler._brackets)} brackets; use brackets=1, or HyperBandScheduler")
        first = scheduler._brackets[0]._rungs[-1][0]
        factor = _whole(scheduler._reduction_factor)
        return {
            "type": "asha",
            "num_samples": num_trials,
            "grace_period": _whole(first),
            "max_t": _whole(scheduler._max_t),
            "reduction_factor": factor,
        }
    if kind == "HyperBandScheduler":
        return {"type": "hyperband", "max_t": _whole(scheduler._max_t_attr), "reduction_factor": _whole(scheduler._eta)}
    raise InputError(f"{kind} has no counterpart; use ASHAScheduler or HyperBandScheduler")


def _whole(number: float) -> float:
    return int(number) if float(number).is_integer() else number


def _searcher(searcher: Any) -> dict[str, Any]:
    kind = type(searcher).__name__
    points = list(getattr(searcher, "_points_to_evaluate", None) or [])
    found: dict[str, Any] = {"points_to_evaluate": points} if points else {}
    if searcher is None or kind == "BasicVariantGenerator":
        return found
    if kind != "OptunaSearch":
        raise InputError(f"{kind} has no counterpart; use OptunaSearch, or leave search_alg out for random search")
    if searcher._space:
        raise InputError("OptunaSearch has a space of its own; give it as param_space")
    name = type(searcher._sampler).__name__.removesuffix("Sampler").lower()
    if searcher._sampler is not None and name not in ("tpe", "gp", "cmaes", "nsgaii"):
        raise InputError(f"{type(searcher._sampler).__name__} is not among Optuna's TPE, GP, CmaEs and NSGAII; use one")
    sampler = {"type": "optuna", **({} if searcher._sampler is None else {"sampler": name})}
    if searcher._seed is not None:
        sampler["seed"] = searcher._seed
    rewards = {"evaluated_rewards": list(searcher._evaluated_rewards)} if searcher._evaluated_rewards else {}
    return {**found, **rewards, "sampler": sampler}
