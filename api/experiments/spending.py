"""Money as the watcher asks for it: may a queued experiment start, and has an owner used his budget up."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

from rubberband.api.experiments.budgets import Budgets
from rubberband.api.settings import SharedPool
from rubberband.api.store.sql import Store
from rubberband.api.web.problems import UNAVAILABLE, HttpProblem
from rubberband.states import AT_WORK
from rubberband.values.submission import Submission

ASK_EVERY_S = 5.0
"""Time after which it is asked again whether there is money for an experiment that waits for it."""
COUNT_EVERY_S = 1.0
"""Interval of counting what owners have spent."""
COUNTING_SHARE = 0.02
"""Largest share of the time spent counting, where there are very many experiments."""


class Spending:
    """Asks a pool's budgets, not too often. For one thread."""

    def __init__(self, pool: SharedPool | None, store: Store) -> None:
        """Without a pool there is money for everything."""
        self.budgets = None if pool is None else Budgets(pool, store)
        self._ask_at: dict[str, float] = {}
        """Experiments that wait for money -> the instant of the monotonic clock at which to ask again."""
        self._bill_at = self._count_at = -math.inf
        self._told: set[tuple[str, int]] = set()

    def is_due(self, row: Submission) -> bool:
        """Whether to ask for an experiment of the queue now."""
        now = time.monotonic()
        return now >= self._ask_at.get(row.name, -math.inf) and now >= self._bill_at

    def shortage(self, row: Submission) -> str:
        """Return why an experiment of the queue waits for money; empty if it may start."""
        self._ask_at.pop(row.name, None)
        if self.budgets is None:
            return ""
        try:
            self.budgets.require_start(row, time.time())
        except HttpProblem as problem:
            self._ask_at[row.name] = time.monotonic() + ASK_EVERY_S
            if problem.kind is UNAVAILABLE:  # the broker is asked for all of them
                self._bill_at = time.monotonic() + ASK_EVERY_S
            return f"it waits for money: {problem.detail}"
        return ""

    def to_end(self, rows: Iterable[Submission]) -> list[tuple[Submission, str]]:
        """Return the running experiments whose owners have spent their budgets of the month, and why they end.

        Those that `ends` was called with are left out.
        """
        begin = time.monotonic()
        if self.budgets is None or begin < self._count_at:
            return []
        at_work = [row for row in rows if row.state in AT_WORK and (row.name, row.attempt) not in self._told]
        why = self.budgets.used_up({row.owner for row in at_work}, time.time())
        self._count_at = time.monotonic() + max(COUNT_EVERY_S, (time.monotonic() - begin) / COUNTING_SHARE)
        return [(row, why[row.owner]) for row in at_work if row.owner in why]

    def ends(self, row: Submission) -> None:
        """Note that an experiment was asked to end."""
        self._told.add((row.name, row.attempt))
