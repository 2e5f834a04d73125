"""The workers of a gang on virtual instances, some of which are slow: the time of a balanced step, and its shares.

A worker needs time in proportion to its samples, so that a balanced gang is as fast as its workers together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import median_low

from rubberband.values.balance import BalanceUse

SAMPLES = 64
"""Samples of one worker in a step with equal shares."""
STEPS = 50
"""Steps of an iteration."""
STRAGGLES = 4.0
"""A worker that is slower than the median by this factor is reported as a straggler."""


def balanced_factor(paces: Sequence[float]) -> float:
    """Return how many times longer a balanced step takes than on even workers; `paces` are the workers' own factors."""
    return len(paces) / math.fsum(1.0 / pace for pace in paces)


def balance_use(paces: Sequence[float], even_s: float) -> BalanceUse | None:
    """Return what a balanced gang reports of an iteration that takes `even_s` on even workers; None on even workers."""
    if len(set(paces)) <= 1:
        return None
    speeds = [1.0 / pace for pace in paces]
    batch, step_s = SAMPLES * len(paces), balanced_factor(paces) * even_s / STEPS
    reached = [round(batch * math.fsum(speeds[:rank]) / math.fsum(speeds)) for rank in range(len(paces) + 1)]
    usual = median_low(paces)
    return BalanceUse(
        shares=tuple(after - before for before, after in itertools.pairwise(reached)),
        compute_s=(step_s,) * len(paces),
        step_s=step_s,
        equal_step_s=max(paces) * even_s / STEPS,
        steps=STEPS,
        stragglers=tuple(rank for rank, pace in enumerate(paces) if pace >= STRAGGLES * usual),
    )
