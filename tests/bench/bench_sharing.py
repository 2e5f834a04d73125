"""What sharing policies cost and win: `python -m tests.bench.bench_sharing [DATA [POLICY …]]`.

Prints the CPU seconds of one decision, and the mean JCT of five experiments as simulated and as run by real controllers
on the real broker (virtual instances), and on random workloads next to equal shares. With DATA, the folder of Pollux's
public measurements (`traces/MODEL/…` and `workloads/workload-N.csv`), it also simulates every workload there on 16
instances of 4 GPUs, and compares with the published results. Asserts nothing.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rubberband.planner.sharing import POLICIES, Capacity, Demand, keeps_promises, make_policy
from rubberband.planner.sharing.jobs import CurveJob
from rubberband.planner.sharing.simulation import simulate
from rubberband.pools.simulating import simulated
from rubberband.spec.pool import PoolFile
from tests.harness.simulated_pool import run_jcts_s, simulated_jcts_s

SIZES = ((160, 64), (1000, 1000))
"""Demands and GPUs of a decision; AdaptDL takes 6.8 to 8.8 CPU s for the first."""
PUBLISHED_S = {
    "fitness": {"1": 2088.8, "2": 3322.9, "3": 2188.5, "4": 2721.0},
    "tiresias": {"1": 2473.7, "2": 5145.0, "3": 3876.3, "4": 3280.3},
    "optimus": {"1": 4087.1, "2": 6913.9, "3": 3944.0, "4": 5967.8},
}
"""Policy -> workload -> published mean JCT; `fitness` is Pollux."""
STRICT = "ranked:first=1"
"""`ranked` with the first size of Pollux: a job begins on one GPU."""
PUBLISHED_SECOND_S = {"1": 41_818.0, "2": 49_042.0, "3": 14_635.0, "4": 53_032.0}
"""Workload -> the second largest of the 160 JCTs under Pollux, which is published as the 99th percentile."""


def demands(num: int, gpus: int, seed: int = 0) -> list[Demand]:
    """Return random demands that scale well, badly, or best on some number of GPUs."""
    random, sizes = np.random.default_rng(seed), np.arange(1, gpus + 1)
    found = []
    for number in range(num):
        share = random.uniform(0.0, 0.2)
        seconds = random.lognormal(8.0, 1.5) * (share + (1.0 - share) / sizes ** random.uniform(0.5, 1.0))
        if number % 3 == 0:
            seconds = seconds + 0.3 * sizes
        found.append(
            Demand(
                name=f"job-{number}",
                arrived_at=-float(random.uniform(60.0, 1e5)),
                seconds_left=seconds.tolist(),
                delta_s=30.0,
                moves=int(random.integers(0, 20)),
                attained_gpu_s=1.0,
            )
        )
    return found


def decisions(names: Sequence[str]) -> None:
    """Print the CPU seconds of a first decision, and of the next one after some demands have ended."""
    print(f"{'policy':>14} {'demands':>8} {'GPUs':>6} {'first CPU s':>12} {'next CPU s':>12}")
    for num, gpus in SIZES:
        asked, capacity = demands(num, gpus), Capacity(instances=gpus // 4, gpus_per_instance=4)
        for name in names:
            policy, times_s, current = make_policy(name), [], {}
            for left in (asked, asked[num // 50 :]):
                kept = {demand.name: current[demand.name] for demand in left if demand.name in current}
                began_s = time.process_time()
                current = policy.allocate(left, capacity, kept, 0.0)
                times_s.append(time.process_time() - began_s)
            print(f"{name:>14} {num:>8} {gpus:>6} {times_s[0]:>12.4f} {times_s[1]:>12.4f}", flush=True)


def agreement(names: Sequence[str]) -> None:
    """Print the mean JCT of one workload as simulated, and with real controllers and the real broker."""
    print(f"\n{'policy':>14} {'simulated':>10} {'run':>9}   mean JCT of five experiments on 4 instances of 4 GPUs")
    for name in names:
        if keeps_promises(name):
            simulated_s, run_s = (statistics.mean(act(name).values()) for act in (simulated_jcts_s, run_jcts_s))
            print(f"{name:>14} {simulated_s:>10.1f} {run_s:>9.1f}   {100.0 * (run_s / simulated_s - 1.0):+.1f} %")


def random_jobs(seed: int) -> tuple[list[CurveJob], Capacity]:
    """Return a random pool and jobs for it that scale well or badly, in half of the cases on whole instances only."""
    random = np.random.default_rng(seed)
    capacity = Capacity(instances=int(random.choice([2, 4, 8, 16])), gpus_per_instance=4)
    asked = demands(int(random.integers(5, 40)), capacity.gpus, seed)
    apart_s = statistics.mean(each.seconds_left[0] for each in asked) / capacity.gpus / random.uniform(0.2, 1.5)
    least, resize_s = int(random.choice([1, 4])), float(random.choice([0.0, 5.0, 30.0, 120.0]))
    jobs, at = [], 0.0
    for each in asked:
        whole = [each.seconds_left[max(least, count // least * least) - 1] for count in range(1, capacity.gpus + 1)]
        jobs.append(
            CurveJob(name=each.name, submitted_at=at, kind="k", seconds=whole, resize_s=resize_s, min_gpus=least)
        )
        at += float(random.exponential(apart_s))
    return jobs, capacity


def against_equal(names: Sequence[str], num: int = 100) -> None:
    """Print what mean JCT and makespan are of those of equal shares, on random workloads."""
    print(
        f"\n{'policy':>14} {'mean JCT':>9} {'worst':>6} {'makespan':>9} {'moves':>6}   of equal's, {num} random pools"
    )
    for name in names:
        if not keeps_promises(name):
            continue
        rows = []
        for seed in range(num):
            (jobs, capacity), (same, _) = random_jobs(seed), random_jobs(seed)
            found = simulate(jobs, capacity, make_policy(name), interval_s=None)
            equal = simulate(same, capacity, make_policy("equal"), interval_s=None)
            mean = statistics.mean(found.jcts_s) / statistics.mean(equal.jcts_s)
            rows.append((mean, found.makespan_s / equal.makespan_s, found.summary()["moves_per_job"] or 0.0))
        mean, makespan, moves = np.mean(rows, axis=0)
        print(f"{name:>14} {mean:>9.3f} {max(rows)[0]:>6.3f} {makespan:>9.3f} {moves:>6.2f}", flush=True)


def workloads(data: Path, names: Sequence[str]) -> None:
    """Print the results of every workload, and the means of what they are of Pollux's published ones.

    The tail is the second largest JCT of 160, as published; numpy's 99th percentile lies below it.
    """
    print("\nPollux's fitness does not use the work left. ranked, default, hell, knee, srpt and optimus do.")
    pool = PoolFile(instances=16, gpus_per_instance=4)
    files = sorted((data / "workloads").glob("workload-*.csv"))
    print(
        f"{'policy':>14} {'workload':>8} {'mean JCT':>9} {'published':>9} {'/Pollux':>8} {'2nd':>6} {'/Pollux':>8} "
        f"{'makespan':>9} {'moves':>6} {'CPU s':>6}"
    )
    for name in names:
        ratios: list[tuple[float, float]] = []
        for file in files:
            number = file.stem.removeprefix("workload-")
            outcome = simulated(pool, file, [name], data / "traces").outcomes[name]
            mean_s, second_s = statistics.mean(outcome.jcts_s), sorted(outcome.jcts_s)[-2]
            known = PUBLISHED_S.get(name, {}).get(number)
            shown = "-" if known is None else f"{100.0 * (mean_s / known - 1.0):+.2f} %"
            over = (
                mean_s / PUBLISHED_S["fitness"].get(number, mean_s),
                second_s / PUBLISHED_SECOND_S.get(number, second_s),
            )
            ratios.append(over)
            print(
                f"{name:>14} {number:>8} {mean_s:>9.1f} {shown:>9} {over[0]:>8.3f} {second_s:>6.0f} {over[1]:>8.3f} "
                f"{outcome.makespan_s:>9.0f} {outcome.summary()['moves_per_job']:>6.2f} {outcome.cpu_s:>6.1f}",
                flush=True,
            )
        mean, second = (statistics.mean(each) for each in zip(*ratios, strict=True))
        print(f"{name:>14} {'mean':>8} {'':>9} {'':>9} {mean:>8.3f} {'':>6} {second:>8.3f}", flush=True)


def main(arguments: Sequence[str]) -> None:
    names = list(arguments[1:]) or [*(name for name in POLICIES if name != "default"), STRICT]
    decisions(names)
    agreement(names)
    against_equal(names)
    if arguments:
        workloads(Path(arguments[0]), names)


if __name__ == "__main__":
    main(sys.argv[1:])
