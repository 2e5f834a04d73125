"""Which trials run and which wait, kept as their statuses change, so that no event walks through all trials.

The result is that of a walk through all of them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rubberband.executor.core.trial_state import TrialState


class _Trials:
    """Trials by number."""

    def __init__(self) -> None:
        self._trials: dict[int, TrialState] = {}
        self._sorted: list[TrialState] | None = None

    def __len__(self) -> int:
        return len(self._trials)

    def sorted(self) -> Sequence[TrialState]:
        """All of them, by number."""
        if self._sorted is None:
            self._sorted = [self._trials[number] for number in sorted(self._trials)]
        return self._sorted


class RunningTrials(_Trials):
    """The trials that train now: when the first of them is due, and which train on an instance.

    A trial's gang does not change as long as it is in here; whoever changes when it is due says so by `note_due`.
    """

    def __init__(self, trials: Iterable[TrialState]) -> None:
        super().__init__()
        self._due: list[tuple[float, int]] = []
        """A heap; of each trial it holds a time that is no later than when it is due, and perhaps more."""
        self._on: dict[str, dict[int, TrialState]] = {}
        for trial in trials:
            self.add(trial)

    def add(self, trial: TrialState) -> None:
        """Add a trial that starts to train."""
        self._trials[trial.trial] = trial
        self._sorted = None
        for slot in trial.gang:
            self._on.setdefault(slot.instance, {})[trial.trial] = trial
        heapq.heappush(self._due, (trial.due_at, trial.trial))

    def remove(self, trial: TrialState) -> None:
        """Remove a trial that no longer trains."""
        del self._trials[trial.trial]
        self._sorted = None
        for instance in {slot.instance for slot in trial.gang}:
            del self._on[instance][trial.trial]
            if not self._on[instance]:
                del self._on[instance]

    def on(self, instance: str) -> list[TrialState]:
        """Return the trials that train there, by number."""
        there = self._on.get(instance, {})
        return [there[number] for number in sorted(there)]

    def uses(self, instance: str) -> bool:
        """Whether any trains there."""
        return instance in self._on

    def note_due(self, trial: TrialState, due_at: float) -> None:
        """Set when a trial is due."""
        if due_at < trial.due_at and trial.trial in self._trials:
            heapq.heappush(self._due, (due_at, trial.trial))
        trial.due_at = due_at

    def first_due_at(self) -> float:
        """Return when the first of them is due; infinite if none is."""
        heap = self._due
        while heap:
            at, number = heap[0]
            trial = self._trials.get(number)
            if trial is None:
                heapq.heappop(heap)
            elif at != trial.due_at:
                heapq.heapreplace(heap, (trial.due_at, number))
            else:
                return at
        return math.inf

    def due(self, now: float) -> list[TrialState]:
        """Return the trials that are due by now, by number."""
        if not self._due or self._due[0][0] > now:
            return []
        found: dict[int, TrialState] = {}
        while self._due and self.first_due_at() <= now:
            _, number = heapq.heappop(self._due)
            found[number] = self._trials[number]
        for trial in found.values():
            heapq.heappush(self._due, (trial.due_at, trial.trial))
        return [found[number] for number in sorted(found)]


class WaitingTrials(_Trials):
    """The trials that wait for a slot, which they get by number."""

    def __init__(self, trials: Iterable[TrialState]) -> None:
        super().__init__()
        self._trials = {trial.trial: trial for trial in trials}
        self._order = sorted(self._trials)
        """A heap; it holds the number of each of them once, and perhaps others."""
        self._listed = set(self._order)

    def add(self, trial: TrialState) -> None:
        """Add a trial that waits."""
        self._trials[trial.trial] = trial
        self._sorted = None
        if trial.trial not in self._listed:
            self._listed.add(trial.trial)
            heapq.heappush(self._order, trial.trial)

    def remove(self, trial: TrialState) -> None:
        """Remove a trial that no longer waits; one whose bracket has not begun is not among them."""
        self._trials.pop(trial.trial, None)
        self._sorted = None

    def first(self, count: int) -> list[TrialState]:
        """The first `count` of them."""
        found: list[TrialState] = []
        while self._order and len(found) < count:
            number = heapq.heappop(self._order)
            if number in self._trials:
                found.append(self._trials[number])
            else:
                self._listed.discard(number)
        for trial in found:
            heapq.heappush(self._order, trial.trial)
        return found
