"""The money that a plan leaves beside its cost, so that a run carries it out to its end.

A run starts an instance only where max_cost covers the whole fleet at the highest price until trials train on it, and
stops while there is still money to release what it holds (`rubberband.executor.core.bill`). A plan that leaves less
would wait for instances, or be stopped just before its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rubberband.values.offer import SECONDS_PER_HOUR, Offer
from rubberband.values.plan import StagePlan

SLACK_S = 1.0
"""A run that is done at the very instant of the stop may be stopped instead."""
SHORTEST_REACH_S = 2.0
"""If prices are below the highest ones, the stop comes while max_cost still reaches about this far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """The terms of the reserve of plans."""

    margin_s: float = 0.0
    """Longest time to release instances."""
    highest_price_usd_per_hour: float | None = None
    """The highest price of a type that may be used instead; None: no other type is."""
    ready: int = 0
    """Instances that are ready now, where the rest of a job is planned."""
    beside_usd: float = 0.0
    """Reserve of what runs beside the plan."""

    def is_asked_for(self, offer: Offer) -> bool:
        """Whether plans on an offer have any: not where all is released at once, and costs what is expected."""
        may_cost_more = offer.spot is not None or self.highest_price_usd_per_hour is not None
        return may_cost_more or self.margin_s > 0.0 or self.beside_usd > 0.0

    def usd(self, offer: Offer, choices: Sequence[StagePlan], costs_usd: Sequence[float]) -> float:
        """Return the reserve in US dollars of stages that are predicted to cost `costs_usd`."""
        spent_usd = needed_usd = 0.0
        before = StagePlan(instances=self.ready, gpus_per_trial=1, market=choices[0].market)
        for choice, cost_usd in zip(choices, costs_usd, strict=True):
            kept = min(before.instances, choice.instances) if choice.market == before.market else 0
            if kept < choice.instances:
                needed_usd = max(needed_usd, spent_usd + self._start_usd(offer, kept, choice.instances - kept))
            spent_usd += cost_usd
            needed_usd = max(needed_usd, spent_usd + self.release_usd(offer, choice))
            before = choice
        return self.beside_usd + max(0.0, needed_usd - spent_usd)

    def release_usd(self, offer: Offer, choice: StagePlan) -> float:
        """Return the money with which a run stops that holds the instances of a stage."""
        margin_s = self.margin_s + SLACK_S if self.margin_s else 0.0
        price = offer.price_usd_per_s if offer.spot is None else offer.market_price_usd_per_s(choice.market)
        usd = (choice.instances * price + offer.head_cost_usd(1.0)) * margin_s
        if offer.billing == "per_instance":
            extra = self._highest_usd_per_s(offer) - price
            usd += choice.instances * extra * max(margin_s, SHORTEST_REACH_S)
        return usd

    def _start_usd(self, offer: Offer, held: int, new: int) -> float:
        """Return what `held` instances and `new` ones may cost until all are ready, and then given back."""
        if offer.billing == "per_function":
            return new * offer.once_usd_per_instance
        until_s = self.margin_s + offer.init_delay_s
        instances_s = held * until_s + new * max(until_s, offer.minimum_billed_s)
        once_usd = new * offer.once_usd_per_instance + offer.head_cost_usd(until_s)
        return self._highest_usd_per_s(offer) * instances_s + once_usd

    def _highest_usd_per_s(self, offer: Offer) -> float:
        """Return the highest price of an instance that is still to be bought."""
        highest = max(offer.price_usd_per_hour, self.highest_price_usd_per_hour or 0.0)
        return (highest + offer.side_usd_per_hour) / SECONDS_PER_HOUR
