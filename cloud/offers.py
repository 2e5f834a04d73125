"""Offers that an experiment can rent: prices, delays, and costs beside the rent.

Values of the experiment file come first, then the profile's measurements, then the table (see
`rubberband.cloud.catalogue`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

from rubberband.cloud.catalogue import (
    InstanceType,
    Live,
    Table,
    instant,
    nearest_types,
    row_source,
    similar_types,
    table_of,
    types_of,
)
from rubberband.cloud.provider import Extras
from rubberband.errors import InputError, ProfileMissingError
from rubberband.spec.fields import Delay, delay_of
from rubberband.spec.resources import Resources
from rubberband.units import nearest, shown
from rubberband.values.kinds import OWN, part_of
from rubberband.values.offer import SECONDS_PER_HOUR, Offer, SideCost, Spot
from rubberband.values.profile import FIXED, Profile, Spread

ASK_AWS = ", ask AWS by `rubberband estimate --live`"
"""Part of a remedy, which is none where AWS was asked and did not answer."""
_ENDING_S = 60.0
"""From the end of the rent until the machine is off."""


def offer(
    resources: Resources,
    profile: Profile | None = None,
    *,
    instance_type: str | None = None,
    environment: Mapping[str, str] = os.environ,
    table: Table | None = None,
) -> Offer:
    """Return the offer of the one type that `resources` names, or of `instance_type` among several.

    `table` is the one with live prices (`rubberband.cloud.aws.prices`), if there is one.

    Raises InputError for a type that neither table nor file describes, for an unknown price in the region, and if
    `instance_type` is missing with several types.
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
    """Return the offer of every type that `resources` names, in that order; `profiles` is one, or type -> profile.

    Raises InputError as `offer` does, and if one profile cannot hold for all types, as their GPUs differ or are
    unknown; ProfileMissingError for a type without a profile.
    """
    types, table = types_of(resources), table_of(resources, environment, table)
    if isinstance(profiles, Profile) and len(types) > 1:
        _check_same_gpus(types, table)
    return tuple(_offer(resources, _profile_of(profiles, name), name, table) for name in types)


def fallback_offers(
    resources: Resources,
    first: Offer,
    *,
    speeds: Mapping[str, float] | None = None,
    table: Table | None = None,
    environment: Mapping[str, str] = os.environ,
) -> list[Offer]:
    """Return the offers of the experiment's other types with the number and model of GPUs of `first`, cheapest first.

    After these come types of another model with as many GPUs, of as much memory, whose speed over `first`'s is known
    (`speeds`), since unequal workers are balanced: the cheapest for its speed first.
    """
    known, speeds, ranked = table_of(resources, environment, table), speeds or {}, []
    model = known[first.instance_type].gpu_model if first.instance_type in known else ""
    for name in similar_types(resources, first.instance_type, known):
        is_other = known[name].gpu_model != model
        if not is_other or name in speeds:
            price = offer(resources, instance_type=name, environment=environment, table=known)
            ranked.append((is_other, price.price_usd_per_hour / speeds.get(name, 1.0), price))
    return [price for *_, price in sorted(ranked, key=lambda entry: entry[:2])]


PriceBasis = Literal["given", "live", "default"]
"""A price is the file's, the cloud's of today, or the table's."""


def price_source(resources: Resources, instance_type: str, *, table: Table | None = None) -> tuple[PriceBasis, str]:
    """Return the source of a type's on-demand price, also for a report (see `row_source`)."""
    row = table_of(resources, table=table).get(instance_type)
    if resources.price_usd_per_hour is not None:
        return "given", "the file"
    if row is None:
        return "default", "free of charge"
    basis: PriceBasis = "default" if row.live_in(resources.region).on_demand_at is None else "live"
    if resources.provider not in OWN and resources.catalogue is None:
        return basis, _cloud(resources)
    return basis, row_source(row, resources.region)


def spot_source(resources: Resources, instance_type: str, *, table: Table | None = None) -> tuple[PriceBasis, str]:
    """Return the source of a type's spot price, also for a report: the cloud's has zone and time."""
    row = table_of(resources, table=table).get(instance_type)
    live = row.live_in(resources.region) if row is not None else Live()
    if resources.spot.price_usd_per_hour is not None:
        return "given", "the file"
    if not live.spot_usd_per_hour or live.spot_at is None:
        return "default", "the catalogue, indicative"
    zone = min(live.spot_usd_per_hour, key=lambda zone: live.spot_usd_per_hour[zone])
    of_zones = f"{zone} (the lowest of {len(live.spot_usd_per_hour)} zones)"
    return "live", f"{_cloud(resources)}, {of_zones}, {instant(live.spot_at)}"


def _cloud(resources: Resources) -> str:
    return "AWS" if resources.provider in OWN else f"provider {resources.provider}"


def _profile_of(profiles: Profile | Mapping[str, Profile] | None, name: str) -> Profile | None:
    if profiles is None or isinstance(profiles, Profile):
        return profiles
    if name not in profiles:
        raise ProfileMissingError(f"profile.by_instance_type: {shown(name)} has none; {nearest(name, profiles)}")
    return profiles[name]


def _check_same_gpus(types: tuple[str, ...], table: Table) -> None:
    models = [
        (name, table[name].gpu_model or ("unknown ones" if table[name].gpus else "none"))
        for name in types
        if name in table
    ]
    for name, model in models[1:]:
        first, of_first = models[0]
        if model != of_first or model in ("unknown ones", "none"):
            raise InputError(
                f"profile: one profile holds for one kind of GPU, and {first} has {of_first}, {name} {model}; write "
                f"profile: {{by_instance_type: {{{first}: ..., {name}: ...}}}}"
            )


def _offer(resources: Resources, profile: Profile | None, name: str, table: Table) -> Offer:
    row = table.get(name)
    kind = resources.kind
    provision_delay_s, provision_spread = _delay(
        resources.provision_delay,
        (profile.provision_delay_s, profile.provision_spread) if profile else (None, FIXED),
        kind.provision_s,
    )
    has_extras = part_of(resources.provider, "extras")
    extras = Extras() if has_extras is None else has_extras(resources, name, table, provision_delay_s)
    init_delay_s, init_spread = _delay(
        resources.init_delay,
        (profile.init_delay_s, profile.init_spread) if profile else (None, FIXED),
        kind.init_s + extras.init_s,
    )
    gpus = _gpus(resources, name, row, table)
    price_usd_per_hour = float(gpus) if resources.unit == "GPU-h" else _price_usd_per_hour(resources, name, row)
    restart_s = provision_delay_s + init_delay_s + (profile.startup_s(1) if profile else 0.0)
    head_usd = None if "head_price_usd_per_hour" in resources.model_fields_set else extras.head_price_usd_per_hour
    is_unbilled = kind.is_borrowed and "minimum_billed_s" not in resources.model_fields_set
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
        minimum_billed_s=0.0 if is_unbilled else resources.minimum_billed_s,
        data_usd_per_instance=resources.dataset_gb * resources.data_price_usd_per_gb,
        head_price_usd_per_hour=resources.head_price_usd_per_hour if head_usd is None else head_usd,
        head_side_usd_per_hour=0.0 if head_usd is None else extras.head_side_usd_per_hour,
        spot=_spot(resources, name, row, price_usd_per_hour, restart_s) if resources.market == "spot" else None,
        side_costs=_side_costs(resources, extras, provision_delay_s),
        unit=resources.unit,
        trials_per_gpu=resources.trials_per_gpu,
        place="GPU" if resources.slots is None else "slot",
    )


def _side_costs(resources: Resources, extras: Extras, provision_delay_s: float) -> tuple[SideCost, ...]:
    given_usd = resources.side_usd_per_hour
    if resources.billing == "per_function" or given_usd == 0.0:
        return ()
    if given_usd is None:
        return extras.side_costs
    usd_once = given_usd * unrented_h(provision_delay_s)
    return (SideCost(line="volumes and addresses", usd_per_hour=given_usd, usd_once=usd_once),)


def unrented_h(provision_delay_s: float) -> float:
    """Return the hours for which volume and address are billed, and the rent is not.

    They are billed from the launch until the machine is off, the rent only from running to the end.
    """
    return (provision_delay_s + _ENDING_S) / SECONDS_PER_HOUR


def _delay(asked: Delay | None, measured: tuple[float | None, Spread], default_s: float) -> tuple[float, Spread]:
    if asked is not None:
        return delay_of(asked)
    measured_s, spread = measured
    return (default_s, FIXED) if measured_s is None else (measured_s, spread)


def _gpus(resources: Resources, name: str, row: InstanceType | None, table: Table) -> int:
    if resources.slots is not None and row is not None:
        _check_slots(resources.slots, row)
    if resources.gpus_per_instance is not None:
        return resources.gpus_per_instance
    if row is not None and row.gpus:
        return row.gpus
    if row is not None:
        raise InputError(
            f"resources.instance_type: {name} has no GPUs; give slots (how many trials train at a time on one's CPUs), "
            "or choose a type with GPUs (`rubberband cloud prices` lists them)"
        )
    if name == resources.kind.default_type:
        return 1
    raise InputError(
        f"resources.instance_type: {shown(name)} is not in the catalogue; "
        + nearest_types(name, table, "or give gpus_per_instance and price_per_hour")
    )


def _check_slots(slots: int, row: InstanceType) -> None:
    if row.gpus:
        raise InputError(
            f"resources.slots: {slots} are for an instance without GPUs, and {row.instance_type} has {row.gpus}; leave "
            "it out, or give gpus_per_instance"
        )
    if row.vcpus is not None and slots > row.vcpus:
        raise InputError(
            f"resources.slots: {slots} are more than the {row.vcpus:g} vCPUs of {row.instance_type}; lower it to "
            f"{row.vcpus:g}"
        )


def _price_usd_per_hour(resources: Resources, name: str, row: InstanceType | None) -> float:
    if resources.price_usd_per_hour is not None:
        return resources.price_usd_per_hour
    if row is None:
        if resources.is_free:
            return 0.0
        raise InputError(f"resources.price_per_hour: {shown(name)} is not in the catalogue; give its price per hour")
    if not row.live_in(resources.region).offered:
        raise InputError(
            f"resources.instance_type: {_cloud(resources)} has no {name} in {resources.region}; choose another type or "
            "region (`rubberband cloud prices` lists both)"
        )
    if resources.region not in row.prices_usd_per_hour:
        known = ", ".join(row.prices_usd_per_hour) or "no region"
        raise InputError(
            f"resources.region: the catalogue has a price of {name} for {known}, not for {resources.region}; give "
            "price_per_hour, or a table that has it as resources.catalogue"
        )
    return row.prices_usd_per_hour[resources.region]


def _spot(resources: Resources, name: str, row: InstanceType | None, on_demand: float, restart_s: float) -> Spot:
    asked = resources.spot
    price_usd_per_hour = asked.price_usd_per_hour
    if price_usd_per_hour is None and row is not None:
        price_usd_per_hour = row.live_spot_usd_per_hour(resources.region)
    if price_usd_per_hour is None:
        if row is not None and row.live_in(resources.region).spot_at is not None:
            raise InputError(
                f"resources.market: {_cloud(resources)} has no {name} on spot in {resources.region}; set market: "
                "on_demand, give resources.spot.price_per_hour, or choose another type or region"
            )
        if row is None or row.spot_share is None:
            raise InputError(
                f"resources.spot.price_per_hour: the catalogue has no spot price of {name}; give it (or, for "
                f"several types, a table with spot_share as resources.catalogue){ASK_AWS}, or set market: on_demand"
            )
        price_usd_per_hour = row.spot_share * on_demand
    return Spot(
        price_usd_per_hour=price_usd_per_hour,
        interruptions_per_hour=asked.interruptions_per_hour,
        checkpoint_iterations=asked.checkpoint_iterations,
        restart_s=restart_s if asked.restart_s is None else asked.restart_s,
    )
