"""What becomes of instances: asked for, running, interrupted, lost, given back. Writes the state, returns orders."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import get_args

from rubberband.executor.core import rules
from rubberband.executor.core.budget import market_usd_per_s
from rubberband.executor.core.events import (
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
    LaunchInstance,
    LiveInstance,
    ReleaseInstance,
)
from rubberband.executor.core.forecast import forecast, stage_forecast
from rubberband.executor.core.purse import MONEY_SLACK_USD
from rubberband.executor.core.state import GONE, LIVE, InstanceRecord, InstanceStatus, Job, State
from rubberband.executor.core.trials import stop
from rubberband.values.offer import SECONDS_PER_HOUR
from rubberband.values.plan import Market

# On demand instead of spot, within a stage: when the spot pool is dry, and time and budget are worth it. Pure.


DRY_S = 600.0
"""After a refusal, spot is tried again only after this long, where on demand is bought instead."""
USUAL_TIMES = 2.0
"""So many times the interruptions that are expected, and `launch_attempts` more, are no reason yet to leave spot."""


def is_dry(state: State) -> bool:
    """Whether spot was refused, or taken away too often, just now."""
    return state.now < state.spot_dry_until


def note_dry(state: State, reason: str) -> None:
    """Spot is not to be had."""
    state.spot_dry_until, state.spot_dry_reason = state.now + DRY_S, reason


def note_taken(job: Job, state: State, record: InstanceRecord) -> None:
    """A spot instance is taken away: too often in this stage is as good as a refusal."""
    if record.market != "spot" or job.offer.spot is None or not state.stages:
        return
    since = state.stages[-1].started_at
    taken = [r for r in state.instances.values() if (r.interrupted_at or (r.preempted and r.ended_at) or -1.0) >= since]
    usual = job.offer.spot.interruptions_per_hour * state.chosen().instances * (state.now - since) / SECONDS_PER_HOUR
    if len(taken) > job.launch_attempts + USUAL_TIMES * usual:
        note_dry(state, f"EC2 took {len(taken)} spot instances away in this stage")


def affordable_on_demand(job: Job, state: State, wanted: int) -> int:
    """How many of `wanted` spot instances are bought on demand instead: 0 where spot may be had, or it is not worth it.

    It is worth it where no trial could train otherwise, or the deadline would be missed with the instances that there
    are (without a deadline, where the shortest time is asked for), and if the whole should stay within max_cost.
    """
    if state.chosen().market != "spot" or job.offer.billing == "per_function" or not is_dry(state):
        return 0
    if held := len(state.live()):
        if job.deadline_s is None and job.objective == "min_cost":
            return 0
        if job.deadline_s is not None and forecast(job, state, state.now, held).jct_s <= job.deadline_s:
            return 0
    return next((count for count in range(wanted, 0, -1) if _missing_usd(job, state, count) <= 0.0), 0)


def stays_on_demand(job: Job, state: State) -> bool:
    """Whether what was bought on demand instead of spot is kept for the stage that begins."""
    return (
        state.chosen().market == "spot" and is_dry(state) and _missing_usd(job, state, state.chosen().instances) <= 0.0
    )


def _missing_usd(job: Job, state: State, count: int) -> float:
    """What max_cost lacks for the expected cost with `count` of the stage's instances on demand."""
    if job.max_cost_usd is None:
        return 0.0
    left_s = stage_forecast(job, state, state.now).jct_s - (state.now - state.started_at)
    dearer = market_usd_per_s(job.offer, "on_demand") - market_usd_per_s(job.offer, "spot")
    cost_usd = forecast(job, state, state.now).cost_usd + count * max(0.0, dearer) * left_s
    return cost_usd - job.max_cost_usd - MONEY_SLACK_USD


def needed_usd(job: Job, state: State) -> float | None:
    """The max_cost with which one instance would be bought on demand instead; None where that is not what it lacks."""
    if job.max_cost_usd is None or state.chosen().market != "spot" or not is_dry(state):
        return None
    lacking_usd = _missing_usd(job, state, 1)
    return job.max_cost_usd + lacking_usd if lacking_usd > 0.0 else None


RETRY_DELAY_S = 10.0
"""Before a refused launch, or one that came to nothing, is tried again; doubled each time."""
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


def note(job: Job, state: State, event: InstanceEvent) -> list[Command]:
    """Take in what happened to an instance. What is gone stays gone, whatever is told of it later but its price."""
    record = _record(state, event)
    if isinstance(event, InstancePriced):
        record.hour_prices_usd = event.hour_prices_usd
    if record.status in GONE:
        if isinstance(event, InstancePriced):
            state.reckon_gone_again()
        return []
    state.rent_changed()
    match event:
        case InstanceRunning():
            _note_running(record, event)
        case InstanceReady():
            if record.ready_at is None:
                record.ready_at = event.occurred_at
            _note_started(job, state)
            if record.status is InstanceStatus.RUNNING:
                record.status, record.leased_until = InstanceStatus.READY, None
        case InstanceRefused():
            was_wanted = record.status in LIVE
            record.status, record.reason = InstanceStatus.REFUSED, event.reason
            rounds = job.launch_attempts - state.launches_left
            state.relaunch_at = event.occurred_at + RETRY_DELAY_S * 2 ** max(0, rounds - 1)
            if event.sold_out and was_wanted and record.market == "spot":
                _note_sold_out(job, state, event.reason)
            if event.failed_start and was_wanted:
                _note_failed_start(job, state, record)
        case InstanceInterrupted():
            _note_interrupted(job, state, record, event)
        case InstanceLost():
            was_wanted = record.status in LIVE
            commands = lose(job, state, record, event.ended_at, event.reason, preempted=event.preempted)
            if was_wanted and record.ready_at is None and not record.preempted and not rules.cut_short(job, record):
                _note_failed_start(job, state, record)
            return commands
        case InstanceReleased():
            record.status, record.ended_at = InstanceStatus.ENDED, event.ended_at
            if record.running_at is None:
                record.running_at = event.running_at
            if record.price_usd_per_hour is None:
                record.price_usd_per_hour = event.price_usd_per_hour
            record.instance_type = record.instance_type or event.instance_type
            record.zone = record.zone or event.zone
    return []


def _record(state: State, event: InstanceEvent) -> InstanceRecord:
    """The instance's record; a new one of what only the version that wrote the journal would have asked for."""
    if event.instance not in state.instances:
        market = state.chosen().market
        state.add(InstanceRecord(instance=event.instance, requested_at=event.occurred_at, market=market))
    return state.instances[event.instance]


def _note_running(record: InstanceRecord, event: InstanceRunning) -> None:
    record.running_at = event.running_at
    record.price_usd_per_hour = event.price_usd_per_hour
    record.instance_type, record.zone = event.instance_type, event.zone
    if event.hour_prices_usd is not None:
        record.hour_prices_usd = event.hour_prices_usd
    if record.status is InstanceStatus.REQUESTED:
        record.status = InstanceStatus.RUNNING


def _note_interrupted(job: Job, state: State, record: InstanceRecord, event: InstanceInterrupted) -> None:
    if record.interrupted_at is None:
        record.interrupted_at = event.occurred_at
        note_taken(job, state, record)
        _allow_another_launch(job, state)
    if record.status is not InstanceStatus.RELEASING:
        record.status = InstanceStatus.LEAVING


def _note_sold_out(job: Job, state: State, reason: str) -> None:
    """Spot is dry: on demand may be asked for at once, and that is no attempt more."""
    note_dry(state, reason)
    if (lacking := rules.missing(job, state)) and affordable_on_demand(job, state, lacking):
        state.relaunch_at, state.round_until = state.now, state.now + RETRY_DELAY_S


def _note_failed_start(job: Job, state: State, record: InstanceRecord) -> None:
    """It never got ready: the next one is bought later, and after too many in a row none is, for now."""
    record.failed_start = True
    if job.start_attempts is None:
        return
    state.failed_starts += 1
    past = state.failed_starts - job.start_attempts
    delay_s = RETRY_DELAY_S * 2 ** (state.failed_starts - 1) if past < 0 else PAUSE_S * 2 ** min(past, 20)
    state.relaunch_at = max(state.relaunch_at, state.now + delay_s)


def _note_started(job: Job, state: State) -> None:
    """One got ready: what kept others from it is over, or was theirs alone."""
    if job.start_attempts is not None and state.failed_starts:
        state.failed_starts, state.relaunch_at = 0, 0.0


def _allow_another_launch(job: Job, state: State) -> None:
    """What the provider takes away was not refused: to replace it costs none of the attempts."""
    state.launches_left = min(job.launch_attempts, state.launches_left + 1)


def lose(
    job: Job, state: State, record: InstanceRecord, ended_at: float, reason: str, *, preempted: bool = False
) -> list[Command]:
    """The instance is gone; its trials go on from their checkpoints, elsewhere, and none of them has failed."""
    record.status, record.ended_at, record.reason = InstanceStatus.ENDED, ended_at, reason
    record.preempted = preempted
    if preempted and record.interrupted_at is None:
        note_taken(job, state, record)
        _allow_another_launch(job, state)
    state.rent_changed()
    return [stop(job, state, trial, preempted=preempted) for trial in state.runners.on(record.instance)]


def launch_missing(job: Job, state: State) -> list[Command]:
    """Ask for the instances that the stage still lacks, as far as the budget allows."""
    if state.now < state.relaunch_at or (missing := rules.missing(job, state)) == 0:
        return []
    if (missing := rules.startable(job, state, missing)) == 0:
        return []
    if (count := rules.affordable(job, state, missing)) == 0 or not _may_launch(state):
        return []
    on_demand = affordable_on_demand(job, state, count)
    count = on_demand or count
    market: Market = "on_demand" if on_demand else state.chosen().market
    records = [
        InstanceRecord(instance=f"i-{number:03d}", requested_at=state.now, market=market, instead_of_spot=on_demand > 0)
        for number in range(len(state.instances) + 1, len(state.instances) + 1 + count)
    ]
    for record in records:
        state.add(record)
    _bind_leases(job, state, records)
    stage = state.stages[-1]
    stage.widest = max(stage.widest, len(state.live()))
    return [launch(record) for record in records]


def launch(record: InstanceRecord) -> LaunchInstance:
    """Ask for an instance; asked again, with the first lease that it was ordered with."""
    return LaunchInstance(instance=record.instance, market=record.market, first_lease_s=record.first_lease_s)


def _may_launch(state: State) -> bool:
    """Whether an attempt is left; it is used up. What is lacking within moments (many are lost at once) is one."""
    if state.now < state.round_until:
        return True
    if state.launches_left <= 0:
        return False
    state.launches_left -= 1
    state.round_until = state.now + RETRY_DELAY_S
    return True


def _bind_leases(job: Job, state: State, records: Sequence[InstanceRecord]) -> None:
    """Say how long the first leases of what is asked for now are: the budget covers them, driver or not."""
    until = rules.leased_until(job, state, booting=True)
    if until is None:
        return
    for record in records:
        record.first_lease_s = until - state.now
    state.rent_changed()


def let_go(job: Job, state: State, records: Iterable[InstanceRecord]) -> None:
    """No lease of theirs is cut any more; they end themselves at the latest when those end that they have."""
    until = rules.leased_until(job, state)
    for record in records:
        if record.running_at is not None and record.leased_until is None:
            record.leased_until = until
    state.rent_changed()


def release(job: Job, state: State, records: Sequence[InstanceRecord]) -> list[Command]:
    """Give instances back."""
    if not records:
        return []
    let_go(job, state, records)
    for record in records:
        record.status = InstanceStatus.RELEASING
    return [ReleaseInstance(instance=record.instance) for record in records]


def release_left(job: Job, state: State) -> list[Command]:
    """Give back what is taken away soon and has no trial on it any more."""
    leaving = state.leaving()
    if not leaving:
        return []
    return release(job, state, [record for record in leaving if not state.runners.uses(record.instance)])


def release_surplus(job: Job, state: State) -> list[Command]:
    """Give back what the stage that begins does not need: those billed longest, and all of another market.

    As long as there is no spot capacity, what was bought on demand instead stays.
    """
    chosen = state.chosen()
    stays = stays_on_demand(job, state)
    ours = [r for r in state.live() if r.market == chosen.market or (stays and r.instead_of_spot)]
    others = [record for record in state.live() if record not in ours]
    unbilled_first = sorted(ours, key=lambda record: (record.running_at is not None, record.market == chosen.market))
    surplus = max(0, len(ours) - chosen.instances)
    return release(job, state, [*others, *unbilled_first[:surplus]])


# What a new driver makes of the instances that it finds: which go on, which are asked for again, which are lost.


Loss = tuple[InstanceRecord, float, str, bool]
"""What is gone, since when, why, and whether the provider took it away."""


def sort_out(state: State, event: DriverResumed) -> tuple[list[Command], list[Loss]]:
    """Adopt what lives, and say what to order and what is lost. Writes the records of what is not lost."""
    live = {found.instance: found for found in event.live}
    ended = {found.instance: found for found in event.ended}
    commands: list[Command] = []
    lost: list[Loss] = []
    for record in state.instances.values():
        if record.status in GONE:
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
    state.rent_changed()
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
