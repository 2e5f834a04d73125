"""What a few measured values are taken to show, beside what was expected: as much as chance does not explain. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

WITHIN_NOISE = 0.03
"""A smaller deviation is left alone."""
SMALLEST_DELAY_S = 0.1
"""Likewise, of delays."""


def shrunk(ratios: Sequence[float], cv: float, least: float) -> float:
    """Return the factor that the ratios are taken to show; 1 if it deviates by no more than `least`.

    `cv` is how much the ratios vary, as far as that is known: if they show that they vary more, they do.
    """
    middle = median(ratios)
    spread = 1.4826 * median(abs(ratio - middle) for ratio in ratios) / middle if middle else 0.0
    deviation = middle * math.hypot(1.0, spread) - 1.0
    error = max(spread, cv) / math.sqrt(len(ratios))
    if abs(deviation) <= max(least, error):
        return 1.0
    factor = 1.0 + deviation * (1.0 - (error / deviation) ** 2)
    return factor if abs(factor - 1.0) > least else 1.0


def settled(expected_s: float, seen_s: Sequence[float], cv: float) -> float:
    """Return the delay to expect, from the one expected before and those that were seen."""
    if not seen_s:
        return expected_s
    if expected_s == 0.0:
        return median(seen_s) if median(seen_s) > SMALLEST_DELAY_S else 0.0
    least = max(WITHIN_NOISE, SMALLEST_DELAY_S / expected_s)
    return expected_s * shrunk([seen / expected_s for seen in seen_s], cv, least)
