"""Parts that the experiments on asynchronous SGD share: the equations as printed, simulated servers, and errors.

The paper is "A model-based approach to streamlining distributed training for asynchronous SGD" (Lin et al.). Only the
times of its model of 8 MB are printed; the others are assumed from sizes and bandwidths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from common import COLOURS, line
from mva import first_come, hybrid
from parameter_server import Discipline, Law, constant, gamma, simulated_throughputs

from rubberband.planner.queueing import (
    ASSUMED_BLEND,
    Network,
    blended,
    calibrated,
    curve,
    exact,
    highest,
)
from rubberband.values.asynchronous import AsyncProfile, AsyncTimes

Links = Literal["in turn", "shared"]
LINKS: tuple[Links, Links] = ("in turn", "shared")
"""Whether a link carries one transfer after another, or all of them at an equal share."""
CV = 0.1
"""Coefficient of variation of all simulated times."""
SMALL = AsyncTimes(compute_s=0.029, up_s=0.072, server_s=0.018, down_s=0.072)
"""The fully connected model of 8 MB (§3.2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughputs:
    """Updates per second of 1, 2, … workers: simulated, and by every model."""

    simulated: Mapping[Links, Sequence[float]]
    models: Mapping[str, Sequence[float]]

    def error(self, model: str, links: Links) -> list[float]:
        """Relative errors of a model for 2 and more workers."""
        pairs = zip(self.models[model][1:], self.simulated[links][1:], strict=True)
        return [abs(found / truth - 1.0) for found, truth in pairs]


def network(times: AsyncTimes) -> Network:
    """Return the closed network of one server (Figure 6)."""
    return Network(delay_s=times.compute_s, up_s=times.up_s, server_s=times.server_s, down_s=times.down_s)


@lru_cache
def simulated(times: AsyncTimes, workers: int, links: Links, cv: float = CV) -> float:
    """Return the updates per second of `workers` with a real queue at every station."""
    row = [times.compute_s, times.up_s, times.server_s, times.down_s]
    disciplines: list[Discipline] = ["delay", links, "in turn", links]
    laws: list[Law] = [gamma(cv) if cv else constant] * 4
    found = simulated_throughputs(
        np.array([row] * workers), disciplines, laws, replicas=60, steps=140 * workers + 300, warm_up=60 * workers + 150
    )
    return float(found.sum())


def throughputs(times: AsyncTimes, workers: int) -> Throughputs:
    """Return the simulated throughputs and those of all models, for 1 to `workers` workers."""
    truth = {links: [simulated(times, count, links) for count in range(1, workers + 1)] for links in LINKS}
    station, profile = network(times), AsyncProfile(times=times, updates_per_iteration=1)
    models = {
        "exact": exact(station, workers),
        "FCFS as printed": printed(station, workers),
        "FCFS": first_come(station, workers),
        "hybrid": hybrid(station, workers),
        "assumed": blended(station, workers, ASSUMED_BLEND),
        "high end": highest(station, workers),
    }
    for links in LINKS:
        models[f"calibrated ({links})"] = curve(calibrated(profile, {2: truth[links][1]}), workers).point
    return Throughputs(simulated=truth, models={name: found.tolist() for name, found in models.items()})


def printed(station: Network, workers: int) -> np.ndarray:
    """Eq. 2 as printed, without the bound: X(1), …, X(workers)."""
    found, queues, throughput = [], np.zeros(3), 0.0
    times_s, is_link = np.array([station.up_s, station.server_s, station.down_s]), np.array([1.0, 0.0, 1.0])
    for count in range(1, workers + 1):
        waits_s = times_s * (1.0 + queues - 0.5 * is_link * throughput * times_s)
        throughput = count / (station.delay_s + waits_s.sum())
        queues = throughput * waits_s
        found.append(throughput)
    return np.array(found)


def percent(share: float) -> str:
    """Return a share as a percentage."""
    return f"{100.0 * share:.1f} %"


def lines(found: Throughputs, models: Sequence[str], axis: int = 1) -> list[dict[str, object]]:
    """Return the simulated throughputs as dotted lines, and those of the models as solid ones."""
    counts = list(range(1, len(found.models["exact"]) + 1))
    drawn = [
        line(f"simulated, {links}", counts, found.simulated[links], "#8a919c", axis, dash=dash, width=1.5)
        for links, dash in zip(LINKS, ("dot", "dash"), strict=True)
    ]
    solid = [line(name, counts, found.models[name], COLOURS[at], axis) for at, name in enumerate(models)]
    return [*drawn, *solid]


def simulation_assumption() -> str:
    """Return what stands for the measurements."""
    return (
        "Measurements are plots without numbers, so that simulated servers stand for them: every update queues at "
        f"uplink, server and downlink, and all times vary by {100 * CV:g} %. TCP is between the two kinds of links: "
        "'in turn' carries one transfer after another, 'shared' all at once."
    )
