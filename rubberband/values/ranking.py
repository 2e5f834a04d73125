"""Which of two results is better. Everything that orders results asks this. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
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
    repeats: int = 1
    """Repeats of its configuration that count, with a value of the metric."""
    mean: float | None = None
    """Their mean, which ranks the configuration; None where each configuration is trained once."""
    spread: float | None = None
    """Their standard deviation (of a sample); None of one."""

    @property
    def mean_text(self) -> str:
        """Return `0.953 ± 0.004 of 3`; empty without a mean."""
        if self.mean is None:
            return ""
        spread = "" if self.spread is None else f" \N{PLUS-MINUS SIGN} {self.spread:.2g}"
        return f"{self.mean:.6g}{spread} of {self.repeats}"

    @property
    def note(self) -> str:
        """Return a remark beside the value, such as `, not feasible`; may be empty."""
        mean = f", mean {self.mean_text} repeat{'' if self.repeats == 1 else 's'}" if self.mean is not None else ""
        return mean + (", not feasible" if self.feasible is False else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Order of results by a metric, feasible ones first; those without a finite value of it come last.

    Infeasible ones are ordered by the sum of what they break the limits by, and then by the metric (the rules of Deb
    2000, An efficient constraint handling method for genetic algorithms, section 3, as samplers of Optuna have them).
    """

    metric: str
    mode: Literal["max", "min"]
    limits: tuple[Limit, ...] = ()
    repeats: int = 1
    """Trials of each configuration, whose numbers follow each other; it is ranked by their mean."""

    def merit(self, metrics: Mapping[str, float]) -> Merit:
        """Return the merit of a result's metrics."""
        value = metrics.get(self.metric)
        if value is None or not math.isfinite(value):
            return True, 0.0, 0.0
        return False, math.fsum(self.violations(metrics)), self.signed(value)

    def violations(self, metrics: Mapping[str, float]) -> tuple[float, ...]:
        """Return by how much metrics break each limit."""
        return tuple(limit.violation(metrics) for limit in self.limits)

    def mean(self, reports: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
        """Return the means of the metrics that rank, over the reports of a configuration's repeats.

        Repeats without a finite value of the metric are left out. A metric with a limit has none if a repeat lacks it.
        """
        if len(reports) == 1:
            return reports[0]
        reported, found = [report for report in reports if report], dict[str, float]()
        for metric in (self.metric, *(limit.metric for limit in self.limits)):
            values = [report.get(metric, math.nan) for report in reported]
            known = [value for value in values if math.isfinite(value)]
            if known and (metric == self.metric or len(known) == len(values)):
                found[metric] = fmean(known)
        return found

    def standing(self, metrics: Mapping[str, float], repeats: Sequence[Mapping[str, float]]) -> Standing:
        """Return the standing of a result, for views; `repeats` are the metrics of its configuration's repeats."""
        means = self.mean(repeats)
        feasible = not any(self.violations(means)) if self.limits and metrics else None
        known = [value for one in repeats if math.isfinite(value := one.get(self.metric, math.nan))]
        found = Standing(value=metrics.get(self.metric), feasible=feasible)
        if self.repeats == 1 or not known:
            return found
        spread = stdev(known) if len(known) > 1 else None
        return replace(found, repeats=len(known), mean=means[self.metric], spread=spread)

    def signed(self, value: float) -> float:
        """Return a value of the metric, negated if higher ones are better: the lowest is the best."""
        return -value if self.mode == "max" else value
