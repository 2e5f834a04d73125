"""A parameter server and its workers, event by event, in many replicas at once.

The simulation knows nothing of the planner's formulae: updates move through worker, uplink, server and downlink, and
are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

Discipline = Literal["delay", "shared", "in turn"]
"""All at once at full speed; all at once at an equal share; or one after another."""
Floats = npt.NDArray[np.float64]
Law = Callable[[np.random.Generator, int], Floats]
"""(random, size) -> factors with mean 1."""


def exponential(random: np.random.Generator, size: int) -> Floats:
    """Factors with the exponential law."""
    return random.exponential(size=size)


def constant(random: np.random.Generator, size: int) -> Floats:
    """No variation."""
    return np.ones(size)


def gamma(cv: float) -> Law:
    """Return the gamma law with this coefficient of variation."""
    return lambda random, size: random.gamma(cv**-2, cv**2, size=size)


def simulated_throughputs(
    demands_s: Floats,
    disciplines: Sequence[Discipline],
    laws: Sequence[Law],
    *,
    replicas: int = 500,
    steps: int = 4000,
    warm_up: int = 1000,
    seed: int = 0,
) -> Floats:
    """Return (workers,) updates per second, for mean times `demands_s` of (workers, stations).

    Every worker visits the stations in their order, for ever. Of `steps` events per replica, `warm_up` do not count.
    """
    random = np.random.default_rng(seed)
    workers, stations = demands_s.shape
    at = random.integers(stations, size=(replicas, workers))
    left_s = np.empty((replicas, workers))
    for station in range(stations):
        rows, who = np.nonzero(at == station)
        left_s[rows, who] = demands_s[who, station] * laws[station](random, len(rows))
    arrived = random.random((replicas, workers)) - 1.0
    updates, elapsed_s = np.zeros(workers), 0.0
    every = np.arange(replicas)
    shared = np.array([each == "shared" for each in disciplines])
    queued = np.array([each == "in turn" for each in disciplines])
    for step in range(steps):
        present = np.zeros((replicas, stations))
        np.add.at(present, (every[:, None], at), 1.0)
        speed = np.where(shared[at], 1.0 / np.take_along_axis(present, at, axis=1), 1.0)
        for station in np.flatnonzero(queued):
            here = at == station
            order = np.where(here, arrived, np.inf)
            speed[here & (order > order.min(axis=1, keepdims=True))] = 0.0
        with np.errstate(divide="ignore"):
            until_s = np.where(speed > 0.0, left_s / speed, np.inf)
        who = until_s.argmin(axis=1)
        passed_s = until_s[every, who]
        left_s -= passed_s[:, None] * speed
        old = at[every, who]
        new = (old + 1) % stations
        at[every, who], arrived[every, who] = new, step
        for station in range(stations):
            rows = np.flatnonzero(new == station)
            left_s[rows, who[rows]] = demands_s[who[rows], station] * laws[station](random, len(rows))
        if step >= warm_up:
            elapsed_s += passed_s.sum()
            updates += np.bincount(who[new == 0], minlength=workers)
    return updates / (elapsed_s / replicas) / replicas
