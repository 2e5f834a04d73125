"""Trials after equal iterations: what one trained for one iteration shows nothing beside another after thirty. Pure."""

from __future__ import annotations

import math
from dataclasses import replace

from rubberband.executor.result.parts import TrialResult
from rubberband.executor.result.result import Result
from rubberband.values.ranking import Standing
from rubberband.views.formatting import finite, ranked


def stage_ends(result: Result) -> list[int]:
    """Return the iterations at the ends of stages, in ascending order; before the first, what all trials have done."""
    ends, before = set[int](), 0
    for stage in result.stages:
        before = 0 if stage.rung == 0 and stage.bracket is not None else before
        before += stage.iterations
        ends.add(before)
    most = max((trial.iterations for trial in result.trials), default=0)
    least = min((trial.iterations for trial in result.trials if trial.iterations), default=0)
    return sorted(end for end in ends if end <= most) or [least]


def metric_after(result: Result, trial: TrialResult, iterations: int) -> float | None:
    """Return the metric by its last report of `iterations` at most; None without a finite one."""
    if iterations >= trial.iterations:
        return finite(trial.metrics.get(result.metric))
    reports = [metrics for _, done, metrics in trial.present_curve if done <= iterations]
    return finite(reports[-1].get(result.metric)) if reports else None


def choices(result: Result) -> list[int]:
    """Return the numbers of iterations after which trials are worth comparing: two or more have reached them.

    They are the ends of stages or rungs; of a search with one stage, powers of two.
    """
    reached = sorted((trial.iterations for trial in result.trials if trial.curve), reverse=True)
    most = reached[1] if len(reached) > 1 else 0
    ends = [rung.iterations for rung in result.rungs] or stage_ends(result)
    if len(ends) <= 1 and most:
        ends = [2**power for power in range(int(math.log2(most)) + 1)]
    return [end for end in ends if 0 < end <= most]


def after(result: Result, iterations: int) -> Result:
    """Return the result as its trials stood after `iterations`: those that trained less have no metric, and the best is
    the best of the others, also of those that were stopped. 0: the result as it is."""
    if not iterations:
        return result
    cut = replace(result, trials=tuple(_cut(one, iterations) for one in result.trials), best=None)
    if cut.ranking.limits or cut.repeats > 1:
        cut = replace(cut, trials=tuple(replace(one, standing=_standing(cut, one)) for one in cut.trials))
    first = next(iter(ranked(cut)), None)
    return replace(cut, best=first if first is not None and first.metrics and first.status != "failed" else None)


def _standing(result: Result, trial: TrialResult) -> Standing:
    """Return the standing of a trial by the metrics that it and the repeats of its configuration have now."""
    return result.ranking.standing(trial.metrics, [one.metrics for one in result.counting(trial)])


def _cut(trial: TrialResult, iterations: int) -> TrialResult:
    if trial.iterations < iterations:
        return replace(trial, metrics={}, curve=(), bracket=None, standing=None)
    curve = tuple(report for report in trial.present_curve if report[1] <= iterations)
    metrics = curve[-1][2] if curve else {}
    return replace(trial, metrics=metrics, curve=curve, bracket=None, standing=None, iterations=iterations)
