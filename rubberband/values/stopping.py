"""Rules by which trials and searches end early, in plain values: `search.stop` as a job holds it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

EVALUATED_AT = "evaluated_at"
"""Metric of a trial that does not evaluate after each iteration: the iteration of which its metrics are."""


def is_evaluated(iterations: int, metrics: Mapping[str, float], metric: str) -> bool:
    """Return whether a report after that many iterations has a result of its own, and not that of an earlier one."""
    return metric in metrics and metrics.get(EVALUATED_AT, iterations) == iterations


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """A trial ends when its metric gets no better. Iterations are those that the trial evaluates."""

    iterations: int
    min_delta: float = 0.0
    """An improvement is more than this."""
    std: float | None = None
    """If not None, the trial ends instead when the latest `iterations` results deviate by less than this."""
    after: int = 0
    """Iterations before which no trial ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Median:
    """A trial ends when its best result is worse than the median of the other trials' running averages."""

    after: int = 1
    """Evaluated iterations before which no trial ends, and from which on the others are averaged."""
    trials: int = 3
    """Others that must have come as far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plateau:
    """The search ends when its best results are all alike."""

    top: int
    """The best results, of all reports of all trials."""
    std: float
    """Their standard deviation is at most this."""
    reports: int = 0
    """More reports in a row than this must be so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoImprovement:
    """The search ends when its best result gets no better; the first limit that is reached ends it."""

    trials: int | None = None
    """Trials in a row that end their first stage, or their first rung."""
    time_s: float | None = None
    cost_usd: float | None = None
    syncs: int | None = None
    plateau: Plateau | None = None
    min_delta: float = 0.0
    """An improvement is more than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRules:
    """The rules of a search; none by default."""

    target: float | None = None
    """The search ends when a trial reports this, or better."""
    patience: Patience | None = None
    median: Median | None = None
    no_improvement: NoImprovement | None = None
    worth_per_usd: float | None = None
    """The search ends when a USD is expected to improve the metric by less than this."""
    grace_period: int = 1
    """Iterations of the scheduler before which no trial ends."""

    @property
    def ends_trials(self) -> bool:
        """Whether a rule may end a trial."""
        return self.patience is not None or self.median is not None


_BOUNDED = re.compile(r"(?<![a-z])(accuracy|acc|f1|auc|auroc|precision|recall|m?iou|dice|top1|top5)(?![a-z])", re.I)
_NOT_NEGATIVE = re.compile(r"(?<![a-z])(mse|rmse|mae|perplexity|ppl|latency|wer|cer)(?![a-z])", re.I)
_ALL = (-inf, inf)


def target_fault(target: float, metric: str, mode: str) -> str:
    """Return why a target is never reached, or by any report; empty where that is not known."""
    lowest, highest = (0.0, 100.0) if _BOUNDED.search(metric) else (0.0, inf) if _NOT_NEGATIVE.search(metric) else _ALL
    side = "at most" if mode == "min" else "at least"
    of = f"{metric} is {lowest:g} or more" if highest == inf else f"{metric} is from {lowest:g} to {highest:g}"
    if target < lowest if mode == "min" else target > highest:
        return f"{target:g} is never reached: {of}; give a target within that"
    if target >= highest if mode == "min" else target <= lowest:
        better = "lower" if mode == "min" else "higher"
        return f"every report is {side} {target:g}: {of}; give a {better} target, or the other mode"
    return ""
