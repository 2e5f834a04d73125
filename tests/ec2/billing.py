"""The meter: what the instances of the fake have cost, as EC2 bills them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tests.ec2.instance import SPOT_TERMINATION, Instance, Market
from tests.ec2.spot_prices import HOUR_S, SpotMarket

MINIMUM_BILLED_S = 60.0
VOLUME_USD_PER_GB_MONTH = 0.08
"""gp3 in us-east-1; a month has 720 hours, as in AWS's examples (EBS pricing: by the second, 60 s at the least)."""
IOPS_USD_PER_MONTH = 0.005
"""Of each above 3,000."""
ADDRESS_USD_PER_HOUR = 0.005
NAT_USD_PER_GB = 0.045


@dataclass(frozen=True, slots=True, kw_only=True)
class BillLine:
    instance_id: str
    instance_type: str
    market: Market
    zone: str
    price_usd_per_hour: float
    """On average over `billed_s`: the price of a spot instance is another one in each hour."""
    running_at: float
    ended_at: float | None
    """When it began to shut down; None while it runs."""
    billed_s: float
    cost_usd: float
    tags: Mapping[str, str]
    launch_index: int = 0
    """Its place among the instances of one request, which have the same tags."""


SideKind = Literal["volume", "address", "nat"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SideLine:
    """What EC2 charges beside the rent of an instance; from its launch until it is terminated."""

    instance_id: str
    line: SideKind
    cost_usd: float
    tags: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """All that is due at an instant. Instances that never ran cost no rent; what runs counts until now."""

    lines: tuple[BillLine, ...]
    """Rent."""
    beside: tuple[SideLine, ...]

    @property
    def rent_usd(self) -> float:
        return sum(line.cost_usd for line in self.lines)

    @property
    def total_usd(self) -> float:
        return self.rent_usd + sum(line.cost_usd for line in self.beside)

    def side_usd(self, line: str) -> float:
        """The sum of what is charged for volumes, addresses or NAT."""
        return sum(one.cost_usd for one in self.beside if one.line == line)


def billed(known: Sequence[Instance], now: float, spot: SpotMarket) -> Bill:
    """The bill at `now`: from running until shutting-down, to the second and a minute at the least; on the spot market
    each hour since running at the price of its beginning, whatever it was at purchase.

    A spot instance that EC2 interrupts in its first hour is free; whoever ends one pays for its seconds, and so does
    everybody after that hour (EC2 User Guide, "Billing for interrupted Spot Instances", Linux but SUSE).
    """
    return Bill(
        lines=tuple(_line(one, now, spot) for one in known if _ran(one, now)),
        beside=tuple(side for one in known for side in _beside(one, now)),
    )


def _beside(instance: Instance, now: float) -> Iterator[SideLine]:
    """A volume is billed until it is released, with the instance; an address while it is in use; NAT by the GB."""
    gone_at = math.inf if instance.ended_at is None else instance.ended_at + instance.shutting_down_s
    hours = max(MINIMUM_BILLED_S, min(now, gone_at) - instance.launched_at) / HOUR_S
    volume_hours = hours
    if instance.end_behavior == "stop":  # a stopped instance keeps its volume
        kept_until = now if instance.restarted_at is None else instance.restarted_at
        volume_hours = max(MINIMUM_BILLED_S, kept_until - instance.launched_at) / HOUR_S
    volumes_usd_per_month = (instance.volume_gb + instance.further_gb) * VOLUME_USD_PER_GB_MONTH
    volumes_usd_per_month += instance.further_iops * IOPS_USD_PER_MONTH
    amounts_usd: dict[SideKind, float] = {
        "volume": volume_hours * volumes_usd_per_month / 720.0,
        "address": hours * ADDRESS_USD_PER_HOUR if instance.public_address else 0.0,
        "nat": instance.nat_gb * NAT_USD_PER_GB if _ran(instance, now) else 0.0,
    }
    for line, cost_usd in amounts_usd.items():
        if cost_usd:
            yield SideLine(
                instance_id=instance.instance_id, line=line, cost_usd=cost_usd, tags=dict(instance.volume_tags)
            )


def _ran(instance: Instance, now: float) -> bool:
    return instance.running_at <= (now if instance.ended_at is None else instance.ended_at)


def _until(instance: Instance, now: float) -> float:
    return now if instance.ended_at is None else min(now, instance.ended_at)


def _billed_s(instance: Instance, now: float) -> float:
    return max(MINIMUM_BILLED_S, _until(instance, now) - instance.running_at)


def _line(instance: Instance, now: float, spot: SpotMarket) -> BillLine:
    until, billed_s = _until(instance, now), _billed_s(instance, now)
    cost_usd = _cost_usd(instance, until, billed_s, spot)
    return BillLine(
        instance_id=instance.instance_id,
        instance_type=instance.machine_type.name,
        market=instance.market,
        zone=instance.zone,
        price_usd_per_hour=cost_usd / billed_s * HOUR_S,
        running_at=instance.running_at,
        ended_at=instance.ended_at,
        billed_s=billed_s,
        cost_usd=cost_usd,
        tags=dict(instance.tags),
        launch_index=instance.launch_index,
    )


def _cost_usd(instance: Instance, until: float, billed_s: float, spot: SpotMarket) -> float:
    if instance.is_prepaid:
        return 0.0
    if instance.market != "spot":
        return billed_s / HOUR_S * instance.price_usd_per_hour
    interrupted = instance.state_reason == SPOT_TERMINATION and until == instance.ended_at
    if interrupted and until - instance.running_at < HOUR_S:
        return 0.0
    return spot.cost_usd(instance.machine_type, instance.zone, instance.running_at, billed_s)
