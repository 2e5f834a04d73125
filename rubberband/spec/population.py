"""Population based training (Jaderberg et al. 2017) as a scheduler: generations that exploit and explore at each SYNC.

Trials of one population train side by side, a stage for each generation. At its end the worst ones take over the
checkpoints of the best ones ("exploit"), with configurations that differ from theirs ("explore").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from rubberband.errors import InputError
from rubberband.spec.fields import Count, fault
from rubberband.spec.quantiles import grid_index
from rubberband.spec.samplers import Path, SamplerType, configured, leaves
from rubberband.spec.scheduling import Scheduler
from rubberband.spec.space import DOMAINS, Domain, SubSpace
from rubberband.units import nearest, shown
from rubberband.values.plan import Stage
from rubberband.values.schedulers import Exchange

MAX_POPULATION = 10_000
MAX_GENERATIONS = 1000
"""Stages of an experiment."""
_OF_OTHERS = {
    "num_samples": "population: 8",
    "max_t": "generations: 10 and iterations: 5, whose product it is",
    "grace_period": "iterations: 5, those of a generation",
    "reduction_factor": "quantile: 0.25",
}
Unit = Callable[[Path, str], float]


class Pbt(Scheduler):
    """Population based training: after each generation, the worst trials continue from the best ones' checkpoints.

    They do so with changed configurations. All trials train to the end.
    """

    type: Literal["pbt"]
    population: Annotated[int, Field(strict=True, ge=2, le=MAX_POPULATION)]
    """Trials, all of which train in every generation."""
    generations: Annotated[int, Field(strict=True, ge=1, le=MAX_GENERATIONS)]
    """Stages; there is an exchange between two of them."""
    iterations: Count = 1
    """Iterations of a generation."""
    quantile: Annotated[float, Field(strict=True, gt=0.0, le=0.5)] = 0.25
    """Share of the population that takes over checkpoints at an exchange, and of those that they are taken from."""
    perturb: Annotated[
        tuple[Annotated[float, Field(strict=True, gt=0.0, allow_inf_nan=False)], ...], Field(min_length=1)
    ] = (0.8, 1.2)
    """Factors, of which one multiplies a number. A value of a choice moves to a neighbour instead."""
    explore: Literal["perturb", "gp"] = "perturb"
    """How numbers change: by `perturb` and `resample`, or as a Gaussian process has learned what they gain (PB2). It
    chooses numbers with bounds; what has none, choices, and parameters of an option change as without it."""
    resample: Annotated[float, Field(strict=True, ge=0.0, le=1.0)] = 0.25
    """Probability with which a parameter is drawn anew instead."""
    mutate: Annotated[tuple[str, ...] | None, Field(min_length=1)] = None
    """Parameters that change; the others are taken over with the checkpoint, such as those that shape the model. By
    default all change."""

    @model_validator(mode="before")
    @classmethod
    def _has_its_own_size(cls, data: Any) -> Any:
        for key, own in _OF_OTHERS.items() if isinstance(data, Mapping) else ():
            if key in data:
                raise fault(f"is of other schedulers; write {own}", at=key)
        return data

    @model_validator(mode="after")
    def _changes_something(self) -> Self:
        if self.explore == "perturb" and self.resample == 0.0 and set(self.perturb) == {1.0}:
            raise fault("perturb=[1.0] with resample=0 changes nothing; write perturb: [0.8, 1.2]", at="perturb")
        return self

    def brackets(self) -> tuple[tuple[Stage, ...], ...]:
        """Its one chain of stages, all of the whole population."""
        between = Stage(trials=self.population, iterations=self.iterations, exchange=Exchange(quantile=self.quantile))
        last = Stage(trials=self.population, iterations=self.iterations)
        return ((*(between,) * (self.generations - 1), last),)

    def check(self, space: Mapping[str, Any], sampler: SamplerType) -> None:
        """Raise InputError for samplers other than random and quasi, and where no parameter may change."""
        if sampler not in ("random", "quasi"):
            raise InputError(
                f"the {sampler} sampler draws no population whose configurations change later; write sampler: "
                "{type: random} or {type: quasi}"
            )
        if not any(leaves(space)):
            raise InputError("space has no parameter to change; give one a domain, such as {type: loguniform, …}")
        known = {path[-1] for path, _ in leaves(space)}
        for name in self.mutate or ():
            if name not in known:
                raise InputError(f"mutate: {shown(name)} is no parameter with a domain; {nearest(name, known)}")
        if self.explore == "gp" and not self.modelled(space):
            raise InputError("explore: gp chooses numbers with bounds, and none of them may change; leave it out")

    def modelled(self, space: Mapping[str, Any]) -> list[tuple[str, Domain]]:
        return [
            (name, domain)
            for name, domain in space.items()
            if self.explore == "gp"
            and isinstance(domain, Domain)
            and "lower" in domain.arguments
            and (self.mutate is None or name in self.mutate)
        ]

    def explored(self, space: Mapping[str, Any], configuration: Mapping[str, Any], unit: Unit) -> dict[str, Any]:
        """Return the configuration with each parameter of `mutate` perturbed or drawn anew (Jaderberg et al., 4.1).

        Unlike Ray Tune's, a perturbed value stays within its domain. Where another option of a choice comes with
        parameters of its own, they are drawn.
        """

        def draw(path: Path, domain: Domain) -> Any:
            name = path[-1]
            stays = all(configuration.get(path[at]) == path[at + 1] for at in range(0, len(path) - 1, 2))
            if not stays or name not in configuration:
                return domain.draw(unit(path, "value"))
            value = domain.find(configuration[name])
            if self.mutate is not None and name not in self.mutate:
                return value
            if unit(path, "resample") < self.resample:
                return domain.draw(unit(path, "value"))
            if domain.options:
                return neighbour(domain, value, unit(path, "move"))
            factor = self.perturb[min(int(unit(path, "move") * len(self.perturb)), len(self.perturb) - 1)]
            return scaled(domain, value, factor)

        return configured(space, draw)


def neighbour(domain: Domain, value: Any, u: float) -> Any:
    """Return the option before or after a value, each with probability 1/2; at an end, it may stay."""
    at = domain.index(value.name if isinstance(value, SubSpace) else value) + (1 if u >= 0.5 else -1)
    return domain.options[min(max(at, 0), len(domain.options) - 1)]


def scaled(domain: Domain, value: float, factor: float) -> Any:
    """Return a number of a domain times a factor, within the domain; a whole number or multiple moves by one at least.

    Examples:
        >>> scaled(rubberband.randint(1, 9), 2, 1.2), scaled(rubberband.uniform(0.5, 0.99), 0.9, 1.2)
        (3, 0.99)
    """
    whole, q = DOMAINS[domain.kind].whole, domain.arguments.get("q")
    lower, upper = domain.arguments.get("lower", -math.inf), domain.arguments.get("upper", math.inf)
    moved = value * factor
    if not whole and q is None:
        return min(max(moved, lower), upper)
    step = q or 1
    upper = upper - 1 if whole and q is None else upper
    least = math.ceil(grid_index(lower, step)) if math.isfinite(lower) else -math.inf
    most = math.floor(grid_index(upper, step)) if math.isfinite(upper) else math.inf
    index = grid_index(moved, step)
    count = math.ceil(index) if moved > value else math.floor(index)
    return domain.rounded(step * min(max(count, least), most))
