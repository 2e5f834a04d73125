"""The bill, and where the paid time went: reckoned from the state's instants by the offer's rules. Pure.

Every instance is billed at its own price at purchase; where none is known, at the offer's for the market. Where the
price is another one in each hour (spot on EC2), each hour since the instance began to run is billed at its own; an hour
whose price is not known yet counts at the most that it may cost, so that the bill is never more than the ledger says.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from rubberband.executor.core.purse import MONEY_SLACK_USD, Coming, Purse, RunningCost
from rubberband.executor.core.state import Allocation, InstanceRecord, InstanceStatus, Job, State
from rubberband.values.offer import DATA_LINE, HEAD_LINE, RENT_LINES, SECONDS_PER_HOUR, BillLine, Offer
from rubberband.values.plan import Market, StagePlan


def price_usd_per_s(record: InstanceRecord, offer: Offer) -> float:
    """What the instance costs a second, with its side costs: in its latest hour that is known, or at purchase."""
    if record.hour_prices_usd:
        return (record.hour_prices_usd[-1] + offer.side_usd_per_hour) / SECONDS_PER_HOUR
    if record.price_usd_per_hour is not None:
        return (record.price_usd_per_hour + offer.side_usd_per_hour) / SECONDS_PER_HOUR
    return market_usd_per_s(offer, record.market)


def instance_cost_usd(job: Job, record: InstanceRecord, at: float, *, is_expected: bool = False) -> float:
    """What one instance had cost by `at` (a live one as if released then), with its minimum and data.

    Where `is_expected`, hours whose price is not known yet cost what the latest one does, not the most that they may.
    """
    offer = job.offer
    if record.running_at is None or record.running_at > at:
        # One that ended before it ran has no rent, but had a volume.
        return offer.side_usd_once if record.status is InstanceStatus.ENDED else 0.0
    if offer.billing == "per_function":
        return offer.once_usd_per_instance
    billed_s = max(held_s(record, at), offer.minimum_billed_s)
    return _rent_usd(job, record, billed_s, is_expected) + offer.once_usd_per_instance


def _rent_usd(job: Job, record: InstanceRecord, billed_s: float, is_expected: bool = False) -> float:
    """What it costs while it runs, its side costs included."""
    prices = record.hour_prices_usd
    if prices is None:
        return price_usd_per_s(record, job.offer) * billed_s
    rent_usd = 0.0
    for hour, price_usd_per_hour in enumerate(prices):
        lasts_s = min(SECONDS_PER_HOUR, billed_s - hour * SECONDS_PER_HOUR)
        rent_usd += (price_usd_per_hour + job.offer.side_usd_per_hour) / SECONDS_PER_HOUR * max(0.0, lasts_s)
    unknown_s = max(0.0, billed_s - len(prices) * SECONDS_PER_HOUR)
    later = price_usd_per_s(record, job.offer) if is_expected else _highest_usd_per_s(job, record)
    return rent_usd + later * unknown_s


def rent_usd_per_hour(job: Job, record: InstanceRecord, at: float) -> float:
    """What the instance has cost an hour without its side costs: on average, where each hour has its own price."""
    offer, billed_s = job.offer, max(held_s(record, at), job.offer.minimum_billed_s)
    if record.hour_prices_usd is not None and billed_s > 0.0:
        return _rent_usd(job, record, billed_s) / billed_s * SECONDS_PER_HOUR - offer.side_usd_per_hour
    if record.price_usd_per_hour is not None:
        return record.price_usd_per_hour
    if offer.spot is not None and record.market == "spot":
        return offer.spot.price_usd_per_hour
    return offer.price_usd_per_hour


def _highest_usd_per_s(job: Job, record: InstanceRecord) -> float:
    """The most that an instance costs a second: on spot its maximum price, which is the price on demand."""
    price = price_usd_per_s(record, job.offer)
    return max(price, job.reserved_usd_per_hour / SECONDS_PER_HOUR) if record.market == "spot" else price


def new_instance_usd(offer: Offer, market: Market, held_s: float) -> float:
    """What an instance that is still to be bought will cost by the offer, its minimum and its data included."""
    if offer.billing == "per_function":
        return offer.once_usd_per_instance
    return market_usd_per_s(offer, market) * max(held_s, offer.minimum_billed_s) + offer.once_usd_per_instance


def market_usd_per_s(offer: Offer, market: Market) -> float:
    """The offer's price on a market; on demand where it has no other."""
    return offer.price_usd_per_s if offer.spot is None else offer.market_price_usd_per_s(market)


def held_s(record: InstanceRecord, at: float) -> float:
    """Seconds for which the instance had run by `at`."""
    if record.running_at is None:
        return 0.0
    return max(0.0, _by(record.ended_at, at) - record.running_at)


def bill_lines(job: Job, state: State, at: float) -> tuple[BillLine, ...]:
    """The bill by what it is for; the lines add up to `bill_usd`, and those of nothing are left out."""
    offer = job.offer
    records = [one for one in state.instances.values() if one.running_at is not None and one.running_at <= at]
    hours = sum(max(held_s(one, at), offer.minimum_billed_s) for one in records) / SECONDS_PER_HOUR
    stillborn = sum(one.running_at is None and one.status is InstanceStatus.ENDED for one in state.instances.values())
    lines = [
        BillLine(line=cost.line, usd=cost.usd_per_hour * hours + cost.usd_once * (len(records) + stillborn))
        for cost in offer.side_costs
    ]
    lines.append(BillLine(line=DATA_LINE, usd=offer.data_usd_per_instance * len(records)))
    lines.append(BillLine(line=HEAD_LINE, usd=offer.head_cost_usd(_head_s(state, at))))
    rest_usd = bill_usd(job, state, at) - sum(line.usd for line in lines)
    rent = BillLine(line=RENT_LINES[offer.billing], usd=rest_usd)
    return tuple(line for line in (rent, *lines) if abs(line.usd) > MONEY_SLACK_USD)


def bill_usd(job: Job, state: State, at: float) -> float:
    """What everything had cost by `at`, in US dollars: instances, data, functions, head node."""
    instances = sum(instance_cost_usd(job, record, at) for record in state.instances.values())
    functions = sum(_function_usd(job, state, use, _by(use.ended_at, at) - use.started_at) for use in _uses(job, state))
    return instances + functions + job.offer.head_cost_usd(_head_s(state, at))


def _head_s(state: State, at: float) -> float:
    return max(0.0, _by(state.ended_at, at) - state.started_at - state.paused_s)


def _uses(job: Job, state: State) -> list[Allocation]:
    """The gangs' stretches that are paid for by themselves."""
    return state.allocations if job.offer.billing == "per_function" else []


def _function_usd(job: Job, state: State, use: Allocation, busy_s: float) -> float:
    """What a gang costs that is busy for so long, at the price of the instance that it is on."""
    offer = job.offer
    price = price_usd_per_s(state.instances[use.gang[0].instance], offer)
    return price * len(use.gang) / offer.gpus * max(0.0, busy_s)


def _by(ended_at: float | None, at: float) -> float:
    return at if ended_at is None else min(ended_at, at)


def purse(job: Job, state: State) -> Purse:
    """What is paid for now, and how it grows; of a job with a cap. It is kept until the rent changes."""
    if state.purse is None:
        state.purse = _purse(job, state, state.current())
    return state.purse


def coming(job: Job, bound_s: float) -> Coming:
    """An instance that is asked for, and ends `bound_s` after it began to run at the earliest."""
    price = 0.0 if job.offer.billing == "per_function" else job.reserved_usd_per_hour / SECONDS_PER_HOUR
    return Coming(
        bound_s=max(bound_s, job.offer.minimum_billed_s),
        reserved_usd_per_s=price,
        data_usd=job.offer.once_usd_per_instance,
    )


def purse_without_released(job: Job, state: State) -> Purse:
    """What is paid for, and how it grows, if all that is released is given back now."""
    released = [record for record in state.current() if record.status is InstanceStatus.RELEASING]
    purse = _purse(job, state, [record for record in state.current() if record not in released])
    purse.settled_usd += sum([instance_cost_usd(job, record, state.now) for record in released])
    return purse


def _purse(job: Job, state: State, held: Iterable[InstanceRecord]) -> Purse:
    assert job.max_cost_usd is not None, "spending is forecast only under a cap"
    offer, now = job.offer, state.now
    settled_usd = offer.head_cost_usd(_head_s(state, now))
    rate_usd_per_s = offer.head_price_usd_per_hour / SECONDS_PER_HOUR
    if offer.billing == "per_function":
        for instance, gpu_s in state.used_gpu_s().items():
            settled_usd += price_usd_per_s(state.instances[instance], offer) / offer.gpus * gpu_s
        for use in map(state.allocation, state.running()):
            settled_usd += _function_usd(job, state, use, now - use.started_at)
            rate_usd_per_s += _function_usd(job, state, use, 1.0)
    lines: list[RunningCost] = []
    expected: list[Coming] = []
    for record in held:
        if record.running_at is None:
            expected.append(coming(job, _bound_s(job, record)))
        else:
            settled_usd += offer.once_usd_per_instance
            if offer.billing == "per_instance":
                lines.append(_line(job, record, record.running_at))
    state.settled_usd += sum([instance_cost_usd(job, record, math.inf) for record in state.just_gone()])
    settled_usd += state.settled_usd
    return Purse(
        cap_usd=job.max_cost_usd,
        settled_usd=settled_usd,
        rate_usd_per_s=rate_usd_per_s,
        rate_since=now,
        lines=tuple(lines),
        coming=tuple(expected),
    )


def _bound_s(job: Job, record: InstanceRecord) -> float:
    """How long an instance runs that hears nothing more: its first lease, and until it has noticed the end of it."""
    return 0.0 if record.first_lease_s is None else record.first_lease_s + job.release_margin_s / 2.0


def _line(job: Job, record: InstanceRecord, running_at: float) -> RunningCost:
    bound_until = running_at + (_bound_s(job, record) if record.ready_at is None else 0.0)
    if record.leased_until is not None:
        bound_until = max(bound_until, record.leased_until + job.release_margin_s / 2.0)
    highest, known = _highest_usd_per_s(job, record), record.hour_prices_usd
    earlier_s = 0.0 if not known else (len(known) - 1) * SECONDS_PER_HOUR
    return RunningCost(
        since=running_at + earlier_s,
        before_usd=_rent_usd(job, record, earlier_s),
        paid_until=running_at + job.offer.minimum_billed_s,
        bound_until=bound_until,
        usd_per_s=highest if known == () else price_usd_per_s(record, job.offer),
        known_until=math.inf if known is None else running_at + len(known) * SECONDS_PER_HOUR,
        reserved_usd_per_s=highest,
    )


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
    repeated_gpu_s: float = 0.0
    """Training again what a checkpoint did not hold."""

    @property
    def total_gpu_s(self) -> float:
        """All GPU-seconds on the bill."""
        trained_gpu_s = self.training_gpu_s + self.repeated_gpu_s
        return trained_gpu_s + self.startup_gpu_s + self.provisioning_gpu_s + self.idle_gpu_s + self.minimum_gpu_s

    @property
    def training_share(self) -> float:
        """Share of the paid GPU-seconds that trained; 0 if nothing was paid."""
        return self.training_gpu_s / self.total_gpu_s if self.total_gpu_s else 0.0


def paid_time(job: Job, state: State, at: float) -> PaidTime:
    """Split the paid GPU-seconds up to `at` by what they went into."""
    training = repeated = startup = 0.0
    for use in state.allocations:
        end = at if use.ended_at is None else use.ended_at
        first_step = end if use.training_at is None else use.training_at
        startup += len(use.gang) * (first_step - use.started_at)
        first_new_step = first_step if use.repeated_until is None else use.repeated_until
        repeated += len(use.gang) * (first_new_step - first_step)
        training += len(use.gang) * (end - first_new_step)
    if job.offer.billing == "per_function":
        return PaidTime(
            training_gpu_s=training,
            startup_gpu_s=startup,
            provisioning_gpu_s=0.0,
            idle_gpu_s=0.0,
            minimum_gpu_s=0.0,
            repeated_gpu_s=repeated,
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
        idle_gpu_s=max(0.0, held - training - repeated - startup - provisioning),
        minimum_gpu_s=minimum,
        repeated_gpu_s=repeated,
    )


# What must be left of max_cost beside a plan's cost, so that the plan is carried out to its end. Pure.
#
# A run stops while there is still money for giving everything back; a plan that leaves less would be stopped just
# before it is done.


SLACK_S = 1.0
"""A run that is done at the very instant of the stop may be stopped instead."""


class Reserve:
    """The reserve of plans that are carried out with this release margin."""

    def __init__(self, margin_s: float, dearest_usd_per_hour: float | None) -> None:
        """`dearest_usd_per_hour`: what an instance that stands in for another may cost; None: none does."""
        self._margin_s = margin_s + SLACK_S if margin_s else 0.0
        self._dearest_usd_per_hour = dearest_usd_per_hour

    @property
    def is_asked_for(self) -> bool:
        """Whether there is any."""
        return self._margin_s > 0.0

    def of_plan(self, offer: Offer, stages: tuple[StagePlan, ...], *, held: int = 0) -> float:
        """Of the widest stage, in USD, where `held` instances are ready."""
        return max(self.of_width(offer, choice.instances, held=held) for choice in stages)

    def of_width(self, offer: Offer, instances: int, *, held: int = 0) -> float:
        """Of so many instances: the release margin, and what is reserved beyond their price until they are ready."""
        reserved = max(offer.price_usd_per_hour, self._dearest_usd_per_hour or 0.0) + offer.side_usd_per_hour
        reserve_usd = (instances * reserved + offer.head_price_usd_per_hour) * self._margin_s
        if offer.billing == "per_instance" and self._margin_s:
            least = offer.market_price_usd_per_s("on_demand" if offer.spot is None else "spot") * SECONDS_PER_HOUR
            new = max(0, instances - held)
            reserve_usd += new * (reserved - least) * max(offer.minimum_billed_s, offer.init_delay_s)
        return reserve_usd / SECONDS_PER_HOUR
