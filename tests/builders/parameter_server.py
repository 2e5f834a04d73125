"""A parameter server and its workers, simulated and as a Markov chain: what the planner's formulae are held against.

Nothing here knows of their shortcuts: updates move through worker, uplink, server and downlink, and are counted.
"""

from __future__ import annotations

import itertools
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


def balanced_throughputs(demands_s: Floats) -> Floats:
    """Return (workers,) updates per second where all times are exponential: the global balance of the Markov chain.

    A state has the station of every worker; the first station is a delay, the others share their speed. `demands_s` is
    (workers, stations), all positive; there are stations ** workers states.
    """
    workers, stations = demands_s.shape
    states = list(itertools.product(range(stations), repeat=workers))
    number = {state: at for at, state in enumerate(states)}
    rates = np.zeros((len(states), len(states)))
    served = np.zeros((workers, len(states)))
    for state, at in number.items():
        for worker, station in enumerate(state):
            rate = 1.0 / demands_s[worker, station] / (state.count(station) if station else 1)
            after = (*state[:worker], (station + 1) % stations, *state[worker + 1 :])
            rates[number[after], at] += rate
            rates[at, at] -= rate
            if station == 0:
                served[worker, at] = rate
    rates[-1] = 1.0  # the probabilities sum to 1, in place of an equation that follows from the others
    return served @ np.linalg.solve(rates, np.eye(len(states))[-1])


def subset_throughputs(demands_s: Floats) -> Floats:
    """The same by mean value analysis over all 2^K subsets of the workers, of which some times may be 0."""
    workers = len(demands_s)
    queues = {frozenset[int](): np.zeros_like(demands_s[:, 1:])}
    found = np.zeros(workers)
    for size in range(1, workers + 1):
        for there in map(frozenset, itertools.combinations(range(workers), size)):
            queue = np.zeros_like(demands_s[:, 1:])
            for worker in there:
                waits_s = demands_s[worker, 1:] * (1.0 + queues[there - {worker}].sum(axis=0))
                found[worker] = 1.0 / (demands_s[worker, 0] + waits_s.sum())
                queue[worker] = found[worker] * waits_s
            queues[there] = queue
    return found
