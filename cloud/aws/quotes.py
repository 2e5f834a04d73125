"""AWS's quotes: facts and spot prices of instance types from EC2, on-demand prices from the price list, and what this
account is charged beside the rent.

Linux, shared tenancy, US dollars. Parts that the role may not read, or that come late, are left out with a note.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, TypeVar

from rubberband.cloud.aws.calls import AwsSession
from rubberband.cloud.aws.client import described_types, facts_in, pages, type_facts
from rubberband.cloud.aws.errors import FAILURES, explain, lacks_rights
from rubberband.cloud.aws.images import Image, built_image, choose_image
from rubberband.cloud.aws.installing import what_to_install
from rubberband.cloud.aws.network import OwnInstance, choose_subnets, own_place, ways_out
from rubberband.cloud.aws.prices import ALL_PARTS, Part, Quote, TypeFacts
from rubberband.cloud.aws.s3 import Packages
from rubberband.cloud.catalogue import LiveTable, SideFacts, types_of
from rubberband.errors import InputError
from rubberband.spec.resources import Resources

T = TypeVar("T")

GPU_TYPES = ("g*", "p*")
"""Patterns of the names of types with GPUs (and some others)."""
PATIENCE_S = 45.0
"""Time limit for all requests; parts that are missing then are left out."""
AT_ONCE = 8
"""Requests to the price list at the same time; it has one page for each type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedQuotes:
    """Answers of AWS."""

    quotes: Mapping[str, Quote]
    """Quotes of all requested types (of all with GPUs, if none was); a part that failed has no time."""
    problems: tuple[str, ...] = ()
    """Reasons for missing parts, a line each, with the remedy."""


def fetch(
    session: AwsSession,
    types: Sequence[str] | None,
    parts: Collection[Part] = ALL_PARTS,
    *,
    clock: Callable[[], float] = time.time,
) -> FetchedQuotes:
    """Return facts and prices of `types`, or of all types with GPUs. Errors of AWS become `FetchedQuotes.problems`.

    Without the part `facts`, the types must be given.
    """
    now = clock()
    asking = _Asking(lambda: clock() < now + PATIENCE_S)
    facts = None
    if "facts" in parts:
        facts = asking.ask(lambda: facts_of(session, types, asking.in_time))
    names = list(dict.fromkeys(facts or () if types is None else types))
    known = [name for name in names if facts is None or name in facts]
    spot, on_demand = None, None
    if "spot" in parts and known:
        spot = asking.ask(lambda: spot_prices(session, known, now, asking.in_time))
    if "on_demand" in parts and known:
        on_demand = asking.ask(lambda: _on_demand_prices(session, known, asking.in_time))
    quotes = {
        name: Quote(
            facts=None if facts is None else facts.get(name),
            facts_at=None if facts is None else now,
            on_demand_usd_per_hour=None if on_demand is None else on_demand.get(name),
            on_demand_at=None if on_demand is None else now,
            spot_usd_per_hour={} if spot is None else spot.get(name, {}),
            spot_at=None if spot is None else now,
        )
        for name in names
    }
    return FetchedQuotes(quotes=quotes, problems=tuple(asking.problems))


def facts_of(
    session: AwsSession, types: Sequence[str] | None, in_time: Callable[[], bool] = lambda: True
) -> dict[str, TypeFacts]:
    """Return type -> facts, of those `types` that the region has, or of all with GPUs. Raises botocore's errors."""
    names = GPU_TYPES if types is None else types
    found = {one["InstanceType"]: facts_in(one) for one in described_types(session, names, in_time=in_time)}
    return {name: facts for name, facts in found.items() if types is not None or facts.gpus}


def spot_prices(
    session: AwsSession, types: Sequence[str], now: float, in_time: Callable[[], bool] = lambda: True
) -> dict[str, dict[str, float]]:
    """Return type -> zone -> the spot price at `now` (Unix time), in USD per hour. Raises botocore's errors."""
    latest: dict[tuple[str, str], tuple[datetime, float]] = {}
    history = pages(
        session.client("ec2").describe_spot_price_history,
        "SpotPriceHistory",
        in_time=in_time,
        InstanceTypes=list(types),
        ProductDescriptions=["Linux/UNIX"],
        StartTime=datetime.fromtimestamp(now, UTC),
    )
    for one in history:
        place, price = (one["InstanceType"], one["AvailabilityZone"]), (one["Timestamp"], float(one["SpotPrice"]))
        if place not in latest or latest[place][0] < price[0]:
            latest[place] = price
    found: dict[str, dict[str, float]] = {}
    for (name, zone), (_, price_usd) in sorted(latest.items()):
        found.setdefault(name, {})[zone] = price_usd
    return found


def on_demand_price(
    session: AwsSession, instance_type: str, in_time: Callable[[], bool] = lambda: True
) -> float | None:
    """Return USD per hour in the session's region; None if it is not sold by the hour. Raises botocore's errors."""
    wanted = {
        "instanceType": instance_type,
        "regionCode": session.region,
        "operatingSystem": "Linux",
        "tenancy": "Shared",
        "preInstalledSw": "NA",
        "capacitystatus": "Used",
    }
    products = pages(
        session.client("pricing").get_products,
        "PriceList",
        in_time=in_time,
        ServiceCode="AmazonEC2",
        Filters=[{"Type": "TERM_MATCH", "Field": key, "Value": value} for key, value in wanted.items()],
    )
    prices_usd = [price for product in products for price in hourly_prices_usd(json.loads(product))]
    return min(prices_usd, default=None)


def _on_demand_prices(session: AwsSession, types: Sequence[str], in_time: Callable[[], bool]) -> dict[str, float]:
    # The first one alone: if it is refused, the others would be too.
    first, *rest = types
    found = {first: on_demand_price(session, first, in_time)}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            found |= zip(rest, pool.map(lambda name: on_demand_price(session, name, in_time), rest), strict=True)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return {name: price for name, price in found.items() if price is not None}


def hourly_prices_usd(product: Any) -> Iterable[float]:
    """Yield the on-demand prices of a product: none for capacity blocks, which are sold in advance."""
    if product["product"].get("attributes", {}).get("marketoption", "OnDemand") != "OnDemand":
        return
    for term in product.get("terms", {}).get("OnDemand", {}).values():
        for dimension in term["priceDimensions"].values():
            price_usd = float(dimension["pricePerUnit"].get("USD", 0.0))
            if dimension["unit"] == "Hrs" and price_usd > 0.0:
                yield price_usd


class _Asking:
    """Requests one part after the other and keeps the errors; stops after an error that would repeat."""

    def __init__(self, in_time: Callable[[], bool]) -> None:
        self.in_time = in_time
        self.problems: list[str] = []
        self._hopeless = False

    def ask(self, part: Callable[[], T]) -> T | None:
        if self._hopeless:
            return None
        try:
            return part()
        except FAILURES as error:
            self.problems.append(explain(error))
            self._hopeless = not lacks_rights(error)
            return None


def side_facts(
    session: AwsSession, resources: Resources, instance_type: str, place: OwnInstance | None = None
) -> SideFacts:
    """Return what instances of a type are charged for besides rent. Raises InputError if they could not be launched;
    botocore's errors."""
    words = resources.aws
    facts = type_facts(session, instance_type)
    installs = (words.install or "").strip() != "none"
    is_head = instance_type == words.head_instance_type
    own = None if is_head else _built(session, resources, facts)
    word, asked_gb = (None if installs else words.image, None) if is_head else (words.image, words.volume_gb)
    image, volume_gb = choose_image(session, word, facts, asked_gb, installs=installs, own=own)
    _, subnets = choose_subnets(session, words.subnets, instance_type, place)
    out = ways_out(session, list(subnets.values()))
    return SideFacts(
        volume_gb=(volume_gb or image.root_gb or 0) + image.further_gb,
        public_address=len(out.private) < len(subnets),
        nat=out.nat,
        s3_endpoint=out.s3_endpoint,
        installed=installs and own is None,
    )


def _built(session: AwsSession, resources: Resources, facts: TypeFacts) -> Image | None:
    """Return the owner's image that instances would boot, if there is one. Nothing is written into the bucket."""
    try:
        installed = what_to_install(Packages(None, resources.checkpoints), resources.aws)
    except InputError:  # preflight reports it
        return None
    return built_image(session, resources.aws, installed, facts)


def with_side_facts(table: LiveTable, session: AwsSession, resources: Resources) -> LiveTable:
    """Return the table with the side costs of the experiment's types (and its head) in this account.

    A note says why they are unknown, if they are.
    """
    rows, notes, place = dict(table), list(table.notes), own_place()
    names = dict.fromkeys([*types_of(resources), resources.aws.head_instance_type])
    for name in [name for name in names if name in rows]:
        try:
            beside = side_facts(session, resources, name, place)
        except InputError:  # preflight reports it
            continue
        except FAILURES as error:
            notes.append(f"volumes and addresses are those of a new account, with no NAT gateway: {explain(error)}")
            break
        live = replace(rows[name].live_in(resources.region), beside=beside)
        rows[name] = replace(rows[name], live={**rows[name].live, resources.region: live})
    return LiveTable(rows, notes)
