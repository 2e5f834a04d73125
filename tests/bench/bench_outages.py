"""Random outages of AWS, its machines and its driver during runs on EC2: a summary, and each run that went wrong.

Run: python -m tests.bench.bench_outages --runs N --seed S
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter
from collections.abc import Sequence

from tests.bench.bench_crash_points import counted
from tests.harness.outages import Told, replay_command, run_seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    asked = parser.parse_args()
    logging.disable(logging.ERROR)
    began, told = time.process_time(), list[Told]()
    for seed in range(asked.seed, asked.seed + asked.runs):
        told.append(run_seed(seed))
        if wrong := told[-1].outcome.wrong:
            print(f"  {replay_command(seed)}  # {'; '.join(wrong)}", flush=True)
    report(told)
    wrong = sum(bool(one.outcome.wrong) for one in told)
    seeds = f"seeds {asked.seed} to {asked.seed + asked.runs - 1}"
    cpu_s = time.process_time() - began
    print(f"{wrong} of {len(told)} runs went wrong ({seeds}, {cpu_s / len(told):.2f} s of CPU each)")
    sys.exit(bool(wrong))


def report(told: Sequence[Told]) -> None:
    """What runs met, and how they ended."""
    print("ended: " + counted(Counter(one.outcome.ended for one in told)))
    print("met: " + counted(sum((one.seen for one in told), Counter())))
    deaths = sum(len(one.outcome.died_in) for one in told)
    print(f"deaths of drivers: {deaths}; instances: {sum(one.outcome.instances for one in told)}")
    for reason, count in Counter(one.reason for one in told if one.outcome.ended == "failed").most_common(5):
        print(f"  failed {count}: {reason}")


if __name__ == "__main__":
    main()
