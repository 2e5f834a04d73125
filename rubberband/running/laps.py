"""Seconds of a command until its run begins, by what they went into."""

from __future__ import annotations

import os
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

_BEGAN_FIELD = 19
"""Field of /proc/self/stat after the command's name: clock ticks from the boot to the start of the process."""


class Laps:
    """A stopwatch: each lap adds the time since the one before to its cause."""

    def __init__(self, began_s: float | None = None) -> None:
        """`began_s`: when the first lap began, on the monotonic clock; None: now."""
        self._last_s = time.monotonic() if began_s is None else began_s
        self.seconds: Counter[str] = Counter()

    def lap(self, cause: str) -> None:
        """Add the time since the latest lap to `cause`."""
        now_s = time.monotonic()
        self.seconds[cause] += now_s - self._last_s  # type: ignore[assignment]
        self._last_s = now_s


def process_began_s() -> float | None:
    """Return when this process began, on the monotonic clock; None where that is not known."""
    with suppress(OSError, ValueError, IndexError, AttributeError):
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[_BEGAN_FIELD])
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return time.monotonic() - max(0.0, age_s)
    return None
