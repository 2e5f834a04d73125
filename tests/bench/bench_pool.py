"""Random runs of a pool in random weather, by the thousand: how many went wrong, and how often machines moved warm.

With `shared`, real controllers share it: how many promises were made and kept, and what was seen. A deadline that was
promised and is missed is wrong, unless an instance was lost or a driver died. Exits with 1 if a run went wrong.

With `odd`, real controllers share it too, answers to launches are lost, checkpoint stores go away, limits are set by
hand, the service is restarted, and what has ended is resumed.

Run: python -m tests.bench.bench_pool [RUNS] [FIRST_SEED] [shared | odd]
"""

from __future__ import annotations

import sys
import time
from collections import Counter

from tests.harness.pool_runs import PoolRun
from tests.harness.shared_pool import SharedRun, replay_command, wrong_end

RUNS = 10_000


def main() -> None:
    """Run the seeds, and print those that went wrong."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else RUNS
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    if sys.argv[3:]:
        share(range(first, first + runs), odd=sys.argv[3] == "odd")
    else:
        lend(first, runs)


def share(seeds: range, *, odd: bool) -> None:
    """Run seeds of experiments that share a pool; print those that went wrong at once."""
    began, wrong, members, seen = time.process_time(), 0, 0, Counter[str]()
    for seed in seeds:
        run = SharedRun(seed, odd=odd)
        if what := wrong_end(run):
            wrong += 1
            print(f"  {replay_command(seed, odd=odd)}  # {what}", flush=True)
        members += len(run.members)
        seen += run.seen
    cpu_s = time.process_time() - began
    print(f"{len(seeds)} runs of {members} experiments, {cpu_s:.0f} CPU s; {wrong} runs went wrong")
    print("seen: " + ", ".join(f"{what} {count}" for what, count in seen.most_common()))
    if wrong:
        sys.exit(1)


def lend(first: int, runs: int) -> None:
    """Run seeds of a pool whose tenants only ask, hold and give back; print those that went wrong."""
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
    if wrong:
        sys.exit(1)


if __name__ == "__main__":
    main()
