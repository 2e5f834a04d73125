"""Worth of the rest of a search beside its cost: from the state to the curves and rounds of the model. Pure.

The driver computes it at each SYNC, where it plans the rest; without a SYNC, whenever a share of the results has come.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from rubberband import planner
from rubberband.executor.core.bill import bill_usd
from rubberband.executor.core.events import RestValued
from rubberband.executor.core.forecast import Forecast, forecast
from rubberband.executor.core.job import Bracket, Job
from rubberband.executor.core.progress import merit_of
from rubberband.executor.core.ranking import best_trial, is_result, merit, repeats_of
from rubberband.executor.core.state import LaneState, State
from rubberband.executor.core.trial_state import TrialState, TrialStatus
from rubberband.values.worth import RestWorth

if TYPE_CHECKING:
    from rubberband.planner import Chain, Curve, Rest

Repeats = Sequence[TrialState]
"""The trials of one configuration."""

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
    if best is None or not _is_ranked(job, now_best := repeats_of(state, best)):
        return None
    if expected.jct_s <= state.elapsed_s(state.now):  # nothing that trains is known to be left, and so has no price
        return None
    every = [repeats_of(state, trial) for trial in state.trials[:: job.repeats]]
    begun = [one for one in every if any(trial.reports or trial.status is TrialStatus.FAILED for trial in one)]
    ranked = [one for one in begun if not _is_short(one) and _is_ranked(job, one)]
    ranked.sort(key=lambda one: (merit(job.ranking, _alive(one)), one[0].trial))
    curves = {one[0].trial: _curve(job, one) for one in ranked[:_MOST_CURVES]}
    curves = {trial: curve for trial, curve in curves.items() if len(curve.values) >= planner.LEAST_REPORTS}
    place = {trial: number for number, trial in enumerate(curves)}
    chains = [chain for lane in state.active() for chain in _chains(lane, place)]
    ended = [_oriented(job, one) for one in ranked[:_MOST_CURVES] if any(map(is_result, one))]
    value, unknown = _oriented(job, now_best), sum(_is_unknown(job, one) for one in begun)
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


# Configurations, each with its repeats: usually one trial


def _alive(repeats: Repeats) -> Repeats:
    return [trial for trial in repeats if trial.status is not TrialStatus.FAILED]


def _is_ranked(job: Job, repeats: Repeats) -> bool:
    """Whether a configuration has a result that keeps all limits."""
    alive = _alive(repeats)
    return bool(alive) and not any(merit(job.ranking, alive)[:2])


def _is_short(repeats: Repeats) -> bool:
    """Whether the reports are too few for a curve."""
    return min((len(trial.reports) for trial in _alive(repeats)), default=0) < planner.LEAST_REPORTS


def _is_unknown(job: Job, repeats: Repeats) -> bool:
    """Whether reports are too few for a curve, and more will come, or wait for SYNC; on a rung it has lost."""
    ahead = {TrialStatus.QUEUED, TrialStatus.RUNNING} | ({TrialStatus.PAUSED} if job.has_sync else set())
    return _is_short(repeats) and any(trial.status in ahead for trial in repeats)


def _oriented(job: Job, repeats: Repeats) -> float:
    """Return the metric by which a configuration is ranked, the higher the better."""
    return -job.ranking.signed(job.ranking.mean([trial.metrics for trial in _alive(repeats)])[job.metric])


def _curve(job: Job, repeats: Repeats) -> Curve:
    """Return the evaluated reports of a configuration: means, after iterations that all of its repeats have done."""
    alive, found = _alive(repeats), dict[int, list[float]]()
    for report in (report for trial in alive for report in trial.reports):
        if (value := merit_of(job.ranking, report)) is not None:
            found.setdefault(report.iterations, []).append(value)
    at = [iterations for iterations, values in sorted(found.items()) if len(values) == len(alive)]
    is_over = all(trial.ended for trial in alive)
    return planner.Curve(iterations=at, values=[fmean(found[iterations]) for iterations in at], is_over=is_over)


# Chains


def _chains(lane: LaneState, place: Mapping[int, int]) -> Iterator[Chain]:
    """Yield the configurations of a lane that go on, by bracket, with the rounds that they have left."""
    if lane.stages:
        yield from _under_way(lane, place)
    for bracket in lane.brackets:
        if not lane.stages or bracket.first_stage > lane.stage.stage:
            new = lane.job.stages[bracket.first_stage].trials // lane.job.repeats
            yield planner.Chain(new=new, rounds=_rounds(lane, bracket.first_stage, bracket, new))


def _under_way(lane: LaneState, place: Mapping[int, int]) -> Iterator[Chain]:
    """Yield the chain of the bracket under way, unless it is at its end, or has no trial left."""
    job, is_sync = lane.job, lane.stage.ended_at is not None
    at = lane.next_stage if is_sync else lane.stage.stage
    if at >= lane.bracket.end_stage:
        return
    trials = [lane.state.trials[number] for number in (lane.begins_with(at) if is_sync else lane.stage.trials)]
    trials = [trial for trial in trials if trial.status not in (TrialStatus.FAILED, TrialStatus.STOPPED)]
    firsts = sorted({trial.trial // job.repeats * job.repeats for trial in trials})
    going = [repeats_of(lane.state, lane.state.trials[first]) for first in firsts]
    if going:
        yield planner.Chain(
            curves=tuple(place[first] for first in firsts if first in place),
            new=sum(_chosen_of(lane, one, at) for one in going if _is_unknown(job, one)),
            rounds=_rounds(lane, at, lane.bracket, len(going)),
        )


def _chosen_of(lane: LaneState, repeats: Repeats, stage: int) -> int:
    """Return the number of random configurations whose best one is like one that was promoted with few reports."""
    job = lane.job
    if not job.has_sync:
        return int(job.stages[0].rungs.reduction_factor ** repeats[0].rung)
    return max(1, job.stages[lane.bracket.first_stage].trials // job.stages[stage].trials)


def _rounds(lane: LaneState, stage: int, bracket: Bracket, going: int) -> tuple[tuple[int, int], ...]:
    """Return the rounds from a stage to the end of its bracket; with rungs, those that `going` ones still climb."""
    job, each = lane.job, lane.job.repeats
    if job.has_sync:
        stages = range(stage, bracket.end_stage)
        return tuple((min(going, max(1, job.stages[one].trials // each)), job.iterations_by(one)) for one in stages)
    ends, fewest = job.rung_ends(stage), job.stages[stage].rungs.fewest(going * each)
    reached = [sum(trial.rung >= rung for trial in lane.state.trials) for rung in range(len(ends))]
    counts = [max(1, most // each, there // each) for most, there in zip(fewest, reached, strict=True)]
    return tuple(zip(counts, ends, strict=True))


def _round_sizes(rest: Rest) -> list[float]:
    """Return improvements in round numbers: about the quarter and the twentieth of the cases reach them, if any do."""
    return sorted({_rounded(size) for size in (rest.quantile(0.75), rest.quantile(0.95)) if size > 0.0})


def _rounded(size: float) -> float:
    """Return the largest number of 1, 2, 5, 10, 20 and so on that is not above `size`."""
    power = math.floor(math.log10(size))
    return max(number for digit in (0.5, 1, 2, 5) if (number := float(f"{digit}e{power}")) <= size)
