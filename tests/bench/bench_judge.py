"""Predictions for random jobs beside an independent simulation, and the simulation beside the executor.

    python -m tests.bench.bench_judge [KIND …] [--jobs 40] [--first 0] [--processes 1] [--agree 5] [--runs 400]
        [--replanned 12]

Kinds: waves, hyperband, asha, function, spot, capped, types; all by default. `--agree` jobs of each kind are run on the
executor's virtual clock too, `--runs` times each. A figure is beyond if it is off by more than a point of
odds, or 1 % of the mean time or cost, and by more than 3 standard errors of the simulation besides (4,000 draws, or
24,000 where these leave it unclear). Jobs of the kind `capped` are also run with replanning, some times each: no run
may cost more than its cap, and no more may miss its limits than was promised. Prints figures, asserts none.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import TypeVar

from tests.judge.capped import Capped, capped_of
from tests.judge.jobs import KINDS, planned_job
from tests.judge.verdict import Agreement, Verdict, agreement_of, verdict_of

_WORST = 8
T = TypeVar("T")


def judged(kind: str, seed: int) -> Verdict:
    return verdict_of(planned_job(kind, seed))


def agreed(kind: str, runs: int, seed: int) -> Agreement:
    """Compare the simulation and the executor on the job of a seed."""
    return agreement_of(planned_job(kind, seed), runs)


def capped(runs: int, seed: int) -> Capped:
    """Run a capped job with replanning."""
    return capped_of(planned_job("capped", seed), runs)


def line(each: Verdict) -> str:
    """One job: predicted, and true."""
    odds, seconds, usd = each.odds, each.time_s, each.cost_usd
    return (
        f"  seed {each.seed:<5} "
        f"odds {odds.predicted:.3f} of {odds.judged:.3f} ({100 * odds.off(relative=False):+.1f})   "
        f"time {seconds.predicted:.0f} of {seconds.judged:.0f} s ({seconds.off(relative=True):+.1%})   "
        f"cost {usd.predicted:.3f} of {usd.judged:.3f} USD ({usd.off(relative=True):+.1%})   {' '.join(each.beyond)}"
    )


def report(kind: str, verdicts: Sequence[Verdict], took_s: float) -> None:
    """Print a kind's count, and its worst jobs."""
    counts = {what: sum(what in each.beyond for each in verdicts) for what in ("odds", "time", "cost")}
    high = sum("odds" in each.beyond and each.odds.predicted > each.odds.judged for each in verdicts)
    print(
        f"{kind:<10} {len(verdicts):>5} jobs; beyond: odds {counts['odds']} ({high} too high), time {counts['time']}, "
        f"cost {counts['cost']}; any {sum(bool(each.beyond) for each in verdicts)}   ({took_s:.0f} s)",
        flush=True,
    )
    wrong = [each for each in verdicts if each.beyond]
    for name, size in (
        ("odds", lambda each: abs(each.odds.off(relative=False))),
        ("time", lambda each: abs(each.time_s.off(relative=True))),
        ("cost", lambda each: abs(each.cost_usd.off(relative=True))),
    ):
        worst = sorted((each for each in wrong if name in each.beyond), key=size, reverse=True)[:_WORST]
        if worst:
            print(f"  worst {name}:")
            print("\n".join(line(each) for each in worst), flush=True)


def report_agreement(kind: str, found: Sequence[Agreement]) -> None:
    """Print how far the simulation is from virtual runs, in standard errors (1 on average where they agree)."""
    rms = [
        math.sqrt(sum(value(each) ** 2 for each in found) / len(found))
        for value in (lambda each: each.time_z, lambda each: each.cost_z, lambda each: each.odds_z)
    ]
    worst = max(found, key=lambda each: each.worst)
    print(
        f"{kind:<10} {len(found):>5} jobs, simulation beside virtual runs, in standard errors: time {rms[0]:.2f}, cost "
        f"{rms[1]:.2f}, odds {rms[2]:.2f}; largest {worst.worst:.1f} (seed {worst.seed}); left spot in "
        f"{sum(each.left_spot for each in found) / len(found):.1%} of runs",
        flush=True,
    )


def report_capped(found: Sequence[Capped]) -> None:
    """Print how often caps and promises were broken, with replanning and without."""
    runs = sum(each.runs for each in found)
    above = [each for each in found if each.above_cap]
    broken = [each for each in found if each.is_broken]
    above_cap = sum(each.above_cap for each in found)
    print(
        f"capped     {len(found):>5} jobs replanned, {runs} runs: {above_cap} above the cap; "
        f"promise broken in {len(broken)} jobs; kept {sum(each.kept for each in found) / runs:.3f} of runs, "
        f"{sum(each.kept_fixed for each in found) / runs:.3f} as planned, "
        f"{sum(each.confidence * each.runs for each in found) / runs:.3f} promised",
        flush=True,
    )
    for each in [*above, *(one for one in broken if one not in above)][: 2 * _WORST]:
        print(
            f"  seed {each.seed:<5} promised {each.confidence:.2f} (found {each.predicted:.3f}), kept {each.kept} of "
            f"{each.runs} replanned, {each.kept_fixed} as planned; above the cap {each.above_cap}, stopped by it "
            f"{each.stopped}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", default=[])
    parser.add_argument("--jobs", type=int, default=40)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--agree", type=int, default=5)
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--replanned", type=int, default=12, help="runs of each capped job with replanning")
    asked = parser.parse_args()
    seeds = range(asked.first, asked.first + asked.jobs)
    with ProcessPoolExecutor(asked.processes) as pool:

        def each(call: Callable[[int], T], over: Iterable[int]) -> list[T]:
            return list(pool.map(call, over))

        for kind in asked.kinds or KINDS:
            began_s = time.perf_counter()
            verdicts = each(partial(judged, kind), seeds)
            report(kind, verdicts, time.perf_counter() - began_s)
            if asked.agree:
                report_agreement(kind, each(partial(agreed, kind, asked.runs), seeds[: asked.agree]))
            if kind == "capped" and asked.replanned:
                report_capped(each(partial(capped, asked.replanned), seeds))


if __name__ == "__main__":
    main()
