"""State of a pool: its machines, their slices, and what they have cost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Literal

from rubberband.cloud.pool.journal import PoolLimits
from rubberband.units import month_begin
from rubberband.values.offer import SECONDS_PER_HOUR, left_to_provider_until
from rubberband.values.plan import Market

MachineStatus = Literal["ordered", "running", "releasing", "ended"]


@dataclass(slots=True, kw_only=True)
class Machine:
    """One instance that the pool rents."""

    name: str
    gpus: int
    market: Market
    ordered_at: float
    usd_per_hour: float
    """Its rent at purchase, with its side costs."""
    cap_usd_per_hour: float
    """Its price as the caps count it: on spot that on demand, which no hour's price exceeds."""
    hour_prices_usd: tuple[float, ...] | None = None
    """Price of each hour since it began to run, with side costs, as far as is known; None: its price stays."""
    once_usd: float
    minimum_billed_s: float
    status: MachineStatus = "ordered"
    running_at: float | None = None
    ended_at: float | None = None
    free_since: float
    """Instant at which its last tenant gave it back, or at which it was ordered."""
    retired: str = ""
    """Why it is lent no more; empty: it may be lent."""
    warned_at: float | None = None
    """Instant at which its loss was announced."""
    interrupted_at: float | None = None
    """Instant at which the provider announced that it reclaims the machine."""
    reason: str = ""
    """Why it ended."""
    preempted: bool = False
    instance_type: str = ""
    zone: str = ""
    slices: list[Slice] = field(default_factory=list)
    """Slices that are held now."""

    @property
    def left_until(self) -> float:
        """Instant until which it is left to the provider, which is about to take it away; -inf: it is not."""
        if self.interrupted_at is None:
            return -math.inf
        return left_to_provider_until(self.running_at, self.interrupted_at)

    @property
    def is_live(self) -> bool:
        """Whether it may cost money, now or soon."""
        return self.status != "ended"

    @property
    def free_gpus(self) -> int:
        return self.gpus - sum(held.gpus for held in self.slices)

    def bill_usd(self, at: float) -> float:
        """Return its cost by `at`; a machine that runs is billed for its minimum at once."""
        if self.running_at is None or self.running_at > at:
            return 0.0
        held_s = min(at, math.inf if self.ended_at is None else self.ended_at) - self.running_at
        return self._rent_usd(max(held_s, self.minimum_billed_s)) + self.once_usd

    def _rent_usd(self, billed_s: float) -> float:
        """Return its cost while it ran; hours without a known price cost as much as they may."""
        if self.hour_prices_usd is None:
            return self.usd_per_hour * billed_s / SECONDS_PER_HOUR
        lasted_s = [
            min(SECONDS_PER_HOUR, billed_s - hour * SECONDS_PER_HOUR) for hour in range(len(self.hour_prices_usd))
        ]
        known_usd = sum(price * max(0.0, s) for price, s in zip(self.hour_prices_usd, lasted_s, strict=True))
        unknown_s = max(0.0, billed_s - len(lasted_s) * SECONDS_PER_HOUR)
        return (known_usd + self.cap_usd_per_hour * unknown_s) / SECONDS_PER_HOUR

    @property
    def price_now_usd_per_hour(self) -> float:
        """Price of its latest hour, which a tenant pays that takes it now."""
        return self.hour_prices_usd[-1] if self.hour_prices_usd else self.usd_per_hour


@dataclass(slots=True, kw_only=True)
class Slice:
    """GPUs of one machine that a tenant has asked for; it sees them as an instance."""

    tenant: str
    experiment: str
    instance: str
    gpus: int
    requested_at: float
    lease_s: float
    market: Market = "on_demand"
    machine: Machine | None = None
    """None: it waits."""
    running_at: float | None = None
    """From when the tenant holds it, and is billed."""
    usd_per_hour: float = 0.0
    """Its share of the machine's price when it began to run, which stays."""
    ended_at: float | None = None
    reason: str = ""
    preempted: bool = False
    sold_out: bool = False
    """Whether its machine never ran because the provider has none."""
    fault: str = ""
    """Why the tenant found its machine faulty, which was retired for that."""

    def begin(self, at: float) -> None:
        """Begin to run, at the price that its machine has now."""
        assert self.machine is not None, "a slice runs on a machine"
        self.running_at = max(at, self.requested_at)
        self.usd_per_hour = self.machine.price_now_usd_per_hour * self.gpus / self.machine.gpus

    def bill_usd(self, at: float) -> float:
        """Return the tenant's cost of it by `at`: its share of the machine's price, while it held it."""
        if self.running_at is None or self.running_at > at:
            return 0.0
        held_s = min(at, math.inf if self.ended_at is None else self.ended_at) - self.running_at
        return self.usd_per_hour * held_s / SECONDS_PER_HOUR


@dataclass(slots=True, kw_only=True)
class PoolState:
    """Everything that a broker knows, but for the leases; it is the fold of its events."""

    limits: PoolLimits
    machines: dict[str, Machine] = field(default_factory=dict)
    slices: dict[tuple[str, str], Slice] = field(default_factory=dict)
    """(tenant, instance) -> slice, in the order of the requests."""
    tenants: dict[str, list[Slice]] = field(default_factory=dict)
    """Tenant -> all slices that it has asked for, in order."""
    live: dict[str, Machine] = field(default_factory=dict)
    """The machines that may cost money."""
    held: dict[tuple[str, str], Slice] = field(default_factory=dict)
    """The slices that wait or are held."""
    scales: list[tuple[float, int, float]] = field(default_factory=list)
    """Instants at which the number of machines in use changed, it from then on, and the efficiency at it."""
    past_machines: int = 0
    """Machines that ended long ago, and are only counted."""
    past_bill_usd: float = 0.0
    past_lent_usd: float = 0.0
    """Cost of these machines, and the part of it that forgotten tenants paid."""

    def to_json(self, since: float) -> dict[str, Any]:
        """Return it as JSON values for `from_json`; tenants and machines that ended before `since` are only summed."""
        kept = {tenant for tenant, slices in self.tenants.items() if any(_is_recent(loan, since) for loan in slices)}
        slices = [loan for loan in self.slices.values() if loan.tenant in kept]
        used = {loan.machine.name for loan in slices if loan.machine is not None}
        machines = [machine for machine in self.machines.values() if machine.name in used or _is_recent(machine, since)]
        names = {machine.name for machine in machines}
        gone = [machine for machine in self.machines.values() if machine.name not in names]
        forgotten = [loan for loan in self.slices.values() if loan.tenant not in kept]
        return {
            "limits": asdict(self.limits),
            "machines": [{**_plain(machine), "slices": []} for machine in machines],
            "slices": [{**_plain(loan), "machine": loan.machine and loan.machine.name} for loan in slices],
            "scales": [scale for scale, after in pairwise([*self.scales, (math.inf,)]) if after[0] >= since],
            "past_machines": self.past_machines + len(gone),
            "past_bill_usd": self.past_bill_usd + math.fsum(machine.bill_usd(math.inf) for machine in gone),
            "past_lent_usd": self.past_lent_usd + math.fsum(loan.bill_usd(math.inf) for loan in forgotten),
        }

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> PoolState:
        """Return the state that `to_json` made this of."""
        past = {name: plain[name] for name in ("past_machines", "past_bill_usd", "past_lent_usd")}
        scales = [(scaled_at, machines, efficiency) for scaled_at, machines, efficiency in plain.get("scales", ())]
        state = cls(limits=PoolLimits(**plain["limits"]), scales=scales, **past)
        for values in plain["machines"]:
            prices = values["hour_prices_usd"]
            machine = Machine(**{**values, "slices": [], "hour_prices_usd": None if prices is None else tuple(prices)})
            state.machines[machine.name] = machine
            if machine.is_live:
                state.live[machine.name] = machine
        for values in plain["slices"]:
            on = values["machine"]
            loan = Slice(**{**values, "machine": None if on is None else state.machines[on]})
            key = (loan.tenant, loan.instance)
            state.slices[key] = loan
            state.tenants.setdefault(loan.tenant, []).append(loan)
            if loan.ended_at is None:
                state.held[key] = loan
                if loan.machine is not None:
                    loan.machine.slices.append(loan)
        return state

    def waiting(self) -> Iterator[Slice]:
        """Yield the requests that wait, in order."""
        return (loan for loan in self.held.values() if loan.machine is None)

    def in_use(self) -> int | None:
        """Return the number of machines that the pool uses by its autoscaling; None: as many as are asked for."""
        return self.scales[-1][1] if self.limits.autoscales and self.scales else None

    def usd_per_hour(self) -> float:
        """Return the prices of all machines that may cost money, as the caps count them."""
        return sum(machine.cap_usd_per_hour for machine in self.live.values())

    def bill_usd(self, at: float) -> float:
        """Return the provider's bill by `at`."""
        return self.past_bill_usd + math.fsum(machine.bill_usd(at) for machine in self.machines.values())

    def lent_usd(self, at: float) -> dict[str, float]:
        """Return tenant -> its bill by `at`."""
        return {tenant: math.fsum(loan.bill_usd(at) for loan in slices) for tenant, slices in self.tenants.items()}

    def idle_usd(self, at: float) -> float:
        """Return the pool's own cost by `at`: GPUs that no tenant held, minima that were not used up, starts.

        On spot also what the price of an hour differs from that of the hour in which a tenant took a machine.
        """
        return self.bill_usd(at) - math.fsum(self.lent_usd(at).values()) - self.past_lent_usd

    def month_usd(self, at: float) -> float:
        """Return the bill of the calendar month (UTC) of `at`, by then."""
        return self.ended_month_usd(at) + self.live_month_usd(at, at)

    def ended_month_usd(self, at: float) -> float:
        """Return what the machines that have ended cost in the month of `at`."""
        begin = month_begin(at)
        return math.fsum(
            machine.bill_usd(math.inf) - machine.bill_usd(begin)
            for machine in self.machines.values()
            if machine.ended_at is not None and machine.ended_at > begin
        )

    def live_month_usd(self, at: float, until: float) -> float:
        """Return what the live machines will have cost by `until`, from the begin of the month of `at`."""
        begin = month_begin(at)
        return math.fsum(machine.bill_usd(until) - machine.bill_usd(begin) for machine in self.live.values())


def _is_recent(rented: Machine | Slice, since: float) -> bool:
    return rented.ended_at is None or rented.ended_at >= since


def _plain(rented: Machine | Slice) -> dict[str, Any]:
    return {name: getattr(rented, name) for name in rented.__slots__}
