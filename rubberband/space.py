"""The search space: Ray Tune's domains, and the configurations drawn from them.

The constructors bear Ray Tune's names and positional arguments (`uniform(0, 1)`, `choice(["a", "b"])`); a bare value is
a constant. Sampling is a pure function of (seed, parameter's name, trial): a trial's configuration depends neither on
the order of the parameters nor on the number of trials, and is the same with every version of Python.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rubberband.domains import (
    DOMAINS,
    Choice,
    Domain,
    Grid,
    LogRandint,
    LogUniform,
    QLogRandint,
    QLogUniform,
    QRandint,
    QRandn,
    QUniform,
    Randint,
    Randn,
    Uniform,
    plain,
)
from rubberband.errors import InputError
from rubberband.units import nearest, shown

SamplerType = Literal["random", "grid"]


def uniform(lower: float, upper: float) -> Uniform:
    """A float between `lower` and `upper`, uniformly."""
    return Uniform(lower=lower, upper=upper)


def quniform(lower: float, upper: float, q: float) -> QUniform:
    """A multiple of `q` from `lower` to `upper`, uniformly."""
    return QUniform(lower=lower, upper=upper, q=q)


def loguniform(lower: float, upper: float, base: float = 10) -> LogUniform:
    """A float between `lower` and `upper`, uniformly in its logarithm (of any base: `base` changes nothing)."""
    return LogUniform(lower=lower, upper=upper, base=base)


def qloguniform(lower: float, upper: float, q: float, base: float = 10) -> QLogUniform:
    """A multiple of `q` from `lower` to `upper`, uniformly in its logarithm."""
    return QLogUniform(lower=lower, upper=upper, q=q, base=base)


def randn(mean: float = 0.0, sd: float = 1.0) -> Randn:
    """A normally distributed float."""
    return Randn(mean=mean, sd=sd)


def qrandn(mean: float, sd: float, q: float) -> QRandn:
    """A normally distributed float, rounded to a multiple of `q`."""
    return QRandn(mean=mean, sd=sd, q=q)


def randint(lower: int, upper: int) -> Randint:
    """A whole number from `lower` to `upper - 1`, uniformly."""
    return Randint(lower=lower, upper=upper)


def lograndint(lower: int, upper: int, base: float = 10) -> LogRandint:
    """A whole number from `lower` to `upper - 1`, uniformly in its logarithm."""
    return LogRandint(lower=lower, upper=upper, base=base)


def qrandint(lower: int, upper: int, q: int = 1) -> QRandint:
    """A multiple of `q` from `lower` to `upper` (included), uniformly."""
    return QRandint(lower=lower, upper=upper, q=q)


def qlograndint(lower: int, upper: int, q: int, base: float = 10) -> QLogRandint:
    """A multiple of `q` from `lower` to `upper` (included), uniformly in its logarithm."""
    return QLogRandint(lower=lower, upper=upper, q=q, base=base)


def choice(categories: Sequence[Any]) -> Choice:
    """One of `categories`, each as likely as the next."""
    return Choice(values=categories)


def grid_search(values: Sequence[Any]) -> Grid:
    """Every one of `values`, under the grid sampler."""
    return Grid(values=values)


def parse(value: object) -> Any:
    """A parameter of the search space: a domain, a mapping with a `type`, or a constant.

    Raises InputError for an unknown type, missing, unknown or wrong arguments, and constants that JSON does not hold.
    """
    if isinstance(value, tuple(DOMAINS.values())):
        return value
    if not isinstance(value, Mapping):
        return plain(value)
    words = dict(value)
    kind = words.pop("type", None)
    domain_type = DOMAINS.get(kind) if isinstance(kind, str) else None
    if domain_type is None:
        raise InputError(
            f"type {shown(kind)} is not a kind of parameter; {nearest(str(kind), DOMAINS)}"
            if kind is not None
            else f"{shown(value)} has no type; add one of {', '.join(DOMAINS)}"
        )
    return domain_type.from_words(words)


def sample(space: Mapping[str, Any], sampler: SamplerType, num_samples: int, seed: int) -> list[dict[str, Any]]:
    """The configurations of trials 0 … num_samples - 1, in that order; the same for the same arguments, for ever.

    `random` draws each parameter from its own stream. `grid` is the cross product of the choices and grids in the order
    of `space`, the last parameter varying fastest; it needs `num_samples` to be the size of the grid.

    Raises InputError as `check` does.
    """
    check(space, sampler, num_samples)
    if sampler == "grid":
        rows = itertools.product(*(_grid_values(value) for value in space.values()))
        return [dict(zip(space, row, strict=True)) for row in rows]
    return [
        {
            name: value.draw(_unit(seed, name, trial)) if isinstance(value, Domain) else value
            for name, value in space.items()
        }
        for trial in range(num_samples)
    ]


def check(space: Mapping[str, Any], sampler: SamplerType, num_samples: int) -> None:
    """Refuse, with InputError, a space that `sampler` cannot draw `num_samples` configurations from."""
    if sampler == "random":
        for name, value in space.items():
            if isinstance(value, Grid):
                raise InputError(f"space.{name} is a grid, which the random sampler does not walk; make it a choice")
        return
    for name, value in space.items():
        if isinstance(value, Domain) and not isinstance(value, Choice | Grid):
            raise InputError(
                f"space.{name} has no grid ({value.kind}); list its values as {{type: grid, values: [...]}}"
            )
    size = math.prod(len(_grid_values(value)) for value in space.values())
    if size != num_samples:
        fate = f"{size - num_samples} would be dropped" if size > num_samples else "some would be trained twice"
        raise InputError(
            f"the grid has {size} configurations and the scheduler starts {num_samples} trials: {fate}; set "
            f"num_samples to {size} (or the trials of the first stage), or use the random sampler"
        )


def to_words(value: Any) -> Any:
    """A parameter as an experiment file writes it; `parse` reads it back."""
    return value.to_words() if isinstance(value, Domain) else value


def _grid_values(value: Any) -> Sequence[Any]:
    return value.values if isinstance(value, Choice | Grid) else (value,)


def _unit(seed: int, name: str, trial: int) -> float:
    """A float in (0, 1) with 52 bits, by hashing: no library's generator, so no library's release alters it."""
    key = json.dumps([seed, name, trial]).encode()
    return ((int.from_bytes(hashlib.sha256(key).digest()[:8], "big") >> 12) + 0.5) * 2.0**-52
