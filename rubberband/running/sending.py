"""Whether rented instances get the code that an experiment needs, before any is rented."""

from __future__ import annotations

from dataclasses import replace

from rubberband.executor.ray.code import unsent
from rubberband.executor.training.entrypoint import Entrypoint
from rubberband.planning.feasible import PricesAndQuotas
from rubberband.spec.experiment import Experiment


def with_unsent(prices: PricesAndQuotas, experiment: Experiment, entrypoint: Entrypoint | None) -> PricesAndQuotas:
    """Add a remark if rented instances would not get the code that they need."""
    if entrypoint is None or not experiment.resources.kind.is_rented or not (why := unsent(entrypoint)):
        return prices
    return replace(prices, notes=(*prices.notes, f"a run is refused now: {why}."))
