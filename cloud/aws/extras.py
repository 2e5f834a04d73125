"""Costs and times of EC2's instances beside their rent, and the types that torch cannot use.

An instance costs its root volume, its public address, and traffic through a NAT gateway. Their prices come from a
dated table, `side_costs.csv`. AWS describes the account (`SideFacts`); if it is not asked, a new account is assumed.
Traffic between zones (0.01 USD/GB each way) is left out: a gang is in one zone, S3 is free within a region, and the
driver sends instances in other zones only its code and a few bytes an iteration. boto3 is not needed.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

from rubberband.cloud.catalogue import SideFacts, Table, usual_firmware_s
from rubberband.cloud.offers import unrented_h
from rubberband.cloud.provider import Extras
from rubberband.errors import InputError
from rubberband.spec.resources import Resources
from rubberband.units import shown
from rubberband.values.offer import SideCost


def extras(resources: Resources, instance_type: str, table: Table, provision_delay_s: float) -> Extras:
    """Return what an instance of a type costs and takes; the head's price is AWS's, as the shipped table's does not
    count. Raises InputError for a type that torch cannot use."""
    brings_its_own = resources.aws.image is not None and (resources.aws.install or "").strip() == "none"
    if _NO_TORCH.match(instance_type) and not brings_its_own:
        raise InputError(
            f"resources.instance_type: {shown(instance_type)} has an accelerator that the published builds of PyTorch "
            "cannot use; choose a type with an NVIDIA GPU, such as g4dn.xlarge or g5.xlarge, or give an image with "
            "everything (resources.aws: image, and install: none)"
        )
    row, region = table.get(instance_type), resources.region
    facts = row.live_in(region).beside if row is not None else None
    gpus = row is None or row.gpus > 0
    found = Extras(
        init_s=usual_firmware_s(instance_type),
        side_costs=side_costs(resources, facts, gpus=gpus, provision_delay_s=provision_delay_s),
    )
    head = table.get(resources.aws.head_instance_type)
    if head is None or head.live_in(region).on_demand_at is None:
        return found
    costs = side_costs(resources, head.live_in(region).beside, gpus=head.gpus > 0)
    beside = sum(cost.usd_per_hour for cost in costs)
    price_usd = head.prices_usd_per_hour[region] + beside
    return replace(found, head_price_usd_per_hour=price_usd, head_side_usd_per_hour=beside)


_MINIMUM_BILLED_S = 60.0


def require_runnable(resources: Resources, *, is_lent: bool) -> None:
    """Raise InputError for a missing checkpoint store, and for other billing than EC2's, unless a pool lends."""
    if resources.checkpoints is None:
        raise InputError(
            "resources.checkpoints: missing, and instances of EC2 do not see this machine's files; run `rubberband aws "
            "setup`, which makes a bucket, or name one, such as checkpoints: s3://my-bucket/rubberband"
        )
    if resources.billing != "per_instance":
        raise InputError(
            f"resources.billing: {resources.billing} can be planned with, but EC2 bills instances, busy or not, so "
            "that max_cost would not be kept; leave it out"
        )
    if not is_lent and resources.minimum_billed_s < _MINIMUM_BILLED_S:
        raise InputError(
            f"resources.minimum_billed: {resources.minimum_billed_s:g} s can be planned with, but EC2 bills a minute "
            "at least, so that max_cost would not be kept; leave it out"
        )


_NO_TORCH = re.compile(r"(g5g|g4ad|dl\w+|inf\d|trn\w+|vt1|f[12]|p2)\.")
"""Types with accelerators that the published wheels of PyTorch cannot use: AWS's, AMD's, Intel's and Qualcomm's, FPGAs,
NVIDIA's K80, and T4G on Arm (pytorch/pytorch#160162)."""


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
_INSTALLED_GB = {True: 4.0, False: 1.0}
"""Download of torch, Ray and the rest: with CUDA, and without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SidePrices:
    """Prices of one region, in US dollars."""

    volume_usd_per_gb_month: float
    snapshot_usd_per_gb_month: float
    nat_usd_per_gb: float


@cache
def _table() -> Mapping[str, SidePrices]:
    text = files("rubberband.cloud.aws").joinpath("side_costs.csv").read_text(encoding="utf-8")
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
    around_h = unrented_h(provision_delay_s)
    volume_usd_per_hour = facts.volume_gb * prices.volume_usd_per_gb_month / HOURS_PER_MONTH
    found = [SideCost(line=VOLUME_LINE, usd_per_hour=volume_usd_per_hour, usd_once=volume_usd_per_hour * around_h)]
    if facts.public_address:
        usd_once = ADDRESS_USD_PER_HOUR * around_h
        found.append(SideCost(line=ADDRESS_LINE, usd_per_hour=ADDRESS_USD_PER_HOUR, usd_once=usd_once))
    # Without checkpoints, whose size is not known.
    passed_gb = (0.0 if facts.s3_endpoint else resources.dataset_gb) + (_INSTALLED_GB[gpus] if facts.installed else 0.0)
    if facts.nat and passed_gb:
        found.append(SideCost(line=NAT_LINE, usd_once=passed_gb * prices.nat_usd_per_gb))
    return tuple(found)
