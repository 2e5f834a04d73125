"""Whether rented instances get the code that an experiment needs, before any is rented."""

from __future__ import annotations

from dataclasses import replace

from rubberband.errors import EntrypointError, InputError
from rubberband.executor.training.entrypoint import Entrypoint
from rubberband.planning.feasible import PricesAndQuotas
from rubberband.spec.experiment import Experiment


def unsent_of(experiment: Experiment, entrypoint: Entrypoint) -> str:
    """Return why rented instances would not get the code that they need; empty if they would, or are this machine."""
    resources = experiment.resources
    if not resources.kind.is_elsewhere:
        return ""
    from rubberband.executor.ray.code import unsent

    aws = resources.aws
    return unsent(entrypoint, installs=resources.kind.is_borrowed or bool(aws.install or aws.setup or aws.image))


def require_sent(experiment: Experiment, entrypoint: Entrypoint) -> None:
    """Raise InputError if rented instances would not get the code that they need."""
    if why := unsent_of(experiment, entrypoint):
        raise InputError(why)


def with_unsent(prices: PricesAndQuotas, experiment: Experiment, entrypoint: Entrypoint | None) -> PricesAndQuotas:
    """Add a remark if rented instances would not get the code that they need, or a program is nowhere."""
    if entrypoint is None or not (why := _missing(experiment, entrypoint) or unsent_of(experiment, entrypoint)):
        return prices
    return replace(prices, notes=(*prices.notes, f"a run is refused now: {why}."))


def _missing(experiment: Experiment, entrypoint: Entrypoint) -> str:
    """Return that a program for rented instances is neither here nor named by a path; empty if it may be there."""
    if entrypoint.command is not None and experiment.resources.kind.is_rented:
        try:
            entrypoint.check(1, elsewhere=True)
        except EntrypointError as error:
            return str(error)
    return ""
