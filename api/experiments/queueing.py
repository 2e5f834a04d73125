"""The queue of a service: which experiment starts next, and when each is expected to start. Pure."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rubberband.values.kinds import kind_in
from rubberband.values.submission import Submission


class Queue:
    """Queued experiments, whose owners take turns: one with many experiments does not stand before all others.

    A free slot goes to the owner with the fewest running experiments for its weight. Among equals, it goes to the owner
    whose turn began first, by start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996, section 2) with one unit of
    work for each start; then to the older experiment. The experiments of one owner start in the order of their arrival.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        """`weights`: owner -> share relative to others; 1 where it is missing."""
        self._weights = weights
        self._owners: dict[str, str] = {}
        """Experiment -> its owner, in the order of arrival."""
        self._arrived: dict[str, dict[str, int]] = {}
        """Owner -> experiment -> number of its arrival, in that order."""
        self._arrivals = 0
        self._finish: dict[str, float] = {}
        """Owner -> virtual time at which its latest turn is over."""
        self._now = 0.0
        """Virtual time: the begin of the latest turn."""

    def __len__(self) -> int:
        return len(self._owners)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the experiments in the order of their arrival."""
        return iter(tuple(self._owners))

    def copy(self, without: Collection[str] = ()) -> Queue:
        """Return a queue of its own with the same experiments, but for those in `without`."""
        made = Queue(self._weights)
        made._owners, made._arrivals = dict(self._owners), self._arrivals
        made._arrived = {owner: dict(names) for owner, names in self._arrived.items()}
        made._finish, made._now = dict(self._finish), self._now
        for name in without:
            made.drop(name)
        return made

    def put(self, name: str, owner: str) -> None:
        """Add an experiment as the last one. Idempotent: one that is queued keeps its place."""
        if name not in self._owners:
            self._owners[name] = owner
            self._arrived.setdefault(owner, {})[name] = self._arrivals
            self._arrivals += 1

    def drop(self, name: str) -> None:
        """Remove an experiment. Idempotent."""
        owner = self._owners.pop(name, None)
        if owner is not None:
            del self._arrived[owner][name]
            if not self._arrived[owner]:
                del self._arrived[owner]

    def owner(self, name: str) -> str:
        """Return the owner of a queued experiment."""
        return self._owners[name]

    def next(self, running: Mapping[str, int], without: Collection[str] = ()) -> str | None:
        """Return the experiment that starts next; None if there is none. `running`: owner -> its running experiments.

        Those in `without` are passed over: they cannot start now.
        """
        first: list[tuple[float, float, int, str]] = []
        for owner, names in self._arrived.items():
            for name, arrival in names.items():
                if name not in without:
                    first.append((running.get(owner, 0) / self._weight(owner), self._begin(owner), arrival, name))
                    break
        return min(first)[-1] if first else None

    def took_turn(self, owner: str) -> None:
        """Note that an experiment of `owner` got a slot."""
        self._now = self._begin(owner)
        self._finish[owner] = self._now + 1.0 / self._weight(owner)

    def _begin(self, owner: str) -> float:
        """Return the virtual time at which the owner's next turn begins: an owner saves no turns while it asks none."""
        return max(self._finish.get(owner, 0.0), self._now)

    def _weight(self, owner: str) -> float:
        return self._weights.get(owner, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Experiment that has a slot."""

    owner: str
    ends_at: float | None
    """Expected end (Unix time); None where it has no plan yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Experiment that waits for a slot, or would."""

    takes_s: float | None
    """Time that it is expected to hold its slot; None where it has no plan yet."""
    shortest_s: float = 0.0
    """Time of its shortest plan; 0 where that is not known."""
    deadline_at: float | None = None
    """Unix time."""

    @property
    def last_start_at(self) -> float | None:
        """The last start that meets the deadline (Unix time); None without a deadline."""
        return None if self.deadline_at is None else self.deadline_at - self.shortest_s

    def held_s(self, start_at: float) -> float | None:
        """Return the time that it holds a slot from `start_at` on; None where that is not known.

        It is planned again at its start, within its deadline: one that starts too late for that is refused.
        """
        if self.deadline_at is None or self.last_start_at is None or self.takes_s is None:
            return self.takes_s
        return 0.0 if start_at > self.last_start_at else min(self.takes_s, self.deadline_at - start_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Place of an experiment in the queue, and its expected start."""

    place: int
    """1 starts next."""
    ahead: int
    """Experiments that have a slot, or start before it."""
    start_at: float | None
    """Unix time; None where one ahead has no plan yet, or no slot is ever free."""
    waiting: Waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The slots of a service at an instant, and the experiments that wait for one."""

    queue: Queue
    running: Sequence[Holder]
    waiting: Mapping[str, Waiting]
    """Name -> experiment of the queue."""
    slots: int

    @property
    def is_free(self) -> bool:
        """Whether the next experiment starts at once."""
        return self.has_slot(len(self.running) + len(self.queue))

    def has_slot(self, ahead: int) -> bool:
        """Whether one with this many `ahead` of it waits for no slot."""
        return ahead < self.slots

    def joined(self, name: str, owner: str, waiting: Waiting) -> Line:
        """Return the line once one more experiment has joined it."""
        queue = self.queue.copy()
        queue.put(name, owner)
        return replace(self, queue=queue, waiting={**self.waiting, name: waiting})

    def turns(self, now: float) -> dict[str, Turn]:
        """Return the turn of each experiment that waits, in their order.

        A start is the earliest end of a slot, each held for as long as its plan takes. No start is known behind an
        experiment without a plan.
        """
        queue, counts = self.queue.copy(), Counter(one.owner for one in self.running)
        known = self.slots > 0 and all(one.ends_at is not None for one in self.running)
        number, at = itertools.count(), now
        ends = [
            (math.inf if one.ends_at is None else max(now, one.ends_at), next(number), one.owner)
            for one in self.running
        ]
        heapq.heapify(ends)
        found: dict[str, Turn] = {}
        while (name := queue.next(counts)) is not None:
            while ends and len(ends) >= self.slots:
                end_at, _, owner = heapq.heappop(ends)
                counts[owner] -= 1
                at = max(at, end_at)
                name = queue.next(counts) or name
            waiting, owner = self.waiting[name], queue.owner(name)
            found[name] = Turn(
                place=len(found) + 1,
                ahead=len(self.running) + len(found),
                start_at=at if known else None,
                waiting=waiting,
            )
            queue.drop(name)
            queue.took_turn(owner)
            counts[owner] += 1
            held_s = waiting.held_s(at) if known else None
            known = known and held_s is not None
            heapq.heappush(ends, (at + (held_s or 0.0), next(number), owner))
        return found


NO_LINE = Line(queue=Queue({}), running=(), waiting={}, slots=1)


def holder_of(row: Submission) -> Holder:
    """Return an experiment that runs, or starts, as the queue behind it sees it."""
    if kind_in(row.words).is_simulated:  # a rehearsal passes its hours within seconds
        return Holder(owner=row.owner, ends_at=row.changed_at)
    summary = row.summary
    if summary.planned_jct_s is None and summary.forecast_jct_s is None:
        return Holder(owner=row.owner, ends_at=None)
    if summary.started_at is not None:
        return Holder(owner=row.owner, ends_at=summary.started_at + summary.ends_s())
    held_s = waiting_of(row).held_s(row.changed_at)
    return Holder(owner=row.owner, ends_at=None if held_s is None else row.changed_at + held_s)


def waiting_of(row: Submission) -> Waiting:
    """Return a queued experiment as the queue sees it."""
    summary, takes_s = row.summary, row.summary.planned_jct_s
    if takes_s is not None:
        takes_s = max(0.0, summary.ends_s() - summary.jct_s)
    if kind_in(row.words).is_simulated:
        takes_s = 0.0
    return Waiting(
        takes_s=takes_s,
        shortest_s=summary.shortest_jct_s or 0.0,
        deadline_at=None if summary.started_at is not None else row.deadline_at,
    )
