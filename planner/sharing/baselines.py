"""Schedulers from the literature to compare with: Tiresias and Optimus, as Pollux's authors set them up (§5.1).

Both know no promises. They put the GPUs of a gang on the instances with the most free GPUs first, and let gangs share
instances.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rubberband.planner.sharing.demand import Allotments, Capacity, Demand, Ints, Table


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
