"""Asynchronous successive halving (ASHA): the ladder of rungs, and which trial may climb next.

Algorithm 2 of Li et al., "A System for Massively Parallel Hyperparameter Tuning" (MLSys 2020): when a slot is free, a
trial goes on that is among the best 1/eta of the results of its rung and was not promoted yet, from the highest such
rung; without one, a new configuration starts in rung 0. No trial waits for the others of its rung. A result counts in
its rung for good, also once its trial was promoted.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """The rungs of a search."""

    totals: tuple[int, ...]
    """Iterations in all that a trial has done at the end of each rung; the last one is max_t."""
    reduction_factor: int
    """Eta: the best 1/eta of a rung are promoted."""

    @property
    def gains(self) -> tuple[int, ...]:
        """Iterations that each rung adds."""
        return tuple(after - before for before, after in pairwise((0, *self.totals)))

    def fewest(self, trials: int) -> tuple[int, ...]:
        """Return the fewest of `trials` that reach each rung: what waiting for all of a rung would promote.

        Without waiting more are promoted, since a trial may be among the best of its rung only for a while.
        """
        return tuple(trials // self.reduction_factor**rung for rung in range(len(self.totals)))


Result = tuple[Any, int]
"""Merit of a trial in its rung (the lowest is the best), and the trial."""


class Rungs:
    """The results of every rung but the last, best first, and who was promoted."""

    def __init__(self, ladder: Ladder) -> None:
        self._eta = ladder.reduction_factor
        self._results: list[list[Result]] = [[] for _ in ladder.totals[:-1]]
        self._left: list[list[Result]] = [[] for _ in ladder.totals[:-1]]
        """Heaps of those that were not promoted."""

    def record(self, rung: int, merit: Any, trial: int) -> None:
        """A trial has ended a rung; those of the last one have no further to go."""
        if rung < len(self._results):
            insort(self._results[rung], (merit, trial))
            heapq.heappush(self._left[rung], (merit, trial))

    def promotable(self) -> tuple[int, int] | None:
        """Return the rung and the number of the trial that goes on next; None if no trial may."""
        for rung in range(len(self._results) - 1, -1, -1):
            if self.may_promote(rung):
                return rung, self._left[rung][0][1]
        return None

    def may_promote(self, rung: int) -> bool:
        """Whether the best result of a rung that was not promoted is among its best 1/eta."""
        if rung >= len(self._results) or not self._left[rung]:
            return False
        results = self._results[rung]
        most = len(results) // self._eta
        return most > 0 and bisect_left(results, self._left[rung][0]) < most

    def promote(self, rung: int) -> int:
        """Take the best trial of a rung that was not promoted off it; return its number."""
        trial: int = heapq.heappop(self._left[rung])[1]
        return trial

    def highest(self) -> int | None:
        """Return the highest rung with a trial that was not promoted; None without any."""
        return next((rung for rung in range(len(self._left) - 1, -1, -1) if self._left[rung]), None)

    def counts(self) -> Sequence[int]:
        """Return the results of each rung but the last."""
        return [len(results) for results in self._results]
