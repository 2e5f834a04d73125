"""The forecast of a running experiment: when it will end and what it will have cost, from where it stands. Pure.

The current stage of each lane is list-scheduled on the slots that the plan gives it, with the profile's times
(corrected by what was measured at the latest replan) and the speed of each trial, as far as it is known; later stages
are as predicted then. Lanes run side by side: the latest one ends the run, and their costs add up.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

from rubberband.executor.core.ahead import Climber, Field, Host, Rest
from rubberband.executor.core.bill import bill_usd, instance_cost_usd, market_usd_per_s, new_instance_usd
from rubberband.executor.core.events import Gang
from rubberband.executor.core.fleet import InstanceRecord, InstanceStatus
from rubberband.executor.core.job import Job
from rubberband.executor.core.own_speeds import OwnSpeed, updated
from rubberband.executor.core.state import LaneState, Phase, State, stage_iterations
from rubberband.executor.core.trial_state import TrialState, TrialStatus
from rubberband.features import part
from rubberband.planner.exact.model import least_instances as instances_for
from rubberband.values.offer import slots
from rubberband.values.profile import Profile, adding_up_words, mixed_factor, mixture_words

# Instances of other types, used instead of the planned one: how fast gangs on them are, by the speeds of the types.
#
# Everything is 1 as long as no type with another speed is held. Pure.


def speed_of(job: Job, record: InstanceRecord) -> float:
    """Return the speed of an instance's GPUs over that of the planned type."""
    return job.speeds.get(record.instance_type, 1.0)


def gang_factor(profile: Profile, state: State, gang: Gang) -> float:
    """Return how many times longer than the profile's an iteration takes on a gang's instances."""
    job = state.job
    if not job.speeds or not gang:
        return 1.0
    return _factor(job, profile, [speed_of(job, state.instances[slot.instance]) for slot in gang])


def lane_factor(profile: Profile, lane: LaneState, gpus: int) -> float:
    """Return the same of trials with `gpus` GPUs that are still to start on a lane's ready instances, on average.

    Gangs within an instance are each as fast as that; one that spans several is of all of them.
    """
    job = lane.job
    ready = [speed_of(job, record) for record in lane.held.ready]
    if not job.speeds or not ready:
        return 1.0
    if gpus > job.offer.slots:
        return _factor(job, profile, [fmean(ready) if job.balances else min(ready)] * gpus)
    return len(ready) / math.fsum(1.0 / _factor(job, profile, [speed] * gpus) for speed in ready)


def _factor(job: Job, profile: Profile, speeds: Sequence[float]) -> float:
    if profile.asynchronous is not None and job.balances:
        return float(part("mixture")(profile.asynchronous, tuple(speeds)))
    return mixed_factor(speeds, balanced=job.balances)


def assumed(lane: LaneState) -> str:
    """Return the assumption about a lane's instances of other types, in words; empty where there are none."""
    job = lane.job
    counts = Counter(record.instance_type or job.offer.instance_type for record in lane.held.ready)
    text = mixture_words(counts, job.speeds, job.offer.instance_type)
    if not text:
        return ""
    if not job.balances:
        return f"{text}; a gang waits for its slowest GPU"
    return f"{text}; {adding_up_words(job.profile)} in a gang"


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Forecast of the whole experiment as of now."""

    jct_s: float
    cost_usd: float


def forecast(state: State, now: float, instances: Mapping[int, int] | None = None) -> Forecast:
    """The expected job completion time and bill, as of `now`.

    `instances`: those of a lane in its current stage, if not those of the plan.
    """
    job = state.job
    if state.course in ("ending", "finished"):
        end = state.ended_at if state.ended_at is not None else now
        return Forecast(jct_s=end - state.started_at, cost_usd=bill_usd(state, end))
    if not state.stages:
        return Forecast(jct_s=job.prediction.jct_s, cost_usd=job.prediction.cost_usd)
    elapsed_s, ends_s, cost_usd = now - state.started_at, [now - state.started_at], bill_usd(state, now)
    for lane in state.active():
        stage = stage_left(lane, now, (instances or {}).get(lane.lane))
        later = later_stages(lane)
        ends_s.append(elapsed_s + stage.jct_s + later.jct_s)
        head_usd = 0.0 if job.is_divided else job.offer.head_cost_usd(stage.jct_s)
        cost_usd = cost_usd + stage.cost_usd + head_usd + later.cost_usd
    if job.is_divided:
        cost_usd += job.offer.head_cost_usd(max(ends_s) - elapsed_s)
    return Forecast(jct_s=max(ends_s), cost_usd=cost_usd)


def later_stages(lane: LaneState) -> Forecast:
    """Seconds that the lane's stages after the current one take, and what they cost, as predicted for the trials left.

    Where there are several brackets, that is without the head node.
    """
    later = [_later_stage(lane, stage) for stage in range(lane.stage.stage + 1, lane.end_stage)]
    return Forecast(jct_s=sum(stage.jct_s for stage in later), cost_usd=sum(stage.cost_usd for stage in later))


def _later_stage(lane: LaneState, stage: int) -> Forecast:
    """Return the time and cost of a later stage: less than predicted where fewer trials are left than it was planned
    for, in proportion to its waves and to the instances that they need.
    """
    job, predicted = lane.job, lane.state.predicted[stage]
    planned, left = min(job.stages[stage].trials, lane.planned_trials), lane.trials_left
    if stage >= lane.bracket.end_stage or left >= planned:
        return Forecast(jct_s=predicted.provisioning_s + predicted.duration_s, cost_usd=predicted.cost_usd)
    if left == 0:
        return Forecast(jct_s=0.0, cost_usd=0.0)
    chosen, offer = lane.state.plan.stages[stage], job.offer
    at_once = max(1, slots(chosen.instances, offer.slots, chosen.gpus_per_trial))
    needed = min(chosen.instances, instances_for(left, offer.slots, chosen.gpus_per_trial))
    duration_s = predicted.duration_s * math.ceil(left / at_once) / math.ceil(planned / at_once)
    taken_s = predicted.provisioning_s + duration_s
    share = needed / chosen.instances * taken_s / (predicted.provisioning_s + predicted.duration_s)
    if offer.billing == "per_function":
        share = left / planned
    return Forecast(jct_s=taken_s, cost_usd=predicted.cost_usd * share)


def stage_left(lane: LaneState, now: float, instances: int | None = None) -> Forecast:
    """Seconds until the SYNC of the lane's current stage, and what that adds to the bill, without the head node."""
    if not lane.job.has_sync and lane.stage.ended_at is None:
        return _rest_left(lane, now, instances)
    left_s = stage_left_s(lane, now, instances)
    return Forecast(jct_s=left_s, cost_usd=_stage_left_usd(lane, now, left_s))


def stage_left_s(
    lane: LaneState, now: float, instances: int | None = None, known_s: Mapping[int, float] | None = None
) -> float:
    """Seconds until the SYNC of the lane's current stage is expected.

    `known_s`: seconds that running trials still take, where that is known better than by the profile.
    """
    is_idle = not (lane.held.ready or lane.runners or lane.phase is Phase.PLANNING)
    waits = lane.phase is Phase.SCALING or is_idle
    waiting_s = max(0.0, _ready_at(lane) - now) if waits else 0.0
    return waiting_s + _training_left_s(lane, now, instances, known_s or {})


def _ready_at(lane: LaneState) -> float:
    """Return when the stage's instances are expected to be ready: as planned, or later if some were asked for later."""
    state = lane.state
    stage, offer, live = lane.stage, lane.job.offer, lane.held.live
    planned_s = state.predicted[stage.stage].provisioning_s
    start_s = planned_s or offer.provision_delay_s + offer.init_delay_s  # as measured, where it was planned to grow
    asked_at = max((r.requested_at for r in live if r.status is not InstanceStatus.READY), default=-math.inf)
    if len(state.lanes) > 1 and lane.chosen.instances <= len(lane.held.ready):
        return state.now  # instances were handed on to it
    return max(stage.started_at + planned_s, asked_at + start_s)


def runs_in_s(lane: LaneState, now: float) -> float:
    """Seconds until what the stage still lacks is expected to run."""
    coming = (record.requested_at for record in lane.held.live if record.running_at is None)
    return max(0.0, max(coming, default=lane.stage.started_at) + lane.job.offer.provision_delay_s - now)


def _stage_left_usd(lane: LaneState, now: float, left_s: float) -> float:
    """Return the cost that the current stage still adds to the bill: minima that are paid already are used up first."""
    job = lane.job
    if lane.phase is Phase.PLANNING:
        return 0.0
    offer, end, ours = job.offer, now + left_s, lane.held
    if offer.billing == "per_function":
        return _functions_left_usd(lane, now)
    held = [record for record in [*ours.live, *ours.leaving] if record.running_at is not None]
    growth_usd = sum(
        instance_cost_usd(job, record, end, is_expected=True) - instance_cost_usd(job, record, now, is_expected=True)
        for record in held
    )
    chosen = lane.chosen
    coming = max(0, lane.wanted - sum(record.running_at is not None for record in ours.live))
    coming_s = max(0.0, left_s - runs_in_s(lane, now))
    return growth_usd + coming * new_instance_usd(offer, chosen.market, coming_s)


_SAMPLES, _TRIALS_OF_ALL = 8, 800
"""Samples of who goes on, and the trials of all of them together."""


def _rest_left(lane: LaneState, now: float, instances: int | None) -> Forecast:
    """Return what is left of a run without a SYNC: the mean of some samples of who goes on."""
    live = sorted(lane.held.live, key=lambda one: (not lane.runners.uses(one.instance), one.ready_at is None))
    waits = lane.phase is Phase.SCALING or not (lane.held.ready or lane.runners)
    waiting_s = max(0.0, _ready_at(lane) - now) if waits else 0.0
    wide = max(1, lane.chosen.gpus_per_trial // lane.job.offer.slots)
    total = instances or max(len(live), 0 if lane.state.buys_none else lane.wanted, wide)
    hosts, climbers = _on_hosts(lane, now, live, total // wide, wide, are_ready=waits)
    profile, stage = lane.state.profile, lane.job.stages[0]
    iteration_s = profile.iteration_s(lane.chosen.gpus_per_trial)
    over = [one for one in lane.state.trials if one.status is TrialStatus.FAILED or one.stopped_at is not None]
    field = Field(
        hosts=hosts,
        climbers=climbers,
        rungs=lane.rungs,
        rung_s=[profile.startup_s(lane.chosen.gpus_per_trial) + work * iteration_s for work in stage.rung_work],
        repeats=lane.job.repeats,
        over={one.trial for one in over},
        has_completed=lane.state.completed > 0,
    )
    samples = max(1, min(_SAMPLES, _TRIALS_OF_ALL // len(lane.state.trials))) if stage.rungs.promotes else 1
    found = [field.rest(sample) for sample in range(samples)]
    return Forecast(
        jct_s=waiting_s + fmean(one.left_s for one in found),
        cost_usd=fmean(_rest_usd(lane, now, one, live, wide, waiting_s) for one in found),
    )


def _on_hosts(
    lane: LaneState, now: float, live: Sequence[InstanceRecord], count: int, wide: int, *, are_ready: bool
) -> tuple[list[Host], list[Climber]]:
    """Return `count` hosts of `wide` instances each, the live ones first, and the trials on them and after these.

    `are_ready`: whether those that are still to come are counted beside.
    """
    offer, host_of, hosts = lane.job.offer, dict[str, int](), list[Host]()
    coming_s = 0.0 if are_ready else runs_in_s(lane, now) + offer.init_delay_s
    at_once = max(1, offer.slots // lane.chosen.gpus_per_trial)
    for first in range(0, count * wide, wide):
        ours = live[first : first + wide]
        host_of |= {one.instance: len(hosts) for one in ours}
        is_ready = len(ours) == wide and all(one.ready_at is not None for one in ours)
        hosts.append(Host(slots=at_once, ready_s=0.0 if is_ready else coming_s))
    late = 0.0
    if not lane.job.stages[0].rungs.promotes:
        late = lateness(len(lane.runners) + len(lane.waiters), count * at_once)
    running = zip(lane.running(), _running_left_s(lane, now, late), strict=True)
    climbers = [
        Climber(trial=one.trial, rung=one.rung, left_s=left_s, host=host_of.get(one.gang[0].instance))
        for one, left_s in running
    ]
    queued = ((one, _trial_left_s(lane, one, late=late)) for one in lane.queued())
    climbers += [Climber(trial=one.trial, rung=one.rung, left_s=left_s) for one, left_s in queued]
    return hosts, climbers


def _rest_usd(
    lane: LaneState, now: float, rest: Rest, live: Sequence[InstanceRecord], wide: int, waiting_s: float
) -> float:
    """Return what the rest of a run adds to the bill: each instance is paid until it is given back."""
    job, chosen = lane.job, lane.chosen
    offer, usd = job.offer, 0.0
    held_s = [waiting_s + each_s for each_s in rest.held_s for _ in range(wide)]
    coming = [each_s for at, each_s in enumerate(held_s) if at >= len(live) or live[at].running_at is None]
    usd = sum(new_instance_usd(offer, chosen.market, max(0.0, each_s - runs_in_s(lane, now))) for each_s in coming)
    if offer.billing == "per_function":
        return usd + market_usd_per_s(offer, chosen.market) * chosen.gpus_per_trial / offer.slots * rest.busy_s
    ends = [
        *zip(live, held_s, strict=False),
        *((one, rest.left_s) for one in (*live[len(held_s) :], *lane.held.leaving)),
    ]
    return usd + sum(
        instance_cost_usd(job, record, now + each_s, is_expected=True)
        - instance_cost_usd(job, record, now, is_expected=True)
        for record, each_s in ends
        if record.running_at is not None
    )


def _functions_left_usd(lane: LaneState, now: float) -> float:
    job = lane.job
    chosen = lane.chosen
    coming = max(0, chosen.instances - sum(record.running_at is not None for record in lane.held.live))
    left_s = _running_left_s(lane, now)
    left_s += [_trial_left_s(lane, trial) for trial in lane.queued()]
    usd_per_s = market_usd_per_s(job.offer, chosen.market) * chosen.gpus_per_trial / job.offer.slots
    return usd_per_s * sum(left_s) + coming * new_instance_usd(job.offer, chosen.market, 0.0)


def _training_left_s(lane: LaneState, now: float, instances: int | None, known_s: Mapping[int, float]) -> float:
    """Seconds until the current stage's last trial is done: list scheduling on the plan's slots."""
    chosen = lane.chosen
    num_slots = max(1, slots(instances or chosen.instances, lane.job.offer.slots, chosen.gpus_per_trial))
    if lane.job.stages[lane.stage.stage].rungs.promotes:
        return _climbing_left_s(lane, now, num_slots, known_s)
    late = lateness(len(lane.runners) + len(lane.waiters), num_slots)
    free_in, waiting = _running_left_s(lane, now, late, known_s), [*lane.queued()]
    if lane.state.instance_cap is not None:  # trials beyond the slots stop at their next checkpoint, and wait
        waiting += lane.running()[num_slots:]
        del free_in[num_slots:]
    ends_in = [*free_in]
    free_in += _coming_in_s(lane, now, num_slots - len(free_in))
    heapq.heapify(free_in)
    for trial in waiting:
        ends_in.append(free_in[0] + _trial_left_s(lane, trial, late=late))
        heapq.heapreplace(free_in, ends_in[-1])
    return max(ends_in, default=0.0)  # a slot that no trial waits for is not waited for


def _coming_in_s(lane: LaneState, now: float, count: int) -> list[float]:
    """Seconds until each of `count` more slots is free: now, or once an instance is ready that is still to come.

    While all wait for their instances, that is counted beside.
    """
    chosen, slots_each = lane.chosen, lane.job.offer.slots
    if lane.phase is not Phase.TRAINING or not lane.held.ready:
        return [0.0] * count
    ready = slots(len(lane.held.ready), slots_each, chosen.gpus_per_trial)
    late = min(count, max(0, slots(chosen.instances, slots_each, chosen.gpus_per_trial) - ready))
    asked_at = max((record.requested_at for record in lane.held.live if record.ready_at is None), default=now)
    ready_s = max(0.0, asked_at + lane.job.offer.provision_delay_s + lane.job.offer.init_delay_s - now)
    return [0.0] * (count - late) + [ready_s] * late


def _rungs_left(lane: LaneState) -> list[tuple[int, float]]:
    """Return how many trials are still to enter each rung, and the seconds of each there."""
    profile, work = lane.state.profile, lane.job.stages[0].rung_work
    gpus = lane.chosen.gpus_per_trial
    startup_s, iteration_s = profile.startup_s(gpus), profile.iteration_s(gpus)
    return [(trials, startup_s + work[rung] * iteration_s) for trials, rung in _to_come(lane.state)]


def _to_come(state: State) -> list[tuple[int, int]]:
    """Return how many trials are still to enter each rung; none where a stage is one rung.

    Those are the fewest: more do only where a result is among the best for a while.
    """
    ladder = state.job.stages[0].rungs
    left = sum(t.stopped_at is None or t.rung > 0 for t in state.trials)
    wanted = enumerate(ladder.fewest(left))
    found = [(fewest - sum(t.rung >= rung for t in state.trials), rung) for rung, fewest in wanted]
    return [(trials, rung) for trials, rung in found if trials > 0]


def expected_iterations(state: State) -> int:
    """Return the iterations of all trials at the end, as far as they are known; those of the stages without rungs.

    A trial that has ended by itself or failed, or was stopped by the user, does none of those that its stages had left
    for it, and later stages train no more trials than are left.
    """
    job = state.job
    if job.has_sync:
        over = (t for t in state.trials if t.ended or t.stopped_at is not None or t.status is TrialStatus.FAILED)
        whole = sum(_expected_trials(state, index) * stage.iterations for index, stage in enumerate(job.stages))
        joined = [t.joined_stage for t in state.trials if t.joined_stage is not None]
        whole += sum(job.iterations_by(stage) - job.stages[stage].iterations for stage in joined)
        return whole - sum(_left_out(state, trial) for trial in over)
    active = (TrialStatus.QUEUED, TrialStatus.RUNNING)
    ends = job.rung_ends(0)
    begun = sum(ends[t.rung] if t.status in active else t.iterations for t in state.trials)
    if state.course in ("ending", "finished"):
        return begun
    return begun + sum(trials * job.stages[0].rungs.gains[rung] for trials, rung in _to_come(state))


def _expected_trials(state: State, stage: int) -> int:
    """Return how many trials a stage trains, as far as is known: all in the first one of a bracket."""
    job, record = state.job, state.record_of(stage)
    bracket, planned = job.bracket_of(stage), job.stages[stage].trials
    lane = state.lanes[bracket.lane]
    if stage == bracket.first_stage or not lane.stages or stage >= lane.bracket.end_stage:
        return planned
    return min(planned, lane.trials_left) if record is None else len(record.trials)


def _left_out(state: State, trial: TrialState) -> int:
    """Return the iterations that its stage, or the first one of its bracket, had left for a trial that is over."""
    begins = next(b.first_stage for b in state.job.all_brackets() if trial.trial in state.job.trials_of(b))
    return state.job.iterations_by(max(begins, trial.last_stage)) - trial.iterations


def _climbing_left_s(lane: LaneState, now: float, num_slots: int, known_s: Mapping[int, float]) -> float:
    """Seconds until no trial climbs any more: all slots share the work, and one trial has all rungs ahead of it."""
    running, later = _running_left_s(lane, now, known_s=known_s), _rungs_left(lane)
    work_s = sum(running) + sum(_trial_left_s(lane, trial) for trial in lane.queued())
    work_s += sum(trials * run_s for trials, run_s in later)
    return max(work_s / num_slots, max(running, default=0.0) + sum(run_s for _, run_s in later))


def lateness(trials: int, num_slots: int) -> float:
    """Standard deviations by which the last of several trials is later than their average, where times vary.

    That is the largest of as many normal quantities as there are slots (Blom's approximation), of sums of trials where
    some wait.
    """
    last = min(trials, num_slots)
    if last <= 1:
        return 0.0
    waves = math.ceil(trials / num_slots)
    return NormalDist().inv_cdf((last - 0.375) / (last + 0.25)) / math.sqrt(waves)


def _running_left_s(
    lane: LaneState, now: float, late: float = 0.0, known_s: Mapping[int, float] | None = None
) -> list[float]:
    """Seconds that each running trial still takes."""
    known = known_s or {}
    trained = {use.trial for use in lane.state.allocations if use.ended_at is None and use.training_at is not None}
    return [
        known[trial.trial]
        if trial.trial in known
        else running_left_s(lane, trial, now, starts=trial.trial not in trained, late=late)
        for trial in lane.running()
    ]


def running_left_s(lane: LaneState, trial: TrialState, now: float, *, starts: bool, late: float = 0.0) -> float:
    """Seconds that a running trial still takes, what it has done since its start or last report left out.

    `starts`: whether it has not made its first step.
    """
    return max(0.0, _trial_left_s(lane, trial, starts, late) - (now - trial.progress_at))


def iterations_left(lane: LaneState, trial: TrialState) -> int:
    """Iterations that a queued or running trial trains until its stage ends, with those that it trains again."""
    again = lane.state.repeats(trial)
    if again and trial.status is TrialStatus.RUNNING:
        use = lane.state.allocation(trial)
        goes_on = use.training_at is not None and trial.reports[-1].reported_at > use.training_at
        again = 0 if goes_on else max(0, again - use.repeated)
    return lane.target_iterations(trial) - trial.iterations + again


def _trial_left_s(lane: LaneState, trial: TrialState, starts: bool = True, late: float = 0.0) -> float:
    """Seconds from the trial's start, or its latest report, to the stage's end, `late` standard deviations late."""
    state = lane.state
    left, own = iterations_left(lane, trial), own_speed(lane, trial)
    runs = trial.status is TrialStatus.RUNNING
    profile = state.profile
    gpus = len(trial.gang) if runs and lane.job.resize_in_stage else lane.chosen.gpus_per_trial
    mixed = gang_factor(profile, state, trial.gang) if runs else lane_factor(profile, lane, gpus)
    training_s = left * profile.iteration_s(gpus) * own.factor * mixed
    if late and left > 0:
        deviation = math.sqrt(math.log1p(own.error**2 + state.profile.iteration_cv**2 / left))
        training_s *= math.exp(late * deviation - deviation**2 / 2.0)
    return training_s + (profile.startup_s(gpus) if starts else 0.0)


STATED_ENDS = 10.0
"""Weight of a stated chance of an end, beside what a run sees: as if this many ends had shown it."""


def end_chance(state: State) -> float:
    """Return the probability with which a trial ends by itself after an iteration: as stated and as seen in the run.

    Where none is stated, one trial more counts that has trained to the end, so that few ends do not say much.
    """
    stated, last = state.profile.end_chance, state.job.max_iterations
    ends = sum(trial.ended and trial.iterations < last for trial in state.trials)
    if not ends and not stated:
        return 0.0
    trained = sum(trial.iterations for trial in state.trials)
    before = STATED_ENDS / stated if stated else last
    return (ends + stated * before) / (trained + before)


_AVERAGE = OwnSpeed(factor=1.0, error=0.0)


def own_speed(lane: LaneState, trial: TrialState) -> OwnSpeed:
    """Return how much longer than the profile's the trial's iterations take, by earlier stages and by this one."""
    state = lane.state
    known = lane.own.get(trial.trial)
    if known is None:
        if state.profile.trial_cv == 0.0 or not lane.job.has_sync:
            return _AVERAGE
        known = OwnSpeed(factor=1.0, error=state.profile.trial_cv)
    done = trial.iterations - (lane.target_iterations(trial) - stage_iterations(lane.job, lane.stage.stage, trial))
    if done <= 0 or trial.status is not TrialStatus.RUNNING:
        return known
    use = state.allocation(trial)
    if use.training_at is None or use.repeated_until is not None or trial.reports[-done].reported_at <= use.training_at:
        return known  # it began anew in between
    taken_s = trial.reports[-1].reported_at - use.training_at
    mixed = gang_factor(state.profile, state, use.gang)
    ratio = taken_s / (done * state.profile.iteration_s(len(use.gang)) * mixed)
    return updated(known, ratio, done, state.profile.iteration_cv)
