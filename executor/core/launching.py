"""Launches: how many instances a stage asks for, on which market, and which it waits for. Writes the state."""

from __future__ import annotations

from collections.abc import Sequence

from rubberband.executor.core import limits
from rubberband.executor.core.bill import market_usd_per_s
from rubberband.executor.core.events import Command, LaunchInstance
from rubberband.executor.core.fleet import InstanceRecord, InstanceStatus
from rubberband.executor.core.forecast import forecast, stage_left_s
from rubberband.executor.core.state import LaneState, Phase, State
from rubberband.executor.core.trials import starts
from rubberband.units import MONEY_SLACK_USD, counted
from rubberband.values.offer import SECONDS_PER_HOUR
from rubberband.values.plan import Market

DRY_S = 600.0
"""After a refusal, spot is tried again only after this long, where on demand is bought instead."""
USUAL_TIMES = 2.0
"""Interruptions up to this multiple of the expected ones, and `launch_attempts` more, are no reason to leave spot."""
RETRY_DELAY_S = 10.0
"""Before a refused launch, or one that came to nothing, is tried again; doubled each time."""


def launch_missing(lane: LaneState) -> list[Command]:
    """Ask for the instances that the lane's stage still lacks, as far as the budget allows."""
    state = lane.state
    if state.now < lane.relaunch_at or (missing := lane.missing) == 0:
        return []
    if (missing := startable(lane, missing)) == 0:
        return []
    if (count := limits.affordable(state, missing)) == 0 or not _may_launch(lane):
        return []
    on_demand = affordable_on_demand(lane, count)
    count = on_demand or count
    market: Market = "on_demand" if on_demand else lane.chosen.market
    records = [
        InstanceRecord(
            instance=f"i-{number:03d}",
            requested_at=state.now,
            market=market,
            instead_of_spot=on_demand > 0,
            lane=lane.lane,
        )
        for number in range(len(state.instances) + 1, len(state.instances) + 1 + count)
    ]
    for record in records:
        state.fleet.add(record)
    _bind_leases(state, records)
    note_width(lane)
    return [launch(record) for record in records]


def launch(record: InstanceRecord) -> LaunchInstance:
    """Ask for an instance; asked again, with the first lease that it was ordered with."""
    return LaunchInstance(instance=record.instance, market=record.market, first_lease_s=record.first_lease_s)


def note_width(lane: LaneState) -> None:
    """Remember the most instances that the lane's stage has held."""
    lane.stage.widest = max(lane.stage.widest, len(lane.held.live))


def _may_launch(lane: LaneState) -> bool:
    """Use up an attempt, and return whether one was left. Launches within moments (many are lost at once) are one."""
    if lane.state.now < lane.round_until:
        return True
    if lane.launches_left <= 0:
        return False
    lane.launches_left -= 1
    lane.round_until = lane.state.now + RETRY_DELAY_S
    return True


def allow_another_launch(lane: LaneState) -> None:
    """Allow another launch: replacing an instance that the provider took away costs none of the attempts."""
    lane.launches_left = min(lane.job.launch_attempts, lane.launches_left + 1)


def _bind_leases(state: State, records: Sequence[InstanceRecord]) -> None:
    """Say how long the first leases of what is asked for now are: the budget covers them, driver or not."""
    until = limits.leased_until(state, booting=True)
    if until is None:
        return
    for record in records:
        record.first_lease_s = until - state.now
    state.fleet.rent_changed()


def startable(lane: LaneState, wanted: int) -> int:
    """How many of `wanted` instances may be asked for, as far as it is known whether instances get ready.

    Once one has failed to, those that are on their way count among the attempts that are left. When none is left, one
    is tried now and then, while trials train on others.
    """
    state = lane.state
    if lane.job.start_attempts is None or state.fleet.failed_starts == 0:
        return wanted
    coming = sum(record.status is not InstanceStatus.READY for record in state.fleet.live())
    if state.buys_none:
        return 1 if lane.held.ready and not coming and lane.phase is Phase.TRAINING else 0
    return max(0, min(wanted, lane.job.start_attempts - state.fleet.failed_starts - coming))


def awaited(lane: LaneState) -> bool:
    """Whether an instance of the lane's stage may still come before its trials start."""
    if lane.waits_for_instances or _waits_for_recalled(lane) or _waits_for_promise(lane):
        return True
    if lane.state.buys_none and lane.phase is Phase.SCALING and starts(lane):
        return False
    held = lane.held
    if len(held.ready) < len(held.live):
        return True
    if lane.launches_left <= 0 or startable(lane, 1) == 0:
        return False
    if lane.waits_for_room:
        return True
    return (lane.relaunch_at > lane.state.now and lane.missing > 0) or limits.awaits_release(lane)


def _waits_for_promise(lane: LaneState) -> bool:
    """Whether the lane's stage is promised more instances than its share of the cap is yet.

    It does not begin on fewer: gangs that are narrower end their iterations later than the promise allows.
    """
    planned = lane.chosen.instances
    wanted = planned if lane.needs is None else min(planned, lane.needs)
    return lane.max_instances < wanted <= lane.promised_instances


def _waits_for_recalled(lane: LaneState) -> bool:
    """Whether a lane lacks an instance that it may have once another lane has given one back."""
    if lane.wanted <= len(lane.held.live):
        return False
    return any(record.recalled_at is not None for record in lane.state.fleet.leaving())


# On demand instead of spot, within a stage: when the spot pool is dry, and time and budget are worth it.


def is_dry(state: State) -> bool:
    """Whether spot was refused, or taken away too often, just now."""
    return state.now < state.fleet.spot_dry_until


def note_dry(state: State, reason: str) -> None:
    """Spot is not to be had."""
    state.fleet.spot_dry_until, state.fleet.spot_dry_reason = state.now + DRY_S, reason


def note_taken(state: State, record: InstanceRecord) -> None:
    """A spot instance is taken away: too often in this stage is as good as a refusal."""
    job = state.job
    lane = state.lanes[record.lane]
    if record.market != "spot" or job.offer.spot is None or not lane.stages:
        return
    since, ours = lane.stage.started_at, [r for r in state.instances.values() if r.lane == lane.lane]
    taken = [r for r in ours if (r.interrupted_at or (r.preempted and r.ended_at) or -1.0) >= since]
    usual = job.offer.spot.interruptions_per_hour * lane.chosen.instances * (state.now - since) / SECONDS_PER_HOUR
    if len(taken) > job.launch_attempts + USUAL_TIMES * usual:
        note_dry(state, f"EC2 took {counted(len(taken), 'spot instance')} away in this stage")


def affordable_on_demand(lane: LaneState, wanted: int) -> int:
    """How many of `wanted` spot instances are bought on demand instead: 0 where spot may be had, or it is not worth it.

    It is worth it where no trial could train otherwise, or the deadline would be missed with the instances that there
    are (without a deadline, where the shortest time is asked for), and if the whole should stay within max_cost.
    """
    job, state = lane.job, lane.state
    if lane.chosen.market != "spot" or job.offer.billing == "per_function" or not is_dry(state):
        return 0
    if held := len(lane.held.live):
        if job.deadline_s is None and job.objective == "min_cost":
            return 0
        if job.deadline_s is not None and forecast(state, state.now, {lane.lane: held}).jct_s <= job.deadline_s:
            return 0
    return next((count for count in range(wanted, 0, -1) if _missing_usd(lane, count) <= 0.0), 0)


def stays_on_demand(lane: LaneState) -> bool:
    """Whether what was bought on demand instead of spot is kept for the stage that begins."""
    chosen = lane.chosen
    return chosen.market == "spot" and is_dry(lane.state) and _missing_usd(lane, chosen.instances) <= 0.0


def _missing_usd(lane: LaneState, count: int) -> float:
    """Return what max_cost lacks for the expected cost with `count` of the stage's instances on demand."""
    job, state = lane.job, lane.state
    if job.max_cost_usd is None:
        return 0.0
    left_s = stage_left_s(lane, state.now)
    extra_usd_per_s = market_usd_per_s(job.offer, "on_demand") - market_usd_per_s(job.offer, "spot")
    cost_usd = forecast(state, state.now).cost_usd + count * max(0.0, extra_usd_per_s) * left_s
    return cost_usd - job.max_cost_usd - MONEY_SLACK_USD


def needed_usd(lane: LaneState) -> float | None:
    """The max_cost with which one instance would be bought on demand instead; None where that is not what it lacks."""
    if lane.job.max_cost_usd is None or lane.chosen.market != "spot" or not is_dry(lane.state):
        return None
    lacking_usd = _missing_usd(lane, 1)
    return lane.job.max_cost_usd + lacking_usd if lacking_usd > 0.0 else None
