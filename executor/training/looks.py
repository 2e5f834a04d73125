"""The budget of time for choosing the batch, and a clock that other work on the machine does not disturb.

Every look at the batch takes time: readings, fits, trial passes, and the additional pass of a step in halves. A budget
bounds them all together, whether steps take a millisecond or a minute.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

SHARE = 0.0075
"""Share of the time for looks: of what has passed, and of the whole segment's from its beginning, since what is learnt
early is used for long. Together 1.5 % in the end."""
_QUEUED = "/proc/thread-self/schedstat"
"""Nanoseconds of this thread on a CPU, and in its queue (Linux)."""


def own_time() -> float:
    """Return a time in seconds that stands still while this thread could run and another one has its CPU.

    It goes on while the thread waits for data, a GPU or other workers: those are costs of the trial. Where the system
    does not count the time in the queue, nothing is left out.
    """
    now = time.perf_counter()
    try:
        with open(_QUEUED, "rb") as file:
            return now - int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return now


@dataclass(slots=True)
class LookBudget:
    """Time that one segment's training and its looks took, in seconds."""

    trained_s: float = 0.0
    spent_s: float = 0.0
    look_s: float = 0.0
    """Seconds of a usual look."""

    def spend(self, seconds: float) -> None:
        """Note a look."""
        self.spent_s += seconds
        self.look_s = seconds if self.look_s == 0.0 else 0.5 * (self.look_s + seconds)

    def left_s(self, remaining_s: float) -> float:
        """Return what looks may still take now; `remaining_s` is the training that is left."""
        return SHARE * (2.0 * self.trained_s + remaining_s) - self.spent_s

    def interval(self, least: int, step_s: float, remaining_s: float) -> int:
        """Return the steps until the next look: `least`, or more if the budget does not suffice by then."""
        missing_s = self.look_s - self.left_s(remaining_s)
        return max(least, math.ceil(missing_s / (SHARE * step_s)))

    def affordable(self, cost_s: float, interval: int, step_s: float, remaining_s: float) -> float:
        """Return how many times `cost_s` can be spent until the next look, beside it."""
        left_s = self.left_s(remaining_s) + SHARE * interval * step_s - self.look_s
        return max(0.0, left_s) / cost_s
