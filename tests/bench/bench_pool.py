"""Random runs of a pool in random weather, by the thousand: how many went wrong, and how often machines moved warm.

Run: python -m tests.bench.bench_pool [RUNS] [FIRST_SEED]
"""

from __future__ import annotations

import sys
import time

from tests.property.pool_runs import PoolRun

RUNS = 10_000


def main() -> None:
    """Run the seeds, and print those that went wrong."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else RUNS
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    began, wrong = time.process_time(), []
    kills = lent = warm = machines = 0
    for seed in range(first, first + runs):
        one = PoolRun(seed)
        try:
            one.run()
        except AssertionError as error:
            wrong.append((seed, str(error)))
        kills += one.kills
        machines += len(one.pool.state.machines)
        for held in one.pool.state.slices.values():
            if held.running_at is not None and held.machine is not None and held.machine.running_at is not None:
                lent += 1
                warm += held.machine.running_at < held.requested_at
    cpu_s = time.process_time() - began
    print(f"{runs} runs, {cpu_s:.0f} CPU s; the broker died {kills} times")
    print(f"{machines} machines rented, {lent} times lent, {warm} of these warm")
    print(f"{len(wrong)} runs went wrong")
    for seed, what in wrong:
        print(f"  python -m tests.bench.bench_pool 1 {seed}  # {what}")


if __name__ == "__main__":
    main()
