"""Policies by rules of thumb: the largest relative gain, and KNEE and HELL of Lin et al. (asynchronous SGD, §IV).

KNEE and HELL give each demand the GPUs w that the demand itself finds best, whoever else is there, so a pool under
them is stable only while the load stays below the efficiency S(1) / (w S(w)) at that w: on the paper's four models at
about .77 for HELL, .65 for KNEE(.01), .86 for KNEE(.05).
"""

from __future__ import annotations

import heapq
from typing import Literal

import numpy as np

from rubberband.planner.sharing.demand import Floats, Ints, Table

Resizing = Literal["malleable", "moldable"]
"""Whether the GPUs of a demand may change after its start. A moldable one can still be paused."""

_MOST_PROGRESS = 0.9
"""Progress beyond which `gamma` delays a demand no further: it would starve near its end."""


def gain(table: Table) -> Ints:
    """MREL: one GPU each in order of arrival, then more where each GPU shortens the time left by the largest share."""
    gpus = table.floor.copy()
    free = table.gpus - int(gpus.sum())
    queue: list[tuple[float, int, int, int]] = []
    for turn, row in enumerate(table.by_arrival()):
        if found := _best_step(table.seconds[row, : table.most[row] + 1], int(gpus[row])):
            heapq.heappush(queue, (-found[0], turn, row, found[1]))
    while free > 0 and queue:
        _, turn, row, step = heapq.heappop(queue)
        if step > free:
            continue
        gpus[row] += step
        free -= step
        if found := _best_step(table.seconds[row, : table.most[row] + 1], int(gpus[row])):
            heapq.heappush(queue, (-found[0], turn, row, found[1]))
    return gpus


def _best_step(seconds: Floats, gpus: int) -> tuple[float, int] | None:
    """Return the largest relative gain per GPU beyond `gpus` and its number of GPUs; None if none helps."""
    after = seconds[gpus + 1 :]
    if not len(after) or not np.isfinite(after[-1]):
        return None
    if not np.isfinite(seconds[gpus]):
        return 1.0, int(np.argmax(np.isfinite(after))) + 1
    rates = (1.0 - after / max(float(seconds[gpus]), 1e-300)) / np.arange(1, len(after) + 1)
    best = int(np.argmax(rates))
    return (float(rates[best]), best + 1) if rates[best] > 0.0 else None


def knee(table: Table, *, alpha: float = 0.01, resizing: Resizing = "malleable") -> Ints:
    """KNEE(alpha): to each, the fewest GPUs beyond which one more shortens it by less than alpha; shortest first.

    w = min{w : d(w) >= alpha, d(w + 1) < alpha} with d(w) = (S(w - 1) - S(w)) / S(w - 1). The paper defines d with the
    opposite sign, with which no w qualifies.
    """
    seconds = table.seconds
    with np.errstate(invalid="ignore"):
        shorter = 1.0 - seconds[:, 1:] / seconds[:, :-1]
    shorter = np.where(np.isfinite(seconds[:, :-1]), shorter, np.isfinite(seconds[:, 1:]))
    stops = (shorter >= alpha) & np.append(shorter[:, 1:] < alpha, np.ones((len(seconds), 1), dtype=np.bool_), axis=1)
    wanted = np.where(stops.any(axis=1), np.argmax(stops, axis=1) + 1, 0)
    counts = np.minimum(wanted[:, None], np.arange(table.gpus + 1))
    return _shortest_first(table, counts, np.take_along_axis(seconds, counts, axis=1), resizing)


def hell(table: Table, *, gamma: float = 0.0, resizing: Resizing = "malleable") -> Ints:
    """HELL: to each, the GPUs with the least S(w) / E(w) = w S(w)^2 / S(1); the least of these first.

    `gamma` above 0 puts demands with little progress first (§VI): times are multiplied by (1 / (1 - progress))^gamma.
    """
    late = (1.0 - np.minimum(table.values("progress"), _MOST_PROGRESS)) ** -gamma
    single_s = np.maximum(table.single_s(), 1e-300)
    with np.errstate(invalid="ignore"):
        scores = np.arange(table.gpus + 1) * table.seconds**2 / single_s[:, None] * late[:, None]
    scores = np.where(np.isfinite(table.seconds), scores, np.inf)
    lowest = np.minimum.accumulate(scores, axis=1)
    better = np.append(np.zeros((len(scores), 1), dtype=np.bool_), scores[:, 1:] < lowest[:, :-1], axis=1)
    counts = np.maximum.accumulate(np.where(better, np.arange(table.gpus + 1), 0), axis=1)
    return _shortest_first(table, counts, lowest, resizing)


def _shortest_first(table: Table, counts: Ints, scores: Floats, resizing: Resizing) -> Ints:
    """Serve the least score first (Algorithms 1 and 2): `counts` and `scores` are (J, W + 1), by the GPUs W left."""
    gpus = table.floor.copy()
    free = table.gpus - int(gpus.sum())
    rows = np.arange(len(gpus))
    if resizing == "moldable":
        started = np.asarray([demand.started_gpus for demand in table.demands], dtype=np.int64)
        fixed = np.where(started > 0, started, counts[:, -1])
        order = np.lexsort((rows, scores[:, -1]))
        for row in order[np.isfinite(scores[order, -1])].tolist():
            extra = int(fixed[row] - gpus[row])
            if 0 < extra <= free:
                gpus[row] += extra
                free -= extra
        return gpus
    waiting = np.ones(len(gpus), dtype=np.bool_)
    while free > 0 and waiting.any():
        room = np.minimum(gpus + free, table.gpus)
        now = np.where(waiting, scores[rows, room], np.inf)
        row = int(np.argmin(now))
        if not np.isfinite(now[row]):
            break
        count = max(int(gpus[row]), int(counts[row, room[row]]))
        free -= count - int(gpus[row])
        gpus[row] = count
        waiting[row] = False
    return _filled(table, gpus, free)


def _filled(table: Table, gpus: Ints, free: int) -> Ints:
    """Give what is left, the fewest GPUs at a time, to whoever thereby ends before all others would (eq. 5)."""
    rows = np.arange(len(gpus))
    while free > 0 and len(gpus):
        first_s = table.seconds[rows, gpus].min()
        reach = np.minimum(gpus + free, table.gpus)
        able = np.flatnonzero(table.seconds[rows, reach] < first_s)
        if not len(able):
            break
        needed = [int(np.argmax(table.seconds[row, gpus[row] :] < first_s)) for row in able]
        best = int(np.argmin(needed))
        gpus[able[best]] += needed[best]
        free -= needed[best]
    return gpus
