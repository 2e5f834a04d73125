"""Rules of `search.stop`: whether a trial ends, when it reports, and whether the search does. Pure.

A trial that a rule ends is as one that ends by itself: its latest report ranks at every SYNC or rung. Both kinds of
rules look at reports that a checkpoint holds, so that the result can be handed over.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rubberband.executor.core.bill import bill_usd
from rubberband.executor.core.forecast import forecast
from rubberband.executor.core.history import Rule, SearchEnd, TrialCut
from rubberband.executor.core.progress import Curves, merit_of
from rubberband.executor.core.ranking import repeats_of
from rubberband.executor.core.state import LaneState, State
from rubberband.executor.core.trial_state import TrialState, TrialStatus
from rubberband.units import counted, duration, format_usd
from rubberband.values.stopping import NoImprovement
from rubberband.values.worth import RestWorth

# Trials


def ends_trial(lane: LaneState, trial: TrialState) -> TrialCut | None:
    """Return why a trial ends with the report that it has just made; None: it goes on.

    It never ends before the scheduler's grace period, and with its last iteration it ends anyway.
    """
    job, state = lane.job, lane.state
    stop, report = job.stop, trial.reports[-1]
    if not stop.ends_trials or merit_of(job.ranking, report) is None:
        return None
    curves = state.curves or Curves(stop, job.ranking)
    state.curves = curves
    curve = curves.of(trial)
    if not is_saved(state, trial) or trial.iterations < stop.grace_period:
        return None
    if trial.iterations >= job.iterations_by(lane.bracket.end_stage - 1):
        return None
    patience, median = stop.patience, stop.median
    if patience is not None and curve.has_stalled and trial.iterations >= patience.after:
        if patience.std is not None:
            return _cut(state, trial, "patience", f"its latest {patience.iterations} results are alike")
        by_more = f" of more than {patience.min_delta:g}" if patience.min_delta else ""
        times = counted(curve.waited, "evaluated iteration")
        return _cut(state, trial, "patience", f"no improvement{by_more} in {times}")
    if median is not None and curve.results >= median.after:
        others = curves.median_of_others(curve, trial.iterations, median.trials)
        if others is not None and curve.best < others:
            its, theirs = (-job.ranking.signed(merit) for merit in (curve.best, others))
            reason = f"its best {job.metric}, {its:.6g}, is worse than the median of others, {theirs:.6g}"
            return _cut(state, trial, "median", reason)
    return None


def _cut(state: State, trial: TrialState, rule: Rule, reason: str) -> TrialCut:
    return TrialCut(
        at_s=state.elapsed_s(state.now), trial=trial.trial, iterations=trial.iterations, rule=rule, reason=reason
    )


def is_saved(state: State, trial: TrialState) -> bool:
    """Whether a checkpoint holds the iteration of a trial's latest report, or the trial saves none at all."""
    saved = trial.reports[-1].saved_iterations
    if saved == 0:
        return not state.profile.resumes or trial.checkpoint_iterations == trial.iterations
    return saved is None


# The search


def note_result(state: State, trial: TrialState) -> None:
    """Take the latest report of a trial into the best result so far."""
    job, report = state.job, trial.reports[-1]
    rule = job.stop.no_improvement
    if rule is None or any(job.ranking.violations(report.metrics)):  # infeasible results are no improvement
        return
    if (merit := merit_of(job.ranking, report)) is None:
        return
    spent_usd = 0.0 if rule.cost_usd is None else bill_usd(state, report.reported_at)
    state.best_so_far.note(merit, trial.trial, report.reported_at, spent_usd, rule.min_delta)
    if rule.plateau is not None:
        state.best_so_far.note_alike(merit, rule.plateau)


def ends_search(state: State, trials: Sequence[TrialState]) -> SearchEnd | None:
    """Return why the search ends now; None: it goes on. Asked after reports and SYNCs, and when time has passed.

    `trials` are those that may have reached the target since it was asked before.
    """
    if _is_at_its_end(state):
        return None
    stop = state.job.stop
    if stop.target is not None and (trial := reaching(state, trials)) is not None:
        value = trial.metric(state.job.metric)
        reason = f"trial {trial.trial} reached the target: {state.job.metric}={value:.6g} "
        mean = f" by the mean of its {state.job.repeats} repeats" if state.job.repeats > 1 else ""
        reason += f"after {counted(trial.iterations, 'iteration')} (target {stop.target:g}{mean})"
        return _end(state, "target", reason, trial.trial)
    if stop.no_improvement is not None and (since := _without_improvement(state, stop.no_improvement)):
        return _end(state, "no_improvement", f"no improvement {since}", None)
    if stop.worth_per_usd is not None and (worth := state.history.of(RestWorth)[-1:]):
        per_usd = worth[0].per_usd
        if per_usd is not None and per_usd < stop.worth_per_usd:
            bought = f"{per_usd:.2g} per USD, below worth={stop.worth_per_usd:g}"
            return _end(state, "worth", f"{worth[0].in_words(state.job.metric)}: {bought}", None)
    return None


def _end(state: State, rule: Rule, reason: str, trial: int | None) -> SearchEnd:
    expected = forecast(state, state.now)
    return SearchEnd(
        at_s=state.elapsed_s(state.now),
        rule=rule,
        reason=reason,
        trial=trial,
        expected_jct_s=expected.jct_s,
        expected_cost_usd=expected.cost_usd,
    )


def _is_at_its_end(state: State) -> bool:
    """Whether nothing is left to train: the search ends by itself with the SYNC that is due."""
    return not any(
        lane.runners or lane.waiters or lane.next_stage < lane.end_stage or lane.rungs.highest() is not None
        for lane in state.active()
    )


def reaching(state: State, trials: Sequence[TrialState]) -> TrialState | None:
    """Return the first of the trials that has reached the target by its latest report; None without one.

    Repeats of a configuration reach it by their mean, once all of them have reported: the best of them is returned.
    """
    job, target = state.job, state.job.stop.target
    if target is None:
        return None
    least = -job.ranking.signed(target)
    for trial in trials:
        repeats = [one for one in repeats_of(state, trial) if one.status is not TrialStatus.FAILED]
        merits = {one.trial: merit for one in repeats if (merit := _feasible_merit(state, one)) is not None}
        if not merits or len(merits) < len(repeats) or statistics.fmean(merits.values()) < least:
            continue
        kept = [one for one in repeats if merits[one.trial] >= least and is_saved(state, one)]
        if kept:
            return max(kept, key=lambda one: merits[one.trial])
    return None


def _feasible_merit(state: State, trial: TrialState) -> float | None:
    """Return the merit of a trial's latest report; None if there is none, or it breaks a limit."""
    ranking = state.job.ranking
    if not trial.has_reported or any(ranking.violations(trial.metrics)):
        return None
    return merit_of(ranking, trial.reports[-1])


def _without_improvement(state: State, rule: NoImprovement) -> str:
    """Return for how long the best result has not improved, if that is too long; else nothing."""
    best = state.best_so_far
    if best.trial is None:
        return ""
    if rule.trials is not None and best.trials >= rule.trials:
        return f"by {counted(best.trials, 'trial')} in a row"
    if rule.syncs is not None and best.syncs >= rule.syncs:
        return f"since {counted(best.syncs, 'SYNC')}"
    if (due_at := idle_until(state)) is not None and state.now >= due_at:
        return f"for {duration(state.now - best.at)}"
    if rule.cost_usd is not None and (spent_usd := bill_usd(state, state.now) - best.bill_usd) >= rule.cost_usd:
        return f"for {format_usd(spent_usd)}"
    if rule.plateau is not None and best.alike > rule.plateau.reports:
        return f"among the best {rule.plateau.top} results, which deviate by at most {rule.plateau.std:g}"
    return ""


def idle_until(state: State) -> float | None:
    """Return when the search ends unless its best result improves; None without a rule about time."""
    rule = state.job.stop.no_improvement
    if rule is None or rule.time_s is None or state.best_so_far.trial is None:
        return None
    return state.best_so_far.at + rule.time_s
