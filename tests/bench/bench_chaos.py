"""Random runs in random weather, by the thousand: runs a second and core, what ended how, what went wrong.

Run: python -m tests.bench.bench_chaos [RUNS] [FIRST_SEED] [FAMILY] [--ends | --odd]

With --ends, half of the trials end by themselves. With --odd, runs whose allotments change are resumed after their ends
with other allotments, answers to launches are lost, and clocks step back. Exits with 1 if a run went wrong.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import Counter

from tests.harness.chaos import Outcome, replay_command, run_seed
from tests.harness.chaos_cases import Family

RUNS = 10_000


def main() -> None:
    asked = [word for word in sys.argv[1:] if not word.startswith("--")]
    ends, odd, num_wrong = "--ends" in sys.argv, "--odd" in sys.argv, 0
    runs = int(asked[0]) if asked else RUNS
    first = int(asked[1]) if len(asked) > 1 else 0
    only = ["allotments"] if odd else asked[2:]
    gc.freeze()
    for family, what in FAMILIES.items():
        if only and family not in only:
            continue
        fixed = [run_one(seed, family, replan=False, ends=ends, odd=odd) for seed in range(first, first + runs)]
        report(f"{what}, plans held fixed", fixed)
        again = 0 if family.startswith("asha") else runs // 50  # without a SYNC nothing is planned again
        replanned = [run_one(seed, family, replan=True, ends=ends, odd=odd) for seed in range(first, first + again)]
        if replanned:
            report("the same, planned again at every SYNC", replanned)
        for how, timed, replan in (("held fixed", fixed, False), ("planned again", replanned, True)):
            wrong = [(seed, outcome) for seed, outcome, _ in timed if outcome.wrong]
            num_wrong += len(wrong)
            print(f"{len(wrong)} of {len(timed)} runs with plans {how} went wrong")
            for seed, outcome in wrong:
                told = replay_command(seed, family, replan=replan, ends=ends, odd=odd)
                print(f"  {told}  # {'; '.join(outcome.wrong)}")
    if num_wrong:
        sys.exit(1)


FAMILIES: dict[Family, str] = {
    "27 trials": "27 trials (stages 27/9/3/1 of 1/2/6/18 iterations)",
    "brackets": "2 to 4 brackets in up to 3 lanes",
    "asha": "trials that climb rungs",
    "brackets that learn": "2 to 4 brackets, whose configurations tpe draws",
    "asha that learns": "trials that climb rungs, and whose configurations tpe draws",
    "allotments": "any of them without a sampler, while it is allotted fewer and more instances at random",
}
Timed = tuple[int, Outcome, float]


def run_one(seed: int, family: Family, *, replan: bool, ends: bool, odd: bool) -> Timed:
    """A seed, what came of it, and the CPU seconds that it took; the state is checked at its end."""
    began = time.process_time()
    outcome = run_seed(seed, family, replan=replan, check_every=10 if odd else 1_000_000, ends=ends, odd=odd)
    return seed, outcome, time.process_time() - began


def report(what: str, timed: list[Timed]) -> None:
    """Print figures of some runs."""
    cpu_s = sum(took_s for _, _, took_s in timed)
    num_events = sum(outcome.num_events for _, outcome, _ in timed)
    ended: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    for _, outcome, _ in timed:
        ended[outcome.ended] += 1
        seen += outcome.seen
    print(f"{what}: {len(timed)} runs")
    print(f"  {len(timed) / cpu_s:.0f} runs a second and core; {num_events / len(timed):.0f} events a run, ", end="")
    print(f"{1e6 * cpu_s / num_events:.0f} us an event")
    slowest = max(timed, key=lambda one: one[2])
    print(f"  the slowest: seed {slowest[0]}, {slowest[2]:.2f} s, {slowest[1].num_instances} instances")
    print("  ended: " + ", ".join(f"{outcome} {count}" for outcome, count in ended.most_common()))
    print("  seen: " + ", ".join(f"{fault} {count}" for fault, count in seen.most_common()))


if __name__ == "__main__":
    main()
