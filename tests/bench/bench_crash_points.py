"""A driver on EC2 killed before and after every call of a run, in all weathers: how many points, what came of them.

Run: python -m tests.bench.bench_crash_points [POINTS | all] [SEED]
"""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from collections.abc import Sequence

from tests.property.crash_points import ENDS, Outcome, calls_of_a_run, points, replay_command, run_point, sample

POINTS = 10_000


def main() -> None:
    logging.disable(logging.WARNING)
    asked = sys.argv[1] if len(sys.argv) > 1 else str(POINTS)
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    every = list(points(seed))
    chosen = every if asked == "all" else sample(int(asked), seed)
    began, began_cpu = time.perf_counter(), time.process_time()
    outcomes = [run_point(point) for point in chosen]
    took_s, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
    each_ms = 1e3 * cpu_s / len(outcomes)
    print(f"{len(outcomes)} points of {len(every)} (seed {seed}), {took_s:.0f} s, {each_ms:.1f} ms of CPU each")
    report(outcomes)
    broken = [outcome for outcome in outcomes if outcome.wrong]
    print(f"{len(broken)} of {len(outcomes)} points went wrong")
    for outcome in broken:
        print(f"  {replay_command(outcome.point)}  # {'; '.join(outcome.wrong)}")


def report(outcomes: Sequence[Outcome]) -> None:
    """How many there were of each kind, and how far the ledger is from the bill."""
    for what in (
        "markets",
        "after",
        "weather",
        "lasts",
        "hidden_s",
        "then",
        "gap_s",
        "head",
        "cap",
        "together",
        "one_zone",
        "taken",
    ):
        counts = Counter(getattr(outcome.point, what) for outcome in outcomes)
        print(f"  {what}: " + ", ".join(f"{value} {count}" for value, count in sorted(counts.items(), key=str)))
    deaths = Counter(outcome.deaths for outcome in outcomes)
    print("  deaths of drivers and sweeps: " + ", ".join(f"{count} x {n}" for count, n in sorted(deaths.items())))
    lengths = {markets: calls_of_a_run(markets) for markets in {outcome.point.markets for outcome in outcomes}}
    print(f"  calls of an undisturbed run: {lengths}")
    print("  ended: " + ", ".join(f"{how} {count}" for how, count in Counter(o.ended for o in outcomes).most_common()))
    print(f"  drivers and sweeps: {sum(o.drivers for o in outcomes)}; instances: {sum(o.instances for o in outcomes)}")
    for what, gaps_s in (("within a lease", (0.0, 30.0)), ("after every lease", (900.0,))):
        found = [o for o in outcomes if o.ended in ENDS and o.point.gap_s in gaps_s and o.point.weather != "stale"]
        more = sorted(o.ledger_usd - o.billed_usd for o in found)
        if more:
            print(
                f"  ledger less bill, next driver {what}: least {more[0]:.4f}, median {more[len(more) // 2]:.4f}, ",
                end="",
            )
            print(f"most {more[-1]:.4f} USD ({len(more)} runs)")
    stale = [o.ledger_usd - o.billed_usd for o in outcomes if o.ended in ENDS and o.point.weather == "stale"]
    if stale:
        print(f"  ledger less bill where looks are a minute old: least {min(stale):.4f}, most {max(stale):.4f} USD")


if __name__ == "__main__":
    main()
