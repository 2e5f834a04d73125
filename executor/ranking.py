"""The order of trials at a SYNC, and the best one at the end. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

from rubberband.executor.state import State, TrialState, TrialStatus


def rank(trials: Sequence[TrialState], metric: str, mode: Literal["max", "min"]) -> tuple[int, ...]:
    """Trial ids, best latest metric first; ties by trial id; those without a finite metric last."""
    return tuple(trial.trial for trial in sorted(trials, key=_key(metric, mode)))


def _key(metric: str, mode: Literal["max", "min"]) -> Callable[[TrialState], tuple[bool, float, int]]:
    def key(trial: TrialState) -> tuple[bool, float, int]:
        value = trial.metric(metric)
        if value is None or not math.isfinite(value):
            return (True, 0.0, trial.trial)
        return (False, -value if mode == "max" else value, trial.trial)

    return key


def best_trial(state: State, metric: str, mode: Literal["max", "min"]) -> TrialState | None:
    """The winner, or the best so far; None before any report.

    After a finished experiment it is the last stage's best. After one that was cut short it is the best latest metric
    of all trials that did not fail.
    """
    if state.outcome == "done":
        return state.trials[state.stages[-1].ranking[0]]
    reported = (trial for trial in state.trials if trial.reports and trial.status is not TrialStatus.FAILED)
    return min(reported, key=_key(metric, mode), default=None)
