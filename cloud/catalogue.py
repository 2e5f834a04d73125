"""Offers: what an experiment can rent, from its file, its profile and the table of instance types.

The file's overrides come first, then what the profile measured, then the table. The table is `resources.catalogue`,
or the file that the environment's RUBBERBAND_CATALOGUE names, or the one that comes with rubberband; where AWS may be
asked, the caller lays live prices over that last one (`rubberband.cloud.prices`) and hands it in.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, datetime

from rubberband.cloud.instance_types import InstanceType, catalogue, load_table, nearest_types
from rubberband.cloud.side_costs import SideFacts, side_costs
from rubberband.cloud.start_limits import usual_firmware_s
from rubberband.errors import InputError, ProfileMissingError
from rubberband.spec.delays import Delay, delay_of
from rubberband.spec.resources import Resources
from rubberband.units import format_instant, nearest, shown
from rubberband.values.chance import FIXED, Spread
from rubberband.values.offer import Offer, SideCost, Spot
from rubberband.values.profile import Profile

# Instance types of EC2 whose accelerators the published wheels of PyTorch cannot use, refused before anything else.


_FAMILIES = {
    "g5g": "NVIDIA T4G on an Arm CPU (PyPI's torch for Arm has no CUDA, and PyTorch's CUDA builds for Arm no T4G)",
    "g4ad": "AMD Radeon Pro V520",
    "dl1": "Intel Gaudi",
    "dl2q": "Qualcomm AI 100",
    "inf1": "AWS Inferentia",
    "inf2": "AWS Inferentia2",
    "trn1": "AWS Trainium",
    "trn1n": "AWS Trainium",
    "trn2": "AWS Trainium2",
    "trn2u": "AWS Trainium2",
    "vt1": "AMD Alveo U30",
    "f1": "AMD FPGAs",
    "f2": "AMD FPGAs",
    "p2": "NVIDIA K80 (no current build of torch knows it)",
}
"""Family -> its accelerator. Of Arm: pytorch/pytorch#160162."""


def check_accelerator(resources: Resources, instance_type: str) -> None:
    """Raise InputError for a type of EC2 whose accelerator torch cannot use, unless an image brings what can."""
    accelerator = _FAMILIES.get(instance_type.partition(".")[0])
    brings_its_own = resources.aws.image is not None and (resources.aws.install or "").strip() == "none"
    if resources.provider == "aws" and accelerator and not brings_its_own:
        raise InputError(
            f"resources.instance_type: {shown(instance_type)} has {accelerator}, which the published builds of PyTorch "
            "cannot use; choose a type with an NVIDIA GPU, such as g4dn.xlarge or g5.xlarge, or give an image with "
            "everything (resources.aws: image, and install: none)"
        )


LOCAL_TYPE = "local"
"""The instance type of provider local where none is named: one GPU, free of charge."""
UNMEASURED_DELAYS_S = {"local": (3.0, 8.0), "aws": (20.0, 180.0)}
"""Provider -> seconds of provisioning and of initialising, where neither the file nor the profile tells. On one machine
four Ray nodes take about 3 s to start and their first workers about 8 s (mostly importing torch, once for all of them).
On EC2 it is a guess, which a measured profile replaces: booting (longer on bare metal and on p4, p5 and p6, see
`start_limits`), and installing torch. Elsewhere they count as 0."""
ENVIRONMENT_VARIABLE = "RUBBERBAND_CATALOGUE"

Table = Mapping[str, InstanceType]


def offer(
    resources: Resources,
    profile: Profile | None = None,
    *,
    instance_type: str | None = None,
    environment: Mapping[str, str] = os.environ,
    table: Table | None = None,
) -> Offer:
    """What the planner reckons with, of the one type that `resources` names, or of `instance_type` among its several.

    `table` is that with live prices (`rubberband.cloud.prices`), where there is one.

    Raises InputError for a type that the table lacks and the file does not describe, for a price that is not known in
    the region, and where it is not told which of several types is meant.
    """
    types = types_of(resources)
    if instance_type is None and len(types) > 1:
        raise InputError(
            f"resources.instance_types: one type is needed here and {len(types)} are given; choose one of "
            f"{', '.join(types)} as instance_type"
        )
    name = types[0] if instance_type is None else instance_type
    if name not in types:
        raise InputError(f"resources.instance_type: {shown(name)} is not asked for; {nearest(name, types)}")
    return _offer(resources, profile, name, table_of(resources, environment, table))


def offers(
    resources: Resources,
    profiles: Profile | Mapping[str, Profile] | None = None,
    *,
    environment: Mapping[str, str] = os.environ,
    table: Table | None = None,
) -> tuple[Offer, ...]:
    """The offer of every type that `resources` names, in that order; `profiles` is one for all, or type -> profile.

    `table` is that with live prices (`rubberband.cloud.prices`), where there is one.

    Raises InputError as `offer` does, and where one profile cannot hold for all types since their GPUs differ or are
    not known; ProfileMissingError for a type without a profile.
    """
    types, table = types_of(resources), table_of(resources, environment, table)
    if isinstance(profiles, Profile) and len(types) > 1:
        _check_same_gpus(types, table)
    return tuple(_offer(resources, _profile_of(profiles, name), name, table) for name in types)


def table_of(resources: Resources, environment: Mapping[str, str] = os.environ, table: Table | None = None) -> Table:
    """The table of instance types that an experiment plans with: `table`, if there is one already.

    Raises InputError if it cannot be read.
    """
    if table is not None:
        return table
    path = resources.catalogue or environment.get(ENVIRONMENT_VARIABLE)
    return load_table(path) if path else catalogue()


def price_source(
    resources: Resources,
    instance_type: str,
    *,
    environment: Mapping[str, str] = os.environ,
    table: Table | None = None,
) -> str:
    """Where the on-demand price of a type comes from, for a report: the file, or the table (see `row_source`)."""
    row = table_of(resources, environment, table).get(instance_type)
    if resources.price_usd_per_hour is not None:
        return "the file"
    if row is None:
        return "free of charge"
    return row_source(row, resources.region)


def row_source(row: InstanceType, region: str) -> str:
    """Where the on-demand price of a table's row comes from: AWS with the time, or the catalogue with its date."""
    live = row.live.get(region)
    if live is not None and live.on_demand_at is not None:
        return f"AWS, {region}, {instant(live.on_demand_at)}"
    dated = f" of {row.priced_on}" if row.priced_on else ""
    return f"the catalogue{dated}, {region}{', approximate' if region in row.approximate else ''}"


def spot_source(
    resources: Resources,
    instance_type: str,
    *,
    environment: Mapping[str, str] = os.environ,
    table: Table | None = None,
) -> str:
    """Where the spot price of a type comes from, for a report: `the file`, AWS with zone and date, or the table."""
    row = table_of(resources, environment, table).get(instance_type)
    live = row.live.get(resources.region) if row is not None else None
    if resources.spot.price_usd_per_hour is not None:
        return "the file"
    if live is None or not live.spot_usd_per_hour or live.spot_at is None:
        return "the catalogue, indicative"
    zone = min(live.spot_usd_per_hour, key=lambda zone: live.spot_usd_per_hour[zone])
    return f"AWS, {zone} (the lowest of {len(live.spot_usd_per_hour)} zones), {instant(live.spot_at)}"


def instant(at: float) -> str:
    """Unix time for people, to the minute: 2026-11-21T20:00Z."""
    return format_instant(datetime.fromtimestamp(at // 60 * 60, UTC)).replace(":00Z", "Z")


def types_of(resources: Resources) -> tuple[str, ...]:
    """The types that an experiment names. Raises InputError if its provider needs one and it names none."""
    if resources.instance_types is not None:
        return resources.instance_types
    if resources.instance_type is not None:
        return (resources.instance_type,)
    if resources.provider == "local":
        return (LOCAL_TYPE,)
    raise InputError(
        f"resources.instance_type: provider {resources.provider} needs one; add it, such as instance_type: p3.8xlarge"
    )


def _profile_of(profiles: Profile | Mapping[str, Profile] | None, name: str) -> Profile | None:
    if profiles is None or isinstance(profiles, Profile):
        return profiles
    if name not in profiles:
        raise ProfileMissingError(f"profile.by_instance_type: {shown(name)} has none; {nearest(name, profiles)}")
    return profiles[name]


def _check_same_gpus(types: tuple[str, ...], table: Table) -> None:
    models = [(name, table[name].gpu_model or "unknown ones") for name in types if name in table]
    for name, model in models[1:]:
        first, of_first = models[0]
        if model != of_first or model == "unknown ones":
            raise InputError(
                f"profile: one profile holds for one kind of GPU, and {first} has {of_first}, {name} {model}; write "
                f"profile: {{by_instance_type: {{{first}: ..., {name}: ...}}}}"
            )


def _offer(resources: Resources, profile: Profile | None, name: str, table: Table) -> Offer:
    check_accelerator(resources, name)
    row = table.get(name)
    default_provision_s, default_init_s = UNMEASURED_DELAYS_S.get(resources.provider, (0.0, 0.0))
    if resources.provider == "aws":
        default_init_s += usual_firmware_s(name)
    provision_delay_s, provision_spread = _delay(
        resources.provision_delay,
        (profile.provision_delay_s, profile.provision_spread) if profile else (None, FIXED),
        default_provision_s,
    )
    init_delay_s, init_spread = _delay(
        resources.init_delay, (profile.init_delay_s, profile.init_spread) if profile else (None, FIXED), default_init_s
    )
    gpus = _gpus(resources, name, row, table)
    price_usd_per_hour = _price_usd_per_hour(resources, name, row)
    restart_s = provision_delay_s + init_delay_s + (profile.trial_startup_s if profile else 0.0)
    head_usd_per_hour, head_side_usd_per_hour = _head_usd_per_hour(resources, table)
    return Offer(
        instance_type=name,
        gpus=gpus,
        price_usd_per_hour=price_usd_per_hour,
        max_instances=resources.max_instances,
        provision_delay_s=provision_delay_s,
        provision_spread=provision_spread,
        init_delay_s=init_delay_s,
        init_spread=init_spread,
        billing=resources.billing,
        minimum_billed_s=resources.minimum_billed_s,
        data_usd_per_instance=resources.dataset_gb * resources.data_price_usd_per_gb,
        head_price_usd_per_hour=head_usd_per_hour,
        head_side_usd_per_hour=head_side_usd_per_hour,
        spot=_spot(resources, name, row, price_usd_per_hour, restart_s) if resources.market == "spot" else None,
        side_costs=_side_costs(resources, name, row, provision_delay_s),
    )


def _side_costs(
    resources: Resources, name: str, row: InstanceType | None, provision_delay_s: float
) -> tuple[SideCost, ...]:
    if resources.provider != "aws" or resources.billing == "per_function":
        return ()
    gpus = row is None or row.gpus > 0
    return side_costs(resources, _beside(resources, row), gpus=gpus, provision_delay_s=provision_delay_s)


def _beside(resources: Resources, row: InstanceType | None) -> SideFacts | None:
    live = row.live.get(resources.region) if row is not None else None
    return live.beside if live is not None else None


def _delay(asked: Delay | None, measured: tuple[float | None, Spread], default_s: float) -> tuple[float, Spread]:
    if asked is not None:
        return delay_of(asked)
    measured_s, spread = measured
    return (default_s, FIXED) if measured_s is None else (measured_s, spread)


def _gpus(resources: Resources, name: str, row: InstanceType | None, table: Table) -> int:
    if resources.gpus_per_instance is not None:
        return resources.gpus_per_instance
    if row is not None and row.gpus:
        return row.gpus
    if row is not None:
        raise InputError(
            f"resources.instance_type: {name} has no GPUs; give gpus_per_instance (how many workers train on one's "
            "CPUs), or choose a type with GPUs (`rubberband prices` lists them)"
        )
    if name == LOCAL_TYPE and resources.provider == "local":
        return 1
    raise InputError(
        f"resources.instance_type: {shown(name)} is not in the catalogue; {nearest_types(name, table)} "
        "or give gpus_per_instance and price_per_hour"
    )


def _price_usd_per_hour(resources: Resources, name: str, row: InstanceType | None) -> float:
    if resources.price_usd_per_hour is not None:
        return resources.price_usd_per_hour
    if row is None:
        if resources.provider == "local":
            return 0.0
        raise InputError(f"resources.price_per_hour: {shown(name)} is not in the catalogue; give its price per hour")
    if resources.region in row.live and not row.live[resources.region].offered:
        raise InputError(
            f"resources.instance_type: AWS has no {name} in {resources.region}; choose another type or region"
        )
    if resources.region not in row.prices_usd_per_hour:
        known = ", ".join(row.prices_usd_per_hour) or "no region"
        raise InputError(
            f"resources.region: the catalogue has a price of {name} for {known}, not for {resources.region}; give "
            "price_per_hour, or a table that has it as resources.catalogue"
        )
    return row.prices_usd_per_hour[resources.region]


def _head_usd_per_hour(resources: Resources, table: Table) -> tuple[float, float]:
    """The head's price, and what of it is for its volume and its address.

    As the file says, or what AWS tells of the head's type; what is only in the shipped table does not count.
    """
    if resources.provider != "aws" or "head_price_usd_per_hour" in resources.model_fields_set:
        return resources.head_price_usd_per_hour, 0.0
    row = table.get(resources.aws.head_instance_type)
    live = row.live.get(resources.region) if row is not None else None
    if row is None or live is None or live.on_demand_at is None:
        return resources.head_price_usd_per_hour, 0.0
    beside = sum(cost.usd_per_hour for cost in side_costs(resources, live.beside, gpus=row.gpus > 0))
    return row.prices_usd_per_hour[resources.region] + beside, beside


def _spot(resources: Resources, name: str, row: InstanceType | None, on_demand: float, restart_s: float) -> Spot:
    asked = resources.spot
    price_usd_per_hour = asked.price_usd_per_hour
    if price_usd_per_hour is None and row is not None and row.live_spot_usd_per_hour(resources.region) is not None:
        price_usd_per_hour = row.live_spot_usd_per_hour(resources.region)
    if price_usd_per_hour is None:
        if row is None or row.spot_share is None:
            raise InputError(
                f"resources.spot.price_per_hour: the catalogue has no spot price of {name}; give it (or, for several "
                "types, a table with spot_share as resources.catalogue), ask AWS by `rubberband plan`, or set market: "
                "on_demand"
            )
        price_usd_per_hour = row.spot_share * on_demand
    return Spot(
        price_usd_per_hour=price_usd_per_hour,
        interruptions_per_hour=asked.interruptions_per_hour,
        checkpoint_iterations=asked.checkpoint_iterations,
        restart_s=restart_s if asked.restart_s is None else asked.restart_s,
    )
