"""Whether rented instances get the code that an experiment needs, before any is rented."""

from __future__ import annotations

from dataclasses import replace

from rubberband.errors import InputError
from rubberband.executor.ray.code import unsent
from rubberband.executor.training.entrypoint import Entrypoint
from rubberband.planning.feasible import PricesAndQuotas
from rubberband.spec.experiment import Experiment


def unsent_of(experiment: Experiment, entrypoint: Entrypoint) -> str:
    """Return why rented instances would not get the code that they need; empty if they would, or are this machine."""
    resources = experiment.resources
    if not resources.kind.is_elsewhere:
        return ""
    return unsent(entrypoint, installs=bool(resources.aws.install or resources.aws.setup or resources.aws.image))


def require_sent(experiment: Experiment, entrypoint: Entrypoint) -> None:
    """Raise InputError if rented instances would not get the code that they need."""
    if why := unsent_of(experiment, entrypoint):
        raise InputError(why)


def with_unsent(prices: PricesAndQuotas, experiment: Experiment, entrypoint: Entrypoint | None) -> PricesAndQuotas:
    """Add a remark if rented instances would not get the code that they need."""
    if entrypoint is None or not (why := unsent_of(experiment, entrypoint)):
        return prices
    return replace(prices, notes=(*prices.notes, f"a run is refused now: {why}."))
