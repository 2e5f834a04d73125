"""Benchmarks of balancing on synthetic workers: `python tests/bench/bench_balancing.py [NAME …] [--seeds 20]`.

Without a name, all of them run. Each figure is printed beside its aim; nothing is asserted.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from rubberband.planner.balancing import Balancer, Look, make_balancer
from rubberband.values.balance import Balance, BalancePolicy
from tests.builders.balancing import CLUSTER, Curve, best_s, even_limits, train

BENCHMARKS: dict[str, Callable[[int], None]] = {}
BATCH = 128
"""Of the four GPUs, as in LB-BSP Fig. 8."""
WITHIN = 1.05
POLICIES: tuple[BalancePolicy, ...] = ("auto", "paper")


def benchmark(run: Callable[[int], None]) -> Callable[[int], None]:
    """Add a benchmark, which gets the number of seeds and prints its figures, under the name of its function."""
    BENCHMARKS[run.__name__.replace("_", "-")] = run
    return run


def row(label: str, figure: str, aim: str = "") -> None:
    """Print one figure beside its aim."""
    print(f"  {label:<58} {figure:>24}   {f'aim {aim}' if aim else ''}".rstrip(), flush=True)


def gpus(policy: BalancePolicy, workers: int = 4) -> Balancer:
    return make_balancer(Balance(policy=policy), "cuda", workers)


def steps_to(ratios: Sequence[float]) -> int:
    """Return the steps until the first one within 5 % of the best."""
    return next((step for step, ratio in enumerate(ratios) if ratio <= WITHIN), len(ratios))


def spread(values: Sequence[float], digits: int = 3) -> str:
    return f"{np.mean(values):.{digits}f} (worst {max(values):.{digits}f})"


# GPU workers: shares by bisection on fitted lines


def _ratios(policy: BalancePolicy, noise: float, seed: int, steps: int) -> list[float]:
    bound_s = best_s(CLUSTER, BATCH)
    return [time_s / bound_s for _, time_s in train(gpus(policy), CLUSTER, BATCH, steps, noise=noise, seed=seed)]


@benchmark
def unlike_gpus(seeds: int) -> None:
    """Four unlike GPUs: steps to within 5 % of the min-max optimum, the steady state, and a shift."""
    for policy in POLICIES:
        aims = ("<= 5", "<= 20", "<= 1.03", "<= 10") if policy == "auto" else ("", "", "", "")
        print(f" policy {policy}")
        row("steps to within 5 %, no noise", str(steps_to(_ratios(policy, 0.0, 0, 400))), aims[0])
        noisy = [steps_to(_ratios(policy, 0.02, seed, 400)) for seed in range(seeds)]
        row("steps to within 5 %, 2 % noise", spread(noisy, 1), aims[1])
        steady = [float(np.mean(_ratios(policy, 0.05, seed, 600)[200:])) for seed in range(seeds)]
        row("steps 200 to 600 over the best, 5 % noise", spread(steady), aims[2])
        for noise in (0.0, 0.02):
            shifts = [_after_shift(policy, noise, seed) for seed in range(seeds if noise else 1)]
            row(f"steps after a shift, {noise:.0%} noise", spread(shifts, 1), aims[3])


def _after_shift(policy: BalancePolicy, noise: float, seed: int) -> int:
    """The second GPU becomes half as fast after 200 steps."""
    slow = Curve(base_s=2 * CLUSTER[1].base_s, per_sample_s=2 * CLUSTER[1].per_sample_s, saturation=12)
    after = (CLUSTER[0], slow, *CLUSTER[2:])
    steps = train(gpus(policy), lambda step: CLUSTER if step < 200 else after, BATCH, 600, noise=noise, seed=seed)
    return steps_to([time_s / best_s(after, BATCH) for _, time_s in steps[200:]])


@benchmark
def one_to_four(seeds: int) -> None:
    """Four workers with speeds 1 : 2 : 3 : 4, 5 % noise: equal shares over balanced ones."""
    curves = tuple(Curve(base_s=0.0, per_sample_s=0.01 / speed) for speed in (1, 2, 3, 4))
    for device in ("cpu", "cuda"):
        found = []
        for seed in range(seeds):
            equal, balanced = (
                sum(
                    time_s
                    for _, time_s in train(
                        make_balancer(Balance(policy=policy), device, 4), curves, 256, 200, noise=0.05, seed=seed
                    )
                )
                for policy in ("equal", "auto")
            )
            found.append(equal / balanced)
        row(
            f"{device}: times as fast, the first steps included",
            f"{np.mean(found):.2f} (worst {min(found):.2f})",
            ">= 2",
        )
    row("bound", "2.50")


@benchmark
def equal_workers(seeds: int) -> None:
    """Four and eight equal workers: the time of balanced steps over that of equal shares."""
    for device in ("cpu", "cuda"):
        for workers in (4, 8):
            for noise in (0.0, 0.02, 0.05, 0.10):
                curves = (Curve(base_s=0.02, per_sample_s=0.01),) * workers
                found, moved = [], 0
                for seed in range(seeds if noise else 1):
                    balancer = make_balancer(Balance(), device, workers)
                    steps = train(balancer, curves, 64 * workers, 300, noise=noise, seed=seed)
                    found.append(float(np.mean([time_s for _, time_s in steps])) / curves[0].time_s(64))
                    moved += any(shares != steps[0][0] for shares, _ in steps)
                label = f"{device}, {workers} workers, {noise:.0%} noise ({moved} of {len(found)} runs moved)"
                row(label, spread(found, 4), "<= 1.01")


@benchmark
def overhead(seeds: int) -> None:
    """Time of one decision: a look taken in, and the shares for the next steps. CPU time, medians."""
    for device in ("cpu", "cuda"):
        for policy in POLICIES:
            for workers in (4, 8, 64):
                found = _decision_s(make_balancer(Balance(policy=policy), device, workers), workers, 20 * seeds)
                aim = {4: "", 8: "< 0.2 ms", 64: "< 2 ms"}[workers] if policy == "auto" else ""
                row(f"{device}, {policy}, {workers} workers", f"{1e3 * found:.3f} ms", aim)
                if policy == "auto" and workers == 8:
                    row("  of a step of 100 ms", f"{found / 0.1:.2%}", "<= 0.5 % with the exchange")


def _decision_s(balancer: Balancer, workers: int, looks: int) -> float:
    random = np.random.default_rng(0)
    speeds, batch_size = random.uniform(100.0, 400.0, workers), 64 * workers
    limits, found = even_limits(workers, batch_size, least=2), []
    for _ in range(looks + 50):
        shares = balancer.shares(batch_size, limits)
        times_s = np.asarray(shares) / speeds * np.exp(0.03 * random.normal(size=workers)) + 0.01
        cpu = tuple(random.uniform(1.0, 4.0, workers).tolist())
        look = Look(shares=shares, compute_s=tuple(times_s.tolist()), cpu=cpu, memory=(0.5,) * workers)
        began = time.process_time()
        balancer.observe(look)
        balancer.shares(batch_size, limits)
        found.append(time.process_time() - began)
    return float(np.median(found[50:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--seeds", type=int, default=20)
    arguments = parser.parse_args()
    for name in arguments.names or BENCHMARKS:
        if name not in BENCHMARKS:
            parser.error(f"no benchmark {name!r}; choose from {', '.join(BENCHMARKS)}")
        print(f"{name}: {BENCHMARKS[name].__doc__}", flush=True)
        BENCHMARKS[name](arguments.seeds)


if __name__ == "__main__":
    main()
