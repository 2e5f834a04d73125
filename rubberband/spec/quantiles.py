"""Quantiles of the distributions of a search space: the value at a number in (0, 1). Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from statistics import NormalDist
from typing import Any


def between(u: float, lower: float, upper: float) -> float:
    """Return a number of a uniform distribution."""
    return min(max(lower * (1.0 - u) + upper * u, lower), upper) + 0.0


def log_between(u: float, lower: float, upper: float, base: float = 10) -> float:
    """Return a number whose logarithm is of a uniform distribution."""
    return min(max(math.exp(between(u, math.log(lower), math.log(upper))), lower), upper) + 0.0


def normal(u: float, mean: float, sd: float) -> float:
    """Return a number of a normal distribution."""
    return NormalDist(mean, sd).inv_cdf(u)


def multiple(value: float, q: float, lower: float = -math.inf, upper: float = math.inf) -> float:
    """Return the multiple of `q` nearest to `value` within the bounds, as the decimal number that people mean by it."""
    count = round(value / q)
    if math.isfinite(lower):
        count = max(math.ceil(grid_index(lower, q)), min(count, math.floor(grid_index(upper, q))))
    return float(count * Decimal(repr(q)))


def grid_index(value: float, q: float) -> float:
    """Return how often `q` is in the value: a whole number for a multiple of `q`, although 0.3 / 0.1 is none."""
    count = value / q
    return float(round(count)) if math.isclose(count, round(count), rel_tol=1e-13, abs_tol=1e-9) else count


def whole(u: float, lower: int, upper: int) -> int:
    """Return a whole number below `upper`, each as likely as the next."""
    return min(lower + math.floor(u * (upper - lower)), upper - 1)


def whole_log(u: float, lower: int, upper: int, base: float) -> int:
    """Return a whole number below `upper`, uniformly in its logarithm."""
    return max(lower, min(math.floor(log_between(u, lower, upper)), upper - 1))


def whole_multiple(u: float, lower: int, upper: int, q: int) -> int:
    """Return a multiple of `q` up to `upper`, each as likely as the next."""
    return q * whole(u, -(-lower // q), upper // q + 1)


def whole_log_multiple(u: float, lower: int, upper: int, q: int, base: float) -> int:
    """Return a multiple of `q` up to `upper`, uniformly in its logarithm."""
    return q * max(-(-lower // q), min(round(log_between(u, lower, upper) / q), upper // q))


def one_of(u: float, values: Sequence[Any]) -> Any:
    """Return one of the values, each as likely as the next."""
    return values[whole(u, 0, len(values))]
