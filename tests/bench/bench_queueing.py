"""Asynchronous training by the queueing model against simulated servers: `python -m tests.bench.bench_queueing`."""

from __future__ import annotations

import numpy as np

from rubberband.planner.queueing import Network, blended, calibrated, curve, exact
from rubberband.values.asynchronous import AsyncProfile, AsyncTimes
from tests.builders.parameter_server import gamma, hybrid, simulated_throughputs

TIMES_MS = {
    "8 MB": (29, 72, 18, 72),
    "16 MB": (300, 90, 30, 90),
    "all equal": (50, 50, 50, 50),
    "compute": (400, 60, 20, 60),
    "server": (60, 10, 60, 10),
    "uplink": (60, 60, 10, 5),
}
WORKERS = (1, 2, 3, 4, 6, 8)


def demands_s(network: Network, workers: int) -> np.ndarray:
    """(workers, stations) of equal workers."""
    return np.array([[network.delay_s, network.up_s, network.server_s, network.down_s]] * workers)


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


def main() -> None:
    band()


if __name__ == "__main__":
    main()
