"""How often the planner's choice is not the best plan: `python tests/bench/bench_choice.py [JOBS] [KIND …]`.

Random small jobs of each kind (`tests.builders.choice`, 400 each unless JOBS says otherwise), with all their plans.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.builders.choice import KINDS, fault, question_of


def main(words: list[str]) -> None:
    """Print a line for each kind, with the first faults."""
    num_jobs, kinds = (int(words[0]) if words else 400), words[1:] or list(KINDS)
    for kind in kinds:
        found = [(seed, wrong) for seed in range(num_jobs) if (wrong := fault(question_of(kind, seed))) is not None]
        infeasible = sum("infeasible" in wrong for _, wrong in found)
        print(f"{kind:14} {num_jobs} jobs, {len(found)} wrong, {infeasible} of them called infeasible", flush=True)
        for seed, wrong in found[:5]:
            print(f"    {kind} {seed}: {wrong}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
