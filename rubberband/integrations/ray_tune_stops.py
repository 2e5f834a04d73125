"""The rules of Ray Tune that end trials and searches, as those of a trial's process and the words of `search.stop`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from rubberband.errors import InputError
from rubberband.integrations.ray_tune_trials import Stop
from rubberband.units import shown


def refused(what: str) -> InputError:
    """Return the error for what has no counterpart."""
    return InputError(f"{what} has no counterpart; leave it out, or see the words of Ray Tune in docs/move.md")


@dataclasses.dataclass(kw_only=True)
class Stops:
    """The meaning of `RunConfig(stop=...)` and of MedianStoppingRule."""

    stop: Stop | None = None
    """The rule that ends a single trial, where it trains."""
    iterations: int | None = None
    """Most iterations of a trial; None if nothing says it."""
    deadline: str | None = None
    words: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The words of `search.stop`."""
    named: list[tuple[str, str, str | None]] = dataclasses.field(default_factory=list)
    """Each class with the metric that it names, and the mode if it names one."""

    def add(self, rule: Any, word: str, words: dict[str, Any]) -> None:
        """Take over a rule of `search.stop`. Raises InputError for a second one of its kind."""
        kind = type(rule).__name__
        if word in self.words:
            raise refused(f"a second {kind}")
        self.words[word] = words
        self.named.append((kind, rule._metric, rule._mode))

    def of_search(self, objective: Mapping[str, Any]) -> dict[str, Any]:
        """Return the words of `search.stop`. Raises InputError where a rule names another metric or mode."""
        for kind, metric, mode in self.named:
            if metric not in (None, objective["metric"]):
                raise refused(f"{kind}(metric={metric!r}) in a search for {objective['metric']}")
            if mode not in (None, objective["mode"]):
                raise refused(f"{kind}(mode={mode!r}) in a search for the {objective['mode']} of {objective['metric']}")
        return {"stop": self.words} if self.words else {}


def stops_of(stop: Any, scheduler: Any) -> Stops:
    """Return the meaning of `RunConfig(stop=...)` and, if it is a rule that ends trials, of the scheduler."""
    found = Stops()
    thresholds: dict[str, Any] = {}
    functions: list[Callable[..., Any]] = []
    most_iterations: list[int] = []
    for rule in _rules(stop):
        kind = type(rule).__name__
        if isinstance(rule, Mapping):
            thresholds |= _thresholds(rule, most_iterations)
        elif kind == "MaximumIterationStopper":
            most_iterations.append(rule._max_iter)
        elif kind == "TrialPlateauStopper":
            found.add(rule, "patience", _patience(rule))
        elif kind == "ExperimentPlateauStopper":
            plateau = {"top": rule._top, "std": rule._std, "reports": max(0, rule._patience - 1)}
            found.add(rule, "no_improvement", {"plateau": plateau})
        elif kind == "TimeoutStopper":
            found.deadline = f"{rule._timeout_seconds}s"
        elif kind == "FunctionStopper":
            functions.append(_stateless(rule._fn))
        elif callable(rule) and not hasattr(rule, "stop_all"):
            functions.append(_stateless(rule))
        elif kind != "NoopStopper":
            raise InputError(
                f"RunConfig(stop={kind}(...)) has no counterpart: it sees all trials from one process; write "
                "stop={'training_iteration': N}, and Tuner(..., search={'stop': {'target': VALUE}}) to end the search"
            )
    if thresholds or functions:
        found.stop = Stop(thresholds, tuple(functions))
    if type(scheduler).__name__ == "MedianStoppingRule":
        found.add(scheduler, "median", _median(scheduler))
    found.iterations = min(most_iterations) if most_iterations else None
    return found


def _patience(rule: Any) -> dict[str, Any]:
    if rule._metric_threshold is not None:
        raise refused(f"TrialPlateauStopper(metric_threshold={rule._metric_threshold:g})")
    return {"iterations": rule._num_results, "std": rule._std, "after": rule._grace_period}


def _median(rule: Any) -> dict[str, Any]:
    """Return the words of `search.stop.median`."""
    for word, value, default in (
        ("time_attr", rule._time_attr, "training_iteration"),
        ("min_time_slice", rule._min_time_slice, 0),
        ("hard_stop", rule._hard_stop, True),
    ):
        if value != default:
            raise InputError(f"MedianStoppingRule({word}={value!r}) has no counterpart; write {word}={default!r}")
    return {"after": max(1, math.ceil(rule._grace_period)), "trials": max(1, rule._min_samples_required)}


def _rules(stop: Any) -> list[Any]:
    if stop is None:
        return []
    if type(stop).__name__ == "CombinedStopper":
        return [rule for inner in stop._stoppers for rule in _rules(inner)]
    if isinstance(stop, list | tuple):
        return [rule for inner in stop for rule in _rules(inner)]
    return [stop]


_COUNTED_BY_TUNE = (
    *("time_total_s", "time_since_restore", "time_this_iter_s", "timestamp"),
    *("iterations_since_restore", "timesteps_since_restore", "timesteps_total", "episodes_total"),
)


def _thresholds(rule: Mapping[str, Any], most_iterations: list[int]) -> dict[str, Any]:
    thresholds = dict(rule)
    if (iterations := thresholds.pop("training_iteration", None)) is not None:
        if isinstance(iterations, bool) or not isinstance(iterations, int | float) or iterations < 1:
            raise refused(f"RunConfig(stop={{'training_iteration': {shown(iterations)}}})")
        most_iterations.append(math.ceil(iterations))
    for metric, threshold in thresholds.items():
        if metric in _COUNTED_BY_TUNE or not isinstance(threshold, int | float):
            raise refused(f"RunConfig(stop={{{metric!r}: {shown(threshold)}}})")
    return thresholds


def _stateless(function: Any) -> Any:
    """Return a function of a trial's own result. Raises InputError for one that keeps something between calls."""
    if getattr(function, "__closure__", None) or not hasattr(function, "__code__"):
        name = getattr(function, "__name__", type(function).__name__)
        raise refused(f"RunConfig(stop={name}), which keeps something between its calls,")
    return function
