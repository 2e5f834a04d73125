"""A provider on a virtual clock: instances start, end and are billed as EC2's are, at no real cost.

Each instance has `InstanceFaults`, unknown to all others; by default nothing goes wrong. It bills from running to the
end, with the minimum, at the price of purchase. Tests compare the bill with the controller's ledger and limits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rubberband.cloud.provider import LEASE_EXPIRED, InstanceDescription, InstanceState
from rubberband.errors import NoCapacityError, ProviderError
from rubberband.values.offer import SECONDS_PER_HOUR, Offer
from rubberband.values.plan import Market

LEASE_S = 600.0
"""Life of an instance without its driver."""


class VirtualClock:
    """A clock that moves only by `advance_to`."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        """Seconds on this clock."""
        return self._now

    def advance_to(self, instant: float) -> None:
        """Move to `instant`, never back."""
        self._now = max(self._now, instant)


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceFaults:
    """Future of one instance. Seconds; infinite: never."""

    refused: str = ""
    """Reason of a permanent refusal; empty: none."""
    sold_out: bool = False
    """Whether it is refused, or ends without having run, for lack of capacity on its market."""
    provision_s: float | None = None
    """From the request until it runs; None: the offer's delay."""
    stillborn_after_s: float = math.inf
    """From the request until it ends without having run, if it does not run by then."""
    init_s: float | None = None
    """From when its driver sees it run until its workers are warm; None: the offer's delay."""
    ends_after_s: float = math.inf
    """From running until it dies, or is interrupted."""
    preempted: bool = False
    """Whether the provider interrupts it then (spot)."""
    notice_s: float | None = None
    """Time from the provider's notice to the interruption; None: no notice."""
    lease_late_s: float = 0.0
    """From the end of its lease until it has noticed, and is off."""
    price_usd_per_hour: float | None = None
    """Price at purchase; None: the offer's for its market."""
    instance_type: str = ""
    """Type that is bought; empty: the offer's."""
    hour_prices_usd: tuple[float, ...] | None = None
    """USD per hour of each hour since it began to run, as EC2 bills spot; the last one stays. None: the price at
    purchase. With prices, an interruption in the first hour makes it free."""


FaultsOf = Callable[[str, Market], InstanceFaults]
"""(instance, market) -> its faults; called once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """Future of a living instance, in times on the clock; infinite: never."""

    running_at: float
    """Now, if it runs already."""
    init_s: float
    """From when a driver sees it run until its workers are warm."""
    notice_at: float
    taken_at: float
    """Instant at which a fault ends it."""
    ends_at: float
    """Instant at which it ends without further calls."""


@dataclass(slots=True, kw_only=True)
class _Machine:
    """True state of one instance."""

    instance: str
    market: Market
    faults: InstanceFaults
    requested_at: float
    runs_at: float
    """Infinite if it never runs."""
    taken_at: float
    """Instant at which a fault ends it; infinite: never."""
    own_lease_until: float | None
    """Its first lease, or the last one that reached it; None: renewals reach it."""
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
        offer: Offer,
        lease_s: float = LEASE_S,
        faults_of: FaultsOf = lambda _instance, _market: InstanceFaults(),
        by_worker: bool = False,
    ) -> None:
        """`offer` sets prices and delays.

        `by_worker`: renewals reach only instances for which `reach` was called; otherwise all that run.
        """
        self._experiment = experiment
        self.virtual_clock = clock
        self._offer = offer
        self._faults_of = faults_of
        self._by_worker = by_worker
        self._machines: dict[str, _Machine] = {}
        self._unreached: dict[str, _Machine] = {}
        """Instances that no renewal has reached yet."""
        self.lease_until = clock.now() + lease_s
        """End of the lease, for instances that renewals reach."""
        self._head_usd = 0.0
        """Cost of earlier heads."""
        self._head_since: float | None = clock.now()

    def launch(self, instance: str, market: Market = "on_demand", *, first_lease_s: float | None = None) -> None:
        """Request an instance. Raises ProviderError if it is to be refused.

        With `first_lease_s` its first lease is exactly that, as that of a request which was written before.
        """
        if instance in self._machines:
            return
        faults, now = self._faults_of(instance, market), self.virtual_clock.now()
        if faults.refused:
            raise NoCapacityError(faults.refused) if faults.sold_out else ProviderError(faults.refused)
        provision_s = self._offer.provision_delay_s if faults.provision_s is None else faults.provision_s
        runs = provision_s < math.inf and provision_s <= faults.stillborn_after_s
        runs_at = now + provision_s if runs else math.inf
        price_usd_per_s = self._offer.market_price_usd_per_s(market)
        if faults.price_usd_per_hour is not None:
            price_usd_per_s = (faults.price_usd_per_hour + self._offer.side_usd_per_hour) / SECONDS_PER_HOUR
        machine = _Machine(
            instance=instance,
            market=market,
            faults=faults,
            requested_at=now,
            runs_at=runs_at,
            taken_at=runs_at + faults.ends_after_s if runs else now + faults.stillborn_after_s,
            own_lease_until=runs_at + (max(0.0, self.lease_until - now) if first_lease_s is None else first_lease_s),
            price_usd_per_s=price_usd_per_s,
        )
        self._machines[instance] = self._unreached[instance] = machine

    def describe(self) -> Sequence[InstanceDescription]:
        """Return every instance, as of now."""
        return [self.status(instance) for instance in self._machines]

    def status(self, instance: str) -> InstanceDescription:
        """Return one instance, as of now. Raises ProviderError if it was never launched."""
        machine, now = self._settled(instance), self.virtual_clock.now()
        faults = machine.faults
        running_at = machine.runs_at if machine.runs_at <= min(now, machine.ended_at) else None
        ended = machine.ended_at <= now
        state: InstanceState = "terminated" if ended else "pending" if running_at is None else "running"
        notice_at = math.inf if faults.notice_s is None else max(machine.runs_at, machine.taken_at - faults.notice_s)
        return InstanceDescription(
            instance=instance,
            experiment=self._experiment,
            state=state,
            requested_at=machine.requested_at,
            running_at=running_at,
            ended_at=machine.ended_at if ended else None,
            reason=machine.reason,
            market=machine.market,
            price_usd_per_hour=faults.price_usd_per_hour,
            instance_type=faults.instance_type,
            interrupted_at=notice_at if notice_at <= min(now, machine.ended_at) else None,
            preempted=machine.preempted,
            sold_out=faults.sold_out and ended and running_at is None,
            hour_prices_usd=self._hour_prices_usd(machine, min(now, machine.ended_at)),
        )

    def _hour_prices_usd(self, machine: _Machine, until: float) -> tuple[float, ...] | None:
        """Return the prices of the hours that it has begun."""
        prices = machine.faults.hour_prices_usd
        if prices is None or machine.runs_at > until:
            return prices and ()
        if machine.preempted and machine.ended_at <= until and until - machine.runs_at < SECONDS_PER_HOUR:
            return (0.0,)
        begun = max(1, math.ceil((until - machine.runs_at) / SECONDS_PER_HOUR))
        return tuple(prices[min(hour, len(prices) - 1)] for hour in range(begun))

    def _settled(self, instance: str) -> _Machine:
        """Return the machine, ended if its time has come."""
        machine = self._machines.get(instance)
        if machine is None:
            raise ProviderError(f"no instance {instance} was ever launched for {self._experiment}")
        if machine.ended_at < math.inf:
            return machine
        end_at = self._ends_at(machine)
        if end_at <= self.virtual_clock.now():
            if end_at < machine.taken_at:
                machine.end(end_at, LEASE_EXPIRED)
            else:
                reason = "taken away by the provider" if machine.faults.preempted else "process died"
                reason = reason if machine.runs_at < math.inf else "it did not start"
                machine.end(end_at, reason, preempted=machine.faults.preempted)
        return machine

    def _ends_at(self, machine: _Machine) -> float:
        """Return when the machine ends without further calls."""
        lease_until = self.lease_until if machine.own_lease_until is None else machine.own_lease_until
        expires_at = max(machine.runs_at, lease_until) + machine.faults.lease_late_s
        return min(machine.ended_at, machine.taken_at, expires_at)

    def ends_at(self, instance: str) -> float:
        """Return when the instance ends without further calls, or ended; infinite: never."""
        return self._ends_at(self._settled(instance))

    def runs_at(self, instance: str) -> float:
        """Return when the instance begins, or began, to run; infinite: never."""
        return self._settled(instance).runs_at

    def release(self, instance: str, *, fault: str = "") -> InstanceDescription:
        """End the instance now."""
        return self.lose(instance, "")

    def lose(self, instance: str, reason: str = "lost") -> InstanceDescription:
        """End the instance now by a fault."""
        machine = self._settled(instance)
        if machine.ended_at == math.inf:
            machine.end(self.virtual_clock.now(), reason)
            self._unreached.pop(instance, None)
        return self.status(instance)

    def renew_lease(self, until: float) -> None:
        """Let running instances end themselves at `until`, if renewals reach them (see `reach`)."""
        now = self.virtual_clock.now()
        self._ensure_head(now)
        self.lease_until = until
        if not self._by_worker:
            for machine in [machine for machine in self._unreached.values() if machine.runs_at <= now]:
                self.reach(machine.instance)

    def reach(self, instance: str) -> None:
        """Let renewals reach the instance from now on, as the driver has a worker on it."""
        machine = self._settled(instance)
        if machine.ended_at == math.inf:
            machine.own_lease_until = None
            self._unreached.pop(instance, None)

    def lose_touch(self, instance: str) -> None:
        """Let no more renewals reach the instance, which keeps its last lease."""
        machine = self._settled(instance)
        if machine.own_lease_until is None:
            machine.own_lease_until = self.lease_until

    def _ensure_head(self, now: float) -> None:
        """Replace a head that has outlived its lease, and end the instances that had joined it."""
        if self._head_since is not None and now <= self.lease_until:
            return
        for machine in self._machines.values():
            self._settled(machine.instance)
            if machine.ended_at == math.inf:
                machine.end(now, "the Ray head ended")
        self._unreached.clear()
        self._head_usd = self._head_bill_usd(now)
        self._head_since = now

    def change_driver(self) -> None:
        """Let a new driver take over: the old one's workers, which renewed the leases, are gone."""
        self._ensure_head(self.virtual_clock.now())
        for instance in self._machines:
            self.lose_touch(instance)

    def course(self, instance: str) -> Course:
        """Return the future of a living instance, as of now."""
        machine = self._settled(instance)
        notice_s = machine.faults.notice_s
        return Course(
            running_at=max(machine.runs_at, self.virtual_clock.now()),
            init_s=self._offer.init_delay_s if machine.faults.init_s is None else machine.faults.init_s,
            notice_at=math.inf if notice_s is None else max(machine.runs_at, machine.taken_at - notice_s),
            taken_at=machine.taken_at,
            ends_at=self._ends_at(machine),
        )

    def bill_usd(self, at: float) -> float:
        """Return the total cost by `at`; for a future time, without further calls until then."""
        return self._head_bill_usd(at) + math.fsum(self._cost_usd(machine, at) for machine in self._machines.values())

    def cost_usd(self, instance: str) -> float:
        """Return what one instance has cost, or will have cost without further calls."""
        return self._cost_usd(self._settled(instance), math.inf)

    def _cost_usd(self, machine: _Machine, at: float) -> float:
        if machine.runs_at > min(at, machine.ended_at):
            return 0.0
        if self._offer.billing == "per_function":
            return self._offer.once_usd_per_instance
        held_s = min(self._ends_at(machine), at) - machine.runs_at
        billed_s = max(held_s, self._offer.minimum_billed_s)
        rent_usd = machine.price_usd_per_s * billed_s
        if machine.faults.hour_prices_usd is not None:
            ends_at = self._ends_at(machine)
            is_taken = machine.preempted or (machine.faults.preempted and ends_at == machine.taken_at)
            is_free = is_taken and ends_at <= at and held_s < SECONDS_PER_HOUR
            rent_usd = 0.0 if is_free else _rent_usd(machine.faults.hour_prices_usd, billed_s)
            rent_usd += self._offer.side_usd_per_hour * billed_s / SECONDS_PER_HOUR
        return rent_usd + self._offer.once_usd_per_instance

    def _head_bill_usd(self, at: float) -> float:
        if self._head_since is None or not self._offer.head_price_usd_per_hour:
            return self._head_usd
        return self._head_usd + self._offer.head_cost_usd(max(0.0, min(at, self.lease_until) - self._head_since))

    def close(self) -> None:
        """Release everything, and the head."""
        for instance in self._machines:
            self.release(instance)
        self._head_usd, self._head_since = self._head_bill_usd(self.virtual_clock.now()), None


def _rent_usd(hour_prices_usd: Sequence[float], billed_s: float) -> float:
    """Return EC2's charge for spot: each hour at its own price, later ones at the last."""
    rent_usd = 0.0
    for hour in range(math.ceil(billed_s / SECONDS_PER_HOUR)):
        price_usd_per_hour = hour_prices_usd[min(hour, len(hour_prices_usd) - 1)]
        rent_usd += price_usd_per_hour * min(1.0, billed_s / SECONDS_PER_HOUR - hour)
    return rent_usd
