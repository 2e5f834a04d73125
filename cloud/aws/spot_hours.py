"""What the hours of spot instances cost: each hour since an instance began to run, at the price when it begins.

"You pay the Spot price that's in effect at the beginning of each instance-hour for your running instance. If Spot price
changes after you launch the instance, the new price is charged against the instance usage for the subsequent hour"
(Amazon EC2 FAQs, Spot Instances). So a price is asked for once an hour has begun, and stays. EC2 does not tell to the
second when an instance began to run: of all prices that may have been in effect then, the highest counts.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from rubberband.cloud.aws.errors import FAILURES, explain
from rubberband.cloud.aws.intents import HOUR_S, Intent, Intents, billed_prices_usd
from rubberband.cloud.aws.machines import Session
from rubberband.cloud.aws.pages import pages

PAUSE_S = 60.0
"""Until prices are asked for again that could not be had."""
ROUNDING_S = 1.0
"""EC2 tells instants to the second, rounded down."""

Changes = Sequence[tuple[float, float]]
"""(from when on, USD per hour), in order."""
_log = logging.getLogger(__name__)


class SpotHours:
    """Finds out what the hours cost that the spot instances of a run have begun. Safe to use from several threads."""

    def __init__(self, session: Session, intents: Intents) -> None:
        self._session = session
        self._intents = intents
        self._mutex = threading.Lock()
        self._ask_at = -math.inf

    def look(self, now: float) -> None:
        """Ask for what is not known yet, all at once; at most once a minute for what EC2 does not tell."""
        with self._mutex:
            unknown = [one for one in self._intents.all() if len(billed_prices_usd(one)) < _hours(one, now)]
            if not unknown or now < self._ask_at:
                return
            try:
                found = priced(self._session, unknown, now)
            except FAILURES as error:
                _log.warning("what spot instances cost in this hour is not known yet: %s", explain(error))
                found = {}
            self._ask_at = now if len(found) == len(unknown) else now + PAUSE_S
            for name, hour_prices_usd in found.items():
                self._intents.price(name, hour_prices_usd)


def _hours(intent: Intent, now: float) -> int:
    """How many hours of a spot instance have begun: of a living one, those that have surely."""
    if intent.market != "spot" or intent.running_at is None or intent.last is None:
        return 0
    if intent.ended_at is not None:
        return max(1, math.ceil((intent.ended_at - intent.running_at) / HOUR_S))
    return math.floor((now - intent.running_at - _doubt_s(intent)) / HOUR_S) + 1


def _doubt_s(intent: Intent) -> float:
    """For how long it is not known whether it ran."""
    if intent.running_at is None or intent.seen_running_at is None:
        return 0.0
    return max(0.0, intent.seen_running_at - intent.running_at)


def priced(session: Session, intents: Sequence[Intent], now: float) -> dict[str, tuple[float, ...]]:
    """Name -> the prices of all hours that have begun, of those instances of which more are known now.

    One request for all of them, whatever their types and zones. Raises botocore's errors.
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
    found = {intent.instance: _with_more(intent, changes, now) for intent in intents}
    return {
        intent.instance: found[intent.instance]
        for intent in intents
        if found[intent.instance] != intent.hour_prices_usd
    }


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
    """When an hour begins, at the earliest."""
    return (intent.running_at or 0.0) + hour * HOUR_S


def highest(changes: Changes, since: float, until: float) -> float | None:
    """The highest price that was in effect between two instants; None where none is known from the beginning on."""
    before = [price for at, price in changes if at <= since]
    during = [price for at, price in changes if since < at <= until]
    return max([before[-1], *during]) if before else None
