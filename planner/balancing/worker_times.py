"""The times of a worker at two shares: its present one, and an equal one.

A line through looks at a small share says little about a large one: a GPU's time is flat until a batch saturates it
(LB-BSP §3.3.1), and small errors of the slope become large ones. So the time at an equal share is kept from the looks
at it, and afterwards changes only as the worker does: by the part by which its time at the same share changes.

A step with more samples takes more time, but at most in proportion: t(x) <= t(y) <= t(x) y / x for x <= y. The kept
time stays within these bounds, so errors do not add up in a long run. A worker without samples keeps its times.
"""

from __future__ import annotations

import math
from typing import Any

from rubberband.planner.balancing.balancer import Line

NEAR = 0.22
"""Difference of the logarithms of two shares below which a look at one informs about the other."""
EQUAL = 0.1
"""The same for a look that replaces the time at an equal share: near shares differ by up to a fifth."""
RATE = 0.1
"""Weight of a look in the moving average of the logarithm of the time."""
FIRST_LOOKS = 5
"""Looks at a new share that are averaged before the worker is said to change."""
LEAST_CHANGE, MOST_CHANGE = 0.25, 0.5
"""Difference of the logarithms of two times beyond which the worker has changed at once."""
SPREADS = 5.0
"""The same as a multiple of the usual difference of a look, between these limits."""
SPREAD_RATE = 0.05


class WorkerTimes:
    """Times of one worker. Shares are samples per step; an equal share need not be a whole number."""

    def __init__(self) -> None:
        self._share = 0
        """Around which the present looks are; 0 before the first one."""
        self._looks = 0
        self._seconds = 0.0
        self._equal_share, self._equal_s = 0.0, 0.0
        self._spread = 0.0
        """Mean absolute difference of the logarithms of a look and of the average before it."""

    def observe(self, share: int, seconds: float, equal_share: float, line: Line) -> None:
        """Take in a look. `line` says how the time changes from one share to a near one."""
        if share == self._share:
            self._follow(seconds)
        elif not self._share or abs(math.log(share / self._share)) > NEAR:
            self._share, self._seconds, self._looks = share, seconds, 1
        else:
            self._follow(seconds * _ratio(line, share, self._share))
        if abs(math.log(self._share / equal_share)) <= EQUAL or not self._equal_s:
            self._equal_s = self._seconds * _ratio(line, self._share, equal_share)
        elif equal_share != self._equal_share:
            self._equal_s *= _ratio(line, self._equal_share, equal_share)
        self._equal_share = equal_share
        if self._looks >= FIRST_LOOKS:
            least, most = sorted((1.0, equal_share / self._share))
            self._equal_s = min(max(self._equal_s, least * self._seconds), most * self._seconds)

    def _follow(self, seconds: float) -> None:
        """Take in a time at the present share."""
        self._looks += 1
        off = math.log(seconds / self._seconds)
        is_known = self._looks > FIRST_LOOKS
        limit = min(max(LEAST_CHANGE, SPREADS * self._spread), MOST_CHANGE) if is_known else MOST_CHANGE
        has_changed = abs(off) > limit
        self._spread += SPREAD_RATE * (min(abs(off), limit) - self._spread)
        factor = math.exp(off if has_changed else off * max(RATE, 1.0 / self._looks))
        self._seconds *= factor
        if has_changed or is_known:
            self._equal_s *= factor

    def time_s(self, share: int, line: Line) -> float:
        """Return the time at a share, by the line from the nearer one of the two; the line's own before any look."""
        if not self._share or not share:
            return line.time_s(share)
        to_present, to_equal = (abs(math.log(share / known)) for known in (self._share, self._equal_share))
        if to_present <= to_equal:
            return self._seconds * _ratio(line, self._share, share)
        return self._equal_s * _ratio(line, self._equal_share, share)

    def state(self) -> list[float]:
        """Return what `restore` needs, in plain values."""
        return [self._share, self._looks, self._seconds, self._equal_share, self._equal_s, self._spread]

    def restore(self, state: list[Any]) -> None:
        """Go on where `state` was taken."""
        self._share, self._looks, self._seconds, self._equal_share, self._equal_s, self._spread = state


def _ratio(line: Line, share: float, other: float) -> float:
    """Return t(other) / t(share)."""
    seconds = line.base_s + line.per_sample_s * share
    return (line.base_s + line.per_sample_s * other) / seconds if seconds > 0.0 else 1.0
