"""Where the backend's threads leave events and the driver picks them up, in the order of their instants."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from rubberband.executor.events import Event

_LONGEST_WAIT_S = 0.5


class Mailbox:
    """Thread-safe; `occurred_at` never decreases from one event to the next."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._mutex = threading.Lock()
        self._latest = float("-inf")
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def stamp(self) -> float:
        """Now, but not before any earlier stamp."""
        with self._mutex:
            return self._stamp()

    def _stamp(self) -> float:
        self._latest = max(self._latest, self._clock())
        return self._latest

    def put(self, event: Callable[[float], Event]) -> None:
        """Add the event that `event` makes of the instant at which it occurred: now."""
        with self._mutex:
            self._events.put(event(self._stamp()))

    def take(self, wake_at: float | None) -> list[Event]:
        """All events there are; if none, wait for one, but not beyond `wake_at` and not for long."""
        wait_s = _LONGEST_WAIT_S if wake_at is None else min(_LONGEST_WAIT_S, wake_at - self._clock())
        events = []
        try:
            events.append(self._events.get(timeout=max(0.0, wait_s)))
            while True:
                events.append(self._events.get_nowait())
        except queue.Empty:
            return events
