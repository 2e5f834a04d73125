"""Total time and cost of a plan for many samples at once: the sums of `model.walk`, without its stages.

A bill is a sum of times, each with the price of what is held meanwhile, but for instances that live shorter than the
billing minimum: what these owe beyond is added where it can be that there are any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rubberband.planner.model import Times, Value
from rubberband.values.offer import SECONDS_PER_HOUR, Offer
from rubberband.values.plan import Cohort, Market, Plan, StagePlan


@dataclass(slots=True)
class _Group:
    """Instances that were started together."""

    instances: int
    since: int
    """The first of the spans of time in which they are billed."""
    held_s: float
    """For how long they were billed before."""


@dataclass(slots=True)
class _Bill:
    """Spans of time one after another, and the price of each second of them."""

    offer: Offer
    market: Market
    groups: list[_Group]
    """Oldest first."""
    held: int
    price_usd_per_s: float = 0.0
    head_usd_per_s: float = 0.0
    spans_s: list[Value] = field(default_factory=list)
    passed_s: list[Value] = field(default_factory=lambda: [0.0])
    """When each span begins, and when the last one ends."""
    usd_per_s: list[float] = field(default_factory=list)
    fixed_usd: float = 0.0
    extra_usd: list[Value] = field(default_factory=list)

    def buy(self, market: Market) -> None:
        """Everything from now on is of this market."""
        self.market = market
        per_instance = self.offer.billing == "per_instance"
        self.price_usd_per_s = self.offer.market_price_usd_per_s(market) if per_instance else 0.0

    def span(self, seconds: Value, also_usd_per_s: float = 0.0) -> None:
        """Hold all instances for `seconds`."""
        self.spans_s.append(seconds)
        self.passed_s.append(self.passed_s[-1] + seconds)
        self.usd_per_s.append(self.held * self.price_usd_per_s + self.head_usd_per_s + also_usd_per_s)

    def start(self, instances: int) -> None:
        """Start instances, and bill their data."""
        self.groups.append(_Group(instances, len(self.spans_s), 0.0))
        self.held += instances
        self.fixed_usd += instances * self.offer.once_usd_per_instance

    def release(self, surplus: int) -> None:
        """Release `surplus` instances, those billed longest first."""
        while surplus > 0:
            oldest = self.groups[0]
            released = min(surplus, oldest.instances)
            self._owed(oldest, released)
            oldest.instances -= released
            self.held -= released
            surplus -= released
            if not oldest.instances:
                del self.groups[0]

    def _owed(self, group: _Group, instances: int) -> None:
        """Bill released instances for the rest of the billing minimum; prepaid time costs nothing."""
        price, minimum_s = self.price_usd_per_s, self.offer.minimum_billed_s
        if price == 0.0 or group.held_s >= minimum_s:
            return
        self.fixed_usd -= instances * price * (minimum_s - group.held_s if group.since < 0 else 0.0)
        lived_s: Value = group.held_s + (self.passed_s[-1] - self.passed_s[max(0, group.since)])
        if np.min(lived_s) < minimum_s:
            self.extra_usd.append(instances * price * np.maximum(0.0, minimum_s - lived_s))

    def sums(self) -> tuple[Value, Value]:
        """Seconds and US dollars in all."""
        both_usd: Value = self.fixed_usd
        arrays, weights = [], []
        for seconds, usd_per_s in zip(self.spans_s, self.usd_per_s, strict=True):
            if isinstance(seconds, np.ndarray):
                arrays.append(seconds)
                weights.append(usd_per_s)
            else:
                both_usd = both_usd + usd_per_s * seconds
        if arrays:
            both_usd = both_usd + np.array(weights) @ np.array(arrays)
        for owed_usd in self.extra_usd:
            both_usd = both_usd + owed_usd
        return self.passed_s[-1], both_usd


def totals(plan: Plan, offer: Offer, times: Times, held: Sequence[Cohort] = ()) -> tuple[Value, Value]:
    """Return total seconds and US dollars of a plan: the sums of `model.walk` over its stages, up to rounding."""
    oldest_first = sorted(held, key=lambda cohort: -cohort.held_s)
    groups = [_Group(cohort.instances, -1, float(cohort.held_s)) for cohort in oldest_first if cohort.instances]
    market: Market = held[0].market if held else plan.stages[0].market
    bill = _Bill(offer, market, groups, sum(group.instances for group in groups))
    bill.head_usd_per_s = offer.head_cost_usd(1.0)
    bill.buy(market)
    for index, choice in enumerate(plan.stages):
        _add(index, choice, bill, times)
    bill.release(bill.held)
    return bill.sums()


def _add(index: int, choice: StagePlan, bill: _Bill, times: Times) -> None:
    """One stage: give back what it does not need, start what it lacks, hold all while it lasts."""
    offer = bill.offer
    if choice.market != bill.market:
        bill.release(bill.held)
        bill.buy(choice.market)
    bill.release(bill.held - choice.instances)
    if choice.instances > bill.held:
        started = choice.instances - bill.held
        bill.span(times.provision_s(index))
        bill.start(started)
        bill.span(times.init_s(index, started))
    replaced_usd_per_s = 0.0
    if choice.market == "spot" and offer.spot is not None:
        rate = offer.spot.interruptions_per_hour / SECONDS_PER_HOUR
        replaced_usd_per_s = choice.instances * rate * offer.once_usd_per_instance
    bill.span(times.stage_s(index, choice), replaced_usd_per_s)
    if offer.billing == "per_function":
        share = choice.gpus_per_trial / offer.gpus
        bill.extra_usd.append(offer.market_price_usd_per_s(choice.market) * share * times.busy_s(index, choice))
