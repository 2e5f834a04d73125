"""The bill, how it grows, and the use of the paid time, from the state's instants and the offer's rules. Pure.

Every instance is billed at its own price at purchase; if none is known, at the offer's for the market. If each hour has
its own price (spot on EC2), each hour since the instance began to run is billed at that price. An hour whose price is
not known yet counts at its highest possible price, so that the bill is never more than the ledger says.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from rubberband.executor.core.fleet import InstanceRecord, InstanceStatus
from rubberband.executor.core.job import Job
from rubberband.executor.core.state import GangRun, LaneState, State
from rubberband.planner import SHORTEST_REACH_S
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


def lane_bill_usd(lane: LaneState, at: float) -> float:
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
    idle_before_gpu_s: float = 0.0
    """The part of `idle_gpu_s` before the first trials start: an instance is ready, and others are not."""
    idle_in_stage_gpu_s: float = 0.0
    """The part within stages: no trial is left for the slot while others train, or a trial's instance was lost."""
    idle_between_gpu_s: float = 0.0
    """The part between stages: the next one waits for more instances."""
    idle_after_gpu_s: float = 0.0
    """The part after the last stage."""

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
    idle = max(0.0, held - training - repeated - startup - provisioning)
    before, between, after = _idle_outside_stages(state, at, idle)
    return PaidTime(
        training_gpu_s=training,
        startup_gpu_s=startup,
        provisioning_gpu_s=provisioning,
        idle_gpu_s=idle,
        minimum_gpu_s=minimum,
        repeated_gpu_s=repeated,
        idle_before_gpu_s=before,
        idle_in_stage_gpu_s=idle - before - between - after,
        idle_between_gpu_s=between,
        idle_after_gpu_s=after,
    )


def _idle_outside_stages(state: State, at: float, idle: float) -> tuple[float, float, float]:
    """Return the GPU-seconds of ready instances before their lanes' first stages train, between stages, and after.

    They are at most `idle` in all; what is left of that is idle within stages.
    """
    before = between = after = 0.0
    for record in state.instances.values():
        if record.ready_at is None:
            continue
        since, gpus = record.ready_at, state.job.offer.gpus
        for number, until in state.fleet.lanes_of(record):
            end = min(_by(record.ended_at, at), until)
            parts = _outside_stages(state.lanes[number], since, max(since, end), at)
            before, between, after = (
                total + gpus * part for total, part in zip((before, between, after), parts, strict=True)
            )
            since = max(since, end)
    before = min(before, idle)
    between = min(between, idle - before)
    return before, between, min(after, idle - before - between)


def _outside_stages(lane: LaneState, since: float, until: float, at: float) -> tuple[float, float, float]:
    """Return the seconds from `since` to `until` before, between and after the times in which the lane's stages train.

    While the lane goes on, what comes after its latest stage is between two of them.
    """
    trained = [(stage.training_at, _by(stage.ended_at, at)) for stage in lane.stages if stage.training_at is not None]
    if not trained:
        return until - since, 0.0, 0.0
    first, last = trained[0][0], trained[-1][1]
    before = max(0.0, min(until, first) - since)
    beyond = max(0.0, until - max(since, last))
    within = math.fsum(max(0.0, min(until, end) - max(since, begin)) for begin, end in trained)
    between = max(0.0, until - since - before - beyond - within)
    is_over = lane.stages[-1].stage + 1 == lane.end_stage or lane.state.ended_at is not None
    return (before, between, beyond) if is_over else (before, between + beyond, 0.0)


# How the bill grows from here, as long as nothing is launched, released or lost. Of two courses: what it will be at the
# prices that are known (on spot those of the hours that have begun; after them, the most that they may be), and what is
# reserved, at the prices that may still come (spot up to its maximum price, an instance that is not bought yet up to
# the most expensive type that may be used instead).


class RunningCost(NamedTuple):
    """One running instance. It is a tuple, as thousands are made a second whenever the rent changes."""

    since: float
    """Start of the hour whose price is `usd_per_s`; if the price never changes, start of the instance."""
    before_usd: float
    """Cost of the hours before that."""
    paid_until: float
    """Billed until then whatever happens: the minimum."""
    bound_until: float
    """The earliest instant at which it surely ends, if the driver wants it to."""
    usd_per_s: float
    known_until: float
    """`usd_per_s` is the price until then, infinite where it stays; afterwards it is at most the reserved one."""
    reserved_usd_per_s: float

    def spent_usd(self, until: float) -> float:
        """Return its cost by then."""
        known_s = (until if until < self.known_until else self.known_until) - self.since
        spent_usd = self.before_usd + self.usd_per_s * known_s
        return (
            spent_usd if until <= self.known_until else spent_usd + self.reserved_usd_per_s * (until - self.known_until)
        )


class Coming(NamedTuple):
    """One instance that is asked for, and may begin to run at any moment."""

    bound_s: float
    """Shortest time that is billed once it runs."""
    reserved_usd_per_s: float
    data_usd: float


@dataclass(slots=True, kw_only=True)
class RunSpending:
    """All that is paid for, and all that may be; it keeps answers that hold for a while."""

    cap_usd: float
    settled_usd: float
    """Cost of ended instances, and of one-off charges (data)."""
    rate_usd_per_s: float
    """Rate of the costs that grow all the time (the head, functions)."""
    rate_since: float
    """`settled_usd` holds what grows all the time up to then."""
    lines: tuple[RunningCost, ...]
    coming: tuple[Coming, ...]
    _stops_at: float | None = field(default=None, init=False)
    _reached: tuple[float, float] | None = field(default=None, init=False)
    """(as of, until): the latest answer of `reaches_about`."""
    _is_surcharged: bool | None = field(default=None, init=False)
    """Whether anything is reserved at more than it costs."""

    def spent_usd(self, now: float) -> float:
        """The bill, at the prices that are known."""
        spent = self.settled_usd + self.rate_usd_per_s * (now - self.rate_since)
        for line in self.lines:
            spent += line.spent_usd(line.paid_until if line.paid_until > now else now)
        return spent

    def with_more(self, coming: Coming, count: int) -> RunSpending:
        """The spending if `count` more instances were asked for."""
        return replace(self, coming=(*self.coming, *[coming] * count))

    def reaches(self, now: float) -> float:
        """Until when all may be held at the reserved prices; before `now` if that is not even now."""
        return self._reaches(now, [(line, line.reserved_usd_per_s) for line in self.lines], 0.0)

    def reaches_about(self, now: float) -> float:
        """Return `reaches`, or a little less: it is computed again once a sixteenth of that time has passed.

        As time passes it moves on, since prices are lower than the reserved ones, and what may come has not come.
        """
        if self._reached is not None:
            as_of, until = self._reached
            if now - as_of <= (until - as_of) / 16.0:
                return until
        until = self.reaches(now)
        self._reached = (now, until)
        return until

    def refresh_at(self, now: float) -> float:
        """Return when to compute the reach again, as it will be farther then; infinite: never.

        Long before it reaches no farther than to the very moment, so that leases can be put off in time.
        """
        if self._is_surcharged is None:
            self._is_surcharged = any(line.reserved_usd_per_s > line.usd_per_s for line in self.lines)
        if not self._is_surcharged:
            return math.inf
        self.reaches_about(now)
        assert self._reached is not None, "it was asked just now"
        as_of, until = self._reached
        return as_of + max(0.0, until - as_of) / 4.0

    def stops_at(self, now: float, margin_s: float) -> float:
        """Until when all may be held at the known prices, `margin_s` being left for the end at the reserved ones.

        As time passes it does not move, but for what may come: that moves it on, and is not looked at before it counts.
        """
        if self._stops_at is not None and (not self.coming or now < self._stops_at - SHORTEST_REACH_S):
            return self._stops_at
        end_s = max(margin_s, SHORTEST_REACH_S)
        surcharge = sum([line.reserved_usd_per_s - line.usd_per_s for line in self.lines]) * end_s
        growing = [(line, line.usd_per_s) for line in self.lines]
        found = self._reaches(now, growing, surcharge) - margin_s
        bound = [line for line in self.lines if line.bound_until > now]
        if bound and found < (paid_until := min([line.bound_until for line in bound]) - margin_s):
            # These are paid for at the reserved prices already, until then.
            surcharge -= sum([line.reserved_usd_per_s - line.usd_per_s for line in bound]) * end_s
            return max(found, min(paid_until, self._reaches(now, growing, surcharge) - margin_s))
        self._stops_at = found
        return found

    def _reaches(self, now: float, lines: Iterable[tuple[RunningCost, float]], set_aside_usd: float) -> float:
        left_usd = self.cap_usd - self.spent_usd(now) - set_aside_usd
        rate_usd_per_s = self.rate_usd_per_s
        growths: list[tuple[float, float]] = []
        for line, usd_per_s in lines:
            paid_until = line.paid_until if line.paid_until > now else now
            if line.bound_until > paid_until:
                left_usd -= line.reserved_usd_per_s * (line.bound_until - paid_until)
                paid_until = line.bound_until
            growths.append((paid_until, usd_per_s))
            if line.known_until < math.inf and usd_per_s < line.reserved_usd_per_s:
                rises_at = line.known_until if line.known_until > paid_until else paid_until
                growths.append((rises_at, line.reserved_usd_per_s - usd_per_s))
        for coming in self.coming:
            left_usd -= coming.reserved_usd_per_s * coming.bound_s + coming.data_usd
            growths.append((now + coming.bound_s, coming.reserved_usd_per_s))
        if left_usd < -MONEY_SLACK_USD:
            return -math.inf
        return _exhausted_at(now, max(0.0, left_usd), rate_usd_per_s, sorted(growths))


def _exhausted_at(now: float, left_usd: float, rate_usd_per_s: float, growths: list[tuple[float, float]]) -> float:
    """Return when `left_usd` is used up, at a rate that grows at each of `growths`: (instant, by how much)."""
    at = now
    for growth_at, growth in growths:
        if rate_usd_per_s > 0 and left_usd < rate_usd_per_s * (growth_at - at):
            break
        left_usd -= rate_usd_per_s * (growth_at - at)
        at = growth_at
        rate_usd_per_s += growth
    return at + left_usd / rate_usd_per_s if rate_usd_per_s > 0 else math.inf
