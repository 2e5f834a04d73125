"""Throughput of asynchronous training by the queueing model: accuracy against oracles, and speed. Asserts nothing.

Run: python -m tests.bench.bench_queueing [NAME …], with names of the parts below; all by default.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np

from rubberband.planner.queueing import Network, blended, calibrated, curve, exact, highest, linearizer, proportional
from rubberband.values.asynchronous import AsyncProfile, AsyncTimes
from tests.builders.parameter_server import (
    balanced_throughputs,
    constant,
    exponential,
    first_come,
    gamma,
    hybrid,
    simulated_throughputs,
    subset_throughputs,
)

EXAMPLE = Network(delay_s=0.029, up_s=0.072, server_s=0.018, down_s=0.072)
"""The model of 8 MB of the paper (§3.2)."""
TIMES_MS = {
    "8 MB": (29, 72, 18, 72),
    "16 MB": (300, 90, 30, 90),
    "all equal": (50, 50, 50, 50),
    "compute": (400, 60, 20, 60),
    "server": (60, 10, 60, 10),
    "uplink": (60, 60, 10, 5),
}
WORKERS = (1, 2, 3, 4, 6, 8)
CASES = 60


def best_ms(act: Callable[[], object], times: int = 7) -> float:
    """The shortest of a few runs, in milliseconds."""
    shortest_s = float("inf")
    for _ in range(times):
        began = time.perf_counter()
        act()
        shortest_s = min(shortest_s, time.perf_counter() - began)
    return 1e3 * shortest_s


def demands_s(network: Network, workers: int) -> np.ndarray:
    """(workers, stations) of equal workers."""
    return np.array([[network.delay_s, network.up_s, network.server_s, network.down_s]] * workers)


def anchors() -> None:
    """Known values of the paper's example."""
    forms = {"exact": exact, "FCFS links": first_come, "hybrid": hybrid, "high end": highest}
    print("anchors: the 8 MB example, updates/s (exact aims: 5.2356, 10.6430, 12.5357, 13.7504; bound 13.889)")
    print(f"{'workers':<12}" + "".join(f"{k:>10}" for k in (1, 2, 4, 10, 100)))
    for name, form in forms.items():
        found = form(EXAMPLE, 100)
        print(f"{name:<12}" + "".join(f"{found[k - 1]:10.4f}" for k in (1, 2, 4, 10, 100)))


def accuracy() -> None:
    """Largest relative differences from independent oracles."""
    random = np.random.default_rng(0)
    chain, subsets, approximate, total = [], [], [], []
    for _ in range(CASES):
        times_s = 10.0 ** random.uniform(-3.0, 1.0, size=4)
        network = Network(delay_s=times_s[0], up_s=times_s[1], server_s=times_s[2], down_s=times_s[3])
        oracle = balanced_throughputs(demands_s(network, 4)).sum()
        chain.append(abs(exact(network, 4)[-1] / oracle - 1.0))
        workers = int(random.integers(2, 10))
        delays_s, multiples = 10.0 ** random.uniform(-3.0, 1.0, workers), random.uniform(0.01, 1.0, workers)
        oracle = subset_throughputs(np.column_stack([delays_s, multiples[:, None] * times_s[1:]]))
        subsets.append(np.abs(proportional(delays_s, multiples, times_s[1:]) / oracle - 1.0).max())
        stations_s = 10.0 ** random.uniform(-2.0, 0.0, size=(workers, 3))
        oracle, found = (
            subset_throughputs(np.column_stack([delays_s, stations_s])),
            linearizer(delays_s, stations_s),
        )
        approximate.append(np.abs(found / oracle - 1.0).max())
        total.append(abs(found.sum() / oracle.sum() - 1.0))
    print(f"\naccuracy: largest relative difference over {CASES} random cases")
    print(f"{'exact, 4 workers, from the Markov chain':<58} {max(chain):9.1e}   aim 1e-9")
    print(f"{'unequal workers by the polynomial, from all 2^K subsets':<58} {max(subsets):9.1e}   aim 1e-9")
    print(f"{'any workers by the Linearizer, updates/s of all':<58} {max(total):9.2%}   aim 0.45%")
    print(f"{'any workers by the Linearizer, the worst worker':<58} {max(approximate):9.2%}")


def speed() -> None:
    """Milliseconds."""
    random = np.random.default_rng(0)
    many = Network(**{name: random.uniform(0.01, 1.0, 1000) for name in ("delay_s", "up_s", "server_s", "down_s")})
    delays_s, multiples = random.uniform(0.01, 1.0, 64), random.uniform(0.1, 1.0, 64)
    common_s, stations_s = np.array([0.072, 0.018, 0.072]), random.uniform(0.01, 0.1, (64, 3))
    print("\nspeed: ms, the shortest of 7")
    for name, act, aim in (
        ("exact, 100 equal workers", lambda: exact(EXAMPLE, 100), "aim 1 ms"),
        ("hybrid, 100 equal workers", lambda: hybrid(EXAMPLE, 100), ""),
        ("exact, 100 equal workers, 1,000 networks at once", lambda: exact(many, 100), ""),
        ("64 unequal workers, exact", lambda: proportional(delays_s, multiples, common_s), "aim 200 ms"),
        ("64 workers of any times, Linearizer", lambda: linearizer(delays_s, stations_s), "aim 200 ms"),
    ):
        print(f"{name:<58} {best_ms(act):9.3f}   {aim}")


def simulation() -> None:
    """The simulation where the theory is exact: any law at the links, exponential at the server."""
    print("\nsimulation where the theory is exact (aim 0.5 %): updates/s")
    print(f"{'workers':<10} {'exact':>10} {'simulated':>10} {'difference':>11}")
    laws = [constant, gamma(0.6), exponential, gamma(1.5)]
    for workers in (1, 2, 4, 9):
        found = simulated_throughputs(
            demands_s(EXAMPLE, workers),
            ["delay", "shared", "in turn", "shared"],
            laws,
            replicas=1500,
            steps=400 * workers + 1000,
            warm_up=80 * workers + 200,
        ).sum()
        known = exact(EXAMPLE, workers)[-1]
        print(f"{workers:<10} {known:10.4f} {found:10.4f} {found / known - 1.0:11.2%}")


def band() -> None:
    """Errors of the planned throughput where it is not exact: links shared or in turn, times that vary more or less."""
    print(
        "\nband: simulated servers against what is planned with; mean and largest error over "
        f"{len(TIMES_MS)} profiles, 1 to {WORKERS[-1]} workers"
    )
    print(f"{'links, cv':<16} {'low end':>13} {'hybrid':>13} {'assumed':>13} {'calibrated':>13} {'in the band':>12}")
    for links in ("in turn", "shared"):
        for cv in (0.05, 0.2, 0.5):
            _print_band(links, cv)


def _print_band(links: str, cv: float) -> None:
    errors: dict[str, list[float]] = {"low end": [], "hybrid": [], "assumed": [], "calibrated": []}
    inside, law = list[bool](), gamma(cv)
    for times_ms in TIMES_MS.values():
        names = ("compute_s", "up_s", "server_s", "down_s")
        times = AsyncTimes(**{name: ms / 1e3 for name, ms in zip(names, times_ms, strict=True)})
        model = AsyncProfile(times=times, updates_per_iteration=1)
        network = Network(delay_s=times.compute_s, up_s=times.up_s, server_s=times.server_s, down_s=times.down_s)
        seen = {
            workers: simulated_throughputs(
                demands_s(network, workers),
                ["delay", links, "in turn", links],
                [law] * 4,
                replicas=100,
                steps=200 * workers + 600,
                warm_up=80 * workers + 300,
            ).sum()
            for workers in WORKERS
        }
        most = WORKERS[-1]
        expected = {
            "low end": exact(network, most),
            "hybrid": hybrid(network, most),
            "assumed": curve(model, most).point,
            "calibrated": curve(calibrated(model, {2: seen[2]}), most).point,
        }
        low, high = exact(network, most), blended(network, most, 1.0)
        for workers, throughput in seen.items():
            inside.append(0.995 * low[workers - 1] <= throughput <= 1.005 * high[workers - 1])
            for name, form in expected.items():
                errors[name].append(abs(form[workers - 1] / throughput - 1.0))
    cells = "".join(f" {np.mean(each):6.1%}{max(each):7.1%}" for each in errors.values())
    print(f"{f'{links}, {cv:g}':<16}{cells} {np.mean(inside):12.0%}")


PARTS = {"anchors": anchors, "accuracy": accuracy, "speed": speed, "simulation": simulation, "band": band}


def main() -> None:
    names = sys.argv[1:] or list(PARTS)
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise SystemExit(f"no part {unknown[0]!r}; choose from {', '.join(PARTS)}")
    for name in names:
        PARTS[name]()


if __name__ == "__main__":
    main()
