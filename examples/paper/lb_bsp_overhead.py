"""LB-BSP, Figure 11: the time of deciding the batch sizes of 32, 64 and 96 CPU workers, measured on this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

import common
import numpy as np
from common import COLOURS, Finding, Report, Table, line, verdict
from page import Figure, panels

from rubberband.planner.balancing import Look, ShareLimits, make_balancer
from rubberband.values.balance import Balance, BalancePolicy

WORKERS = (32, 64, 96)
POLICIES: tuple[BalancePolicy, ...] = ("paper", "auto")
ITERATIONS_S = {"ResNet-32": 2.0, "Inception-V3": 10.0}
"""Seconds of an iteration on CPUs (assumed; the paper gives shares only)."""
GPU_STEP_S = 0.1
PAPER_PERCENT = 1.1
BATCH = 128


def decisions_s(policy: BalancePolicy, device: Literal["cpu", "cuda"], workers: int, looks: int) -> list[float]:
    """Return the CPU seconds of each decision: a look taken in, and the next batch sizes."""
    random = np.random.default_rng(0)
    balancer, batch_size = make_balancer(Balance(policy=policy), device, workers), BATCH * workers
    limits, found = ShareLimits(caps=(batch_size,) * workers), []
    for _ in range(looks):
        shares = balancer.shares(batch_size, limits)
        cpu = random.uniform(2.0, 8.0, workers)
        times_s = np.asarray(shares) / (10.0 * cpu) * np.exp(0.05 * random.normal(size=workers))
        look = Look(shares=shares, compute_s=tuple(times_s.tolist()), cpu=tuple(cpu.tolist()))
        began_s = time.process_time()
        balancer.observe(look)
        balancer.shares(batch_size, limits)
        found.append(time.process_time() - began_s)
    return found[looks // 5 :]


def compute(workers: Sequence[int] = WORKERS, looks: int = 200) -> Report:
    """Time both policies for each number of workers."""
    found = {policy: [decisions_s(policy, "cpu", each, looks) for each in workers] for policy in POLICIES}
    percents = {
        (model, policy): [100.0 * float(np.mean(each)) / step_s for each in times]
        for model, step_s in ITERATIONS_S.items()
        for policy, times in found.items()
    }
    gpu_percent = 100.0 * float(np.mean(decisions_s("auto", "cuda", workers[-1], looks))) / GPU_STEP_S
    most = max(max(each) for each in percents.values())
    rows = [
        (policy, str(count), *_ms(times), *(f"{percents[model, policy][at]:.3f} %" for model in ITERATIONS_S))
        for policy, each in found.items()
        for at, (count, times) in enumerate(zip(workers, each, strict=True))
    ]
    columns = ("policy", "workers", "mean ms", "5th", "95th", *(f"of {model}" for model in ITERATIONS_S))
    return Report(
        title="LB-BSP, Figure 11: overhead of updating batch sizes in CPU clusters",
        tables=[Table(title="One decision for all workers, NARX's training included", columns=columns, rows=rows)],
        figure=figure(workers, percents),
        findings=[
            Finding(
                says="Even in the largest cluster with 96 workers, the total overheads are less than 1.1% of the "
                "iteration time for both models.",
                verdict=verdict(most < PAPER_PERCENT),
                found=f"At most {most:.2f} %. The paper's figure also holds the reading of logs, which we do not need: "
                "the trainer times its own steps.",
            ),
            Finding(
                says="They won't slow down GPU workers because of our non-blocking design.",
                verdict=verdict(gpu_percent < PAPER_PERCENT),
                found=f"One decision for {workers[-1]} GPU workers is {gpu_percent:.2f} % of a step of "
                f"{1e3 * GPU_STEP_S:g} ms, if every step has one; the trainer looks more rarely where steps are short.",
            ),
        ],
        assumptions=[
            f"An iteration of ResNet-32 takes {ITERATIONS_S['ResNet-32']:g} s and one of Inception-V3 "
            f"{ITERATIONS_S['Inception-V3']:g} s: the paper gives shares of them only.",
            "CPU time of this process; the exchange of times and sizes between workers is not in it.",
        ],
    )


def _ms(times_s: Sequence[float]) -> list[str]:
    """Mean and percentiles in milliseconds."""
    return [f"{1e3 * value:.2f}" for value in (np.mean(times_s), *np.quantile(times_s, (0.05, 0.95)))]


def figure(workers: Sequence[int], percents: dict[tuple[str, BalancePolicy], list[float]]) -> Figure:
    """Return the overhead by the number of workers, one panel for each model."""
    lines = [
        line(policy, workers, percents[model, policy], COLOURS[at], panel)
        for panel, model in enumerate(ITERATIONS_S, start=1)
        for at, policy in enumerate(POLICIES)
    ]
    return panels(lines, list(ITERATIONS_S), x="workers", y="% of the iteration")


if __name__ == "__main__":
    common.show(compute)
