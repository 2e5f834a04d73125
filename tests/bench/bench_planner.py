"""Planning times of the speed cases, as a table: `python tests/bench/bench_planner.py` from the checkout.

Every case is planned with a profile whose stages outlast the billing minimum, and with one twenty times as fast, whose
short stages do not (then every instance count has to be looked at). The time is the median of several runs.
"""

from __future__ import annotations

import statistics
import sys
import time

from rubberband.errors import InfeasibleError
from rubberband.offer import Billing, Offer
from rubberband.plan import Constraints, Stage
from rubberband.planner.search import plan
from rubberband.profile import Profile
from rubberband.scheduler import sha

ITERATION_S = {1: 110.0, 2: 57.0, 4: 30.0, 8: 18.0, 16: 13.0, 32: 11.0}
NUM_RUNS = 5


def p3_8xlarge(max_instances: int, billing: Billing) -> Offer:
    """The 4-GPU instance of the experiment file."""
    return Offer(
        instance_type="p3.8xlarge",
        gpus=4,
        price_usd_per_hour=12.24,
        max_instances=max_instances,
        provision_delay_s=15.0,
        init_delay_s=15.0,
        billing=billing,
    )


def profile(speed_up: float) -> Profile:
    """The profile of the experiment file, `speed_up` times as fast."""
    return Profile(
        seconds_per_iteration={gpus: seconds / speed_up for gpus, seconds in ITERATION_S.items()}, trial_startup_s=2.0
    )


CASES: list[tuple[str, tuple[Stage, ...], int, list[tuple[float, float | None]]]] = [
    ("SHA(32,1,50,3)", sha(32, 1, 50, 3), 16, [(1.0, 1200.0), (1.0, None)]),
    ("SHA(64,4,508,2)", sha(64, 4, 508, 2), 32, [(1.0, 10 * 3600.0), (27.5, 1200.0), (100.0, 300.0), (20.0, None)]),
    (
        "SHA(512,4,4096,2)",
        sha(512, 4, 4096, 2),
        256,
        [(1.0, 24 * 3600.0), (20.0, 2 * 3600.0), (20.0, 3600.0), (100.0, 1800.0), (20.0, None)],
    ),
    (
        "1000 trials",
        tuple(Stage(trials=count, iterations=2 * 3**index) for index, count in enumerate((1000, 250, 62, 15))),
        256,
        [(1.0, 7200.0), (20.0, 600.0), (100.0, 180.0), (20.0, None)],
    ),
]


def planning_s(stages: tuple[Stage, ...], speed_up: float, offer: Offer, limits: Constraints) -> tuple[float, str]:
    """Median seconds to plan, and what came out."""
    seconds = []
    outcome = ""
    for _ in range(NUM_RUNS):
        began_s = time.perf_counter()
        try:
            prediction = plan(stages, profile(speed_up), offer, limits).prediction
            outcome = f"{prediction.jct_s:>10.1f} s {prediction.cost_usd:>10.4f} USD"
        except InfeasibleError as error:
            outcome = str(error)
        seconds.append(time.perf_counter() - began_s)
    return statistics.median(seconds), outcome


def main() -> None:
    """Print a line per case."""
    sys.stdout.write(f"{'job':<18} {'k <=':>4} {'billing':<12} {'speed':>6} {'deadline':>9} {'planning':>10}  plan\n")
    for name, stages, max_instances, variants in CASES:
        for billing in ("per_instance", "per_function"):
            for speed_up, deadline_s in variants:
                limits = Constraints(deadline_s=deadline_s, max_gpus_per_trial=16)
                seconds, outcome = planning_s(stages, speed_up, p3_8xlarge(max_instances, billing), limits)
                deadline = "none" if deadline_s is None else f"{deadline_s:.0f} s"
                sys.stdout.write(
                    f"{name:<18} {max_instances:>4} {billing:<12} {speed_up:>5}x {deadline:>9} "
                    f"{seconds * 1e3:>7.1f} ms  {outcome}\n"
                )


if __name__ == "__main__":
    main()
