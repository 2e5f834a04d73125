"""Policies that divide a pool: Pollux's fitness, simple ones, Tiresias and Optimus, the largest gain, KNEE and HELL.

KNEE and HELL are those of Lin et al. (asynchronous SGD, §IV). They give each demand the GPUs w that the demand itself
finds best, whoever else is there, so a pool under them is stable only while the load stays below the efficiency S(1) /
(w S(w)) at that w: on the paper's four models at about .77 for HELL, .65 for KNEE(.01), .86 for KNEE(.05).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rubberband.planner.sharing.demand import Allocations, Bools, Capacity, Demand, Floats, Ints, Table
from rubberband.planner.sharing.placement import place_freely


def divide(values: Floats, gpus: int) -> Ints:
    """Return (J,) counts that add up to at most `gpus`, with the largest sum of `values`.

    `values` is (J, gpus + 1), finite, or -inf where a demand cannot have that number; at least one division must exist.
    GPUs that add nothing are left over.

    Values need not be concave: keeping one's GPUs may be worth more than one GPU more or less. A price per GPU bounds
    the sum from above (Lagrangian relaxation) and leaves few counts per demand that could still be best; a dynamic
    program over the GPUs decides among those.

    Values of different demands are never added: they may differ by more orders of magnitude than a double has digits.
    Where GPUs add the same to several demands, to rounding, those with the largest values then are served first.
    """
    if not len(values):
        return np.zeros(0, dtype=np.int64)
    sizes = np.flatnonzero(np.isfinite(values).any(axis=0))
    values, rows = values[:, sizes], np.arange(len(values))
    price, relaxed = _relaxed(values, sizes, gpus)
    at = _refilled(values, sizes, relaxed, gpus)
    if price > 0.0:
        # What a count is worth beyond its price, in GPUs, next to the relaxed one: at most 0.
        beyond = (values - values[rows, relaxed][:, None]) / price - (sizes - sizes[relaxed][:, None])
        gap = gpus - int(sizes[at].sum()) - float(beyond[rows, at].sum())
        if gap > 1e-12 * gpus:
            return _exact(beyond + sizes, beyond >= -gap - 1e-12 * gpus, sizes, gpus)
    return np.asarray(sizes[at], dtype=np.int64)


def _relaxed(values: Floats, sizes: Ints, gpus: int) -> tuple[float, Ints]:
    """Return the price of a GPU, and (J,) columns that are best at that price and fit.

    Each time the step that adds most per GPU is taken: a walk along the concave hulls of all values. The price is the
    rate of the first step that does not fit; 0 where all fit.
    """
    at: Ints = np.argmax(np.isfinite(values), axis=1)
    free = gpus - int(sizes[at].sum())
    queue: list[tuple[float, float, int, int]] = []
    row, column, rate = 0, 0, 0.0

    def ask(row: int) -> None:
        begin = int(at[row])
        line = values[row, begin:]
        if len(line) > 1:
            rates = (line[1:] - line[0]) / (sizes[begin + 1 :] - sizes[begin])
            best = int(rates.argmax())
            if rates[best] > 0.0:
                heapq.heappush(queue, (-float(rates[best]), -float(line[best + 1]), row, begin + best + 1))

    for row in range(len(values)):
        ask(row)
    while queue:
        rate, _, row, column = heapq.heappop(queue)
        step = int(sizes[column] - sizes[at[row]])
        if step > free:
            return -rate, at
        at[row] = column
        free -= step
        ask(row)
    return 0.0, at


def _refilled(values: Floats, sizes: Ints, columns: Ints, gpus: int) -> Ints:
    """Spend what is left, each time where a GPU adds most."""
    at, rows = np.array(columns), np.arange(len(values))
    free = gpus - int(sizes[at].sum())
    while free > 0:
        steps = sizes - sizes[at][:, None]
        added = values - values[rows, at][:, None]
        rates = np.where((steps > 0) & (steps <= free), added / np.maximum(steps, 1), -np.inf)
        best = float(rates.max())
        if not best > 0.0:
            break
        row, column = np.unravel_index(int(np.argmax(np.where(rates == best, values, -np.inf))), rates.shape)
        free -= int(steps[row, column])
        at[row] = column
    return at


def _exact(worth: Floats, open_counts: Bools, sizes: Ints, gpus: int) -> Ints:
    """Return the counts of the largest sum of `worth`: a dynamic program over the GPUs, among the columns in play."""
    counts: Ints = sizes[np.argmax(open_counts, axis=1)]
    is_open = open_counts.sum(axis=1) > 1
    choices = np.flatnonzero(is_open)
    room = gpus - int(counts[~is_open].sum())
    total = np.full(room + 1, 0.0)
    taken = np.zeros((len(choices), room + 1), dtype=np.int32)
    for number, row in enumerate(choices):
        best = np.full(room + 1, -np.inf)
        for column in np.flatnonzero(open_counts[row] & (sizes <= room)):
            count = int(sizes[column])
            reached = total[: room + 1 - count] + worth[row, column]
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


def fitness(table: Table, *, p: float = -1.0) -> Ints:
    """Maximise FITNESS_p (eq. 14); p = 1 is the sum of speed-ups, p -> -inf the least of them.

    For a fixed p the mean is largest where a sum over the jobs is, so a table of speed-ups and `divide` replace the
    paper's genetic search.
    """
    if not len(table.demands):
        return np.zeros(0, dtype=np.int64)
    speedups = table.speedups() * reallocation_factors(table) + _LEAST_SPEEDUP
    gains = np.log(speedups) if p == 0.0 else np.sign(p) * speedups**p
    return divide(table.allowed(table.values("weight")[:, None] * gains), table.gpus)


EARNS_WITHIN_S = 300.0
"""Seconds in which a change of GPUs must earn the time that it costs: five of the intervals of Pollux §5.1."""
_EARNS_WITHIN = 10.0
"""Multiple of that time that it may take if it is longer: else demands with slow changes never grow."""
_LEAST_KEPT = 0.05
"""Least share of its speed that a change leaves a demand, so that a long resize does not rule it out."""


def ranked(table: Table, *, gamma: float = 1.0) -> Ints:
    """Maximise the sum of weight k^gamma log(1 + f S): fast progress for all, and most for those that end soonest.

    S is the speed-up over one GPU, W / seconds with W the seconds of work left on one. k is the rank of the demand by W
    from the longest (1) to the shortest (J): the number of demands that wait while it runs, shortest first. f is 1
    where the GPUs stay or the demand has none, else what a change leaves of the next 5 minutes, or of ten times its own
    time if that is longer, or of the time to the demand's end if that is shorter. The logarithm keeps demands that stop
    scaling from being left for last.

    It uses the work that is left, as each demand states it. Pollux's fitness does not.
    """
    if not len(table.demands):
        return np.zeros(0, dtype=np.int64)
    work_s = table.single_s()
    ranks = np.empty(len(work_s))
    ranks[np.argsort(-work_s, kind="stable")] = np.arange(1, len(work_s) + 1)
    speed = np.where(np.isfinite(table.seconds), work_s[:, None] / np.maximum(table.seconds, 1e-9), 0.0)
    values = (table.values("weight") * ranks**gamma)[:, None] * np.log1p(speed * _after_change(table))
    return divide(table.allowed(values), table.gpus)


def _after_change(table: Table) -> Floats:
    """(J, G + 1) The share of its speed that a change of its GPUs leaves a demand; 1 where they stay or it has none."""
    rows, held = np.arange(len(table.demands)), np.minimum(table.current, table.gpus)
    delta_s = table.values("delta_s")
    earns_within_s = np.maximum(EARNS_WITHIN_S, _EARNS_WITHIN * delta_s)
    left_s = np.minimum(earns_within_s, np.maximum(table.seconds[rows, held], 1e-9))
    kept = np.maximum(_LEAST_KEPT, 1.0 - delta_s / left_s)
    found = np.repeat(np.where(held == 0, 1.0, kept)[:, None], table.gpus + 1, axis=1)
    found[rows, held] = 1.0
    return found


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

    def allocate(
        self, demands: Sequence[Demand], capacity: Capacity, current: Allocations, now_s: float
    ) -> dict[str, dict[int, int]]:
        """Return the GPUs of the jobs that run."""
        free = capacity.gpus
        running: dict[str, int] = {}
        for demand in sorted(demands, key=lambda each: each.attained_gpu_s >= self.threshold_gpu_s):
            if demand.min_gpus <= free:
                running[demand.name] = demand.min_gpus
                free -= demand.min_gpus
        return place_freely(running, capacity, current)


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimus:
    """Marginal gains in seconds left (Peng et al., EuroSys '18); given true times it is Pollux's Optimus+Oracle.

    Every job gets its least GPUs, in order; then each GPU goes where it saves the most seconds, until none is saved.
    """

    def allocate(
        self, demands: Sequence[Demand], capacity: Capacity, current: Allocations, now_s: float
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
        return place_freely(dict(sorted(gpus.items(), key=lambda item: item[1])), capacity, current)


def _saved_s(demand: Demand, gpus: int) -> float:
    """Return the seconds that one more GPU saves; 0 beyond the most."""
    return demand.seconds_left[gpus - 1] - demand.seconds_left[gpus] if gpus < demand.most_gpus else 0.0


Resizing = Literal["malleable", "moldable"]
"""Whether the GPUs of a demand may change after its start. A moldable one can still be paused."""

_MOST_PROGRESS = 0.9
"""Progress beyond which `gamma` delays a demand no further: it would starve near its end."""


def gain(table: Table) -> Ints:
    """MREL: one GPU each in order of arrival, then more where each GPU shortens the time left by the largest share."""
    gpus = table.floor.copy()
    free = table.gpus - int(gpus.sum())
    queue: list[tuple[float, int, int, int]] = []

    def ask(turn: int, row: int) -> None:
        most = min(int(table.most[row]), int(gpus[row]) + free)
        if found := _best_step(table.seconds[row, : most + 1], int(gpus[row])):
            heapq.heappush(queue, (-found[0], turn, row, found[1]))

    for turn, row in enumerate(table.by_arrival()):
        ask(turn, row)
    while free > 0 and queue:
        _, turn, row, step = heapq.heappop(queue)
        if step <= free:
            gpus[row] += step
            free -= step
        ask(turn, row)
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


AlphaRange = tuple[float, float]
"""alpha_L and alpha_H: alpha on an idle pool, and on one that is fully loaded."""


def knee(table: Table, *, alpha: float | AlphaRange = 0.01, resizing: Resizing = "malleable") -> Ints:
    """KNEE(alpha): to each, the fewest GPUs beyond which one more shortens it by less than alpha; shortest first.

    A range makes alpha follow the load x of the pool (§IV-C): alpha(x) = alpha_L + x (alpha_H - alpha_L), where x is
    that of `_load_of_others`. A busy pool then gives each demand fewer GPUs.
    """
    low, high = alpha if isinstance(alpha, tuple) else (alpha, alpha)
    wanted = _knees(table, low)
    if high > low:
        wanted = _knees(table, low + _load_of_others(table, wanted)[:, None] * (high - low))
    counts = np.minimum(wanted[:, None], np.arange(table.gpus + 1))
    return _shortest_first(table, counts, np.take_along_axis(table.seconds, counts, axis=1), resizing)


def _knees(table: Table, alpha: float | Floats) -> Ints:
    """(J,) w = min{w : d(w) >= alpha, d(w + 1) < alpha} with d(w) = (S(w - 1) - S(w)) / S(w - 1); 0 if there is none.

    `alpha` may be (J, 1). The paper defines d with the opposite sign, with which no w qualifies. S is convex there.
    Where whole instances or waves of trials make steps of it, d is that of its convex hull: on the steps themselves d
    is 0 in between, and the first one would be the knee.
    """
    seconds = table.hull_s()
    with np.errstate(invalid="ignore"):
        shorter = 1.0 - seconds[:, 1:] / seconds[:, :-1]
    shorter = np.where(np.isfinite(seconds[:, :-1]), shorter, np.isfinite(seconds[:, 1:]))
    stops = (shorter >= alpha) & np.append(shorter[:, 1:] < alpha, np.ones((len(seconds), 1), dtype=np.bool_), axis=1)
    return np.where(stops.any(axis=1), np.argmax(stops, axis=1) + 1, 0)


def _load_of_others(table: Table, wanted: Ints) -> Floats:
    """(J,) Load x that each demand finds: the speed-ups of all others over the GPUs of the pool, from 0 to 1.

    A speed-up is that over one GPU, with the GPUs held, or with those `wanted` while a demand holds none. The paper's x
    is lambda E[S(1)] / W: the work that arrives in a second, in seconds of one GPU, over the GPUs. A pool that keeps up
    does as much work as arrives, and speed-ups are the work done in a second. So the two agree in the mean, and the
    arrivals need not be known. On a pool that falls behind, those that wait make x larger.
    """
    held = np.minimum(np.where(table.current > 0, table.current, wanted), table.gpus)
    held_s = table.seconds[np.arange(len(held)), held]
    speedups = np.where(np.isfinite(held_s), table.single_s() / np.maximum(held_s, 1e-300), 0.0)
    return np.asarray(np.minimum((speedups.sum() - speedups) / max(1, table.gpus), 1.0))


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
    return filled(table, gpus, free)


def filled(table: Table, gpus: Ints, free: int) -> Ints:
    """Give what is left, the fewest GPUs at a time, to whoever thereby ends before all others would (eq. 5)."""
    rows = np.arange(len(gpus))
    while free > 0 and len(gpus):
        first_s = table.seconds[rows, gpus].min()
        needed = (table.seconds >= first_s).sum(axis=1) - gpus  # times never rise: as many counts are too few
        needed = np.where(gpus + needed <= table.gpus, needed, free + 1)
        best = int(np.argmin(needed))
        if needed[best] > free:
            break
        gpus[best] += needed[best]
        free -= int(needed[best])
    return gpus
