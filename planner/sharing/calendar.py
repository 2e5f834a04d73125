"""The calendar of promises: GPUs over time that are promised to experiments."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Part of a plan: a number of GPUs for some time."""

    gpus: int
    duration_s: float

    def __post_init__(self) -> None:
        if self.gpus < 0 or not 0.0 <= self.duration_s < math.inf:
            raise ValueError(
                f"a span of {self.gpus} GPUs for {self.duration_s} s cannot be promised; give numbers >= 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CalendarSlot:
    """Time of a plan in the calendar."""

    start_at: float
    end_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calendar:
    """Promises on a pool of `gpus` GPUs. A value: what changes it returns another calendar.

    A plan is a sequence of spans, one after the other without a gap; all instants are of one clock. Count instances
    instead of GPUs where whole instances are lent.
    """

    gpus: int
    """GPUs of the pool, the same at all times."""
    promises: Mapping[str, tuple[float, tuple[Span, ...]]] = field(default_factory=lambda: MappingProxyType({}))
    """Name -> start and plan."""

    def fits(self, plan: Sequence[Span], deadline_at: float, from_at: float) -> CalendarSlot | None:
        """Return the earliest time of the plan from `from_at` on, or None if it would end after `deadline_at`."""
        slot = self.earliest(plan, from_at)
        return slot if slot is not None and slot.end_at <= deadline_at else None

    def earliest(self, plan: Sequence[Span], from_at: float) -> CalendarSlot | None:
        """Return the earliest time from `from_at` on at which the plan fits beside all promises.

        Its `end_at` is the earliest deadline that would do, its `start_at` the start. None if it needs more GPUs than
        the pool has.
        """
        if any(span.gpus > self.gpus for span in plan):
            return None
        edges, levels = self._levels()
        offsets = _ends(plan)
        # The plan fits first where one of its spans starts at the instant at which GPUs become free.
        starts = {from_at, *(at - offset for at in edges for offset in offsets[:-1] if at - offset > from_at)}
        for start_at in sorted(starts):
            if all(
                span.gpus + _highest(edges, levels, start_at + begin_s, start_at + end_s) <= self.gpus
                for span, begin_s, end_s in zip(plan, offsets, offsets[1:], strict=False)
            ):
                return CalendarSlot(start_at=start_at, end_at=start_at + offsets[-1])
        raise AssertionError("after the last promise every plan fits")

    def promise(self, name: str, plan: Sequence[Span], start_at: float) -> Calendar:
        """Return the calendar with this promise in place of an earlier one of `name`.

        Raises ValueError if it does not fit beside the others.
        """
        others = self.withdraw(name)
        slot = others.earliest(plan, start_at)
        if slot is None or slot.start_at > start_at:
            raise ValueError(
                f"the plan of {name!r} needs more GPUs than the {self.gpus} of the pool that are not promised; "
                "start it at the instant that earliest() returns"
            )
        return replace(self, promises=MappingProxyType({**others.promises, name: (start_at, tuple(plan))}))

    def follow(self, name: str, rest: Sequence[Span], now: float) -> Calendar:
        """Return the calendar in which the promise of `name` covers the `rest` of its plan, from `now` on.

        The promise moves where it does not cover the rest any more, as the plan is early, late or another one, and the
        rest fits beside the others. It keeps its end if that is later. Otherwise it stays as it is.
        """
        if not rest or self._covers(name, rest, now):
            return self
        others = self.withdraw(name)
        start_at, plan = self.promises[name]
        spare_s = start_at + _ends(plan)[-1] - now - _ends(rest)[-1]
        longer = [*rest, Span(gpus=rest[-1].gpus, duration_s=max(0.0, spare_s))]
        for moved in (longer, rest):
            slot = others.earliest(moved, now)
            if slot is not None and slot.start_at <= now:
                return others.promise(name, moved, now)
        return self

    def _covers(self, name: str, rest: Sequence[Span], now: float) -> bool:
        """Return whether `name` is promised the GPUs of `rest` all the time, from `now` on."""
        start_at, plan = self.promises[name]
        edges, ends = [start_at + offset for offset in _ends(plan)], [now + offset for offset in _ends(rest)]
        for span, begin_at, end_at in zip(rest, ends, ends[1:], strict=False):
            begin_at, end_at = begin_at + _ROUNDING_S, end_at - _ROUNDING_S
            instants = [begin_at, *(at for at in edges if begin_at < at < end_at)] if begin_at < end_at else []
            if any(self.promised(name, at) < span.gpus for at in instants):
                return False
        return True

    def withdraw(self, name: str) -> Calendar:
        """Return the calendar without the promise of `name`; the same if there is none."""
        return replace(self, promises=MappingProxyType({k: v for k, v in self.promises.items() if k != name}))

    def promised(self, name: str, at: float) -> int:
        """Return the GPUs that `name` is promised at an instant; 0 without a promise."""
        if name not in self.promises:
            return 0
        start_at, plan = self.promises[name]
        ends = [start_at + offset for offset in _ends(plan)]
        spans = zip(plan, ends, ends[1:], strict=False)
        return next((span.gpus for span, begin_at, end_at in spans if begin_at <= at < end_at), 0)

    def most(self, name: str, at: float) -> int:
        """Return the most GPUs that `name` is promised at any time; 0 if its promise is over at `at`."""
        if name not in self.promises:
            return 0
        start_at, plan = self.promises[name]
        return max(span.gpus for span in plan) if at < start_at + _ends(plan)[-1] else 0

    def taken(self, at: float) -> int:
        """Return the GPUs promised to all at an instant."""
        return sum(self.promised(name, at) for name in self.promises)

    def _levels(self) -> tuple[list[float], list[int]]:
        """Return the instants at which the promised GPUs change, and the GPUs promised from each one on."""
        changes: dict[float, int] = {}
        for start_at, plan in self.promises.values():
            ends = [start_at + offset for offset in _ends(plan)]
            for span, begin_at, end_at in zip(plan, ends, ends[1:], strict=False):
                changes[begin_at] = changes.get(begin_at, 0) + span.gpus
                changes[end_at] = changes.get(end_at, 0) - span.gpus
        edges = sorted(changes)
        return edges, list(accumulate(changes[at] for at in edges))


_ROUNDING_S = 1e-3
"""Two promises may overlap by this much: sums of durations are rounded."""


def _ends(plan: Sequence[Span]) -> list[float]:
    """Return 0 and the ends of the spans, in seconds from the start."""
    return list(accumulate((span.duration_s for span in plan), initial=0.0))


def _highest(edges: Sequence[float], levels: Sequence[int], begin_at: float, end_at: float) -> int:
    """Return the most GPUs promised at once between two instants."""
    first = bisect_right(edges, begin_at + _ROUNDING_S) - 1
    last = bisect_left(edges, end_at - _ROUNDING_S)
    return max([0, *levels[max(first, 0) : last]]) if end_at > begin_at else 0
