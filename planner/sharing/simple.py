"""Policies that need no model of speed-up: order of arrival, equal shares, and the shortest first."""

from __future__ import annotations

import heapq

import numpy as np

from rubberband.planner.sharing.table import Ints, Table


def fifo(table: Table) -> Ints:
    """Give each demand as many GPUs as help it, in order of arrival; a later one may overtake one that needs more."""
    gpus = table.floor.copy()
    free = table.gpus - int(gpus.sum())
    for row in table.by_arrival():
        wanted = min(int(table.most[row]), int(gpus[row]) + free)
        if wanted > gpus[row] and wanted >= table.demands[row].min_gpus:
            free -= wanted - int(gpus[row])
            gpus[row] = wanted
    return gpus


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
    gpus = table.floor.copy()
    free = table.gpus - int(gpus.sum())
    for row in np.argsort(table.single_s(), kind="stable").tolist():
        wanted = min(int(table.most[row]), int(gpus[row]) + free)
        if wanted > gpus[row] and wanted >= table.demands[row].min_gpus:
            free -= wanted - int(gpus[row])
            gpus[row] = wanted
    return gpus
