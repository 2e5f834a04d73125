"""The bill, and the use of the paid time, from the state's instants and the offer's rules. Pure.

Every instance is billed at its own price at purchase; if none is known, at the offer's for the market. If each hour has
its own price (spot on EC2), each hour since the instance began to run is billed at that price. An hour whose price is
not known yet counts at its highest possible price, so that the bill is never more than the ledger says.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from rubberband.executor.core.fleet import InstanceRecord, InstanceStatus
from rubberband.executor.core.job import Job
from rubberband.executor.core.spending import Coming, RunningCost, RunSpending
from rubberband.executor.core.state import GangRun, GroupState, State
from rubberband.units import MONEY_SLACK_USD
from rubberband.values.offer import DATA_LINE, HEAD_LINE, RENT_LINES, SECONDS_PER_HOUR, BillLine, Offer
from rubberband.values.plan import Market


def price_usd_per_s(record: InstanceRecord, offer: Offer) -> float:
    """Return the price per second of an instance with its side costs: of its latest known hour, or at purchase."""
    if record.hour_prices_usd:
        return (record.hour_prices_usd[-1] + offer.side_usd_per_hour) / SECONDS_PER_HOUR
    if record.price_usd_per_hour is not None:
        return (record.price_usd_per_hour + offer.side_usd_per_hour) / SECONDS_PER_HOUR
    return market_usd_per_s(offer, record.market)


def instance_cost_usd(job: Job, record: InstanceRecord, at: float, *, is_expected: bool = False) -> float:
    """Return the cost of one instance by `at` (a live one as if released then), with its minimum and data.

    With `is_expected`, hours whose price is not known yet cost as much as the latest one, not the most that they may.
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
    """Return its cost while it runs, its side costs included."""
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
    """Return the rent per hour without side costs: the average, if each hour has its own price."""
    offer, billed_s = job.offer, max(held_s(record, at), job.offer.minimum_billed_s)
    if record.hour_prices_usd is not None and billed_s > 0.0:
        usd_per_hour = _rent_usd(job, record, billed_s) / billed_s * SECONDS_PER_HOUR
        return max(0.0, usd_per_hour - offer.side_usd_per_hour)  # the difference of equal sums may be -1e-17
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
    """Return the cost of an instance that is still to be bought, by the offer, with its minimum and data."""
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


def bill_lines(state: State, at: float) -> tuple[BillLine, ...]:
    """The bill by what it is for; the lines add up to `bill_usd`, and those of nothing are left out."""
    offer = state.job.offer
    records = [one for one in state.instances.values() if one.running_at is not None and one.running_at <= at]
    hours = sum(max(held_s(one, at), offer.minimum_billed_s) for one in records) / SECONDS_PER_HOUR
    stillborn = sum(one.running_at is None and one.status is InstanceStatus.ENDED for one in state.instances.values())
    lines = [
        BillLine(line=cost.line, usd=cost.usd_per_hour * hours + cost.usd_once * (len(records) + stillborn))
        for cost in offer.side_costs
    ]
    lines.append(BillLine(line=DATA_LINE, usd=offer.data_usd_per_instance * len(records)))
    lines.append(BillLine(line=HEAD_LINE, usd=offer.head_cost_usd(_head_s(state, at))))
    rest_usd = bill_usd(state, at) - sum(line.usd for line in lines)
    rent = BillLine(line=RENT_LINES[offer.billing], usd=rest_usd)
    return tuple(line for line in (rent, *lines) if abs(line.usd) > MONEY_SLACK_USD)


def bill_usd(state: State, at: float) -> float:
    """Return the cost of everything by `at`, in US dollars: instances, data, functions, head node."""
    instances = sum(instance_cost_usd(state.job, record, at) for record in state.instances.values())
    functions = sum(_function_usd(state, use, _by(use.ended_at, at) - use.started_at) for use in _uses(state))
    return instances + functions + state.job.offer.head_cost_usd(_head_s(state, at))


def lane_bill_usd(lane: GroupState, at: float) -> float:
    """Return a lane's share of the bill at `at`, without the head node, which all lanes share.

    An instance that was handed on is each lane's for as long as it could use it.
    """
    state = lane.state
    usd = 0.0
    for record in state.instances.values():
        since = -math.inf
        for number, until in state.fleet.lanes_of(record):
            if number == lane.lane and since < at:
                before_usd = 0.0 if since == -math.inf else instance_cost_usd(lane.job, record, since)
                usd += instance_cost_usd(lane.job, record, min(at, until)) - before_usd
            since = until
    uses = (use for use in _uses(state) if state.lane_of[use.trial] == lane.lane)
    return usd + sum(_function_usd(state, use, _by(use.ended_at, at) - use.started_at) for use in uses)


def _head_s(state: State, at: float) -> float:
    return max(0.0, _by(state.ended_at, at) - state.started_at - state.paused_s)


def _uses(state: State) -> list[GangRun]:
    """The gangs' stretches that are paid for by themselves."""
    return state.allocations if state.job.offer.billing == "per_function" else []


def _function_usd(state: State, use: GangRun, busy_s: float) -> float:
    """Return the cost of a gang that is busy for `busy_s`, at the price of its instance."""
    offer = state.job.offer
    price = price_usd_per_s(state.instances[use.gang[0].instance], offer)
    return price * len(use.gang) / offer.slots * max(0.0, busy_s)


def _by(ended_at: float | None, at: float) -> float:
    return at if ended_at is None else min(ended_at, at)


def spending(state: State) -> RunSpending:
    """Return the spending of a job with a cap. It is kept until the rent changes."""
    if state.fleet.spending is None:
        state.fleet.spending = _spending_of(state, state.fleet.current())
    return state.fleet.spending


def coming(job: Job, bound_s: float) -> Coming:
    """An instance that is asked for, and ends `bound_s` after it began to run at the earliest."""
    price = 0.0 if job.offer.billing == "per_function" else job.reserved_usd_per_hour / SECONDS_PER_HOUR
    return Coming(
        bound_s=max(bound_s, job.offer.minimum_billed_s),
        reserved_usd_per_s=price,
        data_usd=job.offer.once_usd_per_instance,
    )


def spending_without_released(state: State) -> RunSpending:
    """Return the spending if everything that is being released is given back now."""
    released = [record for record in state.fleet.current() if record.status is InstanceStatus.RELEASING]
    spending = _spending_of(state, [record for record in state.fleet.current() if record not in released])
    spending.settled_usd += sum([instance_cost_usd(state.job, record, state.now) for record in released])
    return spending


def _spending_of(state: State, held: Iterable[InstanceRecord]) -> RunSpending:
    job = state.job
    assert job.max_cost_usd is not None, "spending is forecast only under a cap"
    offer, now = job.offer, state.now
    settled_usd = offer.head_cost_usd(_head_s(state, now))
    rate_usd_per_s = offer.head_price_usd_per_hour / SECONDS_PER_HOUR
    if offer.billing == "per_function":
        for instance, gpu_s in state.used_gpu_s().items():
            settled_usd += price_usd_per_s(state.instances[instance], offer) / offer.slots * gpu_s
        for use in map(state.allocation, state.running()):
            settled_usd += _function_usd(state, use, now - use.started_at)
            rate_usd_per_s += _function_usd(state, use, 1.0)
    lines: list[RunningCost] = []
    expected: list[Coming] = []
    for record in held:
        if record.running_at is None:
            expected.append(coming(job, _bound_s(job, record)))
        elif record.ended_at is not None:
            settled_usd += instance_cost_usd(job, record, math.inf)
        else:
            settled_usd += offer.once_usd_per_instance
            if offer.billing == "per_instance":
                lines.append(_line(job, record, record.running_at))
    state.fleet.settled_usd += sum([instance_cost_usd(job, record, math.inf) for record in state.fleet.just_gone()])
    settled_usd += state.fleet.settled_usd
    return RunSpending(
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
    """Use of the paid GPU-seconds; the parts add up to `total_gpu_s`."""

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


def paid_time(state: State, at: float) -> PaidTime:
    """Split the paid GPU-seconds up to `at` by what they went into."""
    job = state.job
    training = repeated = startup = 0.0
    for use in state.allocations:
        gpus = len(use.gang) / job.offer.trials_per_gpu
        end = at if use.ended_at is None else use.ended_at
        first_step = end if use.training_at is None else use.training_at
        startup += gpus * (first_step - use.started_at)
        first_new_step = first_step if use.repeated_until is None else use.repeated_until
        repeated += gpus * (first_new_step - first_step)
        training += gpus * (end - first_new_step)
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
