"""Figures 7, 8 and 9 on asynchronous SGD: links that are shared or used in turn, and workers that never overlap."""

from __future__ import annotations

from collections.abc import Sequence

import common
from async_sgd import (
    SMALL,
    Throughputs,
    lines,
    network,
    percent,
    simulated,
    simulation_assumption,
    throughputs,
)
from common import Finding, Report, Table, verdict
from page import panels

from rubberband.values.asynchronous import AsyncTimes

APART = AsyncTimes(compute_s=0.25, up_s=0.1, server_s=0.05, down_s=0.1)
"""Five workers fit: an update takes as long as five transfers, as in Figure 9."""
CLOSE = 0.1
"""A model is accurate where it is off by less."""
MODELS = ("exact", "FCFS", "hybrid")


def waiting(workers: int, links: str) -> float:
    """Return the share of time that workers with constant times wait, as in Figure 8."""
    alone, found = (simulated(SMALL, count, links, 0.0) for count in (1, workers))
    return 1.0 - found / (workers * alone)


def speedups(workers: int) -> list[float]:
    """Return X(K) / X(1) of constant times on links that are used in turn, as in Figure 9."""
    found = [simulated(APART, count, "in turn", 0.0) for count in range(1, workers + 1)]
    return [each / found[0] for each in found]


def findings(found: Throughputs, apart: Sequence[float]) -> list[Finding]:
    """Return the statements of §3.2 and §3.3."""
    most = len(found.models["exact"])
    few, many = range(1, min(3, most)), range(3, most)
    real, ps = found.simulated, found.models["exact"]
    fcfs = found.models["FCFS"]
    waits = {links: waiting(2, links) for links in real}
    return [
        Finding(
            says="The real throughput is higher than predicted by our model with PS links when there are 2 to 3 "
            "workers (it scales almost linearly for 2), while predictions are accurate with more than 3 workers.",
            verdict=verdict(
                *(real["in turn"][at] > 1.05 * ps[at] for at in few),
                *(abs(real["shared"][at] / ps[at] - 1.0) < CLOSE for at in many),
                *(abs(real["in turn"][at] / ps[at] - 1.0) < CLOSE for at in many),
            ),
            found=f"2 workers: {ps[1]:.2f} updates/s by PS, {real['in turn'][1]:.2f} simulated with links in turn "
            f"(linear is {2 * ps[0]:.2f}) and {real['shared'][1]:.2f} with shared ones. {most} workers: {ps[-1]:.2f}, "
            f"{real['in turn'][-1]:.2f} and {real['shared'][-1]:.2f}. So the paper's testbed uses its links in turn "
            "with few workers, and shares them with many.",
        ),
        Finding(
            says="FCFS links show good accuracy for less than 4 workers, but overestimate the throughput for 4 and "
            "more.",
            verdict=verdict(
                *(abs(fcfs[at] / real["in turn"][at] - 1.0) < 1.5 * CLOSE for at in few),
                *(fcfs[at] > 1.05 * real["shared"][at] for at in many if at < 6),
            ),
            found=f"3 workers: {fcfs[2]:.2f} against {real['in turn'][2]:.2f} with links in turn. {most} workers: "
            f"{fcfs[-1]:.2f} against {real['shared'][-1]:.2f} with shared ones.",
        ),
        Finding(
            says="Two workers send data during different time slots, without competing for network bandwidth "
            "(Figure 8).",
            verdict=verdict(waits["in turn"] < 0.01),
            found=f"With constant times and links in turn they wait {percent(abs(waits['in turn']))} of the time: a "
            f"worker that has waited once is out of step from then on. With shared links they keep overlapping and "
            f"wait {percent(waits['shared'])} of it.",
        ),
        Finding(
            says="The job allows up to 5 workers to transmit their updates without overlaps (Figure 9).",
            verdict=verdict(*(abs(apart[at] - min(at + 1, 5)) < 0.05 for at in range(len(apart)))),
            found="Speed-ups of 1, 2, … workers: " + ", ".join(f"{each:.2f}" for each in apart) + ".",
        ),
    ]


def compute(workers: int = 10) -> Report:
    """Compute throughputs of 1 to `workers` workers, at least 6."""
    found, apart = throughputs(SMALL, workers), speedups(7)
    columns = ("workers", *MODELS, "simulated in turn", "simulated shared")
    rows = [
        (
            str(at + 1),
            *(f"{found.models[name][at]:.2f}" for name in MODELS),
            *(f"{found.simulated[links][at]:.2f}" for links in ("in turn", "shared")),
        )
        for at in range(workers)
    ]
    return Report(
        title="Figures 7 to 9 (asynchronous SGD): updates per second of the model of 8 MB",
        tables=[Table(title="Updates per second", columns=columns, rows=rows)],
        figure=panels(lines(found, MODELS), ["8 MB"], x="workers", y="updates per second"),
        findings=findings(found, apart),
        assumptions=[
            "Times of the model of 8 MB as printed: 29 ms at the worker, 72 ms up and down, 18 ms at the server; "
            f"a worker alone makes {1.0 / network(SMALL).update_s:.4f} updates/s.",
            "Figure 9 has no numbers: 0.25 s at the worker, 0.1 s up and down, 0.05 s at the server.",
            simulation_assumption(),
        ],
    )


if __name__ == "__main__":
    common.show(compute)
