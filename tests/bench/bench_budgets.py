"""Random stories of owners with budgets: how often, and by how much, is a budget of a month passed?

`python -m tests.bench.bench_budgets [--stories N] [--acts N] [--before]`. `--before`: only submissions, and what
extensions add, ask for money, and nothing ends what runs, as in version 0.1. An owner has passed his budget if he
spent more than it and a minute of what runs for him.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rubberband.api.experiments.budgets import EXTENSION, PLAN, Ask, Budgets, Spending
from tests.builders.money_stories import BUDGETS_USD, tell, world


def passed_usd(seed: int, acts: int) -> tuple[float, int, int]:
    """Return by how much a budget was passed in a story, and the requests that were made and refused."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as home, world(Path(home)) as made:
        tell(made, random.Random(seed), acts)
        return made.passed_usd, made.asked, made.refused


def as_before(stack: ExitStack) -> None:
    """Leave out the doors that version 0.1 did not have."""
    require = Budgets.require

    def asks_seldom(self: Budgets, row: Any, cost_usd: float, now: float, ask: Ask, **named: Any) -> None:
        if ask in (PLAN, EXTENSION):
            require(self, row, cost_usd, now, ask, **named)

    stack.enter_context(patch.object(Budgets, "require", asks_seldom))
    stack.enter_context(patch.object(Spending, "to_end", lambda self, rows: []))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stories", type=int, default=2000)
    parser.add_argument("--acts", type=int, default=14)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--before", action="store_true")
    given = parser.parse_args(arguments)
    with ExitStack() as stack:
        if given.before:
            as_before(stack)
        found = [passed_usd(given.seed + number, given.acts) for number in range(given.stories)]
    passed = [usd for usd, _, _ in found if usd > 1e-9]
    asked, refused = (sum(column) for column in list(zip(*found, strict=True))[1:])
    print(f"{len(found)} stories, {asked} requests, {refused} refused; budgets {BUDGETS_USD}")
    worst = f", by up to {max(passed):.2f} USD" if passed else ""
    print(f"{len(passed)} stories pass a budget by more than a minute of what runs{worst}")
    return 1 if passed and not given.before else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
