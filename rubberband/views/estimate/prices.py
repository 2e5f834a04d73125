"""Prices of instance types as a table and as JSON, for `rubberband cloud prices` and the service. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rubberband.cloud.catalogue import InstanceType, Live, LiveTable, is_cpu_type
from rubberband.errors import InputError
from rubberband.units import near, nearest, shown
from rubberband.views.formatting import usd

SCHEMA = "rubberband.prices/1"

HEADER = (
    "type", "GPUs", "GPU", "vCPUs", "memory (GiB)",
    "on demand (USD/h)", "per GPU", "from", "spot (USD/h)", "share", "zone", "from",
)  # fmt: skip
_NOTHING = Live()


def cheapest_first(rows: Sequence[InstanceType], region: str) -> list[InstanceType]:
    """Sort by the price of a GPU on demand; types without GPUs or price come last, by name."""

    def key(row: InstanceType) -> tuple[bool, bool, float, str]:
        price = row.prices_usd_per_hour.get(region)
        return not row.gpus, price is None, (price or 0.0) / (row.gpus or 1), row.instance_type

    return sorted(rows, key=key)


def chosen(table: LiveTable, types: Sequence[str], region: str, option: str = "--region") -> list[InstanceType]:
    """Return the given types, or all with GPUs and a price, cheapest first.

    `option` is the name of the region's option. Raises InputError for unknown types and regions.
    """
    if types:
        return cheapest_first([_row(table, name, region) for name in dict.fromkeys(types)], region)
    found = [row for row in table.values() if row.gpus and region in row.prices_usd_per_hour]
    if not found:
        known = dict.fromkeys(name for row in table.values() for name in row.prices_usd_per_hour)
        why = f"AWS could not be asked ({table.notes[0]})" if table.notes else "AWS listed none"
        raise InputError(f"{option} {region}: no prices are known, and {why}; {nearest(region, known)}")
    return cheapest_first(found, region)


def price_notes(table: LiveTable) -> list[str]:
    """Return notes on the source of the prices."""
    return [
        f"AWS prices are not available: {note}. Earlier ones, or the catalogue's, are shown" for note in table.notes
    ]


def prices_json(rows: Sequence[InstanceType], region: str, notes: Sequence[str]) -> dict[str, Any]:
    """Return the output of `rubberband cloud prices -o json`."""
    listed = [price_json(row, region) for row in rows]
    return {"schema": SCHEMA, "region": region, "types": listed, "notes": list(notes)}


def _row(table: LiveTable, name: str, region: str) -> InstanceType:
    if name in table:
        return table[name]
    found = () if is_cpu_type(name) else near(name, table, 3)
    close = " or ".join(shown(name) for name in found)
    remedy = f"did you mean {close}?" if close else "`rubberband cloud prices` lists the types with GPUs"
    if table.notes:
        why = f"is not in the catalogue, and AWS could not be asked ({table.notes[0]})"
        raise InputError(f"{shown(name)} {why}; {remedy}")
    raise InputError(f"AWS has no {shown(name)} in {region}; {remedy}")


def price_rows(rows: Sequence[InstanceType], region: str, now: float) -> list[tuple[str, ...]]:
    """Return the cells of `HEADER` for each type; ~ is approximate or indicative, - unknown."""
    return [_cells(row, region, now) for row in rows]


def price_json(row: InstanceType, region: str) -> dict[str, Any]:
    """Return a type as JSON: prices in USD per hour, instants in Unix time, null for unknown values."""
    live, price = row.live.get(region, _NOTHING), row.prices_usd_per_hour.get(region)
    from_aws = live.on_demand_at is not None
    return {
        "instance_type": row.instance_type,
        "gpus": row.gpus,
        "gpu": row.gpu or None,
        "gpu_memory_gib": row.gpu_memory_gib,
        "vcpus": row.vcpus,
        "memory_gib": row.memory_gib,
        "network_gbps": row.network_gbps,
        "on_demand_usd_per_hour": price,
        "on_demand_source": None if price is None else "aws" if from_aws else "catalogue",
        "on_demand_at": live.on_demand_at,
        "priced_on": None if from_aws else row.priced_on or None,
        "approximate": region in row.approximate,
        "spot_usd_per_hour": row.live_spot_usd_per_hour(region),
        "spot_zones_usd_per_hour": dict(live.spot_usd_per_hour),
        "spot_at": live.spot_at,
        "spot_share": _share(row, region),
    }


def _cells(row: InstanceType, region: str, now: float) -> tuple[str, ...]:
    live, price = row.live.get(region, _NOTHING), row.prices_usd_per_hour.get(region)
    about = "~" if region in row.approximate else ""
    asked_at, on_paper = live.on_demand_at, row.priced_on or "table"
    return (
        row.instance_type,
        str(row.gpus),
        row.gpu_model or "-",
        _number(row.vcpus),
        _number(row.memory_gib),
        "-" if price is None else about + usd(price, 4),
        "-" if price is None or not row.gpus else about + usd(price / row.gpus, 4),
        "-" if price is None else on_paper if asked_at is None else f"AWS, {age(now - asked_at)}",
        *_spot_cells(row, region, now),
    )


def _spot_cells(row: InstanceType, region: str, now: float) -> tuple[str, str, str, str]:
    live, live_usd, share = row.live.get(region, _NOTHING), row.live_spot_usd_per_hour(region), _share(row, region)
    if live_usd is not None and live.spot_at is not None:
        zone = min(live.spot_usd_per_hour, key=lambda zone: live.spot_usd_per_hour[zone])
        percent = "-" if share is None else f"{share:.0%}"
        return usd(live_usd, 4), percent, zone, f"AWS, {age(now - live.spot_at)}"
    price = row.prices_usd_per_hour.get(region)
    if share is None or price is None:
        return "-", "-", "-", "-"
    return f"~{usd(share * price, 4)}", f"~{share:.0%}", "-", row.priced_on or "table"


def _share(row: InstanceType, region: str) -> float | None:
    """Return the spot price over the price on demand: from AWS, or else indicative from the table."""
    live_usd, price = row.live_spot_usd_per_hour(region), row.prices_usd_per_hour.get(region)
    if live_usd is None:
        return row.spot_share
    return live_usd / price if price else None


def age(seconds: float) -> str:
    """Return an age as one rough number: `now`, `5m`, `3h`, `12d`."""
    for unit, unit_s in (("d", 86_400.0), ("h", 3600.0), ("m", 60.0)):
        if seconds >= unit_s:
            return f"{seconds // unit_s:.0f}{unit}"
    return "now"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"
