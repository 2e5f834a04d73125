"""The rest of a run without a SYNC: which trials train when, and until when each instance is held. Pure.

Results that are not there yet decide which trials go on. Each sample ranks them at random among those of their rung, by
numbers that follow from the sample's own: the same state has the same forecast.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from random import Random

from rubberband.values.schedulers import Rungs


@dataclass(frozen=True, slots=True, kw_only=True)
class Climber:
    """A trial that trains, or waits to."""

    trial: int
    rung: int
    left_s: float
    """Seconds to the end of its rung, once it has a slot."""
    host: int | None = None
    """The host that it is on; None: it waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """An instance, or the instances of a wide gang."""

    slots: int
    ready_s: float = 0.0
    """Seconds until trials may start on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """All that decides the rest of a run."""

    hosts: Sequence[Host]
    climbers: Sequence[Climber]
    """In the order in which those that wait get slots."""
    rungs: Rungs
    """Results so far; they are not changed."""
    rung_s: Sequence[float]
    """Seconds of a trial that goes on, in each rung."""
    repeats: int
    """Trials of each configuration."""
    over: Collection[int]
    """Trials that have failed, or were stopped by the user."""
    has_completed: bool
    """Whether a trial has trained to the end."""

    def rest(self, sample: int) -> Rest:
        """Return the rest, as one sample has it."""
        return _Run(self, Random(sample)).to_end()


@dataclass(slots=True)
class Rest:
    """The rest of a run, from now on."""

    left_s: float = 0.0
    """Until no trial trains any more."""
    busy_s: float = 0.0
    """Seconds for which gangs train, added up."""
    held_s: list[float] = field(default_factory=list)
    """Until each host is given back."""


class _Run:
    """One sample of the rest of a run."""

    def __init__(self, field: Field, random: Random) -> None:
        self._field, self._random, self._rungs = field, random, field.rungs.by_rank()
        self._running = [0] * len(field.hosts)
        self._free = [host.slots if host.ready_s <= 0.0 else 0 for host in field.hosts]
        self._held_s: list[float | None] = [None] * len(field.hosts)
        self._again: deque[Climber] = deque()
        self._new = deque(one for one in field.climbers if one.host is None)
        self._awaited = Counter(one.trial // field.repeats for one in field.climbers)
        self._ends: list[tuple[float, int, int, int]] = []
        """Ends of rungs (instant, trial, rung, host), and hosts that get ready, with -1 as their trial."""
        self._completed, self._rest = field.has_completed, Rest()
        for number, host in enumerate(field.hosts):
            if host.ready_s > 0.0:
                heapq.heappush(self._ends, (host.ready_s, -1, 0, number))
        for one in field.climbers:
            if one.host is not None:
                self._free[one.host] -= 1
                self._start(0.0, one, one.host)

    def to_end(self) -> Rest:
        """Run it to its end."""
        now = 0.0
        self._fill(now)
        while self._ends:
            now, trial, rung, host = heapq.heappop(self._ends)
            if trial < 0:
                self._free[host] += self._field.hosts[host].slots
            else:
                self._running[host] -= 1
                self._free[host] += 1
                self._rest.left_s = now
                self._end(trial, rung)
            self._fill(now)
        self._rest.held_s = [self._rest.left_s if held_s is None else held_s for held_s in self._held_s]
        return self._rest

    def _end(self, trial: int, rung: int) -> None:
        unit = trial // self._field.repeats
        self._awaited[unit] -= 1
        if rung + 1 == len(self._field.rung_s):
            self._completed = True
        elif not self._awaited[unit]:
            self._rungs.record(rung, self._random.random(), unit)

    def _start(self, now: float, one: Climber, host: int) -> None:
        self._running[host] += 1
        self._rest.busy_s += one.left_s
        heapq.heappush(self._ends, (now + one.left_s, one.trial, one.rung, host))

    def _fill(self, now: float) -> None:
        """Start trials on what is free; give back hosts without any once no trial waits, or may."""
        while (host := self._fullest()) is not None:
            one = self._next()
            if one is None:
                break
            self._free[host] -= 1
            self._start(now, one, host)
        if self._again or self._new or self._rungs.promotable() is not None or self._awaits_repeats():
            return
        for host, running in enumerate(self._running):
            if not running and self._held_s[host] is None:
                self._held_s[host], self._free[host] = now, 0

    def _fullest(self) -> int | None:
        """Return the host with the fewest free slots that has one."""
        free = [(slots, host) for host, slots in enumerate(self._free) if slots > 0 and self._held_s[host] is None]
        return min(free)[1] if free else None

    def _next(self) -> Climber | None:
        found = self._rungs.promotable()
        if not self._again and found is None and not self._new and not any(self._running) and not self._completed:
            highest = self._rungs.highest()  # too few are left for any to be among the best
            found = None if highest is None else (highest, 0)
        if not self._again and found is not None:
            unit, rung = self._rungs.promote(found[0]), found[0] + 1
            climbing = [Climber(trial=one, rung=rung, left_s=self._field.rung_s[rung]) for one in self._members(unit)]
            self._awaited[unit] += len(climbing)
            self._again.extend(climbing)
        waiting = self._again or self._new
        return waiting.popleft() if waiting else None

    def _members(self, unit: int) -> Sequence[int]:
        repeats = self._field.repeats
        return [trial for trial in range(unit * repeats, (unit + 1) * repeats) if trial not in self._field.over]

    def _awaits_repeats(self) -> bool:
        """Whether repeats wait for others of their configuration: all of them may go on then."""
        if self._field.repeats == 1:
            return False
        return any(0 < count < len(self._members(unit)) for unit, count in self._awaited.items())
