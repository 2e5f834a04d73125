"""A driver on EC2 killed before and after every call of a run or of an image build, in all weathers: what came of it.

Run: python -m tests.bench.bench_crash_points [POINTS | all] [SEED]
"""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from collections.abc import Sequence
from random import Random

from tests.harness import crash_images
from tests.harness.crash_cases import Point
from tests.harness.crash_images import ImageOutcome, ImagePoint, image_points, quick, run_image_point
from tests.harness.crash_points import calls_of_a_run, points, replay_command, run_point
from tests.harness.crash_story import ENDS, Outcome

POINTS = 10_000
PROGRESS = 500


def main() -> None:
    logging.disable(logging.ERROR)
    asked = sys.argv[1] if len(sys.argv) > 1 else str(POINTS)
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    every = [*points(seed), *image_points(seed)]
    count = len(every) if asked == "all" else min(int(asked), len(every))
    began, began_cpu = time.perf_counter(), time.process_time()
    outcomes = outcomes_of(Random(seed).sample(every, count))
    took_s, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
    each_ms = 1e3 * cpu_s / len(outcomes)
    print(f"{len(outcomes)} points of {len(every)} (seed {seed}), {took_s:.0f} s, {each_ms:.1f} ms of CPU each")
    kinds(outcomes)
    report([outcome for outcome in outcomes if isinstance(outcome, Outcome)])
    print(f"{sum(bool(one.wrong) for one in outcomes)} of {len(outcomes)} points went wrong")


def outcomes_of(chosen: Sequence[Point | ImagePoint]) -> list[Outcome | ImageOutcome]:
    """What came of each; what went wrong is printed at once."""
    outcomes: list[Outcome | ImageOutcome] = []
    with quick() as folder:
        for point in chosen:
            image = isinstance(point, ImagePoint)
            outcomes.append(run_image_point(folder, point) if image else run_point(point))
            if wrong := outcomes[-1].wrong:
                command = crash_images.replay_command(point) if image else replay_command(point)
                print(f"  {command}  # {'; '.join(wrong)}", flush=True)
            if len(outcomes) % PROGRESS == 0:
                print(f"  {len(outcomes)} points", file=sys.stderr, flush=True)
    return outcomes


def kinds(outcomes: Sequence[Outcome | ImageOutcome]) -> None:
    """How many there were of each kind of work, and what drivers and sweeps asked for when they died."""
    of_kind: dict[str, list[Outcome | ImageOutcome]] = {}
    for one in outcomes:
        of_kind.setdefault(one.point.markets if isinstance(one, Outcome) else "images", []).append(one)
    for kind, those in sorted(of_kind.items()):
        died_in = Counter(call for one in those for call in one.died_in)
        print(
            f"  {kind}: {len(those)} points, {sum(bool(one.wrong) for one in those)} wrong, "
            f"{sum(one.instances for one in those)} instances, {died_in.total()} deaths"
        )
        print("    ended: " + counted(Counter(one.ended for one in those)))
        print("    died in: " + counted(died_in))


def counted(counts: Counter[str]) -> str:
    return ", ".join(f"{what} {count}" for what, count in counts.most_common())


def report(outcomes: Sequence[Outcome]) -> None:
    """What runs met, and how far the ledger is from the bill."""
    for what in (
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
        "hung",
        "cancelled",
    ):
        counts = Counter(getattr(outcome.point, what) for outcome in outcomes)
        print(f"  {what}: " + ", ".join(f"{value} {count}" for value, count in sorted(counts.items(), key=str)))
    deaths = Counter(len(outcome.died_in) for outcome in outcomes)
    print("  deaths of drivers and sweeps: " + ", ".join(f"{count} x {n}" for count, n in sorted(deaths.items())))
    for markets in sorted({outcome.point.markets for outcome in outcomes}):
        lengths = {cap: len(calls) for cap, calls in calls_of_a_run(markets).items()}
        print(f"  calls of an undisturbed run, {markets}: {lengths}")
    print(f"  spot instances billed at the prices of several hours: {sum(o.repriced for o in outcomes)}")
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
