"""On demand instead of spot, within a stage: when the spot pool is dry, and time and budget are worth it. Pure."""

from __future__ import annotations

from rubberband.executor.accounting import market_usd_per_s
from rubberband.executor.forecast import forecast, stage_forecast
from rubberband.executor.purse import MONEY_SLACK_USD
from rubberband.executor.state import InstanceRecord, Job, State
from rubberband.offer import SECONDS_PER_HOUR

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
