"""The clock of a service in tests: it shows the time that a test sets, on whatever day the test runs."""

from __future__ import annotations

import threading
from datetime import UTC, datetime

MID_MONTH = datetime(2026, 11, 15, tzinfo=UTC).timestamp()
"""No plan of a test reaches from here into the next month."""
_TICK_S = 0.001


class Clock:
    """Unix time. Thread-safe."""

    def __init__(self, now: float = MID_MONTH) -> None:
        self.now = now
        self._lock = threading.Lock()

    def __call__(self) -> float:
        """Return the time, a millisecond later at each call: no two changes of a row have the same instant."""
        with self._lock:
            self.now += _TICK_S
            return self.now
