"""Types, zones and placement groups, in the order in which a launch tries them. It buys nothing."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from rubberband.cloud.aws.calls import Choice, Machines
from rubberband.cloud.aws.errors import FAILURES, explain
from rubberband.cloud.aws.fleet import Fleet
from rubberband.cloud.aws.images import type_facts
from rubberband.cloud.aws.network import ensure_cluster
from rubberband.cloud.aws.pricing import spot_prices
from rubberband.values.plan import Market

_log = logging.getLogger(__name__)

_REMEMBERED_S = 60.0
"""A zone that has refused is tried after the others for this long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ware:
    """An instance type that will do, with its prices as planned; None: not for sale on the spot market."""

    instance_type: str
    on_demand_usd_per_hour: float
    spot_usd_per_hour: float | None = None


class Choices:
    """What `wares` are to be had on `machines`."""

    def __init__(self, fleet: Fleet, machines: Machines, wares: Sequence[Ware], *, together: bool = False) -> None:
        """The first of `wares` is preferred. `together`: all are to be in one zone, since trials may span them."""
        self.together = together
        self._fleet = fleet
        self._machines = machines
        self._wares = tuple(wares)
        self._clusters: dict[tuple[str, str], str | None] = {}
        """(type, zone) -> the placement group there; None: there is none."""
        self._refused_at: dict[tuple[str, str, Market], float] = {}
        """(type, zone, market) -> when it had no more."""

    def note_refusal(self, choice: Choice) -> None:
        """It has no more just now: others that are bought soon ask elsewhere first."""
        self._refused_at[choice.instance_type, choice.zone, choice.market] = self._fleet.clock()

    def turns(self, market: Market, count: int) -> Iterator[tuple[Choice, int]]:
        """The choices to try, one after the other, and the least number of instances for each.

        Instances that must be in one zone: where all of them are to be had, else half of them, else any; then only
        where the first ones are. A zone's cluster may be full, though the zone is not.
        """
        if not self.together:
            for choice in self._of(market):
                yield choice, 1
            return
        choices = list(self._of(market))
        for share in dict.fromkeys((count, -(-count // 2), 1)):
            for choice in choices:
                for group in dict.fromkeys((self._cluster(choice), None)):
                    home = self.home()
                    if home in (None, choice.zone):
                        yield replace(choice, placement_group=group), share if home is None else 1

    def home(self) -> str | None:
        """The zone in which the run's instances live, or may live."""
        living = [
            intent.last for intent in self._fleet.intents.living() if intent.last and intent.last.outcome != "refused"
        ]
        zones = Counter(last.choice.zone for last in living)
        return max(zones, key=lambda zone: zones[zone], default=None)

    def _cluster(self, choice: Choice) -> str | None:
        """The placement group of a choice, if its type can be in one."""
        place = choice.instance_type, choice.zone
        if place not in self._clusters:
            session, found = self._fleet.session, None
            try:
                if type_facts(session, choice.instance_type).clusters:
                    found = ensure_cluster(session, self._machines.owner, choice.zone, choice.instance_type)
            except FAILURES as error:
                _log.warning("instances of trials that span them are not placed close together: %s", explain(error))
            self._clusters[place] = found
        return self._clusters[place]

    def _of(self, market: Market) -> Iterator[Choice]:
        """In the order in which they are asked: what has refused just now comes last."""
        last: list[Choice] = []
        for ware in self._wares:
            choices: Iterable[Choice] = ()
            if market == "on_demand":
                choices = self._on_demand(ware)
            elif ware.spot_usd_per_hour is not None:
                choices = self._on_spot(ware, ware.spot_usd_per_hour)
            for choice in choices:
                refused_at = self._refused_at.get((choice.instance_type, choice.zone, choice.market), -math.inf)
                if self._fleet.clock() - refused_at < _REMEMBERED_S:
                    last.append(choice)
                else:
                    yield choice
        yield from last

    def _on_demand(self, ware: Ware) -> Iterable[Choice]:
        price = ware.on_demand_usd_per_hour
        return [_choice(ware, zone, "on_demand", price) for zone in self._machines.subnets]

    def _on_spot(self, ware: Ware, planned_usd_per_hour: float) -> Iterable[Choice]:
        """The cheapest zone first; where a price is not known, the planned one."""
        name = ware.instance_type
        try:
            now = spot_prices(self._fleet.session, [name], self._fleet.clock()).get(name, {})
        except FAILURES:
            now = {}
        found = [_choice(ware, z, "spot", now.get(z, planned_usd_per_hour)) for z in self._machines.subnets]
        return sorted(found, key=lambda choice: choice.price_usd_per_hour)


def _choice(ware: Ware, zone: str, market: Market, price_usd_per_hour: float) -> Choice:
    return Choice(
        instance_type=ware.instance_type,
        zone=zone,
        market=market,
        price_usd_per_hour=price_usd_per_hour,
        on_demand_usd_per_hour=ware.on_demand_usd_per_hour,
    )
