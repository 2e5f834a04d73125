"""A journal and an inbox that live as long as their process: for virtual runs by the thousand."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from rubberband.cloud.pool.journal import FileJournal, Lease, PoolEvent, from_line, to_line
from rubberband.executor import DriverRequest, Event, Requests, behind, by_age, checked_id


class MemoryJournal:
    def __init__(self) -> None:
        self._events: list[Event] = []

    def append(self, events: Sequence[Event]) -> None:
        self._events.extend(events)

    def events(self, after: int = -1) -> Iterator[tuple[int, Event]]:
        return iter(list(enumerate(self._events))[after + 1 :])


class MemoryInbox(Requests):
    def __init__(self, requests: Sequence[DriverRequest] = ()) -> None:
        self._requests: dict[str, DriverRequest] = {}
        for request in requests:
            self.put(request)

    def put(self, request: DriverRequest) -> None:
        if checked_id(request.id) not in self._requests:
            self._requests[request.id] = behind(request, list(self._requests.values()))

    def pending(self, done: Collection[str] = ()) -> list[DriverRequest]:
        return sorted((request for id, request in self._requests.items() if id not in done), key=by_age)

    def discard(self, id: str) -> None:
        self._requests.pop(id, None)


class MemoryPoolJournal(FileJournal):
    """A pool's journal in memory. It survives its broker, as the text that a file would hold."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._leases: dict[str, Lease] = {}

    def events(self) -> Iterator[PoolEvent]:
        return map(from_line, self._lines)

    def append(self, events: Sequence[PoolEvent]) -> None:
        self._lines += map(to_line, events)

    def replace(self, event: PoolEvent) -> None:
        """Keep this event in place of all others."""
        self._lines = [to_line(event)]

    def leases(self) -> dict[str, Lease]:
        """Return the latest lease of each tenant."""
        return dict(self._leases)

    def renew(self, tenant: str, lease: Lease) -> None:
        """Keep the latest lease of a tenant."""
        self._leases[tenant] = lease
