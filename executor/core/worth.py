"""Worth of the rest of a search beside its cost: from the state to the curves and rounds of the model. Pure.

The driver computes it at each SYNC, where it plans the rest; without a SYNC, whenever a share of the results has come.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from rubberband import planner
from rubberband.executor.core.bill import bill_usd
from rubberband.executor.core.events import RestValued
from rubberband.executor.core.forecast import Forecast, forecast
from rubberband.executor.core.job import Bracket, Job
from rubberband.executor.core.progress import merit_of
from rubberband.executor.core.ranking import best_trial, is_result, merit
from rubberband.executor.core.state import LaneState, State, TrialState, TrialStatus
from rubberband.values.worth import RestWorth

if TYPE_CHECKING:
    from rubberband.planner import Chain, Curve, Rest

_LOOKS = 16
"""Times in a search without SYNCs that its rest is looked at, about."""
_MOST_CURVES = 256
"""Curves that the model is given, the best ones: the others count as worse than all of them."""


def results_of(state: State) -> int:
    """Return how much is known by now: the stages that have ended, or without a SYNC the trials that ended a rung."""
    if state.job.has_sync:
        return sum(stage.ended_at is not None for stage in state.stages)
    return state.completed + sum(sum(lane.rungs.counts()) for lane in state.lanes)


def is_due(state: State) -> bool:
    """Whether the rest is to be looked at now; where it is planned again, that is done with it."""
    job = state.job
    if state.course != "running" or (job.has_sync and job.replan):
        return False
    step = 1 if job.has_sync else max(1, job.num_trials // _LOOKS)
    return results_of(state) >= state.valued_results + step


def value_rest(state: State, now: float) -> RestValued:
    """Return what the rest may bring, as of `now`, as an event."""
    return RestValued(occurred_at=now, worth=worth_of(state, now, forecast(state, now)))


def worth_of(state: State, now: float, expected: Forecast) -> RestWorth | None:
    """Return what the rest may bring beside its cost; None where too little is known, or nothing is left.

    `expected`: end and cost of the whole run.
    """
    job, best = state.job, best_trial(state)
    if best is None or not _is_ranked(job, best):
        return None
    begun = [trial for trial in state.trials if trial.reports or trial.status is TrialStatus.FAILED]
    ranked = [trial for trial in begun if len(trial.reports) >= planner.LEAST_REPORTS and _is_ranked(job, trial)]
    ranked.sort(key=lambda trial: (merit(job.ranking, [trial]), trial.trial))
    curves = {trial.trial: _curve(job, trial) for trial in ranked[:_MOST_CURVES]}
    curves = {trial: curve for trial, curve in curves.items() if len(curve.values) >= planner.LEAST_REPORTS}
    place = {trial: number for number, trial in enumerate(curves)}
    chains = [chain for lane in state.active() for chain in _chains(lane, place)]
    ended = [_oriented(job, trial) for trial in ranked[:_MOST_CURVES] if is_result(trial)]
    value = _oriented(job, best)
    unknown = sum(_is_unknown(job, trial) for trial in begun)
    rest = planner.rest_of(
        list(curves.values()),
        chains,
        value,
        ended=max(ended, default=None),
        given_up=max(0, len(begun) - len(curves) - unknown),
    )
    if rest is None or not chains:
        return None
    return RestWorth(
        at_s=state.elapsed_s(now),
        best=job.ranking.signed(-value),
        expected=rest.expected,
        chances=tuple((size, rest.chance(size)) for size in (0.0, *_round_sizes(rest))),
        worse=rest.worse,
        left_s=max(0.0, expected.jct_s - state.elapsed_s(now)),
        left_usd=max(0.0, expected.cost_usd - bill_usd(state, now)),
    )


def _is_ranked(job: Job, trial: TrialState) -> bool:
    return trial.status is not TrialStatus.FAILED and not merit(job.ranking, [trial])[0]


def _is_unknown(job: Job, trial: TrialState) -> bool:
    """Whether a trial has too few reports for a curve, and trains on or waits for SYNC; on a rung it has lost."""
    trains = trial.status in (TrialStatus.QUEUED, TrialStatus.RUNNING)
    goes_on = trains or (job.has_sync and trial.status is TrialStatus.PAUSED)
    return goes_on and len(trial.reports) < planner.LEAST_REPORTS


def _oriented(job: Job, trial: TrialState) -> float:
    """Return the latest metric of a trial that is ranked, the higher the better."""
    return -job.ranking.signed(trial.metrics[job.metric])


def _curve(job: Job, trial: TrialState) -> Curve:
    """Return the evaluated reports of a trial."""
    merits = ((one.iterations, merit_of(job.ranking, one)) for one in trial.reports)
    found = [(at, value) for at, value in merits if value is not None]
    return planner.Curve(iterations=[at for at, _ in found], values=[value for _, value in found], is_over=trial.ended)


# Chains


def _chains(lane: LaneState, place: Mapping[int, int]) -> Iterator[Chain]:
    """Yield the trials of a lane that go on, by bracket, with the rounds that they have left."""
    if lane.stages:
        yield from _under_way(lane, place)
    for bracket in lane.brackets:
        if not lane.stages or bracket.first_stage > lane.stage.stage:
            trials = lane.job.stages[bracket.first_stage].trials
            yield planner.Chain(new=trials, rounds=_rounds(lane, bracket.first_stage, bracket, trials))


def _under_way(lane: LaneState, place: Mapping[int, int]) -> Iterator[Chain]:
    """Yield the chain of the bracket under way, unless it is at its end, or has no trial left."""
    is_sync = lane.stage.ended_at is not None
    at = lane.next_stage if is_sync else lane.stage.stage
    if at >= lane.bracket.end_stage:
        return
    numbers = lane.begins_with(at) if is_sync else lane.stage.trials
    trials = [lane.state.trials[number] for number in numbers]
    trials = [trial for trial in trials if trial.status not in (TrialStatus.FAILED, TrialStatus.STOPPED)]
    if trials:
        yield planner.Chain(
            curves=tuple(place[trial.trial] for trial in trials if trial.trial in place),
            new=sum(_chosen_of(lane, trial, at) for trial in trials if _is_unknown(lane.job, trial)),
            rounds=_rounds(lane, at, lane.bracket, len(trials)),
        )


def _chosen_of(lane: LaneState, trial: TrialState, stage: int) -> int:
    """Return the number of random trials whose best one a trial is like that was promoted with few reports."""
    job = lane.job
    if not job.has_sync:
        return int(job.stages[0].rungs.reduction_factor ** trial.rung)
    return max(1, job.stages[lane.bracket.first_stage].trials // job.stages[stage].trials)


def _rounds(lane: LaneState, stage: int, bracket: Bracket, trials: int) -> tuple[tuple[int, int], ...]:
    """Return the rounds from a stage to the end of its bracket; with rungs, those that `trials` still climb."""
    job = lane.job
    if job.has_sync:
        stages = range(stage, bracket.end_stage)
        return tuple((min(trials, job.stages[one].trials), job.iterations_by(one)) for one in stages)
    ends, fewest = job.rung_ends(stage), job.stages[stage].rungs.fewest(trials)
    reached = [sum(trial.rung >= rung for trial in lane.state.trials) for rung in range(len(ends))]
    counts = [max(1, most, there) for most, there in zip(fewest, reached, strict=True)]
    return tuple(zip(counts, ends, strict=True))


def _round_sizes(rest: Rest) -> list[float]:
    """Return improvements in round numbers: about the quarter and the twentieth of the cases reach them, if any do."""
    return sorted({_rounded(size) for size in (rest.quantile(0.75), rest.quantile(0.95)) if size > 0.0})


def _rounded(size: float) -> float:
    """Return the largest number of 1, 2, 5, 10, 20 and so on that is not above `size`."""
    power = math.floor(math.log10(size))
    return max(number for digit in (0.5, 1, 2, 5) if (number := float(f"{digit}e{power}")) <= size)
