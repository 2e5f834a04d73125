"""The order of trials at a SYNC and on a rung, and the best one so far or at the end. Pure.

Trials whose numbers follow each other are the repeats of one configuration (`Ranking.repeats`, usually 1): they are
ranked together, by their mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rubberband.executor.core.state import State
from rubberband.executor.core.trial_state import TrialState, TrialStatus
from rubberband.values.ranking import Merit, Ranking, Standing


def rank(trials: Iterable[TrialState], ranking: Ranking) -> tuple[int, ...]:
    """Return trial ids, best latest report first; ties by trial id; those without a finite metric last.

    Repeats of a configuration follow each other, the best one first.
    """
    of = dict[int, list[TrialState]]()
    for trial in trials:
        of.setdefault(trial.trial // ranking.repeats, []).append(trial)
    order = sorted(of, key=lambda configuration: (merit(ranking, of[configuration]), configuration))
    return tuple(trial.trial for configuration in order for trial in _best_first(of[configuration], ranking))


def _best_first(trials: Sequence[TrialState], ranking: Ranking) -> list[TrialState]:
    return sorted(trials, key=lambda trial: (ranking.merit(trial.metrics), trial.trial))


def merit(ranking: Ranking, repeats: Sequence[TrialState]) -> Merit:
    """Return the merit of a configuration by the latest reports of these repeats; the lowest is the best."""
    return ranking.merit(ranking.mean([trial.metrics for trial in repeats]))


def repeats_of(state: State, trial: TrialState) -> list[TrialState]:
    """Return all trials of a trial's configuration, by number: only itself, unless the search repeats."""
    repeats = state.job.repeats
    first = trial.trial // repeats * repeats
    return state.trials[first : first + repeats]


def standing(state: State, trial: TrialState) -> Standing:
    """Return the standing of a trial now, for views.

    The repeats that count are those by which `best_trial` ranks: all that reported and did not fail; at the end of a
    search, those that were trained to the end, if there are any.
    """
    repeats, is_done = repeats_of(state, trial), state.outcome == "done" and state.ended_by is None
    done = [one for one in repeats if is_done and one.status is TrialStatus.COMPLETED]
    counting = done or [one for one in repeats if one.reports and one.status is not TrialStatus.FAILED] or [trial]
    return state.job.ranking.standing(trial.metrics, [one.metrics for one in counting])


def is_result(trial: TrialState) -> bool:
    """Whether a trial may be the best of a finished experiment: it was trained to the end, or until the user's stop."""
    return trial.status is TrialStatus.COMPLETED or (trial.stopped_at is not None and trial.has_reported)


def best_trained(state: State) -> TrialState | None:
    """Return `best_trial` to show it; None for a rehearsal, whose metric is invented."""
    return best_trial(state) if state.job.trains else None


def best_trial(state: State) -> TrialState | None:
    """Return the winner, or the best so far; None before any report.

    After a finished experiment it is the best of the last stages' first ones: each bracket has a winner of its own.
    Trials that the user stopped compete with them, by their latest reports. The one that reached the target is the
    best, whatever others report later.
    After one that was cut short, also by a rule, it is the best latest metric of all trials that did not fail.
    It is the best of a configuration's repeats; those that the user stopped count only where none was completed.
    """
    ended_by = state.ended_by
    if ended_by is not None and ended_by.trial is not None:
        return state.trials[ended_by.trial]
    if state.outcome == "done" and ended_by is None:
        candidates = [trial for trial in state.trials if is_result(trial)]
        if state.job.repeats > 1:
            done = {one.trial // state.job.repeats for one in candidates if one.status is TrialStatus.COMPLETED}
            candidates = [
                trial
                for trial in candidates
                if trial.status is TrialStatus.COMPLETED or trial.trial // state.job.repeats not in done
            ]
    else:
        candidates = [trial for trial in state.trials if trial.has_reported and trial.status is not TrialStatus.FAILED]
    order = rank(candidates, state.job.ranking)
    return state.trials[order[0]] if order else None
