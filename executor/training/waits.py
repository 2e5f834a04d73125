"""The time in which a training loop waits, and for what. Another thread may ask while a wait lasts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Literal

Cause = Literal["data", "peers", "checkpoint"]
"""Cause of a wait: samples, the other workers of the gang, or the checkpoint."""
Waited = Mapping[Cause, Callable[[], float]]
"""Cause -> the seconds of its waits so far; without a cause that is not measured."""


class WaitClock:
    """The seconds of the waits for one cause; each wait is a `with` block of one thread."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._over_s = 0.0
        self._since: float | None = None

    def __enter__(self) -> None:
        self._since = self._clock()

    def __exit__(self, *_: object) -> None:
        since, self._since = self._since, None
        self._over_s += self._clock() - (since or 0.0)

    def seconds(self) -> float:
        """Return the seconds so far, those of the present wait included."""
        since = self._since
        return self._over_s + (0.0 if since is None else self._clock() - since)
