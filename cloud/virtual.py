"""A provider on a virtual clock: instances come, end and are billed as EC2's are, and cost nothing real.

What becomes of each instance is its `Fate`, which nobody else knows beforehand. By default nothing goes wrong. It bills
from running to the end, with the minimum, at the price of purchase, and says what it has billed: so that a test can
hold the controller's ledger, and its promises, against it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rubberband.cloud.provider import InstanceDescription, InstanceState
from rubberband.errors import NoCapacityError, ProviderError
from rubberband.values.offer import SECONDS_PER_HOUR, Offer
from rubberband.values.plan import Market

LEASE_S = 600.0
"""For how long an instance lives on without its driver."""


class VirtualClock:
    """A clock that stands still until it is told to jump."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        """Seconds on this clock."""
        return self._now

    def advance_to(self, instant: float) -> None:
        """Jump to `instant`; never back."""
        self._now = max(self._now, instant)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What becomes of one instance. Seconds; infinite: never."""

    refused: str = ""
    """Why it is refused for good; empty: it is not."""
    sold_out: bool = False
    """Whether that is since its market has none."""
    provision_s: float | None = None
    """From the request until it runs; None: as long as the offer says."""
    stillborn_after_s: float = math.inf
    """From the request until it ends without having run, if it does not run by then."""
    init_s: float | None = None
    """From when its driver sees it run until its workers are warm; None: as long as the offer says."""
    ends_after_s: float = math.inf
    """From running until it dies, or is taken away."""
    preempted: bool = False
    """Whether that is the provider's doing (spot)."""
    notice_s: float | None = None
    """How long before it is taken away the provider says so; None: not at all."""
    lease_late_s: float = 0.0
    """From the end of its lease until it has noticed, and is off."""
    price_usd_per_hour: float | None = None
    """At purchase; None: that of the offer for its market."""
    hour_prices_usd: tuple[float, ...] | None = None
    """USD per hour of each hour since it began to run, the last one for ever, as EC2 bills spot; None: at purchase.
    It is free then if it is taken away in its first hour."""


NOTHING_WRONG = Fate()

FateOf = Callable[[str, Market], Fate]
"""(instance, market) -> its fate; asked once."""


def nothing_goes_wrong(_instance: str, _market: Market) -> Fate:
    """The fate of every instance by default."""
    return NOTHING_WRONG


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What will become of an instance that lives; instants, infinite: never."""

    running_at: float
    """Now, if it runs already."""
    init_s: float
    """From when a driver sees it run until its workers are warm."""
    notice_at: float
    taken_at: float
    """When it ends of itself."""
    ends_at: float
    """When it ends if nobody does anything any more."""


@dataclass(slots=True, kw_only=True)
class _Machine:
    """One instance as it really is, whoever looks."""

    instance: str
    market: Market
    fate: Fate
    requested_at: float
    runs_at: float
    """Infinite if it never runs."""
    taken_at: float
    """When it ends of itself, infinite if it does not."""
    own_lease_until: float | None
    """Its first lease, or the last one that it heard of; None: renewals reach it."""
    price_usd_per_s: float
    ended_at: float = math.inf
    reason: str = ""
    preempted: bool = False

    def end(self, at: float, reason: str, *, preempted: bool = False) -> None:
        self.ended_at, self.reason, self.preempted = at, reason, preempted


class VirtualProvider:
    """Implements `rubberband.cloud.provider.Provider` on a `VirtualClock`."""

    def __init__(
        self,
        experiment: str,
        clock: VirtualClock,
        *,
        provision_delay_s: float = 0.0,
        offer: Offer | None = None,
        lease_s: float = LEASE_S,
        fate_of: FateOf = nothing_goes_wrong,
        by_worker: bool = False,
    ) -> None:
        """Instances cost what `offer` says (None: nothing), and come after its delays; None: `provision_delay_s`.

        `by_worker`: renewals reach only instances that `reach` was called for; otherwise all that run.
        """
        self._experiment = experiment
        self._clock = clock
        self._offer = offer
        self._provision_delay_s = provision_delay_s if offer is None else offer.provision_delay_s
        self._init_delay_s = 0.0 if offer is None else offer.init_delay_s
        self._fate_of = fate_of
        self._by_worker = by_worker
        self._machines: dict[str, _Machine] = {}
        self._unreached: dict[str, _Machine] = {}
        """Those that no renewal has reached yet."""
        self.lease_until = clock.now() + lease_s
        """When instances end themselves, those that hear of it, unless it is put off."""
        self._head_usd = 0.0
        """What earlier heads cost."""
        self._head_since: float | None = clock.now()

    def launch(self, instance: str, market: Market = "on_demand", *, first_lease_s: float | None = None) -> None:
        """Ask for an instance. Raises ProviderError if its fate is to be refused.

        With `first_lease_s` its first lease is just that, as that of a request which was written before.
        """
        if instance in self._machines:
            return
        fate, now = self._fate_of(instance, market), self._clock.now()
        if fate.refused:
            raise NoCapacityError(fate.refused) if fate.sold_out else ProviderError(fate.refused)
        provision_s = self._provision_delay_s if fate.provision_s is None else fate.provision_s
        runs = provision_s < math.inf and provision_s <= fate.stillborn_after_s
        runs_at = now + provision_s if runs else math.inf
        machine = _Machine(
            instance=instance,
            market=market,
            fate=fate,
            requested_at=now,
            runs_at=runs_at,
            taken_at=runs_at + fate.ends_after_s if runs else now + fate.stillborn_after_s,
            own_lease_until=runs_at + (max(0.0, self.lease_until - now) if first_lease_s is None else first_lease_s),
            price_usd_per_s=self._price_usd_per_s(fate, market),
        )
        self._machines[instance] = self._unreached[instance] = machine

    def _price_usd_per_s(self, fate: Fate, market: Market) -> float:
        if fate.price_usd_per_hour is not None:
            side_usd_per_hour = 0.0 if self._offer is None else self._offer.side_usd_per_hour
            return (fate.price_usd_per_hour + side_usd_per_hour) / SECONDS_PER_HOUR
        return 0.0 if self._offer is None else self._offer.market_price_usd_per_s(market)

    def describe(self) -> Sequence[InstanceDescription]:
        """Every instance as of the clock's now."""
        return [self.status(instance) for instance in self._machines]

    def status(self, instance: str) -> InstanceDescription:
        """One instance as of the clock's now. Raises ProviderError if it was never launched."""
        machine, now = self._settled(instance), self._clock.now()
        fate = machine.fate
        running_at = machine.runs_at if machine.runs_at <= min(now, machine.ended_at) else None
        ended = machine.ended_at <= now
        state: InstanceState = "terminated" if ended else "pending" if running_at is None else "running"
        notice_at = math.inf if fate.notice_s is None else max(machine.runs_at, machine.taken_at - fate.notice_s)
        return InstanceDescription(
            instance=instance,
            experiment=self._experiment,
            state=state,
            requested_at=machine.requested_at,
            running_at=running_at,
            ended_at=machine.ended_at if ended else None,
            reason=machine.reason,
            market=machine.market,
            price_usd_per_hour=fate.price_usd_per_hour,
            interrupted_at=notice_at if notice_at <= min(now, machine.ended_at) else None,
            preempted=machine.preempted,
            hour_prices_usd=self._hour_prices_usd(machine, min(now, machine.ended_at)),
        )

    def _hour_prices_usd(self, machine: _Machine, until: float) -> tuple[float, ...] | None:
        """Of the hours that it has begun."""
        prices = machine.fate.hour_prices_usd
        if prices is None or machine.runs_at > until:
            return prices and ()
        if machine.preempted and machine.ended_at <= until and until - machine.runs_at < SECONDS_PER_HOUR:
            return (0.0,)
        begun = max(1, math.ceil((until - machine.runs_at) / SECONDS_PER_HOUR))
        return tuple(prices[min(hour, len(prices) - 1)] for hour in range(begun))

    def _settled(self, instance: str) -> _Machine:
        """The machine, ended if its time has come."""
        machine = self._machines.get(instance)
        if machine is None:
            raise ProviderError(f"no instance {instance} was ever launched for {self._experiment}")
        if machine.ended_at < math.inf:
            return machine
        end_at = self._ends_at(machine)
        if end_at <= self._clock.now():
            if end_at < machine.taken_at:
                machine.end(end_at, "lease expired")
            else:
                reason = "taken away by the provider" if machine.fate.preempted else "process died"
                reason = reason if machine.runs_at < math.inf else "it did not start"
                machine.end(end_at, reason, preempted=machine.fate.preempted)
        return machine

    def _ends_at(self, machine: _Machine) -> float:
        """When the machine ends if nobody does anything any more."""
        lease_until = self.lease_until if machine.own_lease_until is None else machine.own_lease_until
        expires_at = max(machine.runs_at, lease_until) + machine.fate.lease_late_s
        return min(machine.ended_at, machine.taken_at, expires_at)

    def ends_at(self, instance: str) -> float:
        """When the instance ends, or ended, if nobody does anything any more; infinite: never."""
        return self._ends_at(self._settled(instance))

    def runs_at(self, instance: str) -> float:
        """When the instance begins, or began, to run; infinite: never."""
        return self._settled(instance).runs_at

    def release(self, instance: str) -> InstanceDescription:
        """End the instance now."""
        return self._end(instance, "")

    def lose(self, instance: str, reason: str = "lost") -> InstanceDescription:
        """A fault: the machine dies now."""
        return self._end(instance, reason)

    def _end(self, instance: str, reason: str) -> InstanceDescription:
        self._stop(instance, reason)
        return self.status(instance)

    def _stop(self, instance: str, reason: str) -> None:
        machine = self._settled(instance)
        if machine.ended_at == math.inf:
            machine.end(self._clock.now(), reason)
            self._unreached.pop(instance, None)

    def renew_lease(self, until: float) -> None:
        """Instances that run end themselves at `until`; see `reach` for who hears of it."""
        now = self._clock.now()
        if self._head_since is None or now > self.lease_until:
            self._start_head(now)
        self.lease_until = until
        if not self._by_worker:
            for machine in [machine for machine in self._unreached.values() if machine.runs_at <= now]:
                self.reach(machine.instance)

    def reach(self, instance: str) -> None:
        """Renewals reach the instance from now on: the driver has a worker on it."""
        machine = self._settled(instance)
        if machine.ended_at == math.inf:
            machine.own_lease_until = None
            self._unreached.pop(instance, None)

    def lose_touch(self, instance: str) -> None:
        """Renewals do not reach the instance any more; the lease that it has heard of last goes on."""
        machine = self._settled(instance)
        if machine.own_lease_until is None:
            machine.own_lease_until = self.lease_until

    def _start_head(self, now: float) -> None:
        """The head outlived its lease: what had joined it is of no use, and a new one begins."""
        for machine in self._machines.values():
            self._settled(machine.instance)
            if machine.ended_at == math.inf:
                machine.end(now, "the Ray head ended")
        self._unreached.clear()
        self._end_head(now)
        self._head_since = now

    def _end_head(self, now: float) -> None:
        self._head_usd = self._head_bill_usd(now)
        self._head_since = None

    def change_driver(self) -> None:
        """A new driver takes over: the old one's workers, through which renewals reached instances, are gone."""
        now = self._clock.now()
        if self._head_since is None or now > self.lease_until:
            self._start_head(now)
        for instance in self._machines:
            self.lose_touch(instance)

    def course(self, instance: str) -> Course:
        """What will become of an instance that lives, as of now."""
        machine = self._settled(instance)
        notice_s = machine.fate.notice_s
        return Course(
            running_at=max(machine.runs_at, self._clock.now()),
            init_s=self._init_s(machine.fate),
            notice_at=math.inf if notice_s is None else max(machine.runs_at, machine.taken_at - notice_s),
            taken_at=machine.taken_at,
            ends_at=self._ends_at(machine),
        )

    def _init_s(self, fate: Fate) -> float:
        return self._init_delay_s if fate.init_s is None else fate.init_s

    def bill_usd(self, at: float) -> float:
        """What everything has cost by `at`; for a coming instant, if nobody does anything any more until then."""
        return self._head_bill_usd(at) + math.fsum(self._cost_usd(machine, at) for machine in self._machines.values())

    def _cost_usd(self, machine: _Machine, at: float) -> float:
        if self._offer is None or machine.runs_at > min(at, machine.ended_at):
            return 0.0
        if self._offer.billing == "per_function":
            return self._offer.once_usd_per_instance
        held_s = min(self._ends_at(machine), at) - machine.runs_at
        billed_s = max(held_s, self._offer.minimum_billed_s)
        rent_usd = machine.price_usd_per_s * billed_s
        if machine.fate.hour_prices_usd is not None:
            ends_at = self._ends_at(machine)
            is_taken = machine.preempted or (machine.fate.preempted and ends_at == machine.taken_at)
            is_free = is_taken and ends_at <= at and held_s < SECONDS_PER_HOUR
            rent_usd = 0.0 if is_free else _rent_usd(machine.fate.hour_prices_usd, billed_s)
            rent_usd += self._offer.side_usd_per_hour * billed_s / SECONDS_PER_HOUR
        return rent_usd + self._offer.once_usd_per_instance

    def _head_bill_usd(self, at: float) -> float:
        if self._offer is None or self._head_since is None or not self._offer.head_price_usd_per_hour:
            return self._head_usd
        return self._head_usd + self._offer.head_cost_usd(max(0.0, min(at, self.lease_until) - self._head_since))

    def close(self) -> None:
        """Release everything, and the head."""
        for instance in self._machines:
            self._stop(instance, "")
        if self._head_since is not None:
            self._end_head(self._clock.now())


def _rent_usd(hour_prices_usd: Sequence[float], billed_s: float) -> float:
    """What EC2 asks for spot: each hour at its own price, the last price for ever."""
    rent_usd = 0.0
    for hour in range(math.ceil(billed_s / SECONDS_PER_HOUR)):
        price_usd_per_hour = hour_prices_usd[min(hour, len(hour_prices_usd) - 1)]
        rent_usd += price_usd_per_hour * min(1.0, billed_s / SECONDS_PER_HOUR - hour)
    return rent_usd
