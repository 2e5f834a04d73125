"""Decisions of the first parameter server for all workers: their batches, and who may begin when. Pure.

A ticket is the number of a batch of the trial, counted from its beginning: the order of the samples depends on the
seed alone, whichever worker takes which batch. Every ticket is given out once; those of a lost worker are given out
again. An update has a number as well, in the order in which gradients are ready.

With a bound of staleness s > 0, a worker begins its next gradient if it has made at most s updates more than the
slowest one (Ho et al. 2013, stale synchronous parallel). With s = 0 all workers share each batch, and take one update
together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Pace:
    """Tickets, clocks and numbers of updates of one attempt; workers are known by names of their own."""

    max_staleness: int | None
    until_updates: int
    """Updates of the trial at the end of the segment."""
    updates: int = 0
    """Updates of the trial that have a number."""
    next_ticket: int = 0
    returned: deque[int] = field(default_factory=deque)
    """Tickets that were given out and not used, in order."""
    held: dict[str, list[int]] = field(default_factory=dict)
    """Worker -> tickets that it has not used."""
    _clocks: dict[str, int] = field(default_factory=dict)
    """Worker -> its updates, counted from the slowest one's when it came."""
    _rounds: dict[str, int] = field(default_factory=dict)
    """Worker -> the update that it last took part in, if all share a batch."""
    _members: tuple[str, ...] = ()
    """Workers that share the present batch."""
    _round: int = -1
    """The update that `_members` share."""

    @property
    def shares(self) -> bool:
        """Whether all workers share the batch of an update."""
        return self.max_staleness == 0

    @property
    def is_over(self) -> bool:
        """Whether all updates of the segment have a number."""
        return self.updates >= self.until_updates

    @property
    def workers(self) -> Sequence[str]:
        """Workers that are there."""
        return tuple(self._clocks)

    def join(self, worker: str, hand: int = 1) -> None:
        """Add a worker, which holds `hand` tickets at a time."""
        self._clocks[worker] = min(self._clocks.values(), default=0)
        self._rounds[worker] = self.updates - 1
        self.held[worker] = []
        if not self.shares:
            self._fill(worker, hand)

    def leave(self, worker: str) -> None:
        """Take a worker out; its tickets are given to others."""
        self._clocks.pop(worker, None)
        self._rounds.pop(worker, None)
        self.returned.extend(self.held.pop(worker, ()))

    def may_begin(self, worker: str) -> bool:
        """Whether the worker may begin its next gradient."""
        if worker not in self._clocks:
            return False
        if self.shares:
            return self._rounds[worker] < self.updates
        if self.max_staleness is None:
            return True
        return self._clocks[worker] - min(self._clocks.values()) <= self.max_staleness

    def begin(self, worker: str) -> tuple[str, ...]:
        """Note that the worker begins; return those that share its batch, in the order of their parts."""
        if not self.shares:
            return (worker,)
        if self._round < self.updates or not set(self._members) & set(self._clocks):
            self._round, self._members = self.updates, tuple(sorted(self._clocks))
        return self._members if worker in self._members else ()

    def number(self) -> int | None:
        """Return the number of the next update; None if the segment needs no more."""
        if self.is_over:
            return None
        if self.shares:
            return self.updates
        self.updates += 1
        return self.updates - 1

    def used(self, worker: str) -> None:
        """Note that the worker's gradient is applied: it takes another ticket in place of its first."""
        if worker not in self._clocks:
            return
        self._clocks[worker] += 1
        if not self.shares and self.held[worker]:
            self.held[worker].pop(0)
            self._fill(worker, len(self.held[worker]) + 1)

    def end_round(self, workers: Sequence[str]) -> None:
        """Note that the update is made that `workers` shared."""
        for worker in workers:
            if worker in self._rounds:
                self._rounds[worker] = self.updates
        self.updates += 1
        self.next_ticket += 1

    def _fill(self, worker: str, hand: int) -> None:
        while len(self.held[worker]) < hand:
            if self.returned:
                self.held[worker].append(self.returned.popleft())
            else:
                self.held[worker].append(self.next_ticket)
                self.next_ticket += 1

    def state(self) -> dict[str, Any]:
        """Return a copy of the position of the data: the next ticket, and those that workers hold."""
        held = {worker: list(tickets) for worker, tickets in self.held.items()}
        return {"next_ticket": self.next_ticket, "held": held, "returned": list(self.returned)}
