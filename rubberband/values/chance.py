"""How a quantity varies about its mean: plain values. Drawing from them is `rubberband.planner.sampling`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Law = Literal["lognormal", "normal"]
"""Of the time of an iteration: lognormal, or (for the paper's Figure 9) normal and cut off at zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A factor with mean 1: fixed, lognormal with a coefficient of variation, or measured values."""

    cv: float = 0.0
    """Coefficient of variation of the lognormal law; 0 where there are `samples`."""
    samples: tuple[float, ...] = ()
    """Measured values over their mean, each as likely as the others."""

    @property
    def certain(self) -> bool:
        """Whether nothing varies."""
        return self.cv == 0.0 and len(set(self.samples)) <= 1


FIXED = Spread()


def measured(values_s: Sequence[float]) -> tuple[float, Spread]:
    """The mean of measured values and their spread about it; values are not negative, and at least one is given."""
    mean_s = math.fsum(values_s) / len(values_s)
    if mean_s == 0.0 or len(values_s) == 1:
        return mean_s, FIXED
    return mean_s, Spread(samples=tuple(value_s / mean_s for value_s in values_s))
