"""Promotion without a SYNC: the rungs that trials climb, and which trial of a rung goes on next.

A scheduler makes stages (`rubberband.values.plan.Stage`), each up to a SYNC, or one stage whose trials climb rungs.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """The rungs of a stage, and its rule: asynchronous halving (asha), or no promotion where there is one rung."""

    totals: tuple[int, ...]
    """Iterations in all that a trial has done at the end of each rung; the last one is max_t."""
    reduction_factor: int
    """Eta: the best 1/eta of a rung are promoted."""
    repeats: int = 1
    """Trials of a configuration, which go on together, once all of them have ended a rung."""

    @property
    def scheduler(self) -> str:
        """The type that the experiment file gives it."""
        return "asha" if self.promotes else "none"

    @property
    def promotes(self) -> bool:
        """Whether results decide what is trained before all of them are there."""
        return len(self.totals) > 1

    def quota(self, results: int) -> int:
        """Return how many of the best of a rung's `results` may go on: 0 of none, and at most one more with each.

        A result is that of a configuration. Controller, simulations and forecasts ask this alone, so that another rule
        is another `quota`.
        """
        return results // self.reduction_factor

    @property
    def gains(self) -> tuple[int, ...]:
        """Iterations that each rung adds."""
        return tuple(after - before for before, after in pairwise((0, *self.totals)))

    def fewest(self, trials: int) -> tuple[int, ...]:
        """Return the fewest of `trials` that reach each rung: what waiting for all of a rung would promote.

        Without waiting more are promoted, since a trial may be among the best of its rung only for a while.
        """
        configurations = -(-trials // self.repeats)
        reach = accumulate(self.totals[1:], lambda reach, _: self.quota(reach), initial=configurations)
        return tuple(min(trials, self.repeats * configurations) for configurations in reach)

    @property
    def in_words(self) -> str:
        """How trials go on, as a note below a plan."""
        if not self.promotes:
            return "Each trial trains once, to its end; instances are released when no trial is left for them."
        return (
            f"Trials pause after {', '.join(map(str, self.totals))} iterations and continue when they are among the "
            f"best 1/{self.reduction_factor} there; instances without a trial are released at the end. "
            "The order of the results is drawn at random."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """The rule of a SYNC at which the worst trials take over the checkpoints of the best ones, and all go on.

    The scheduler of the experiment file says with which configurations.
    """

    quantile: float
    """Share of the trials that take over a checkpoint, and of those from which it is taken; at most 1/2."""

    def takers(self, trials: int) -> int:
        """Return how many of the trials take over a checkpoint."""
        return min(math.ceil(trials * self.quantile - 1e-9), trials // 2)

    def in_words(self, trials: int) -> str:
        """How trials go on, as a note below a plan."""
        takers = self.takers(trials)
        return (
            f"One fleet trains all {trials} trials in every stage. After each but the last, the worst {takers} "
            f"continue from the checkpoints of the best {takers}, with changed configurations."
        )


Result = tuple[Any, int]
"""Merit of a configuration in its rung (the lowest is the best), and its number; without repeats, that of the trial."""


class Rungs:
    """The results of every rung but the last, best first, and who was promoted."""

    def __init__(self, ladder: Ladder) -> None:
        self._quota = ladder.quota
        self._results: list[list[Result]] = [[] for _ in ladder.totals[:-1]]
        self._left: list[list[Result]] = [[] for _ in ladder.totals[:-1]]
        """Heaps of those that were not promoted."""
        self._known = set[tuple[int, int]]()
        """Rung and number of every result."""

    def record(self, rung: int, merit: Any, trial: int) -> None:
        """A trial has ended a rung; those of the last one have no further to go, and each counts once."""
        if rung < len(self._results) and (rung, trial) not in self._known:
            self._known.add((rung, trial))
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
        most = self._quota(len(results))
        return most > 0 and bisect_left(results, self._left[rung][0]) < most

    def promote(self, rung: int) -> int:
        """Take the best trial of a rung that was not promoted off it; return its number."""
        return heapq.heappop(self._left[rung])[1]

    def withdraw(self, rung: int, trial: int) -> None:
        """Take a trial off its rung without a promotion; its result stays among those of the rung."""
        if rung < len(self._left):
            self._left[rung] = [entry for entry in self._left[rung] if entry[1] != trial]
            heapq.heapify(self._left[rung])

    def highest(self) -> int | None:
        """Return the highest rung with a trial that was not promoted; None without any."""
        return next((rung for rung in range(len(self._left) - 1, -1, -1) if self._left[rung]), None)

    def by_rank(self) -> Rungs:
        """Return a copy whose merits are numbers from 0 to 1 by rank, as random results are spread."""
        found = Rungs.__new__(Rungs)
        found._quota, found._known = self._quota, set(self._known)
        found._results = [
            [((at + 1) / (len(results) + 1), number) for at, (_, number) in enumerate(results)]
            for results in self._results
        ]
        left = [{number for _, number in heap} for heap in self._left]
        found._left = [
            [one for one in results if one[1] in numbers] for results, numbers in zip(found._results, left, strict=True)
        ]
        return found

    def counts(self) -> Sequence[int]:
        """Return the results of each rung but the last."""
        return [len(results) for results in self._results]
