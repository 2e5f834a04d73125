"""Which of two results is better. Everything that orders results asks this. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Merit = tuple[bool, float, float]
"""Merit of a result: the lowest one is the best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Limit that a result has to keep to be feasible."""

    metric: str
    at_most: float | None = None
    at_least: float | None = None

    def violation(self, metrics: Mapping[str, float]) -> float:
        """Return by how much metrics break it, as a share of the limit; inf if they lack a finite value."""
        value = metrics.get(self.metric)
        if value is None or not math.isfinite(value):
            return math.inf
        over = 0.0 if self.at_most is None else max(0.0, value - self.at_most) / (abs(self.at_most) or 1.0)
        under = 0.0 if self.at_least is None else max(0.0, self.at_least - value) / (abs(self.at_least) or 1.0)
        return max(over, under)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Value of a result in the ranking, and whether it is feasible."""

    value: float | None
    """The metric; None if it is not in the latest report."""
    feasible: bool | None = None
    """Whether it keeps all limits; None without limits, and before its first report."""

    @property
    def note(self) -> str:
        """Return a remark beside the value, such as `, not feasible`; may be empty."""
        return ", not feasible" if self.feasible is False else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Order of results by a metric, feasible ones first; those without a finite value of it come last.

    Infeasible ones are ordered by the sum of what they break the limits by, and then by the metric (the rules of Deb
    2000, An efficient constraint handling method for genetic algorithms, section 3, as samplers of Optuna have them).
    """

    metric: str
    mode: Literal["max", "min"]
    limits: tuple[Limit, ...] = ()

    def merit(self, metrics: Mapping[str, float]) -> Merit:
        """Return the merit of a result's metrics."""
        value = metrics.get(self.metric)
        if value is None or not math.isfinite(value):
            return True, 0.0, 0.0
        return False, math.fsum(self.violations(metrics)), self.signed(value)

    def violations(self, metrics: Mapping[str, float]) -> tuple[float, ...]:
        """Return by how much metrics break each limit."""
        return tuple(limit.violation(metrics) for limit in self.limits)

    def standing(self, metrics: Mapping[str, float]) -> Standing:
        """Return the standing of a result, for views."""
        feasible = not any(self.violations(metrics)) if self.limits and metrics else None
        return Standing(value=metrics.get(self.metric), feasible=feasible)

    def signed(self, value: float) -> float:
        """Return a value of the metric, negated if higher ones are better: the lowest is the best."""
        return -value if self.mode == "max" else value
