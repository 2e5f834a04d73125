"""Requests that arrive at an instant of a virtual run."""

from __future__ import annotations

from collections.abc import Callable, Collection

from rubberband.executor import DriverRequest
from tests.builders.memory import MemoryInbox


class TimedInbox(MemoryInbox):
    """Shows a request from when it was asked on, by the clock of the run."""

    def __init__(self, clock: Callable[[], float], *requests: DriverRequest) -> None:
        super().__init__(requests)
        self._clock = clock

    def pending(self, done: Collection[str] = ()) -> list[DriverRequest]:
        return [request for request in super().pending(done) if request.asked_at <= self._clock()]


def extend(at: float, request: str = "r-1", **limits: float) -> DriverRequest:
    return DriverRequest(id=request, kind="extend", asked_at=at, **limits)


def cancel(at: float, request: str = "c-1") -> DriverRequest:
    return DriverRequest(id=request, kind="cancel", asked_at=at)
