"""The course of instances: asked for, running, interrupted, lost, given back. Writes the state, returns orders."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import get_args

from rubberband.executor.core.bill import market_usd_per_s
from rubberband.executor.core.events import (
    AllotmentChanged,
    Command,
    DriverResumed,
    EndedInstance,
    InstanceInterrupted,
    InstanceLost,
    InstancePriced,
    InstanceReady,
    InstanceRefused,
    InstanceReleased,
    InstanceRunning,
    LiveInstance,
    ReleaseInstance,
    RestPlanned,
)
from rubberband.executor.core.fleet import GONE, LIVE, InstanceRecord, InstanceStatus
from rubberband.executor.core.forecast import forecast, runs_in_s, speed_of
from rubberband.executor.core.history import GivenBack, InstanceCapChanged
from rubberband.executor.core.idle_gpus import unneeded
from rubberband.executor.core.job import Job
from rubberband.executor.core.launching import (
    RETRY_DELAY_S,
    affordable_on_demand,
    allow_another_launch,
    launch,
    note_dry,
    note_taken,
    note_width,
    stays_on_demand,
)
from rubberband.executor.core.limits import cut_short, leased_until
from rubberband.executor.core.state import LaneState, Phase, State
from rubberband.executor.core.trials import stop
from rubberband.values.offer import left_to_provider_until, slots
from rubberband.values.plan import Plan, StagePlan

PAUSE_S = 600.0
"""Once too many in a row never got ready: before one more is tried beside those that are ready; doubled each time."""

InstanceEvent = (
    InstanceRunning
    | InstancePriced
    | InstanceReady
    | InstanceRefused
    | InstanceInterrupted
    | InstanceLost
    | InstanceReleased
)
INSTANCE_EVENTS = get_args(InstanceEvent)


def note(state: State, event: InstanceEvent) -> list[Command]:
    """Take in what happened to an instance. An instance that is gone stays gone; only its price may still change."""
    record = _record(state, event)
    if isinstance(event, InstancePriced):
        record.hour_prices_usd = event.hour_prices_usd
    if record.status in GONE:
        if isinstance(event, InstanceReleased) and record.running_at is None and event.running_at is not None:
            _note_released(record, event)  # it ran after its launch was given up
            state.fleet.price_gone_again()
        elif isinstance(event, InstancePriced):
            state.fleet.price_gone_again()
        return []
    state.fleet.rent_changed()
    lane = state.lanes[record.lane]
    match event:
        case InstanceRunning():
            _note_running(record, event)
        case InstanceReady():
            if record.ready_at is None:
                record.ready_at = event.occurred_at
            _note_started(state)
            if record.status is InstanceStatus.RUNNING:
                record.status, record.leased_until = InstanceStatus.READY, None
        case InstanceRefused() if record.running_at is not None:  # it ran, and is paid until now
            return lose(state, record, event.occurred_at, event.reason)
        case InstanceRefused():
            was_wanted = record.status in LIVE
            record.status, record.reason = InstanceStatus.REFUSED, event.reason
            rounds = state.job.launch_attempts - lane.launches_left
            lane.relaunch_at = event.occurred_at + RETRY_DELAY_S * 2 ** max(0, rounds - 1)
            if event.sold_out and was_wanted and record.market == "spot":
                _note_sold_out(lane, event.reason)
            if event.failed_start and was_wanted:
                _note_failed_start(state, record)
        case InstanceInterrupted():
            _note_interrupted(state, record, event)
        case InstanceLost():
            was_wanted = record.status in LIVE
            commands = lose(state, record, event.ended_at, event.reason, preempted=event.preempted)
            never_ready = record.ready_at is None and not record.preempted and not cut_short(state.job, record)
            if was_wanted and (event.overslept or event.same_fault):  # the driver slept; or the fault is counted
                allow_another_launch(lane)
            elif was_wanted and never_ready:
                _note_failed_start(state, record)
            return commands
        case InstanceReleased():
            _note_released(record, event)
    return []


def _record(state: State, event: InstanceEvent) -> InstanceRecord:
    """The instance's record; a new one of what only the version that wrote the journal would have asked for."""
    if event.instance not in state.instances:
        market = state.lanes[0].chosen.market
        state.fleet.add(InstanceRecord(instance=event.instance, requested_at=event.occurred_at, market=market))
    return state.instances[event.instance]


def _note_released(record: InstanceRecord, event: InstanceReleased) -> None:
    record.status, record.ended_at = InstanceStatus.ENDED, event.ended_at
    if record.running_at is None:
        record.running_at = event.running_at
    if record.price_usd_per_hour is None:
        record.price_usd_per_hour = event.price_usd_per_hour
    record.instance_type = record.instance_type or event.instance_type
    record.zone = record.zone or event.zone


def _note_running(record: InstanceRecord, event: InstanceRunning) -> None:
    record.running_at, record.ended_at = event.running_at, event.ended_at
    record.price_usd_per_hour = event.price_usd_per_hour
    record.instance_type, record.zone = event.instance_type, event.zone
    if event.hour_prices_usd is not None:
        record.hour_prices_usd = event.hour_prices_usd
    if record.status is InstanceStatus.REQUESTED:
        record.status = InstanceStatus.RUNNING


def _note_interrupted(state: State, record: InstanceRecord, event: InstanceInterrupted) -> None:
    if record.interrupted_at is None:
        record.interrupted_at = event.occurred_at
        if event.free_if_taken and record.market == "spot":
            record.left_until = left_to_provider_until(record.running_at, event.occurred_at)
        note_taken(state, record)
        allow_another_launch(state.lanes[record.lane])
    if record.status is not InstanceStatus.RELEASING:
        record.status = InstanceStatus.LEAVING


def _note_sold_out(lane: LaneState, reason: str) -> None:
    """Spot is dry: on demand may be asked for at once, and that is no attempt more."""
    state = lane.state
    note_dry(state, reason)
    if (lacking := lane.missing) and affordable_on_demand(lane, lacking):
        lane.relaunch_at, lane.round_until = state.now, state.now + RETRY_DELAY_S


def _note_failed_start(state: State, record: InstanceRecord) -> None:
    """Note an instance that never got ready: the next one is bought later, and none for now after too many in a row."""
    record.failed_start = True
    if state.job.start_attempts is None:
        return
    state.fleet.failed_starts += 1
    past = state.fleet.failed_starts - state.job.start_attempts
    delay_s = RETRY_DELAY_S * 2 ** (state.fleet.failed_starts - 1) if past < 0 else PAUSE_S * 2 ** min(past, 20)
    for lane in state.lanes:
        lane.relaunch_at = max(lane.relaunch_at, state.now + delay_s)


def _note_started(state: State) -> None:
    """One got ready: what kept others from it is over, or was theirs alone."""
    if state.job.start_attempts is not None and state.fleet.failed_starts:
        state.fleet.failed_starts = 0
        for lane in state.lanes:
            lane.relaunch_at = 0.0


def lose(
    state: State, record: InstanceRecord, ended_at: float, reason: str, *, preempted: bool = False
) -> list[Command]:
    """The instance is gone; its trials go on from their checkpoints, elsewhere, and none of them has failed."""
    record.status, record.ended_at, record.reason = InstanceStatus.ENDED, ended_at, reason
    record.preempted = preempted
    if preempted and record.interrupted_at is None:
        note_taken(state, record)
        allow_another_launch(state.lanes[record.lane])
    state.fleet.rent_changed()
    struck = state.lanes[record.lane].runners.on(record.instance)
    return [stop(state, trial, preempted=preempted) for trial in struck]


def let_go(state: State, records: Iterable[InstanceRecord]) -> None:
    """No lease of theirs is cut any more; they end themselves at the latest when those end that they have."""
    until = leased_until(state)
    for record in records:
        if record.running_at is not None and record.leased_until is None:
            record.leased_until = until
    state.fleet.rent_changed()


def release(state: State, records: Sequence[InstanceRecord]) -> list[Command]:
    """Give instances back."""
    if not records:
        return []
    let_go(state, records)
    faults = {record.instance: "it held up its trials" for record in records if record.is_left_as_slow}
    for record in records:
        record.status = InstanceStatus.RELEASING
    return [ReleaseInstance(instance=one.instance, fault=faults.get(one.instance, "")) for one in records]


def release_left(lane: LaneState) -> list[Command]:
    """Give back what is taken away soon and has no trial on it any more.

    An instance that the provider takes away in its first hour is free, and is left to it.
    """
    state = lane.state
    leaving = lane.held.leaving
    if not leaving:
        return []
    unused = [record for record in leaving if not lane.runners.uses(record.instance)]
    if state.course == "running":
        unused = [record for record in unused if record.left_until <= state.now or record.recalled_at is not None]
    if any(record.recalled_at is not None for record in unused):
        state.fleet.reassigned += 1  # another lane may have waited for it
    return release(state, unused)


def release_surplus(lane: LaneState) -> list[Command]:
    """Give back what the lane's stage that begins does not need: slow types, those billed longest, other markets.

    As long as there is no spot capacity, what was bought on demand instead stays.
    """
    chosen = lane.chosen
    stays = stays_on_demand(lane)
    live = lane.held.live
    ours = [r for r in live if r.market == chosen.market or (stays and r.instead_of_spot)]
    others = [record for record in live if record not in ours]
    unbilled_first = sorted(
        ours, key=lambda one: (one.running_at is not None, one.market == chosen.market, speed_of(lane.job, one))
    )
    surplus = max(0, len(ours) - lane.wanted)
    return give_up(lane, [*others, *unbilled_first[:surplus]])


def fit_instance_cap(lane: LaneState) -> list[Command]:
    """Recall what the lane's stage holds beyond its share of the instance cap, or keep again what was recalled.

    An idle instance is given back at once, and one with trials once these have stopped: at their next checkpoints, or
    now where another experiment was promised it. The fewest trials are stopped; of instances that are alike, those
    billed longest go.
    """
    state = lane.state
    if not state.history.of(InstanceCapChanged):
        return []
    held = lane.held
    surplus = len(held.live) - lane.most
    if len(held.live) + len(held.leaving) > lane.max_instances:
        for record in held.leaving:
            record.recalled_at = state.now if record.recalled_at is None else record.recalled_at
    for record in _recalled(held.leaving)[: max(0, -surplus)]:
        record.status, record.recalled_at = InstanceStatus.READY, None
        state.fleet.rent_changed()
    commands = _recall(lane, surplus) if surplus > 0 else []
    end = _stop_recalled if state.fleet.recall == "at_once" else release_left
    return commands + end(lane)


def _recall(lane: LaneState, surplus: int) -> list[Command]:
    held = lane.held
    unbilled_first = sorted(held.live, key=lambda record: record.running_at is not None)
    idle = [record for record in unbilled_first if not lane.runners.uses(record.instance)][:surplus]
    busy = [record for record in held.live if lane.runners.uses(record.instance)]
    for record in _least_used(lane, busy, surplus - len(idle)):
        record.status, record.recalled_at = InstanceStatus.LEAVING, lane.state.now
    lane.state.fleet.rent_changed()
    return give_up(lane, idle)


def _stop_recalled(lane: LaneState) -> list[Command]:
    """Stop the trials on recalled instances now; they go on from their latest checkpoints."""
    recalled = [record for record in lane.held.leaving if record.recalled_at is not None]
    struck = {trial.trial: trial for record in recalled for trial in lane.runners.on(record.instance)}
    return [*(stop(lane.state, trial) for trial in struck.values()), *release_left(lane)]


def _recalled(leaving: Sequence[InstanceRecord]) -> list[InstanceRecord]:
    """Return the instances that are kept again if the cap grows; not those that the provider takes away."""
    return [record for record in leaving if record.recalled_at is not None and record.interrupted_at is None]


def _least_used(lane: LaneState, busy: Sequence[InstanceRecord], count: int) -> list[InstanceRecord]:
    """Return `count` instances on which the fewest trials run, in all: a gang that spans several stops once."""
    left, chosen, stopped = list(busy), list[InstanceRecord](), set[int]()
    while left and len(chosen) < count:
        runs = {record.instance: {trial.trial for trial in lane.runners.on(record.instance)} for record in left}
        found = min(left, key=lambda record: len(runs[record.instance] - stopped))
        left.remove(found)
        chosen.append(found)
        stopped |= runs[found.instance]
    return chosen


def release_unneeded(lane: LaneState) -> list[Command]:
    """Give back idle instances that neither the stage nor the next one needs, once trials have ended by themselves.

    None is bought for the next one within the stage.
    """
    if lane.job.resize_in_stage:
        return _release_idle(lane)
    if lane.waiters or not lane.has_ended:
        return []
    following = lane.stage.stage + 1
    planned = lane.state.plan.stages[following].instances if following < lane.end_stage else 0
    most = lane.chosen.instances if lane.needs is None else lane.needs
    lane.needs = min(most, max(lane.needed_instances, planned))
    live = lane.held.live
    idle = [record for record in live if not lane.runners.uses(record.instance)]
    return give_up(lane, idle[: max(0, len(live) - lane.needs)])


def _release_idle(lane: LaneState) -> list[Command]:
    found = unneeded(lane)
    if found is None:
        return []
    state, lane.needs = lane.state, len(lane.held.live) - len(found.records)
    names = tuple(record.instance for record in found.records)
    at_s, stage = state.elapsed_s(state.now), lane.stage.stage
    state.history.add(
        GivenBack(at_s=at_s, stage=stage, instances=names, left_s=found.left_s, saved_usd=found.saved_usd)
    )
    if found.again_usd:
        predicted = list(state.predicted)
        following = predicted[stage + 1]
        predicted[stage + 1] = replace(
            following,
            provisioning_s=following.provisioning_s + found.later_s,
            cost_usd=following.cost_usd + found.again_usd,
        )
        state.predicted = tuple(predicted)
    return give_up(lane, found.records)


def release_all(lane: LaneState) -> list[Command]:
    """Give back what a lane holds that is over."""
    return give_up(lane, lane.held.live)


# Instances that a lane does not need go warm to another that lacks them, where that surely costs no more than to buy.


def give_up(lane: LaneState, records: Sequence[InstanceRecord]) -> list[Command]:
    """Hand on to other lanes what they lack, and give back the rest of what `lane` does not need."""
    state = lane.state
    spare, commands = list(records), list[Command]()
    for other in state.lanes if len(state.lanes) > 1 else ():
        if other is not lane and other.phase in (Phase.SCALING, Phase.TRAINING):
            taken = _wanted(other, [r for r in spare if r.status is InstanceStatus.READY])
            commands += _hand_on(other, taken)
            spare = [record for record in spare if record not in taken]
    return commands + release(state, spare)


def _wanted(lane: LaneState, spare: Sequence[InstanceRecord]) -> list[InstanceRecord]:
    """Return the instances of `spare` that a lane takes instead of those that it waits for, or cannot buy.

    A stage that lacks more than there is goes on waiting, and what it was handed is paid for meanwhile: by no more than
    the data of a new instance costs.
    """
    job = lane.job
    chosen, held = lane.chosen, lane.held
    kept = len(held.live) - len(_not_running(lane))
    planned = chosen.instances if lane.needs is None else min(chosen.instances, lane.needs)
    lacking = min(planned - kept, lane.max_instances - kept - len(held.leaving))
    taken = [record for record in spare if record.market == chosen.market][: max(0, lacking)]
    if lane.phase is Phase.TRAINING or len(taken) == lacking or job.offer.billing == "per_function":
        return taken
    waits_usd = market_usd_per_s(job.offer, chosen.market) * runs_in_s(lane, lane.state.now)
    return taken if waits_usd <= job.offer.once_usd_per_instance else []


def _not_running(lane: LaneState) -> list[InstanceRecord]:
    """Return the requested instances of a lane that cost nothing to give up: they are not expected to run by now."""
    coming = (record for record in lane.held.live if record.running_at is None)
    return [record for record in coming if record.requested_at + lane.job.offer.provision_delay_s > lane.state.now]


def _hand_on(lane: LaneState, records: Sequence[InstanceRecord]) -> list[Command]:
    """Assign instances to a lane; what it had asked for instead is given up."""
    state = lane.state
    if not records:
        return []
    for record in records:
        state.fleet.hand_on(record, lane.lane, state.now)
    surplus = max(0, len(lane.held.live) - lane.most)
    given_up = release(state, _not_running(lane)[:surplus])
    note_width(lane)
    return given_up


# What a new driver makes of the instances that it finds: which go on, which are asked for again, which are lost.


Loss = tuple[InstanceRecord, float, str, bool]
"""A lost instance, the instant, the reason, and whether the provider took it away."""


def sort_out(state: State, event: DriverResumed) -> tuple[list[Command], list[Loss]]:
    """Adopt what lives, and say what to order and what is lost. Writes the records of what is not lost."""
    live = {found.instance: found for found in event.live}
    ended = {found.instance: found for found in event.ended}
    commands: list[Command] = []
    lost: list[Loss] = []
    for record in state.instances.values():
        if record.status in GONE:
            if record.running_at is None and record.instance in ended:  # it ran after its launch was given up
                _running_again(record, ended[record.instance])
                record.status, record.ended_at = InstanceStatus.ENDED, ended[record.instance].ended_at
                state.fleet.price_gone_again()
            continue
        if record.instance in live:
            found = live[record.instance]
            _running_again(record, found)
            commands += _adopt(record)
        elif record.instance in ended:
            gone = ended[record.instance]
            _running_again(record, gone)
            lost.append((record, gone.ended_at, "ended while no driver was running", gone.preempted))
        elif record.running_at is not None:
            lost.append((record, event.occurred_at, "unknown to the provider", False))
        elif record.status is InstanceStatus.REQUESTED:
            commands.append(launch(record))
        else:
            record.status, record.reason = InstanceStatus.REFUSED, "abandoned before it ran"
    state.fleet.rent_changed()
    return commands, lost


def _running_again(record: InstanceRecord, found: LiveInstance | EndedInstance) -> None:
    record.running_at = found.running_at
    if found.price_usd_per_hour is not None:
        record.price_usd_per_hour = found.price_usd_per_hour
    if found.hour_prices_usd is not None:
        record.hour_prices_usd = found.hour_prices_usd


def _adopt(record: InstanceRecord) -> list[Command]:
    if record.status in (InstanceStatus.RELEASING, InstanceStatus.LEAVING):
        record.status = InstanceStatus.RELEASING
        return [ReleaseInstance(instance=record.instance)]
    record.status = InstanceStatus.REQUESTED if record.running_at is None else InstanceStatus.RUNNING
    return []


# The instance cap: how many instances an experiment may hold, as its user or its pool says. It is shared out among the
# lanes that go on, by the instances that each was planned to have. The plan in force is cut to what a lane may hold, so
# that everything that follows the plan keeps the cap; the driver replans at once.


def note_instance_cap(state: State, event: AllotmentChanged) -> None:
    """Take in another cap: shares and plan follow it now, and instances with the next event."""
    most, before = state.job.offer.max_instances, state.most_instances
    cap = most if event.max_instances is None else max(0, min(most, event.max_instances))
    state.fleet.recall = event.recall
    if (cap, event.promised_instances) == (before, state.promised_instances):
        return
    at = max(state.now, event.occurred_at)
    expected = forecast(state, at)
    state.instance_cap, state.promised_instances = cap, event.promised_instances
    share_out(state)
    if cap == before:
        return
    then = forecast(state, at)
    state.history.add(
        InstanceCapChanged(
            at_s=state.elapsed_s(at),
            max_instances_before=before,
            max_instances=cap,
            jct_before_s=expected.jct_s,
            jct_s=then.jct_s,
            cost_before_usd=expected.cost_usd,
            cost_usd=then.cost_usd,
        )
    )


def share_out(state: State) -> None:
    """Divide the cap among the lanes that go on, and cut their plans to it. Without a cap, do nothing."""
    job = state.job
    active = state.active()
    if state.instance_cap is None or not active:
        return
    quotas = job.lane_instances or (job.offer.max_instances,)
    own = [quotas[lane.lane] for lane in active]
    shares, promised = apportioned(state.instance_cap, own), apportioned(state.promised_instances or 0, own)
    for lane, share, kept in zip(active, shares, promised, strict=True):
        if (share, kept) == (lane.max_instances, lane.promised_instances):
            continue
        lane.max_instances, lane.promised_instances = share, kept
        _cut_plan(lane)
        state.fleet.reassigned += 1
        keeps = lane.is_promised or lane.waits_for_instances
        lane.replans_at_once = job.replan and not keeps
        lane.resized = lane.stage.stage if lane.stages else None
        if not state.buys_none:
            lane.relaunch_at = 0.0
        lane.launches_left = job.launch_attempts


def apportioned(total: int, quotas: Sequence[int]) -> list[int]:
    """Divide `total` in proportion to `quotas`, by largest remainders (Hamilton); one for each first, if that goes."""
    first = [1 if total >= len(quotas) else 0] * len(quotas)
    rest = total - sum(first)
    exact = [rest * quota / sum(quotas) for quota in quotas]
    shares = [one + int(share) for one, share in zip(first, exact, strict=True)]
    by_remainder = sorted(range(len(quotas)), key=lambda index: (int(exact[index]) - exact[index], index))
    for index in by_remainder[: total - sum(shares)]:
        shares[index] += 1
    return shares


def _cut_plan(lane: LaneState) -> None:
    """Cut what is left of the lane's plan to its share, or to what it is promised.

    A plan that is held fixed is the job's again as the share grows.
    """
    job, state = lane.job, lane.state
    first, end = lane.first_left, lane.end_stage
    basis = state.plan if job.replan else job.plan
    most = max(lane.max_instances, lane.promised_instances, lane.least_instances)
    left = tuple(cut(job, choice, most) for choice in basis.stages[first:end])
    state.plan = Plan(stages=(*state.plan.stages[:first], *left, *state.plan.stages[end:]))


def cut(job: Job, choice: StagePlan, most: int) -> StagePlan:
    """The plan of a stage with at most `most` instances; a gang that does not fit on them is as wide as one can be."""
    instances, gpus, planned = min(choice.instances, most), job.offer.slots, choice.gpus_per_trial
    if slots(instances, gpus, planned) > 0:
        return replace(choice, instances=instances)
    size = max((size for size in job.gang_sizes(planned) if slots(instances, gpus, size) > 0), default=planned)
    return replace(choice, instances=instances, gpus_per_trial=size)


def note_resized(lane: LaneState, event: RestPlanned) -> None:
    """The rest is planned again from the current stage on, while that is under way."""
    state = lane.state
    state.decisions.append(event)
    state.plan, state.profile = event.plan, event.profile
    lane.planned_trials = lane.trials_left
    state.predicted = (*state.predicted[: event.stage], *event.predicted, *state.predicted[lane.end_stage :])
    lane.replans_at_once, lane.resized = False, event.stage
    lane.launches_left = lane.job.launch_attempts
    if lane.phase is Phase.TRAINING and not state.buys_none:
        lane.relaunch_at = 0.0
