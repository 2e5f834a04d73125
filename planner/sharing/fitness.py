"""Pollux's policy: the power mean of speed-ups over the fair share (OSDI '21, §4.2), maximised exactly.

For a fixed p the mean is largest where a sum over the jobs is, so a table of speed-ups and `divide` replace the paper's
genetic search.
"""

from __future__ import annotations

import numpy as np

from rubberband.planner.sharing.demand import Bools, Floats, Ints, Table

_HALVINGS = 60
"""Steps of the search for the price: the interval ends at rounding errors."""


def divide(values: Floats, gpus: int) -> Ints:
    """Return (J,) counts that add up to at most `gpus`, with the largest sum of `values`.

    `values` is (J, gpus + 1), finite, or -inf where a demand cannot have that number; at least one division must exist.
    GPUs that add nothing are left over.

    Values need not be concave: keeping one's GPUs may be worth more than one GPU more or less. A price per GPU bounds
    the sum from above (Lagrangian relaxation) and leaves few counts per demand that could still be best; a dynamic
    program over the GPUs decides among those.
    """
    if not len(values):
        return np.zeros(0, dtype=np.int64)
    price, counts = _priced(values, gpus)
    counts = _filled(values, counts, gpus)
    reduced = values - price * np.arange(gpus + 1)
    best = np.max(reduced, axis=1)
    rows = np.arange(len(values))
    gap = price * gpus + float(best.sum()) - float(values[rows, counts].sum())
    if gap <= 1e-12 * max(1.0, abs(float(best.sum()))):
        return counts
    open_counts = reduced >= (best - gap - 1e-12 * (1.0 + np.abs(best)))[:, None]
    return _exact(values, open_counts, gpus)


def _priced(values: Floats, gpus: int) -> tuple[float, Ints]:
    """Return the price at which the demands take as many GPUs as there are, or the fewest more; and what fits."""
    sizes = np.arange(gpus + 1)
    finite = np.where(np.isfinite(values), values, np.nan)
    spread = float(np.nanmax(finite) - np.nanmin(finite))
    low, high = 0.0, spread + 1.0
    counts = np.argmax(values, axis=1)
    if counts.sum() <= gpus:
        return 0.0, counts
    for _ in range(_HALVINGS):
        price = (low + high) / 2.0
        tried = np.argmax(values - price * sizes, axis=1)
        if tried.sum() <= gpus:
            high, counts = price, tried
        else:
            low = price
        if tried.sum() == gpus or high - low <= 1e-15 * spread:
            break
    return high, counts


def _filled(values: Floats, counts: Ints, gpus: int) -> Ints:
    """Spend what is left, each time where a GPU adds most."""
    counts, rows = np.array(counts), np.arange(len(values))
    free = gpus - int(counts.sum())
    while free > 0:
        more = np.minimum(counts[:, None] + np.arange(1, free + 1), gpus)
        added = values[rows[:, None], more] - values[rows, counts][:, None]
        rates = np.where(more > counts[:, None], added / np.arange(1, free + 1), -np.inf)
        row, step = np.unravel_index(int(np.argmax(rates)), rates.shape)
        if not rates[row, step] > 0.0:
            break
        counts[row] += step + 1
        free -= int(step) + 1
    return counts


def _exact(values: Floats, open_counts: Bools, gpus: int) -> Ints:
    """Dynamic program over the GPUs, among the counts that are open."""
    rows = np.arange(len(values))
    counts: Ints = np.argmax(open_counts, axis=1)
    choices = np.flatnonzero(open_counts.sum(axis=1) > 1)
    room = gpus - int(counts[np.setdiff1d(rows, choices)].sum())
    total = np.full(room + 1, 0.0)
    taken = np.zeros((len(choices), room + 1), dtype=np.int32)
    for number, row in enumerate(choices):
        best = np.full(room + 1, -np.inf)
        for count in np.flatnonzero(open_counts[row, : room + 1]):
            reached = total[: room + 1 - count] + values[row, count]
            better = reached > best[count:]
            best[count:][better] = reached[better]
            taken[number, count:][better] = count
        total = best
    left = room
    for number in range(len(choices) - 1, -1, -1):
        counts[choices[number]] = taken[number, left]
        left -= int(taken[number, left])
    return counts


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
