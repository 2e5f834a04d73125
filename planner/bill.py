"""The lines of an estimate's bill: what the plan costs by what it is for. They add up to its (mean) cost."""

from __future__ import annotations

from dataclasses import replace

from rubberband.offer import DATA_LINE, HEAD_LINE, RENT_LINES, BillLine, Offer, SideCost
from rubberband.planner.assumptions import predicted_usd
from rubberband.planner.estimate import Estimate

_LEAST_USD = 1e-9


def bill_lines(estimate: Estimate) -> tuple[BillLine, ...]:
    """The lines of the plan's bill, those of nothing left out; empty without a plan.

    A bill is linear in its prices: one dollar more an hour tells the hours of instances, one more an instance how many
    are started.
    """
    job, offer = estimate.job, estimate.offer
    if job is None:
        return ()
    lines: list[BillLine] = []
    if offer.side_costs or offer.data_usd_per_instance:
        now_usd = predicted_usd(estimate, offer)
        hours = predicted_usd(estimate, _dearer(offer, SideCost(line="", usd_per_hour=1.0))) - now_usd
        started = predicted_usd(estimate, _dearer(offer, SideCost(line="", usd_once=1.0))) - now_usd
        lines += [
            BillLine(line=cost.line, usd=cost.usd_per_hour * hours + cost.usd_once * started)
            for cost in offer.side_costs
        ]
        lines.append(BillLine(line=DATA_LINE, usd=offer.data_usd_per_instance * started))
    lines.append(BillLine(line=HEAD_LINE, usd=offer.head_cost_usd(job.prediction.jct_s)))
    rest_usd = job.prediction.cost_usd - sum(line.usd for line in lines)
    found = [BillLine(line=RENT_LINES[offer.billing], usd=rest_usd), *lines]
    return tuple(line for line in found if abs(line.usd) > _LEAST_USD)


def _dearer(offer: Offer, cost: SideCost) -> Offer:
    return replace(offer, side_costs=(*offer.side_costs, cost))
