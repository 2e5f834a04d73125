"""The size of a search: the largest number with a property that small numbers have and large ones lack."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rubberband.values.plan import SizeKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The size of a search that was sized to its limits."""

    key: SizeKey
    number: int | None
    """None if no size fits: then the estimate is of the smallest search."""
    smallest: int
    num_trials: int
    """Configurations that are tried, over all brackets."""

    @property
    def setting(self) -> str:
        """The size as an override of the file: `search.scheduler.num_samples=283`."""
        return f"search.scheduler.{self.key}={self.number}"

    def to_json(self) -> dict[str, Any]:
        """Return the object under `size` of an estimate's JSON."""
        return {"key": self.key, "number": self.number, "trials": self.num_trials}


_FIRST_STEPS = 128
"""The first step away from a guess is this part of it."""


def largest(
    starts: Sequence[int],
    most: int,
    fits: Callable[[int], bool],
    may_fit: Callable[[int], bool],
    guess: Callable[[int], int] | None = None,
) -> int | None:
    """Return the largest number up to `most` that fits; None if none does.

    From each of `starts` (increasing) to the next one, small numbers fit and large ones do not. `may_fit` is quick, and
    true wherever `fits` is. A good `guess`, from a number that fits, saves looks.
    """
    ends = [*starts[1:], most + 1]
    for start, end in reversed(list(zip(starts, ends, strict=True))):
        end = bisect_left(range(start, end), True, key=lambda number: not may_fit(number)) + start
        if end > start and fits(start):
            return _last(start, end, fits, min(end - 1, guess(start) if guess else end))
    return None


def _last(low: int, high: int, fits: Callable[[int], bool], guess: int) -> int:
    """Return the last number below `high` that fits; `low` does. Steps away from the guess grow fourfold."""
    step, at = max(1, guess // _FIRST_STEPS), guess
    while low < at < high:
        if fits(at):
            low, at = at, at + step
        else:
            high, at = at, at - step
        step *= 4
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
