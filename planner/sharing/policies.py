"""Policies that divide a pool: Pollux's fitness, simple ones, Tiresias and Optimus, the largest gain, KNEE and HELL.

KNEE and HELL are those of Lin et al. (asynchronous SGD, §IV). They give each demand the GPUs w that the demand itself
finds best, whoever else is there, so a pool under them is stable only while the load stays below the efficiency S(1) /
(w S(w)) at that w: on the paper's four models at about .77 for HELL, .65 for KNEE(.01), .86 for KNEE(.05).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rubberband.planner.sharing.demand import Allotments, Bools, Capacity, Demand, Floats, Ints, Table

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
    counts = _refilled(values, counts, gpus)
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


def _refilled(values: Floats, counts: Ints, gpus: int) -> Ints:
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

    For a fixed p the mean is largest where a sum over the jobs is, so a table of speed-ups and `divide` replace the
    paper's genetic search.
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


def fifo(table: Table) -> Ints:
    """Give each demand as many GPUs as help it, in order of arrival; a later one may overtake one that needs more."""
    return _one_by_one(table, table.by_arrival())


def equal(table: Table) -> Ints:
    """EQUI: raise the smallest share per weight first, earlier arrivals first, as far as each can use GPUs."""
    gpus = table.floor.copy()
    free = table.gpus - int(gpus.sum())
    queue = [(gpus[row] / table.demands[row].weight, turn, row) for turn, row in enumerate(table.by_arrival())]
    heapq.heapify(queue)
    while free > 0 and queue:
        _, turn, row = heapq.heappop(queue)
        step = max(1, table.demands[row].min_gpus - int(gpus[row]))
        if gpus[row] >= table.most[row] or step > free:
            continue
        gpus[row] += step
        free -= step
        heapq.heappush(queue, (gpus[row] / table.demands[row].weight, turn, row))
    return gpus


def srpt(table: Table) -> Ints:
    """SRPT: all GPUs that help to the demand with the least work left, then to the next (Lin et al., §V-B)."""
    return _one_by_one(table, np.argsort(table.single_s(), kind="stable").tolist())


def _one_by_one(table: Table, rows: Sequence[int]) -> Ints:
    """Give each demand in turn as many GPUs as help it, if these are at least its fewest."""
    gpus = table.floor.copy()
    free = table.gpus - int(gpus.sum())
    for row in rows:
        wanted = min(int(table.most[row]), int(gpus[row]) + free)
        if wanted > gpus[row] and wanted >= table.demands[row].min_gpus:
            free -= wanted - int(gpus[row])
            gpus[row] = wanted
    return gpus


QUEUE_GPU_S = 16 * 3600.0
"""GPU seconds after which Tiresias moves a job to its second queue (tuned for Pollux's workload)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiresias:
    """Two-queue least attained service for rigid jobs (Gu et al., NSDI '19), without promotion.

    Jobs of the second queue wait for those of the first; within a queue they run in order of arrival. Each takes its
    `min_gpus` or nothing.

    Both know no promises. They put the GPUs of a gang on the instances with the most free GPUs first, and let gangs
    share instances.
    """

    threshold_gpu_s: float = QUEUE_GPU_S

    def allot(
        self, demands: Sequence[Demand], capacity: Capacity, current: Allotments, now_s: float
    ) -> dict[str, dict[int, int]]:
        """Return the GPUs of the jobs that run."""
        free = capacity.gpus
        running: dict[str, int] = {}
        for demand in sorted(demands, key=lambda each: each.attained_gpu_s >= self.threshold_gpu_s):
            if demand.min_gpus <= free:
                running[demand.name] = demand.min_gpus
                free -= demand.min_gpus
        return _spread(running, capacity, current)


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimus:
    """Marginal gains in seconds left (Peng et al., EuroSys '18); given true times it is Pollux's Optimus+Oracle.

    Every job gets its least GPUs, in order; then each GPU goes where it saves the most seconds, until none is saved.
    """

    def allot(
        self, demands: Sequence[Demand], capacity: Capacity, current: Allotments, now_s: float
    ) -> dict[str, dict[int, int]]:
        """Return the GPUs of every job."""
        by_name = {demand.name: demand for demand in demands}
        gpus: dict[str, int] = {}
        for demand in demands:
            if demand.min_gpus <= capacity.gpus - sum(gpus.values()):
                gpus[demand.name] = demand.min_gpus
        saved = {name: _saved_s(by_name[name], count) for name, count in gpus.items()}
        for _ in range(capacity.gpus - sum(gpus.values())):
            name = max(saved, key=lambda name: saved[name], default=None)
            if name is None or saved[name] <= 0.0:
                break
            gpus[name] += 1
            saved[name] = _saved_s(by_name[name], gpus[name])
        return _spread(dict(sorted(gpus.items(), key=lambda item: item[1])), capacity, current)


def _saved_s(demand: Demand, gpus: int) -> float:
    """Return the seconds that one more GPU saves; 0 beyond the most."""
    return demand.seconds_left[gpus - 1] - demand.seconds_left[gpus] if gpus < demand.most_gpus else 0.0


def _spread(gpus: Mapping[str, int], capacity: Capacity, current: Allotments) -> dict[str, dict[int, int]]:
    """Place the gangs in order; one that keeps its number of GPUs stays."""
    free = [capacity.gpus_per_instance] * capacity.instances
    found = {name: dict(current[name]) for name, count in gpus.items() if sum(current.get(name, {}).values()) == count}
    for where in found.values():
        for number, count in where.items():
            free[number] -= count
    for name, count in gpus.items():
        if name in found:
            continue
        found[name] = {}
        while count:
            number = free.index(max(free))
            found[name][number] = min(count, free[number])
            count -= found[name][number]
            free[number] -= found[name][number]
    return found


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
