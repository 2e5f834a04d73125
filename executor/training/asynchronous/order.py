"""The order of updates on a parameter server, and where iterations end among them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

AHEAD = 2
"""Iterations that may be complete on a server before rank 0 has closed the first of them."""


@dataclass(eq=False)
class Order:
    """Which updates a server has applied, by their numbers, and which iterations are complete."""

    first: int
    """The iteration that the segment begins after."""
    boundaries: Sequence[int]
    """Updates of the trial at the end of that iteration, and of each that follows."""

    def __post_init__(self) -> None:
        self.cut = self.closed = self.first
        """Iterations whose updates are complete; and those that rank 0 has closed."""
        self.low = self.boundaries[0]
        """All updates below this number are applied or lost."""
        self._above: set[int] = set()

    @property
    def last(self) -> int:
        """The iteration at the end of the segment."""
        return self.first + len(self.boundaries) - 1

    def may_apply(self, number: int) -> bool:
        """Whether the update belongs to the present iteration, and rank 0 is not too far behind."""
        return number < self.boundaries[min(self.cut + 1, self.closed + AHEAD, self.last) - self.first]

    @property
    def waits(self) -> bool:
        """Whether nothing can be applied before rank 0 closes an iteration."""
        return self.cut < self.last and self.cut >= self.closed + AHEAD

    def may_apply_unclosed(self, number: int) -> bool:
        """Whether the update can be applied, now or later, without rank 0 closing an iteration before."""
        return number < self.boundaries[min(self.closed + AHEAD, self.last) - self.first]

    def is_done(self, number: int) -> bool:
        """Whether the update is applied or lost."""
        return number < self.low or number in self._above

    def done(self, number: int) -> bool:
        """Note that the update is applied or lost; return whether that completes an iteration: then call `end`."""
        self._above.add(number)
        while self.low in self._above:
            self._above.discard(self.low)
            self.low += 1
        return self.ends()

    def ends(self) -> bool:
        """Whether the present iteration is complete."""
        return self.cut < self.last and self.low >= self.boundaries[self.cut + 1 - self.first]

    def end(self) -> int:
        """End the present iteration; return its number."""
        self.cut += 1
        return self.cut


@dataclass(eq=False, slots=True)
class Tally:
    """Sums over the updates of an iteration."""

    began_at: float
    updates: int = 0
    lost: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    """Sums of losses and metrics by name; of their weights by the empty name."""
    _staleness: int = 0
    _max_staleness: int = 0
    _timed: int = 0
    _times: dict[str, float] = field(default_factory=dict)

    def note(self, sums: dict[str, float], times: dict[str, float] | None, staleness: int) -> None:
        """Add a worker's part of an update: its losses, the times of the one before, and its staleness."""
        self._staleness += staleness
        self._max_staleness = max(self._max_staleness, staleness)
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        if times is not None:
            self._timed += 1
            for name, seconds in times.items():
                self._times[name] = self._times.get(name, 0.0) + seconds

    def use(self, workers: int, now: float) -> dict[str, float]:
        """Return the fields of an AsyncUse that the first server knows."""
        mean = {name: self._times.get(name, 0.0) / max(self._timed, 1) for name in TIMES}
        return mean | {
            "workers": workers,
            "updates": self.updates,
            "duration_s": now - self.began_at,
            "staleness": self._staleness / max(self.updates, 1),
            "max_staleness": self._max_staleness,
            "lost": self.lost,
        }


TIMES = ("compute_s", "up_s", "wait_s", "server_s", "down_s")
"""Fields of an AsyncUse that a worker measures."""
