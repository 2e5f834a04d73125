"""Pollux's policy: the power mean of speed-ups over the fair share (OSDI '21, §4.2), maximised exactly.

For a fixed p the mean is largest where a sum over the jobs is, so a table of speed-ups and `divide` replace the paper's
genetic search.
"""

from __future__ import annotations

import numpy as np

from rubberband.planner.sharing.division import divide
from rubberband.planner.sharing.table import Floats, Ints, Table

_LEAST_SPEEDUP = 4e-3
"""Added to every speed-up, so that a job without GPUs has a finite value for p <= 0."""

_MOST_WEIGHT = 5.0
"""Most that the work left multiplies or divides a demand's weight by."""


def fitness(table: Table, *, p: float = -1.0, shortest: float = 0.0) -> Ints:
    """Maximise FITNESS_p (eq. 14); p = 1 is the sum of speed-ups, p -> -inf the least of them.

    `shortest` above 0 weighs each demand by (median of all work left / its work left)^shortest, the work in seconds on
    one GPU: demands that end soon free their GPUs for the others. The weights stay between 1/5 and 5, so that long ones
    do not starve.
    """
    if not len(table.demands):
        return np.zeros(0, dtype=np.int64)
    speedups = table.speedups() * reallocation_factors(table) + _LEAST_SPEEDUP
    gains = np.log(speedups) if p == 0.0 else np.sign(p) * speedups**p
    work_s = np.maximum(table.single_s(), 1e-9)
    soon = np.clip((np.median(work_s) / work_s) ** shortest, 1.0 / _MOST_WEIGHT, _MOST_WEIGHT)
    values = (table.values("weight") * soon)[:, None] * gains
    return divide(table.allowed(values), table.gpus)


def reallocation_factors(table: Table) -> Floats:
    """(J, G + 1) REALLOC_FACTOR = (T - R delta) / (T + delta) where the number of GPUs changes, 1 where it does not.

    T is the age and R the number of changes so far. A start is no change.
    """
    age, delta = table.now_s - table.values("arrived_at"), table.values("delta_s")
    factors = np.maximum(age - table.values("moves") * delta, 0.0) / np.maximum(age + delta, 1e-9)
    begins = (table.current == 0) & (table.values("attained_gpu_s") == 0.0)
    changed = np.where(begins | (delta == 0.0), 1.0, factors)
    found = np.repeat(changed[:, None], table.gpus + 1, axis=1)
    found[np.arange(len(factors)), np.minimum(table.current, table.gpus)] = 1.0
    return found
