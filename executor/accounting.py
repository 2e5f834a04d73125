"""The bill, and where the paid time went: reckoned from the state's instants by the offer's rules. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rubberband.executor.state import InstanceRecord, InstanceStatus, Job, State
from rubberband.offer import SECONDS_PER_HOUR, Offer


def instance_cost_usd(record: InstanceRecord, offer: Offer, at: float) -> float:
    """What one instance had cost by `at` (a live one as if released then), with its minimum and data."""
    if record.running_at is None or record.running_at > at:
        return 0.0
    return offer.instance_cost_usd(held_s(record, at))


def held_s(record: InstanceRecord, at: float) -> float:
    """Seconds for which the instance had run by `at`."""
    if record.running_at is None:
        return 0.0
    return max(0.0, _by(record.ended_at, at) - record.running_at)


def bill_usd(job: Job, state: State, at: float) -> float:
    """What everything had cost by `at`, in US dollars: instances, data, functions, head node."""
    offer = job.offer
    instances = sum(instance_cost_usd(record, offer, at) for record in state.instances.values())
    uses = state.allocations if offer.billing == "per_function" else ()
    functions = sum(
        offer.function_cost_usd(len(use.gang), max(0.0, _by(use.ended_at, at) - use.started_at)) for use in uses
    )
    head_s = max(0.0, _by(state.ended_at, at) - state.started_at - state.paused_s)
    return instances + functions + offer.head_cost_usd(head_s)


def _by(ended_at: float | None, at: float) -> float:
    return at if ended_at is None else min(ended_at, at)


def budget_ends_at(job: Job, state: State) -> float:
    """The last instant until which everything that is held may be held without the bill passing `max_cost`.

    Infinite without a cap, or while nothing adds to the bill. Instances that are still on their way count as if they
    ran already. The bill is piecewise linear: an instance adds to it only once its prepaid minimum is used up.
    """
    if job.max_cost_usd is None:
        return math.inf
    offer, now = job.offer, state.now
    coming = [record for record in state.instances.values() if record.status is InstanceStatus.REQUESTED]
    left_usd = job.max_cost_usd - bill_usd(job, state, now) - len(coming) * offer.instance_cost_usd(0.0)
    rate_usd_per_s = offer.head_price_usd_per_hour / SECONDS_PER_HOUR
    rate_usd_per_s += sum(offer.function_cost_usd(len(trial.gang), 1.0) for trial in state.running())
    growths: list[float] = []
    if offer.billing == "per_instance":
        held = (record for record in state.instances.values() if record.status in _BILLED)
        starts = [record.running_at for record in held if record.running_at is not None] + [now] * len(coming)
        growths = sorted(max(now, start + offer.minimum_billed_s) for start in starts)
    at = now
    for growth in growths:
        if rate_usd_per_s > 0 and left_usd < rate_usd_per_s * (growth - at):
            break
        left_usd -= rate_usd_per_s * (growth - at)
        at = growth
        rate_usd_per_s += offer.price_usd_per_s
    return max(now, at + left_usd / rate_usd_per_s) if rate_usd_per_s > 0 else math.inf


_BILLED = (InstanceStatus.RUNNING, InstanceStatus.READY, InstanceStatus.RELEASING)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaidTime:
    """Where the paid GPU-seconds went; the parts add up to `total_gpu_s`."""

    training_gpu_s: float
    startup_gpu_s: float
    provisioning_gpu_s: float
    """Instances running whose workers were not yet warm (INIT_INSTANCE)."""
    idle_gpu_s: float
    """Slots without a trial: waiting for others at SYNC, held for a later stage, or a crash's gap."""
    minimum_gpu_s: float
    """Billed beyond the release, by the billing minimum."""

    @property
    def total_gpu_s(self) -> float:
        """All GPU-seconds on the bill."""
        return self.training_gpu_s + self.startup_gpu_s + self.provisioning_gpu_s + self.idle_gpu_s + self.minimum_gpu_s

    @property
    def training_share(self) -> float:
        """Share of the paid GPU-seconds that trained; 0 if nothing was paid."""
        return self.training_gpu_s / self.total_gpu_s if self.total_gpu_s else 0.0


def paid_time(job: Job, state: State, at: float) -> PaidTime:
    """Split the paid GPU-seconds up to `at` by what they went into."""
    training = startup = 0.0
    for use in state.allocations:
        end = at if use.ended_at is None else use.ended_at
        first_step = end if use.training_at is None else use.training_at
        startup += len(use.gang) * (first_step - use.started_at)
        training += len(use.gang) * (end - first_step)
    if job.offer.billing == "per_function":
        return PaidTime(
            training_gpu_s=training, startup_gpu_s=startup, provisioning_gpu_s=0.0, idle_gpu_s=0.0, minimum_gpu_s=0.0
        )
    held = minimum = provisioning = 0.0
    for record in state.instances.values():
        if record.running_at is None:
            continue
        seconds = held_s(record, at)
        held += job.offer.gpus * seconds
        minimum += job.offer.gpus * max(0.0, job.offer.minimum_billed_s - seconds)
        provisioning += job.offer.gpus * min(
            seconds, (at if record.ready_at is None else record.ready_at) - record.running_at
        )
    return PaidTime(
        training_gpu_s=training,
        startup_gpu_s=startup,
        provisioning_gpu_s=provisioning,
        idle_gpu_s=max(0.0, held - training - startup - provisioning),
        minimum_gpu_s=minimum,
    )
