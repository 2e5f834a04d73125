"""The money that a plan leaves beside its cost, so that it is carried out to its end.

A run stops while there is still money to release everything; a plan that leaves less would be stopped just before its
end.
"""

from __future__ import annotations

from rubberband.values.offer import SECONDS_PER_HOUR, Offer
from rubberband.values.plan import StagePlan

SLACK_S = 1.0
"""A run that is done at the very instant of the stop may be stopped instead."""


class Reserve:
    """The reserve of plans that are carried out with this release margin."""

    def __init__(self, margin_s: float, dearest_usd_per_hour: float | None) -> None:
        """`dearest_usd_per_hour`: the highest price of a similar type that is used instead; None: no other type is."""
        self._margin_s = margin_s + SLACK_S if margin_s else 0.0
        self._dearest_usd_per_hour = dearest_usd_per_hour

    @property
    def is_asked_for(self) -> bool:
        """Whether there is any."""
        return self._margin_s > 0.0

    def of_plan(self, offer: Offer, stages: tuple[StagePlan, ...], *, held: int = 0) -> float:
        """Reserve of the widest stage, in USD, with `held` instances ready."""
        return max(self.of_width(offer, choice.instances, held=held) for choice in stages)

    def of_width(self, offer: Offer, instances: int, *, held: int = 0) -> float:
        """Reserve of `instances` instances: the release margin, and what is reserved beyond their price at first."""
        reserved = max(offer.price_usd_per_hour, self._dearest_usd_per_hour or 0.0) + offer.side_usd_per_hour
        reserve_usd = (instances * reserved + offer.head_price_usd_per_hour) * self._margin_s
        if offer.billing == "per_instance" and self._margin_s:
            least = offer.market_price_usd_per_s("on_demand" if offer.spot is None else "spot") * SECONDS_PER_HOUR
            new = max(0, instances - held)
            reserve_usd += new * (reserved - least) * max(offer.minimum_billed_s, offer.init_delay_s)
        return reserve_usd / SECONDS_PER_HOUR
