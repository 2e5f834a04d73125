"""Prices of instance types: facts and spot prices from EC2, on-demand prices from the price list; spot bills by hour.

Linux, shared tenancy, US dollars. Parts that the role may not read, or that come late, are left out with a note.
"""

from __future__ import annotations

import json
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from rubberband.cloud.aws.calls import AwsSession
from rubberband.cloud.aws.client import described_types, pages
from rubberband.cloud.aws.errors import FAILURES, explain, lacks_rights
from rubberband.cloud.aws.intents import HOUR_S, Intent, Intents, billed_prices_usd
from rubberband.cloud.prices import ALL_PARTS, Facts, Part, Quote

T = TypeVar("T")

GPU_TYPES = ("g*", "p*")
"""Patterns of the names of types with GPUs (and some others)."""
_WHOLE = re.compile(r"(\d+(?:\.\d+)?) Gigabit")
PATIENCE_S = 45.0
"""Time limit for all requests; parts that are missing then are left out."""
AT_ONCE = 8
"""Requests to the price list at the same time; it has one page for each type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PricesTold:
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
) -> PricesTold:
    """Return facts and prices of `types`, or of all types with GPUs. Errors of AWS become `PricesTold.problems`.

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
    return PricesTold(quotes=quotes, problems=tuple(asking.problems))


def facts_of(
    session: AwsSession, types: Sequence[str] | None, in_time: Callable[[], bool] = lambda: True
) -> dict[str, Facts]:
    """Return type -> facts, of those `types` that the region has, or of all with GPUs. Raises botocore's errors."""
    names = GPU_TYPES if types is None else types
    found = {one["InstanceType"]: _facts(one) for one in described_types(session, names, in_time=in_time)}
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
        place, told = (one["InstanceType"], one["AvailabilityZone"]), (one["Timestamp"], float(one["SpotPrice"]))
        if place not in latest or latest[place][0] < told[0]:
            latest[place] = told
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
    prices_usd = [price for product in products for price in _hourly(json.loads(product))]
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


def _hourly(product: Any) -> Iterable[float]:
    """Yield the on-demand prices of a product: none for capacity blocks, which are sold in advance."""
    if product["product"].get("attributes", {}).get("marketoption", "OnDemand") != "OnDemand":
        return
    for term in product.get("terms", {}).get("OnDemand", {}).values():
        for dimension in term["priceDimensions"].values():
            price_usd = float(dimension["pricePerUnit"].get("USD", 0.0))
            if dimension["unit"] == "Hrs" and price_usd > 0.0:
                yield price_usd


def _facts(described: Any) -> Facts:
    gpus = described.get("GpuInfo", {}).get("Gpus", ())
    memory_mib = next((float(gpu["MemoryInfo"]["SizeInMiB"]) for gpu in gpus if "MemoryInfo" in gpu), None)
    return Facts(
        gpus=sum(int(gpu["Count"]) for gpu in gpus),
        gpu=str(gpus[0].get("Name", "")) if gpus else "",
        gpu_memory_gib=None if memory_mib is None else round(memory_mib / 1024, 1),
        vcpus=int(described["VCpuInfo"]["DefaultVCpus"]),
        memory_gib=round(float(described["MemoryInfo"]["SizeInMiB"]) / 1024, 1),
        network_gbps=_sustained_gbps(described.get("NetworkInfo", {})),
        architectures=tuple(described.get("ProcessorInfo", {}).get("SupportedArchitectures", ())),
    )


def _sustained_gbps(network: Any) -> float | None:
    # `50 Gigabit` is sustained; for `Up to 10 Gigabit` the baseline of its cards is.
    whole = _WHOLE.fullmatch(network.get("NetworkPerformance", ""))
    if whole is not None:
        return float(whole.group(1))
    cards = network.get("NetworkCards", ())
    return round(sum(float(card.get("BaselineBandwidthInGbps", 0.0)) for card in cards), 3) or None


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


# Hourly prices of spot instances: each hour since an instance began to run costs the price at its beginning.
#
# "You pay the Spot price that's in effect at the beginning of each instance-hour for your running instance. If Spot
# price changes after you launch the instance, the new price is charged against the instance usage for the subsequent
# hour" (Amazon EC2 FAQs, Spot Instances). So a price is requested once an hour has begun, and stays. EC2 does not show
# the exact second at which an instance began to run: the highest price that may have been in effect counts.


PAUSE_S = 60.0
"""Pause before missing prices are requested again."""
ROUNDING_S = 1.0
"""EC2's times are in whole seconds, rounded down."""

Changes = Sequence[tuple[float, float]]
"""(start time, USD per hour), in order."""
_log = logging.getLogger(__name__)


class SpotHours:
    """Looks up the prices of all hours that the spot instances of a run have begun. Thread-safe."""

    def __init__(self, session: AwsSession, intents: Intents) -> None:
        self._session = session
        self._intents = intents
        self._mutex = threading.Lock()
        self._ask_at = -math.inf

    def look(self, now: float) -> None:
        """Request all unknown prices at once; repeat those that EC2 lacks at most once a minute."""
        with self._mutex:
            unknown = [one for one in self._intents.all() if len(billed_prices_usd(one)) < _hours(one, now)]
            if not unknown or now < self._ask_at:
                return
            try:
                found = priced(self._session, unknown, now)
            except FAILURES as error:
                _log.warning("this hour's spot prices are not known yet: %s", explain(error))
                found = {}
            self._ask_at = now if len(found) == len(unknown) else now + PAUSE_S
            for name, hour_prices_usd in found.items():
                self._intents.price(name, hour_prices_usd)


def _hours(intent: Intent, now: float) -> int:
    """Return the number of hours of a spot instance that have begun, for a living one with certainty."""
    if intent.market != "spot" or intent.running_at is None or intent.last is None:
        return 0
    if intent.ended_at is not None:
        return max(1, math.ceil((intent.ended_at - intent.running_at) / HOUR_S))
    return math.floor((now - intent.running_at - _doubt_s(intent)) / HOUR_S) + 1


def _doubt_s(intent: Intent) -> float:
    """Return the uncertainty of its start."""
    if intent.running_at is None or intent.seen_running_at is None:
        return 0.0
    return max(0.0, intent.seen_running_at - intent.running_at)


def priced(session: AwsSession, intents: Sequence[Intent], now: float) -> dict[str, tuple[float, ...]]:
    """Return name -> prices of all begun hours, for the instances with new prices.

    One request serves all types and zones. Raises botocore's errors.
    """
    since = min(_begins_at(intent, len(intent.hour_prices_usd)) for intent in intents) - ROUNDING_S
    choices = [intent.last.choice for intent in intents if intent.last is not None]
    changes: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for one in pages(
        session.client("ec2").describe_spot_price_history,
        "SpotPriceHistory",
        InstanceTypes=sorted({choice.instance_type for choice in choices}),
        ProductDescriptions=["Linux/UNIX"],
        Filters=[{"Name": "availability-zone", "Values": sorted({choice.zone for choice in choices})}],
        StartTime=datetime.fromtimestamp(since, UTC),
        EndTime=datetime.fromtimestamp(now, UTC),
    ):
        place = one["InstanceType"], one["AvailabilityZone"]
        changes.setdefault(place, []).append((one["Timestamp"].timestamp(), float(one["SpotPrice"])))
    found = ((intent, _with_more(intent, changes, now)) for intent in intents)
    return {intent.instance: prices for intent, prices in found if prices != intent.hour_prices_usd}


def _with_more(intent: Intent, changes: Mapping[tuple[str, str], Changes], now: float) -> tuple[float, ...]:
    prices = list(intent.hour_prices_usd)
    assert intent.last is not None, "what runs was asked for"
    told = sorted(changes.get((intent.last.choice.instance_type, intent.last.choice.zone), ()))
    while len(prices) < _hours(intent, now):
        begins_at = _begins_at(intent, len(prices))
        price = highest(told, begins_at - ROUNDING_S, begins_at + _doubt_s(intent))
        if price is None:
            break
        prices.append(price)
    return tuple(prices)


def _begins_at(intent: Intent, hour: int) -> float:
    return (intent.running_at or 0.0) + hour * HOUR_S


def highest(changes: Changes, since: float, until: float) -> float | None:
    """Return the highest price in effect between two times; None if it is unknown at the first."""
    before = [price for at, price in changes if at <= since]
    during = [price for at, price in changes if since < at <= until]
    return max([before[-1], *during]) if before else None
