"""The rules that the controller keeps: when a trial hangs, how wide its gang is, what may still be launched. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rubberband.executor.core import budget
from rubberband.executor.core.events import FailureKind, Gang, LimitsChanged
from rubberband.executor.core.fleet import InstanceRecord, InstanceStatus
from rubberband.executor.core.history import Allotted
from rubberband.executor.core.placement import place
from rubberband.executor.core.spending import Purse
from rubberband.executor.core.state import GroupState, Job, Phase, StageRecord, State, TrialState
from rubberband.planner import least_instances as instances_for
from rubberband.units import MONEY_SLACK_USD, counted, format_usd
from rubberband.values.offer import Offer, gang_sizes, slots
from rubberband.values.plan import StagePrediction

SHORTEST_HANG_S = 60.0
"""A trial that trains is never taken to hang before this long without a report, unless the user set a timeout."""
SHORTEST_START_S = 300.0
"""Nor one that has not made its first step, whatever the user set: its worker may have to be started, and its data be
fetched, for the first time."""
SHORTEST_HOLD_S = 0.01
"""An instance that can be paid for no longer than that, or not until it is ready, is not worth asking for."""
BLAMELESS_FAILURES: frozenset[FailureKind] = frozenset({"checkpoint", "died", "gpu", "hung"})
"""Failures that come of stores and machines as often as of a trial's code: the user may have them tried again."""
SMALLEST_WAIT_S = 1e-6
"""A stop that is so near is reached: sums of instants are no more exact than that."""


def begun(job: Job, started_at: float) -> Job:
    """The job once it is known when it started: a deadline that is an instant is no later than that."""
    return job if job.deadline_at is None else replace(job, deadline_s=max(0.0, job.deadline_at - started_at))


def granted(job: Job, event: LimitsChanged) -> Job:
    """The job with the limits that the event grants; none is ever lowered."""
    deadline_s = raised(job.deadline_s, event.deadline_s)
    return replace(
        job,
        deadline_s=deadline_s,
        deadline_at=job.deadline_at if deadline_s == job.deadline_s else None,
        max_cost_usd=raised(job.max_cost_usd, event.max_cost_usd),
    )


def raised(limit: float | None, asked: float | None) -> float | None:
    """The larger one of two limits; None is none."""
    return None if limit is None or asked is None else max(limit, asked)


def without_head(offer: Offer, stages: Sequence[StagePrediction]) -> tuple[StagePrediction, ...]:
    """The stages without the cost of the head node, which is the job's where that has several brackets."""
    return tuple(
        replace(stage, cost_usd=stage.cost_usd - offer.head_cost_usd(stage.provisioning_s + stage.duration_s))
        for stage in stages
    )


def can_go_on(state: State) -> bool:
    """Whether a resume goes on with an experiment that has ended: by the user, a cap, or the fault of no trial."""
    if state.outcome == "cancelled" or state.stranded or (state.outcome == "failed" and failed_blameless(state)):
        return True
    exhausted_usd = state.exhausted_usd
    return exhausted_usd is not None and (state.job.max_cost_usd is None or state.job.max_cost_usd > exhausted_usd)


def failed_blameless(state: State) -> list[TrialState]:
    """The trials that a resume tries again where all of a stage failed: what failed them is not their own code."""
    over = [lane.stage for lane in state.lanes if lane.stages and lane.stage.ended_at is not None]
    contenders = [state.trials[trial] for stage in over if not stage.ranking for trial in stage.trials]
    return [trial for trial in contenders if trial.failure is not None and trial.failure[0] in BLAMELESS_FAILURES]


def hang_limit_s(state: State, trial: TrialState) -> float:
    """Seconds without a report after which a running trial is taken to hang."""
    job = state.job
    if state.allocation(trial).training_at is None:
        return max(SHORTEST_START_S, 10.0 * state.profile.trial_startup_s, job.iteration_timeout_s or 0.0)
    if job.iteration_timeout_s is not None:
        return job.iteration_timeout_s
    return max(SHORTEST_HANG_S, 10.0 * state.profile.iteration_s(len(trial.gang)))


def due_at(state: State, trial: TrialState) -> float:
    """Return when a running trial is taken to hang, unless it reports before."""
    return trial.progress_at + hang_limit_s(state, trial)


def stop_at(state: State) -> float:
    """Return when everything must be given back for the bill to stay within max_cost; infinite without a cap."""
    if state.job.max_cost_usd is None:
        return math.inf
    return budget.purse(state).stops_at(state.now, state.job.release_margin_s)


def look_ahead(state: State) -> tuple[float, float | None]:
    """Return when all instances end themselves without a driver, and when a Tick is due if no other event comes before.

    The first is half of the release margin before max_cost is reached at the reserved prices: the driver's own stop
    comes first, and a machine takes a while to notice that its lease is over. It is infinite without a cap. A Tick is
    due for a hang, a retry, a longer lease, or the end of the budget.
    """
    job = state.job
    now, ends_at = state.now, math.inf
    purse = None if job.max_cost_usd is None else budget.purse(state)
    if purse is not None:
        ends_at = max(now, purse.reaches_about(now) - job.release_margin_s / 2.0)
    if state.course != "running":
        return ends_at, None
    earliest = math.inf
    for lane in state.lanes:
        if leaving := [record.left_until for record in lane.held.leaving if record.left_until > now]:
            earliest = min(earliest, *leaving)
        if (due_at := lane.runners.first_due_at()) < earliest:
            earliest = due_at
        if now < lane.relaunch_at < earliest and lane.phase is not Phase.FINISHED:
            earliest = lane.relaunch_at
    if purse is not None:
        earliest = min(earliest, purse.refresh_at(now), max(now, purse.stops_at(now, job.release_margin_s)))
    return ends_at, earliest if earliest < math.inf else None


def over_budget(state: State, ticked: bool) -> str | None:
    """Why the experiment must end for its cap; None if it need not.

    At the cap's very instant other events (the last SYNC of a plan that costs just the cap) go before the Tick; but
    where events come thick and fast, the cap does not wait for one.
    """
    job = state.job
    if job.max_cost_usd is None or state.now + SMALLEST_WAIT_S < stop_at(state):
        return None
    spent_usd = budget.purse(state).spent_usd(state.now)
    if spent_usd <= job.max_cost_usd + MONEY_SLACK_USD and not ticked:
        return None
    told = f"max_cost={format_usd(job.max_cost_usd)} is reached ({format_usd(spent_usd)} spent)"
    failed = [record for record in state.instances.values() if record.failed_start]
    if job.start_attempts is None or 2 * len(failed) <= len(state.instances):
        return told
    return f"{not_started(len(failed), len(state.instances), failed[-1].reason)}; {told}"


def not_started(failed: int, instances: int, reason: str) -> str:
    """Say how many instances never got ready, and why the last of them did not."""
    return f"{failed} of {counted(instances, 'instance')} failed to start: {reason}"


def fails_to_start(state: State) -> str:
    """Say why the latest instances never got ready, and how many did not."""
    failed = [record for record in state.instances.values() if record.failed_start]
    in_a_row, bought = state.fleet.failed_starts, len(state.instances)
    share = f"{len(failed)} of {bought}"
    count = f"{share} in a row" if in_a_row == bought else f"{in_a_row} in a row, {share} in all"
    return f"instances fail to start: {failed[-1].reason} ({count})"


def leased_until(state: State, *, booting: bool = False) -> float | None:
    """How far the leases of instances that the driver has a worker on may reach, or of those that are `booting`.

    None: as far as the budget is concerned, they end with the driver.
    """
    job = state.job
    if job.lease_s is None or job.max_cost_usd is None:
        return None
    length_s = job.longest_lease_s if booting else job.lease_s
    reached_at = budget.purse(state).reaches(state.now) - job.release_margin_s / 2.0
    return max(state.now, min(state.now + length_s, reached_at))


def affordable(state: State, wanted: int = 1) -> int:
    """How many of `wanted` instances may be asked for: all that is held, and they, can be given back within max_cost.

    This holds for any price that they may have, and for any time at which they may begin to run. The lease of a
    released instance cannot be shortened, and counts until it is given back; none is asked for meanwhile whose own
    lease would be shorter for that.
    """
    job = state.job
    if job.max_cost_usd is None:
        return wanted
    count, reached_at = _affordable(state, budget.purse(state), wanted)
    if count and job.lease_s is not None and reached_at < state.now + job.longest_lease_s + job.release_margin_s:
        rest = _if_given_back(state)
        if rest is not None and reached_at < _affordable(state, rest, count)[1]:
            return 0
    return count


def cut_short(job: Job, record: InstanceRecord) -> bool:
    """Whether an instance ended before it was ready since max_cost paid for no longer."""
    if record.ready_at is not None or record.running_at is None or record.ended_at is None:
        return False
    if job.lease_s is None or record.first_lease_s is None or record.first_lease_s >= job.longest_lease_s:
        return False
    return record.ended_at >= record.running_at + record.first_lease_s


def awaits_release(lane: GroupState) -> bool:
    """Whether another instance could be asked for, were all given back that is released."""
    state = lane.state
    lacking = missing(lane)
    if lacking == 0 or affordable(state, lacking):
        return False
    rest = _if_given_back(state)
    return rest is not None and _affordable(state, rest, 1)[0] > 0


def _if_given_back(state: State) -> Purse | None:
    """The purse if all were given back that is released; None if nothing is."""
    if not any(record.status is InstanceStatus.RELEASING for record in state.fleet.current()):
        return None
    return budget.purse_without_released(state)


def _affordable(state: State, purse: Purse, wanted: int) -> tuple[int, float]:
    """How many more the purse allows, and until when all may be held then."""
    job = state.job
    least_until = state.now + job.release_margin_s + max(SHORTEST_HOLD_S, job.offer.init_delay_s)
    another = budget.coming(job, 0.0)
    for count in range(wanted, 0, -1):
        reached_at = purse.with_more(another, count).reaches(state.now)
        if reached_at >= least_until:
            return count, reached_at
    return 0, math.inf


def gang_size(lane: GroupState) -> int:
    """GPUs per trial: as planned, or the widest gang that fits what is ready; 0 if trials wait, or none fits.

    While an instance starts, trials wait for it: a gang keeps its width until the stage ends, so that a narrower one
    would be late by far more than the start takes. Never fewer than were profiled: a trial may not fit there.
    """
    job = lane.job
    planned, held = lane.chosen.gpus_per_trial, lane.held
    ready = len(held.ready)
    if slots(ready, job.offer.gpus, planned) > 0:
        return planned
    if ready < len(held.live) and not buys_none(lane.state):
        return 0
    allowed = gang_sizes(job.offer.gpus, job.profile.smallest_gpus, planned)
    return max((size for size in allowed if slots(ready, job.offer.gpus, size) > 0), default=0)


def target_iterations(lane: GroupState, trial: TrialState) -> int:
    """Iterations in all that a trial has done at the end of the lane's current stage, or of its rung (asha)."""
    job = lane.job
    if job.ladder is not None:
        return job.ladder.totals[trial.rung]
    stage = lane.stages[-1].stage
    if lane.target is None or lane.target[0] != stage:
        lane.target = stage, job.iterations_by(stage)
    return lane.target[1]


def missing(lane: GroupState) -> int:
    """Instances that the lane's stage still lacks, and may ask for beside those that are taken away soon."""
    state = lane.state
    held = lane.held
    lacking = lane.wanted - len(held.live)
    if lacking <= 0:
        return 0
    room = lane.max_instances - len(held.live) - len(held.leaving)
    if state.allotment is not None:  # another lane may still hold what it gives back
        room = min(room, state.allotment - len(state.fleet.live()) - len(state.fleet.leaving()))
    return max(0, min(lacking, room))


def buys_none(state: State) -> bool:
    """Whether buying has stopped for now, since too many instances in a row never got ready."""
    return state.job.start_attempts is not None and state.fleet.failed_starts >= state.job.start_attempts


def startable(lane: GroupState, wanted: int) -> int:
    """How many of `wanted` instances may be asked for, as far as it is known whether instances get ready.

    Once one has failed to, those that are on their way count among the attempts that are left. When none is left, one
    is tried now and then, while trials train on others.
    """
    state = lane.state
    if lane.job.start_attempts is None or state.fleet.failed_starts == 0:
        return wanted
    coming = sum(record.status is not InstanceStatus.READY for record in state.fleet.live())
    if buys_none(state):
        return 1 if lane.held.ready and not coming and lane.phase is Phase.TRAINING else 0
    return max(0, min(wanted, lane.job.start_attempts - state.fleet.failed_starts - coming))


def awaited(lane: GroupState) -> bool:
    """Whether an instance of the lane's stage may still come before its trials start."""
    if waits_for_allotment(lane) or _waits_for_recalled(lane) or _waits_for_promise(lane):
        return True
    if buys_none(lane.state) and lane.phase is Phase.SCALING and starts(lane):
        return False
    held = lane.held
    if len(held.ready) < len(held.live):
        return True
    if lane.launches_left <= 0 or startable(lane, 1) == 0:
        return False
    return (lane.relaunch_at > lane.state.now and missing(lane) > 0) or awaits_release(lane)


def least_instances(lane: GroupState) -> int:
    """The fewest instances that a gang of the lane's fits on."""
    planned = (choice.gpus_per_trial for choice in lane.state.plan.stages[first_left(lane) : lane.end_stage])
    return -(-min(lane.job.profile.smallest_gpus, *planned) // lane.job.offer.gpus)


def needed_instances(lane: GroupState) -> int:
    """The fewest instances on which the trials under way train at once, as wide as planned."""
    return instances_for(len(lane.runners) + len(lane.waiters), lane.job.offer.gpus, lane.chosen.gpus_per_trial)


def first_left(lane: GroupState) -> int:
    """The lane's current stage, or its first one if none has begun."""
    return lane.stages[-1].stage if lane.stages else lane.brackets[0].first_stage


def most_instances(state: State) -> int:
    """The most instances that the whole experiment may hold now."""
    return state.job.offer.max_instances if state.allotment is None else state.allotment


def spare_instances(state: State) -> int:
    """The instances that it may hold beside those that its lanes may."""
    return max(0, most_instances(state) - sum(lane.max_instances for lane in state.active()))


def waits_for_allotment(lane: GroupState) -> bool:
    """Whether no gang fits on what the lane is allotted: it waits for more."""
    return lane.state.allotment is not None and lane.max_instances < least_instances(lane)


def is_promised(lane: GroupState) -> bool:
    """Whether a pool promises the lane all that the job's plan has left for it."""
    left = lane.job.plan.stages[first_left(lane) : lane.end_stage]
    return lane.promised_instances >= max((choice.instances for choice in left), default=1)


def _waits_for_promise(lane: GroupState) -> bool:
    """Whether the lane's stage is promised more instances than it is allotted yet.

    It does not begin on fewer: gangs that are narrower end their iterations later than the promise allows.
    """
    planned = lane.chosen.instances
    wanted = planned if lane.needs is None else min(planned, lane.needs)
    return lane.max_instances < wanted <= lane.promised_instances


def _waits_for_recalled(lane: GroupState) -> bool:
    """Whether a lane lacks an instance that it may have once another lane has given one back."""
    if lane.wanted <= len(lane.held.live):
        return False
    return any(record.recalled_at is not None for record in lane.state.fleet.leaving())


def stops_at_checkpoint(lane: GroupState, trial: TrialState) -> bool:
    """Whether a running trial stops at a checkpoint: its instance is recalled, or it goes on with another gang."""
    if not lane.state.history.of(Allotted):
        return False
    if any(lane.state.instances[slot.instance].recalled_at is not None for slot in trial.gang):
        return True
    return lane.resized == lane.stage.stage and _changes_width(lane, trial)


def _changes_width(lane: GroupState, trial: TrialState) -> bool:
    """Whether a trial takes a narrower gang, so that another trial can start too, or a wider one that is faster."""
    size, width = gang_size(lane), len(trial.gang)
    if size in (0, width) or (size > width and lane.waiters) or (size < width and not lane.waiters):
        return False
    profile, left = lane.state.profile, target_iterations(lane, trial) - trial.iterations
    saved_s = left * (profile.iteration_s(width) - profile.iteration_s(size))
    if size > width and saved_s <= profile.trial_startup_s:
        return False
    free = lane.free_slots
    return free.room_without(trial.gang, size) >= (1 if size > width else 2)


def room(lane: GroupState) -> int:
    """How many more trials can start on what the lane holds."""
    if not lane.held.ready or (size := gang_size(lane)) == 0:
        return 0
    return lane.free_slots.room(size)


def starts(lane: GroupState) -> Mapping[int, Gang]:
    """Trial -> its gang, for the lane's queued trials (in order) for which slots are free."""
    if not lane.waiters or not lane.held.ready:
        return {}
    free = lane.free_slots
    if free.gpus == 0 or (size := gang_size(lane)) == 0:
        return {}
    waiting = [trial for trial in lane.waiters.first(free.gpus // size) if is_drawn(lane.state, trial)]
    placed = free.place(size, [trial.gang for trial in waiting])
    return {trial.trial: gang for trial, gang in zip(waiting, placed, strict=True) if gang is not None}


def moves(lane: GroupState, trial: TrialState) -> bool:
    """Whether a running trial is to leave an instance that is taken away soon, since there is room on those that stay.

    Where there is none, it may as well go on. A slow instance is not left for a narrower gang.
    """
    if lane.waiters or all(
        lane.state.instances[slot.instance].status is not InstanceStatus.LEAVING for slot in trial.gang
    ):
        return False
    gpus = {record.instance: lane.job.offer.gpus for record in lane.held.ready}
    others = [other for other in lane.running() if other is not trial]
    held = {other.trial: tuple([slot for slot in other.gang if slot.instance in gpus]) for other in others}
    held = {other: gang for other, gang in held.items() if gang}
    size = gang_size(lane)
    if size == 0 or sum(gpus.values()) - sum(map(len, held.values())) < size:
        return False
    left = [lane.state.instances[slot.instance] for slot in trial.gang]
    if size < len(trial.gang) and all(one.is_left_as_slow for one in left if one.status is InstanceStatus.LEAVING):
        return False
    allocation = {other: len(gang) for other, gang in held.items()} | {trial.trial: size}
    return trial.trial in place(allocation, held | {trial.trial: trial.gang}, gpus, locked=held)


def promoted(job: Job, stage: StageRecord) -> tuple[int, ...]:
    """The trials that go on after a stage whose SYNC is over, best first; all of its ranking after a bracket's last."""
    is_last = stage.stage + 1 == job.bracket_of(stage.stage).end_stage
    return stage.ranking if is_last else stage.ranking[: job.stages[stage.stage + 1].trials]


def next_stage(lane: GroupState) -> int:
    """The stage that follows the lane's current one; past its bracket, if all trials of that failed."""
    failed = lane.stage.ended_at is not None and not lane.stage.ranking
    return lane.bracket.end_stage if failed else lane.stage.stage + 1


def is_drawn(state: State, trial: TrialState) -> bool:
    """Whether a trial has its configuration: without a SYNC a sampler that learns draws it only when it starts."""
    return not state.job.draws or state.job.ladder is None or trial.trial in state.drawn


def to_draw(state: State, stage: int) -> tuple[int, ...]:
    """The trials that a sampler has to draw before a stage begins: those of a new bracket, or none."""
    job = state.job
    bracket = job.bracket_of(stage)
    if not job.draws or job.ladder is not None or stage != bracket.first_stage or bracket.first_trial in state.drawn:
        return ()
    return job.trials_of(bracket)


def begins_with(lane: GroupState, stage: int) -> tuple[int, ...]:
    """The trials that train in the lane's next stage, by number: the promoted ones, or those of another bracket."""
    job = lane.job
    bracket = job.bracket_of(stage)
    return job.trials_of(bracket) if stage == bracket.first_stage else tuple(sorted(promoted(job, lane.stage)))
