"""Which of two results is better. Everything that orders results asks this. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Merit = tuple[bool, float]
"""Merit of a result: the lowest one is the best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Order of results by a metric; those without a finite value of it come last."""

    metric: str
    mode: Literal["max", "min"]

    def merit(self, metrics: Mapping[str, float]) -> Merit:
        """Return the merit of a result's metrics."""
        value = metrics.get(self.metric)
        if value is None or not math.isfinite(value):
            return True, 0.0
        return False, self.signed(value)

    def signed(self, value: float) -> float:
        """Return a value of the metric, negated if higher ones are better: the lowest is the best."""
        return -value if self.mode == "max" else value
