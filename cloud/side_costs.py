"""Costs of an EC2 instance beside its rent: its root volume, its public address, traffic through a NAT gateway.

Prices come from a dated table, `side_costs.csv`. AWS describes the account (`SideFacts`); if it is not asked, a new
account is assumed. Pure but for reading the table.

Traffic between zones (0.01 USD/GB each way) is left out: a gang is in one zone, S3 is free within a region, and the
driver sends instances in other zones only its code and a few bytes an iteration.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from rubberband.spec.resources import Resources
from rubberband.values.offer import SECONDS_PER_HOUR, SideCost

VOLUME_LINE = "root volumes"
ADDRESS_LINE = "public IPv4 addresses"
NAT_LINE = "NAT gateway (estimated)"

HOURS_PER_MONTH = 720.0
"""AWS's own examples bill a month of 30 days; a real month differs by up to 7 %."""
ADDRESS_USD_PER_HOUR = 0.005
"""In every region. Volumes and addresses are billed by the second, at least for 60 s, as instances are."""
GPU_IMAGE_GB = 75
PLAIN_IMAGE_GB = 60
"""Assumed root volumes: that of the Deep Learning AMI, and the packages' on a plain image."""
_ENDING_S = 60.0
"""Volume and address are billed from the launch until the machine is off, the rent only from running to the end."""
_INSTALLED_GB = {True: 4.0, False: 1.0}
"""Download of torch, Ray and the rest: with CUDA, and without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SidePrices:
    """Prices of one region, in US dollars."""

    volume_usd_per_gb_month: float
    snapshot_usd_per_gb_month: float
    nat_usd_per_gb: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SideFacts:
    """Billed resources of an instance, as AWS describes the image and the subnets."""

    volume_gb: int
    """Size of its root volume."""
    public_address: bool
    """Whether one of its possible subnets gives it one."""
    nat: bool
    """Whether one of its possible subnets reaches the Internet through a NAT gateway."""
    s3_endpoint: bool = False
    """Whether traffic to S3 bypasses that gateway."""
    installed: bool = True
    """Whether it installs its packages at boot. Else it loads only the driver's wheel, one MB: at most 0.0001 USD."""


@cache
def _table() -> Mapping[str, SidePrices]:
    text = files("rubberband.cloud").joinpath("side_costs.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    return {
        row["region"]: SidePrices(
            volume_usd_per_gb_month=float(row["volume"]),
            snapshot_usd_per_gb_month=float(row["snapshot"]),
            nat_usd_per_gb=float(row["nat"]),
        )
        for row in rows
    }


def side_prices(region: str) -> SidePrices:
    """Return the prices of a region; for one that the table lacks, the highest."""
    known = _table()
    return known[region] if region in known else max(known.values(), key=lambda one: one.volume_usd_per_gb_month)


def side_costs(
    resources: Resources, facts: SideFacts | None, *, gpus: bool, provision_delay_s: float = 0.0
) -> tuple[SideCost, ...]:
    """Return the costs beside the rent of an instance; `gpus`: whether its type has any, if `facts` are missing."""
    prices = side_prices(resources.region)
    if facts is None:
        assumed_gb = resources.aws.volume_gb or (GPU_IMAGE_GB if gpus else PLAIN_IMAGE_GB)
        facts = SideFacts(volume_gb=assumed_gb, public_address=True, nat=False)
    around_h = (provision_delay_s + _ENDING_S) / SECONDS_PER_HOUR
    volume_usd_per_hour = facts.volume_gb * prices.volume_usd_per_gb_month / HOURS_PER_MONTH
    found = [SideCost(line=VOLUME_LINE, usd_per_hour=volume_usd_per_hour, usd_once=volume_usd_per_hour * around_h)]
    if facts.public_address:
        usd_once = ADDRESS_USD_PER_HOUR * around_h
        found.append(SideCost(line=ADDRESS_LINE, usd_per_hour=ADDRESS_USD_PER_HOUR, usd_once=usd_once))
    if facts.nat and (passed_gb := _passed_gb(resources, facts, gpus=gpus)):
        found.append(SideCost(line=NAT_LINE, usd_once=passed_gb * prices.nat_usd_per_gb))
    return tuple(found)


def given_side_cost(usd_per_hour: float, provision_delay_s: float) -> SideCost:
    """Return the costs beside the rent of an instance whose volume and address cost `usd_per_hour`."""
    around_h = (provision_delay_s + _ENDING_S) / SECONDS_PER_HOUR
    return SideCost(line="volumes and addresses", usd_per_hour=usd_per_hour, usd_once=usd_per_hour * around_h)


def _passed_gb(resources: Resources, facts: SideFacts, *, gpus: bool) -> float:
    """Return the assumed download through a NAT gateway, without checkpoints, whose size is unknown."""
    data_gb = 0.0 if facts.s3_endpoint else resources.dataset_gb
    return data_gb + (_INSTALLED_GB[gpus] if facts.installed else 0.0)
