"""Fits and choices of the goodput model: milliseconds, and how far off fits of noisy clusters are. Asserts nothing.

Run: python tests/bench/bench_goodput.py [clusters]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

import numpy as np

from rubberband.planner.goodput import choose, choose_many, step_s
from rubberband.planner.goodput.fit import fit, relative_errors
from rubberband.values.adaptive import BatchLimits, BatchPoint, Throughput

NOISE = 0.05
GPUS_PER_INSTANCE = 4
Configuration = tuple[int, int, int, int]


def configurations(gpus: Sequence[int], per_gpu: Sequence[int], accumulation: Sequence[int]) -> list[Configuration]:
    """(N, K, m, s) of every combination."""
    return [(-(-k // GPUS_PER_INSTANCE), k, m, s) for k in gpus for m in per_gpu for s in accumulation]


EVERYWHERE = configurations((1, 2, 3, 4, 8, 12, 16, 24, 32), (8, 16, 32, 64, 128, 256, 512), (0, 1, 3))
SAMPLES = {
    "100 over the span": lambda random: _some(EVERYWHERE, 100, random),
    "30 over the span": lambda random: _some(EVERYWHERE, 30, random),
    "10 over the span": lambda random: _some(EVERYWHERE, 10, random),
    "12: 1-8 GPUs x 3 batches": lambda random: configurations((1, 2, 4, 8), (16, 32, 64), (0,)),
    "12: 1-8 GPUs x m from end to end": lambda random: configurations((1, 2, 4, 8), (8, 64, 512), (0,)),
}


def cluster(random: np.random.Generator) -> Throughput:
    """A model with parameters of any magnitude."""
    alpha = 10.0 ** random.uniform(-3.0, -0.5)
    local = alpha * 10.0 ** random.uniform(-1.0, 1.0)
    node = local * 10.0 ** random.uniform(0.0, 1.0)
    return Throughput(
        alpha_grad_s=alpha,
        beta_grad_s=alpha * 10.0 ** random.uniform(-2.5, -0.5),
        alpha_local_s=local,
        beta_local_s=local * 10.0 ** random.uniform(-2.5, -1.0),
        alpha_node_s=node,
        beta_node_s=node * 10.0 ** random.uniform(-2.5, -1.0),
        gamma=random.uniform(1.0, 10.0),
    )


def points(
    truth: Throughput, where: Sequence[Configuration], noise: float, random: np.random.Generator
) -> list[BatchPoint]:
    """Steps measured with lognormal noise."""
    seconds = step_s(truth, *np.asarray(where).T) * np.exp(noise * random.normal(size=len(where)))
    return [
        BatchPoint(instances=n, gpus=k, per_gpu=m, accumulation=s, step_s=time_s)
        for (n, k, m, s), time_s in zip(where, seconds.tolist(), strict=True)
    ]


def best_ms(act: Callable[[], object], times: int = 5, each: int = 1) -> float:
    """The shortest of several timings."""
    shortest_s = np.inf
    for _ in range(times):
        began = time.perf_counter()
        for _ in range(each):
            act()
        shortest_s = min(shortest_s, time.perf_counter() - began)
    return 1e3 * shortest_s / each


def print_fits(clusters: int) -> None:
    print(
        f"fit: {clusters} random clusters, {NOISE:.0%} noise; error of the step over {len(EVERYWHERE)} configurations"
    )
    print(f"{'points':<34} {'ms median':>9} {'p90':>6} {'max':>6} {'mean error':>11} {'p90':>7}")
    for name, sample in SAMPLES.items():
        random = np.random.default_rng(1)
        times_ms, errors = [], []
        for _ in range(clusters):
            truth = cluster(random)
            measured = points(truth, sample(random), NOISE, random)
            times_ms.append(best_ms(lambda measured=measured: fit(measured), times=3))
            errors.append(np.mean(relative_errors(fit(measured), points(truth, EVERYWHERE, 0.0, random))))
        p90_ms, p90_error = np.quantile(times_ms, 0.9), np.quantile(errors, 0.9)
        print(
            f"{name:<34} {np.median(times_ms):9.2f} {p90_ms:6.2f} {max(times_ms):6.2f} "
            f"{np.mean(errors):11.1%} {p90_error:7.1%}"
        )


def print_choices() -> None:
    model, limits = cluster(np.random.default_rng(1)), BatchLimits(initial=128, max=4096, max_per_gpu=200)
    gpus = np.arange(1, 1001)
    instances = -(-gpus // GPUS_PER_INSTANCE)
    print(f"\n{'choice of (m, s)':<58} {'ms':>8} {'ms per choice':>14}")
    many_ms = best_ms(lambda: choose_many(model, 2000.0, limits, instances, gpus))
    print(f"{'1,000 allocations at once, 64 batch sizes each':<58} {many_ms:8.3f} {many_ms / 1000:14.4f}")
    one_ms = best_ms(lambda: choose(model, 2000.0, limits, 1, 4), each=100)
    print(f"{'one allocation':<58} {one_ms:8.3f} {one_ms:14.4f}")


def _some(where: list[Configuration], number: int, random: np.random.Generator) -> list[Configuration]:
    return [where[at] for at in random.choice(len(where), number, replace=False)]


def main() -> None:
    print_fits(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
    print_choices()


if __name__ == "__main__":
    main()
