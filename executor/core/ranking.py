"""The order of trials at a SYNC and on a rung, and the best one so far or at the end. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from rubberband.executor.core.state import State, TrialState, TrialStatus
from rubberband.values.ranking import Merit, Ranking, Standing


def merit(ranking: Ranking, trial: TrialState) -> Merit:
    """Return the merit of a trial's latest metrics; the lowest is the best."""
    return ranking.merit(trial.metrics)


def rank(trials: Iterable[TrialState], ranking: Ranking) -> tuple[int, ...]:
    """Return trial ids, best latest report first; ties by trial id; those without a finite metric last."""
    return tuple(trial.trial for trial in sorted(trials, key=lambda trial: (ranking.merit(trial.metrics), trial.trial)))


def standing(state: State, trial: TrialState) -> Standing:
    """Return the standing of a trial now, for views."""
    return state.job.ranking.standing(trial.metrics)


def is_result(trial: TrialState) -> bool:
    """Whether a trial may be the best of a finished experiment: it was trained to the end, or until the user's stop."""
    return trial.status is TrialStatus.COMPLETED or (trial.stopped_at is not None and trial.has_reported)


def best_trial(state: State) -> TrialState | None:
    """Return the winner, or the best so far; None before any report.

    After a finished experiment it is the best of the last stages' first ones: each bracket has a winner of its own.
    Trials that the user stopped compete with them, by their latest reports. The one that reached the target is the
    best, whatever others report later.
    After one that was cut short, also by a rule, it is the best latest metric of all trials that did not fail.
    """
    ended_by = state.ended_by
    if ended_by is not None and ended_by.trial is not None:
        return state.trials[ended_by.trial]
    if state.outcome == "done" and ended_by is None:
        candidates = [trial for trial in state.trials if is_result(trial)]
    else:
        candidates = [trial for trial in state.trials if trial.has_reported and trial.status is not TrialStatus.FAILED]
    order = rank(candidates, state.job.ranking)
    return state.trials[order[0]] if order else None
