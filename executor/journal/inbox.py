"""What is asked of a driver while it runs: to end, or other limits. By a signal, or by who may write in its folder.

Each request is a file that appears whole. The driver journals what it takes from here as an event that carries the
request's id, so that one that is found again after a crash is not taken twice.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from pydantic import TypeAdapter, ValidationError

from rubberband.atomic import write_atomically
from rubberband.errors import InputError
from rubberband.executor.core import rules
from rubberband.executor.core.controller import Controller
from rubberband.executor.core.events import CancelRequested, Event, LimitsChanged
from rubberband.executor.core.state import Job

_ID = re.compile(r"[A-Za-z0-9-]{1,80}")
_MOST_BYTES = 10_000
"""A larger file is no request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverRequest:
    """Something that is asked of the driver."""

    id: str
    """Whoever asks twice by the same id asks once. Up to 80 letters, digits and -."""
    kind: Literal["cancel", "extend"]
    asked_at: float
    """Unix time."""
    deadline_s: float | None = None
    """Of `extend`: the new deadline, from Started as in `Job.deadline_s`; None: as it was."""
    max_cost_usd: float | None = None
    """Of `extend`: the new cap, as in `Job.max_cost_usd`; None: as it was."""


class Requests(Protocol):
    """Where a driver finds what is asked of it."""

    def pending(self, done: Collection[str] = ()) -> list[DriverRequest]:
        """The requests that are not `done`, by when they were asked."""
        ...

    def discard(self, id: str) -> None:
        """Let go of a request that is journalled. Idempotent."""
        ...

    def withdraw_cancels(self) -> None:
        """Let go of every request to end."""
        ...


class NoRequests:
    """Nobody asks for anything."""

    def pending(self, done: Collection[str] = ()) -> list[DriverRequest]:
        """None."""
        return []

    def discard(self, id: str) -> None:
        """Nothing is there to let go of."""

    def withdraw_cancels(self) -> None:
        """Nothing is there to let go of."""


class MemoryInbox:
    """Requests that live as long as their process: for virtual runs by the thousand."""

    def __init__(self, requests: Sequence[DriverRequest] = ()) -> None:
        self._requests: dict[str, DriverRequest] = {}
        for request in requests:
            self.put(request)

    def put(self, request: DriverRequest) -> None:
        """Leave a request. Idempotent by its id. Raises InputError if its id is none."""
        self._requests.setdefault(_checked(request.id), request)

    def pending(self, done: Collection[str] = ()) -> list[DriverRequest]:
        """The requests that are not `done`, by when they were asked."""
        return sorted((request for id, request in self._requests.items() if id not in done), key=_order)

    def discard(self, id: str) -> None:
        """Let go of a request. Idempotent."""
        self._requests.pop(id, None)

    def withdraw_cancels(self) -> None:
        """Let go of every request to end."""
        _withdraw_cancels(self)


class Inbox:
    """The requests to one driver, in a folder, which need not be there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, request: DriverRequest) -> None:
        """Leave a request. Idempotent by its id. Raises InputError if its id is none or it cannot be written."""
        path = self._path(request.id)
        if path.exists():
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, _stored.dump_json(request), durable=True)
        except OSError as error:
            told = error.strerror or str(error)
            raise InputError(f"{self._folder} cannot be written ({told}); make room or give access") from None

    def pending(self, done: Collection[str] = ()) -> list[DriverRequest]:
        """The requests that are not `done`, by when they were asked. What is no request is left out, and left alone."""
        ids = [id for id in self._ids() if id not in done]
        found = [request for id in ids if (request := self._read(id)) is not None]
        return sorted(found, key=_order)

    def discard(self, id: str) -> None:
        """Let go of a request that is journalled. Idempotent; one that cannot be removed is known by the journal."""
        with suppress(OSError):
            self._path(id).unlink(missing_ok=True)

    def withdraw_cancels(self) -> None:
        """Let go of every request to end, since whoever resumes wants to go on. To be called before a resume begins."""
        _withdraw_cancels(self)

    def _path(self, id: str) -> Path:
        return self._folder / f"{_checked(id)}.json"

    def _ids(self) -> Iterator[str]:
        try:
            names = os.listdir(self._folder)
        except OSError:
            return
        for name in names:
            id, dot, kind = name.partition(".")
            if dot and kind == "json" and _ID.fullmatch(id):
                yield id

    def _read(self, id: str) -> DriverRequest | None:
        try:
            written = _stored.validate_json(_read(self._path(id)), strict=True)
        except (OSError, ValidationError):
            return None
        return written if written.id == id and _is_sound(written) else None


_stored: TypeAdapter[DriverRequest] = TypeAdapter(DriverRequest)


def _is_sound(request: DriverRequest) -> bool:
    limits = [limit for limit in (request.deadline_s, request.max_cost_usd) if limit is not None]
    return math.isfinite(request.asked_at) and all(math.isfinite(limit) and limit > 0.0 for limit in limits)


def _checked(id: str) -> str:
    if not _ID.fullmatch(id):
        raise InputError(f"{id!r} is not the id of a request; use 1 to 80 letters, digits and -")
    return id


def _order(request: DriverRequest) -> tuple[float, str]:
    return request.asked_at, request.id


def _withdraw_cancels(inbox: Requests) -> None:
    for request in inbox.pending():
        if request.kind == "cancel":
            inbox.discard(request.id)


def _read(path: Path) -> bytes:
    """What a plain file holds. Anybody may have put anything there: no link is followed, no pipe waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return b""
        data = file.read(_MOST_BYTES + 1)
    return data if len(data) <= _MOST_BYTES else b""


# What the user asks of a driver while it drives, as events: by a signal, or by a request in the experiment's inbox.


POLL_S = 0.5
"""How long a request lies in the inbox at most while a driver is at work."""


def asked_limits(requests: Requests, controller: Controller, now: float) -> list[LimitsChanged]:
    """The limits that are asked for and not taken in yet."""
    extends = (asked for asked in requests.pending(controller.state.requests) if asked.kind == "extend")
    return [event for event in _as_events(extends, controller.job, now) if isinstance(event, LimitsChanged)]


class Desk:
    """Takes requests in for one driver. They are let go of once the journal has them, not before."""

    def __init__(self, requests: Requests, cancelled: Callable[[], bool]) -> None:
        self._requests = requests
        self._cancelled = cancelled
        self._is_signalled = False
        self._look_at = -math.inf
        self._taken: list[str] = []

    def open(self, controller: Controller, now: float) -> list[LimitsChanged]:
        """What counts before anything else does: limits. What an earlier driver had taken in is let go of."""
        for id in controller.state.requests:
            self._requests.discard(id)
        limits = asked_limits(self._requests, controller, now)
        self._taken += [event.request for event in limits]
        return limits

    def asked(self, controller: Controller, now: float, *, at_once: bool) -> list[Event]:
        """What is asked since, to be journalled in this order; `at_once` where it cannot wait for the next poll."""
        events: list[Event] = []
        if not self._is_signalled and self._cancelled():
            self._is_signalled = True
            events.append(CancelRequested(occurred_at=now))
        if at_once or now >= self._look_at:
            self._look_at = now + POLL_S
            pending = self._requests.pending(controller.state.requests)
            self._taken += [request.id for request in pending]
            events += _as_events(pending, controller.job, now)
        return events

    def journalled(self) -> None:
        """Everything that was asked is in the journal."""
        for id in self._taken:
            self._requests.discard(id)
        self._taken.clear()

    def close(self) -> None:
        """The experiment has ended: whoever asks for that has it."""
        self._requests.withdraw_cancels()


def _as_events(requests: Iterable[DriverRequest], job: Job, now: float) -> list[Event]:
    events: list[Event] = []
    for asked in requests:
        if asked.kind == "cancel":
            events.append(CancelRequested(occurred_at=now, request=asked.id))
            continue
        deadline_s = job.deadline_s if asked.deadline_s is None else asked.deadline_s
        max_cost_usd = job.max_cost_usd if asked.max_cost_usd is None else asked.max_cost_usd
        event = LimitsChanged(
            occurred_at=now,
            request=asked.id,
            deadline_s=rules.raised(job.deadline_s, deadline_s),
            max_cost_usd=rules.raised(job.max_cost_usd, max_cost_usd),
        )
        job = rules.granted(job, event)
        events.append(event)
    return events
