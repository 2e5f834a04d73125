"""Ray Tune's PopulationBasedTraining and PB2 in the words of the scheduler `pbt`, taken over or refused by name."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import numpy as np

from rubberband.errors import InputError
from rubberband.spec.space import DOMAINS, Domain, choice, foreign, randint, uniform
from rubberband.units import shown


def population_of(
    scheduler: Any, space: dict[str, Any], points: list[dict[str, Any]], trials: int | str, iterations: int | None
) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]], list[str]]:
    """Return the words of the scheduler, the space, the first points, and lines to show before the run.

    `iterations` are the most of a trial. Raises InputError for a word without a counterpart.
    """
    every, mutations, kind = scheduler._perturbation_interval, scheduler._hyperparam_mutations, type(scheduler).__name__
    if scheduler._time_attr != "training_iteration":
        raise InputError(
            f"{kind}(time_attr={scheduler._time_attr!r}): generations are counted in iterations; write "
            "time_attr='training_iteration'"
        )
    if scheduler._custom_explore_fn is not None:
        raise InputError(f"{kind}(custom_explore_fn=...) has no counterpart; compute such a value in the trial")
    if scheduler._burn_in_period > every:
        raise InputError(
            f"{kind}(burn_in_period={scheduler._burn_in_period:g}) has no counterpart beyond perturbation_interval="
            f"{every:g}; raise that, or leave it out"
        )
    if trials == "auto" or iterations is None:
        missing = "TuneConfig(num_samples=8)" if trials == "auto" else "RunConfig(stop={'training_iteration': N})"
        raise InputError(f"{kind}: nothing says how large the search is; add {missing}")
    if every != int(every) or iterations % every:
        below = iterations // every * every
        raise InputError(
            f"{kind}: {iterations} iterations are no multiple of perturbation_interval={every:g}; write "
            f"RunConfig(stop={{'training_iteration': {below + every:g}}})"
        )
    if kind == "PB2":
        domains = {name: _between(name, value, space.get(name)) for name, value in mutations.items()}
    else:
        domains = {name: _domain(name, value) for name, value in mutations.items()}
    notes = _notes(scheduler, space, domains)
    constants = {name: space[name] for name in domains if name in space and not _is_domain(space[name])}
    first = [{**constants, **(points[at] if at < len(points) else {})} for at in range(int(trials))]
    words = {
        "type": "pbt",
        "population": trials,
        "generations": iterations // int(every),
        "iterations": int(every),
        "quantile": scheduler._quantile_fraction,
        "perturb": sorted(scheduler._perturbation_factors),
        "resample": float(scheduler._resample_probability),
        "mutate": list(domains),
        **({"explore": "gp"} if kind == "PB2" else {}),
    }
    return words, {**space, **domains}, first if constants else points, notes


def _notes(scheduler: Any, space: Mapping[str, Any], domains: Mapping[str, Domain]) -> list[str]:
    notes, kind = [], type(scheduler).__name__
    given = "hyperparam_bounds" if kind == "PB2" else "hyperparam_mutations"
    if not scheduler._synch:
        notes.append(f"{kind}: trials wait for each other at the end of each generation, as with synch=True")
    for name, domain in domains.items():
        own = foreign(space[name]) if name in space and not isinstance(space[name], Domain) else space.get(name)
        if isinstance(own, Domain) and own != domain:
            notes.append(f"{name} is drawn from {given} also at first: {domain!r} instead of {own!r}")
    return notes


def _between(name: str, bounds: Any, own: Any) -> Domain:
    """Return the domain of a parameter of PB2: whole numbers where the space has them. Raises InputError."""
    if not isinstance(bounds, list | tuple) or len(bounds) != 2:
        raise InputError(f"PB2(hyperparam_bounds={{{name!r}: ...}}) is {shown(bounds)}; write [lowest, highest]")
    found = own if isinstance(own, Domain) else foreign(own)
    if isinstance(own, int) or (found is not None and DOMAINS[found.kind].whole):
        return randint(int(bounds[0]), int(bounds[1]) + 1)
    return uniform(float(bounds[0]), float(bounds[1]))


def _is_domain(value: Any) -> bool:
    return isinstance(value, Domain) or foreign(value) is not None


def _domain(name: str, mutation: Any) -> Domain:
    """Return the domain of a mutation. Raises InputError for one that cannot be known."""
    where = f"PopulationBasedTraining(hyperparam_mutations={{{name!r}: ...}})"
    if isinstance(mutation, Domain):
        return mutation
    if isinstance(mutation, list | tuple):
        return choice(list(mutation))
    if isinstance(mutation, Mapping):
        raise InputError(f"{where} is a mapping of its own; write its parameters side by side")
    if (found := foreign(mutation)) is not None:
        return found
    traced = _traced(mutation) if callable(mutation) else None
    if traced is None:
        raise InputError(f"{where} is {shown(mutation)}; write a domain, such as tune.uniform(0.0001, 0.02)")
    return traced


_KNOWN: Mapping[tuple[Any, str], Callable[..., Domain]] = {
    (random, "uniform"): uniform,
    (random, "randint"): lambda low, high: randint(low, high + 1),
    (random, "choice"): lambda values: choice(list(values)),
    (np.random, "uniform"): uniform,
    (np.random, "choice"): lambda values: choice(list(values)),
    (np.random, "randint"): randint,
}
"""Functions that draw one value -> the domain for the same arguments."""


def _traced(function: Callable[[], Any]) -> Domain | None:
    """Return the domain of a function that returns one draw, as `lambda: random.uniform(0.1, 0.2)`; None for others."""
    drawn: list[tuple[object, Domain]] = []

    def recorder(make: Callable[..., Domain]) -> Callable[..., object]:
        def record(*arguments: Any) -> object:
            drawn.append((object(), make(*arguments)))
            return drawn[-1][0]

        return record

    patches = [mock.patch.object(module, name, recorder(make)) for (module, name), make in _KNOWN.items()]
    try:
        for patch in patches:
            patch.start()
        returned = function()
    except Exception:
        return None
    finally:
        for patch in patches:
            patch.stop()
    return next((domain for value, domain in drawn if value is returned), None)
