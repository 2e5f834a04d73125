"""Seeded virtual runs of a pool with faults: tenants that die or freeze, a broker that dies, machines that fail."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from rubberband.cloud.pool import Pool, PoolLimits, PoolProvider
from rubberband.cloud.provider import InstanceDescription
from rubberband.cloud.virtual import InstanceFaults, VirtualClock, VirtualProvider
from rubberband.errors import ProviderError
from rubberband.units import month_begin
from rubberband.values.offer import SECONDS_PER_HOUR, Offer, Spot
from rubberband.values.plan import Market
from tests.builders.invariants import validate_pool
from tests.builders.memory import MemoryPoolJournal

_T = TypeVar("_T")

LEASE_S = 40.0
STEP_S = 2.0


class BrokerKilled(BaseException):
    """The broker dies in the middle of a call to its provider."""


@dataclass
class FaultyCloud:
    """A virtual provider whose caller may be killed before or after a call."""

    inner: VirtualProvider
    rng: random.Random
    kill_share: float
    calls: int = 0

    def _call(self, call: Callable[[], _T]) -> _T:
        self.calls += 1
        dies = self.rng.random() < self.kill_share
        if dies and self.rng.random() < 0.5:
            raise BrokerKilled
        answer = call()
        if dies:
            raise BrokerKilled
        return answer

    def launch(self, instance: str, market: Market = "on_demand", *, first_lease_s: float | None = None) -> None:
        self._call(lambda: self.inner.launch(instance, market, first_lease_s=first_lease_s))

    def release(self, instance: str, *, fault: str = "") -> InstanceDescription:
        return self._call(lambda: self.inner.release(instance, fault=fault))

    def describe(self) -> Sequence[InstanceDescription]:
        return self.inner.describe()

    def renew_lease(self, until: float) -> None:
        self.inner.renew_lease(until)

    def close(self) -> None:
        self.inner.close()


@dataclass
class Tenant:
    """A driver that asks, holds, gives back, and may die or freeze."""

    name: str
    gpus: int
    asked: int = 0
    dead_until: float = 0.0
    """Until then its driver does nothing, and still uses what it held last."""
    believed: dict[str, tuple[str, int, float]] = field(default_factory=dict)
    """Instance -> machine, GPUs, and the start, as it saw them last."""


@dataclass
class PoolRun:
    seed: int

    def __post_init__(self) -> None:
        self.rng = rng = random.Random(self.seed)
        self.start_at = 1_700_000_000.0 + rng.uniform(0.0, 30 * 86_400.0)
        self.clock = VirtualClock(self.start_at)
        self.offer = Offer(
            instance_type="v",
            gpus=4,
            price_usd_per_hour=rng.choice((3.06, 12.24)),
            max_instances=rng.randint(1, 6),
            provision_delay_s=rng.choice((3.0, 30.0)),
            data_usd_per_instance=rng.choice((0.0, 0.02)),
            spot=Spot(price_usd_per_hour=1.0, interruptions_per_hour=0.0),
        )
        price = self.offer.price_usd_per_hour
        self.limits = PoolLimits(
            instances=self.offer.max_instances,
            gpus=4,
            market=rng.choice(("on_demand", "spot")),
            price_usd_per_hour=price,
            once_usd=self.offer.once_usd_per_instance,
            minimum_billed_s=self.offer.minimum_billed_s,
            idle_s=rng.choice((0.0, 60.0, 300.0)),
            release_margin_s=5.0,
            max_usd_per_hour=rng.choice((None, price, 2.5 * price)),
            max_usd_per_month=rng.choice((None, None, 0.2 * price, price)),
        )
        self.below = VirtualProvider("pool", self.clock, offer=self.offer, lease_s=60.0, faults_of=self._faults)
        self.cloud = FaultyCloud(self.below, rng, rng.choice((0.0, 0.02, 0.2)))
        self.journal = MemoryPoolJournal()
        self.kills = 0
        self.compact_events = rng.choice((20, 10_000))
        self.tenants = [Tenant(f"e{i}", rng.choice((1, 2, 4))) for i in range(rng.randint(2, 5))]
        self.pool = self._open()

    def _faults(self, _machine: str, market: Market) -> InstanceFaults:
        assert market == "on_demand" or self.limits.market == "spot"
        prices = tuple(self.rng.uniform(0.5, 3.06) for _ in range(3)) if market == "spot" else None
        return replace(self._end_of_it(), hour_prices_usd=prices)

    def _end_of_it(self) -> InstanceFaults:
        kind = self.rng.random()
        if kind < 0.05:
            return InstanceFaults(refused="no capacity", sold_out=True)
        if kind < 0.10:
            return InstanceFaults(stillborn_after_s=self.rng.uniform(1.0, 60.0), provision_s=math.inf)
        if kind < 0.25:
            return InstanceFaults(
                ends_after_s=self.rng.uniform(0.0, 900.0),
                preempted=self.rng.random() < 0.5,
                notice_s=self.rng.choice((None, 20.0)),
            )
        return InstanceFaults(provision_s=self.rng.uniform(0.0, 60.0))

    def _open(self) -> Pool:
        while True:
            try:
                return Pool(
                    self.cloud,
                    self.journal,
                    self.limits,
                    self.clock.now,
                    start=lambda work: work(),
                    compact_events=self.compact_events,
                )
            except BrokerKilled:
                self.kills += 1

    def _driver(self, tenant: Tenant) -> PoolProvider:
        return PoolProvider(tenant.name, self.pool, tenant.gpus, run="r", clock=self.clock.now, lease_s=LEASE_S)

    def run(self, steps: int = 400) -> None:
        """Run it to its end, and check it all the way. Raises AssertionError."""
        down_until = 0.0
        for _ in range(steps):
            self.clock.advance_to(self.clock.now() + self.rng.uniform(0.1, STEP_S))
            if self.clock.now() < down_until:
                self._check_truth()
                continue
            if self.rng.random() < 0.01:
                down_until = self.clock.now() + self.rng.choice((1.0, 20.0, 200.0))
                self.kills += 1
                self.pool = self._open()
                continue
            try:
                self._step()
            except BrokerKilled:
                self.kills += 1
                self.pool = self._open()
                self._check_truth()  # the new broker has not seen yet which machines ended
                continue
            self._check()
        self._end()

    def _step(self) -> None:
        self.pool.look()
        for tenant in self.tenants:
            if self.clock.now() >= tenant.dead_until:
                self._drive(tenant)

    def _drive(self, tenant: Tenant) -> None:
        driver, rng = self._driver(tenant), self.rng
        driver.renew_lease(self.clock.now() + LEASE_S)
        statuses = [status for status in driver.describe() if status.ended_at is None]
        self._believe(tenant, driver, statuses)
        draw = rng.random()
        if draw < 0.08 and len(statuses) < 6:
            tenant.asked += 1
            with_limit = rng.choice((None, LEASE_S))
            driver.launch(f"i{tenant.asked}", rng.choice(("on_demand", "spot")), first_lease_s=with_limit)
        elif draw < 0.14 and statuses:
            given = rng.choice(statuses).instance
            tenant.believed.pop(given, None)  # trials are stopped before, also if the broker dies as it answers
            driver.release(given)
        elif draw < 0.15:
            tenant.believed = {}
            driver.close()
        elif draw < 0.16:
            tenant.dead_until = self.clock.now() + rng.choice((5.0, 60.0, 600.0))
            return
        self._believe(tenant, driver, [status for status in driver.describe() if status.ended_at is None])

    def _believe(self, tenant: Tenant, driver: PoolProvider, statuses: Sequence[InstanceDescription]) -> None:
        tenant.believed = {
            status.instance: (driver.node(status.instance), tenant.gpus, status.running_at)
            for status in statuses
            if status.running_at is not None
        }

    def _living(self) -> dict[str, InstanceDescription]:
        return {status.instance: status for status in self.below.describe() if status.ended_at is None}

    def _check(self) -> None:
        validate_pool(self.pool.state, self.pool.now())
        self._check_truth()

    def _check_truth(self) -> None:
        """Compare with what the provider really rents, and with what each driver believes that it holds."""
        living = self._living()
        assert len(living) <= self.limits.instances, "more machines live than the pool may have"
        used: dict[str, int] = {}
        for tenant in self.tenants:
            for machine, gpus, _ in tenant.believed.values():
                if machine in living:
                    used[machine] = used.get(machine, 0) + gpus
        assert all(gpus <= 4 for gpus in used.values()), f"lent twice: {used}"
        if self.limits.max_usd_per_hour is not None:
            rate = self.offer.price_usd_per_hour * len(living)
            assert rate <= self.limits.max_usd_per_hour + 1e-9, "the cap per hour is passed"
        cap, now = self.limits.max_usd_per_month, self.clock.now()
        billed_usd = self.below.bill_usd(now) - self.below.bill_usd(month_begin(now))
        assert cap is None or billed_usd <= cap + 1e-9, "the cap of the month is passed"

    def _end(self) -> None:
        """All drivers are gone: nothing may be left, and the bills add up to the provider's."""
        until = self.clock.now() + LEASE_S + self.limits.idle_s + 3 * self.limits.minimum_billed_s + 120.0
        self.cloud.kill_share = 0.0
        while self.clock.now() < until:
            self.clock.advance_to(self.clock.now() + STEP_S)
            self.pool.look()
            validate_pool(self.pool.state, self.pool.now())
        assert not self._living(), "a machine is left"
        now, state = self.clock.now(), self.pool.state
        provider_usd = self.below.bill_usd(now)
        own_usd = math.fsum(self._own_bill_usd(tenant) for tenant in self.tenants)
        assert math.isclose(own_usd + state.idle_usd(now), provider_usd, abs_tol=1e-6), "the bills do not add up"
        assert math.isclose(math.fsum(state.lent_usd(now).values()), own_usd, abs_tol=1e-6)

    def _own_bill_usd(self, tenant: Tenant) -> float:
        """Return what a tenant pays, by the instants and prices that it is told."""
        try:
            statuses = self._driver(tenant).describe()
        except ProviderError:
            return 0.0
        return math.fsum(
            (status.price_usd_per_hour or 0.0) * ((status.ended_at or 0.0) - status.running_at) / SECONDS_PER_HOUR
            for status in statuses
            if status.running_at is not None
        )
