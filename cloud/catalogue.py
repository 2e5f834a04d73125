"""The catalogue: GPU instance types of EC2 with their on-demand prices, and the offer that an experiment plans with.

The prices (Linux, us-east-1, about `PRICED_ON`) were entered by hand and not checked against AWS's price list, which
changes: they are a starting point, and `resources.price_per_hour` overrides them. The catalogue reaches no network.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from rubberband.errors import InputError
from rubberband.offer import Offer
from rubberband.profile import Profile
from rubberband.resources import Resources
from rubberband.units import nearest, shown

PRICED_ON = "2025-05-01"
"""About when these prices held; approximate, since they were not fetched."""
PRICED_REGION = "us-east-1"
LOCAL_TYPE = "local"
"""The instance type of provider local where none is named: one GPU, free of charge."""
UNMEASURED_DELAYS_S = {"local": (7.0, 8.0)}
"""Provider -> seconds of provisioning and of initialising, where neither the file nor the profile tells. On one machine
a Ray node takes 5-9 s to start and its first worker about 8 s (mostly importing torch). Elsewhere they count as 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceType:
    """A row of the catalogue."""

    instance_type: str
    gpus: int
    gpu: str
    gpu_memory_gib: float
    """Memory of one GPU."""
    price_usd_per_hour: float
    """On demand, Linux, in `PRICED_REGION`."""


@cache
def catalogue() -> dict[str, InstanceType]:
    """Every known instance type under its name."""
    text = files("rubberband.cloud").joinpath("catalogue.csv").read_text(encoding="utf-8")
    return {
        row["instance_type"]: InstanceType(
            instance_type=row["instance_type"],
            gpus=int(row["gpus"]),
            gpu=row["gpu"],
            gpu_memory_gib=float(row["gpu_memory_gib"]),
            price_usd_per_hour=float(row["price_usd_per_hour"]),
        )
        for row in csv.DictReader(text.splitlines())
    }


def offer(resources: Resources, profile: Profile | None = None) -> Offer:
    """What the planner reckons with: the file's overrides first, then what the profile measured, then the catalogue.

    Raises InputError for an instance type that the catalogue lacks and the file does not describe, and for a catalogue
    price outside its region.
    """
    name = _instance_type(resources)
    row = catalogue().get(name)
    default_provision_s, default_init_s = UNMEASURED_DELAYS_S.get(resources.provider, (0.0, 0.0))
    measured_provision_s = profile.provision_delay_s if profile else None
    measured_init_s = profile.init_delay_s if profile else None
    return Offer(
        instance_type=name,
        gpus=_gpus(resources, name, row),
        price_usd_per_hour=_price_usd_per_hour(resources, name, row),
        max_instances=resources.max_instances,
        provision_delay_s=_first(resources.provision_delay_s, measured_provision_s, default_provision_s),
        init_delay_s=_first(resources.init_delay_s, measured_init_s, default_init_s),
        billing=resources.billing,
        minimum_billed_s=resources.minimum_billed_s,
        data_usd_per_instance=resources.dataset_gb * resources.data_price_usd_per_gb,
        head_price_usd_per_hour=resources.head_price_usd_per_hour,
    )


def _instance_type(resources: Resources) -> str:
    if resources.instance_type is not None:
        return resources.instance_type
    if resources.provider == "local":
        return LOCAL_TYPE
    raise InputError(
        f"resources.instance_type: provider {resources.provider} needs one; add it, such as instance_type: p3.8xlarge"
    )


def _gpus(resources: Resources, name: str, row: InstanceType | None) -> int:
    if resources.gpus_per_instance is not None:
        return resources.gpus_per_instance
    if row is not None:
        return row.gpus
    if name == LOCAL_TYPE and resources.provider == "local":
        return 1
    raise InputError(
        f"resources.instance_type: {shown(name)} is not in the catalogue; {nearest(name, catalogue())} "
        "or give gpus_per_instance and price_per_hour"
    )


def _price_usd_per_hour(resources: Resources, name: str, row: InstanceType | None) -> float:
    if resources.price_usd_per_hour is not None:
        return resources.price_usd_per_hour
    if row is None:
        if resources.provider == "local":
            return 0.0
        raise InputError(f"resources.price_per_hour: {shown(name)} is not in the catalogue; give its price per hour")
    if resources.region != PRICED_REGION and resources.provider != "local":
        raise InputError(
            f"resources.price_per_hour: the catalogue has prices of {PRICED_REGION} only; give the price of {name} in "
            f"{resources.region}"
        )
    return row.price_usd_per_hour


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)
