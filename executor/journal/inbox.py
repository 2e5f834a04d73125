"""Files by which others and an experiment's process communicate: requests to it, and who hosts it.

Requests are to cancel, to stop a trial, to add trials, for other limits, or for another instance cap. They come by a
signal, or as files in its folder, each of which appears whole. The driver journals a request as an event with its id,
so that it is not applied twice if it is found again after a crash.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

import rubberband
from rubberband.errors import InputError
from rubberband.executor.core.controller import Controller
from rubberband.executor.core.events import (
    AllotmentChanged,
    CancelRequested,
    Event,
    LimitsChanged,
    Recall,
    TrialsAdded,
    TrialStopRequested,
)
from rubberband.executor.core.job import raised
from rubberband.executor.core.state import State
from rubberband.executor.journal.folder import ExperimentFolder
from rubberband.files import EXCLUSIVE, SHARED, locked, make_directories, write_atomically
from rubberband.values.plan import Policy

_ID = re.compile(r"[A-Za-z0-9-]{1,80}")
_MOST_BYTES = 10_000
"""A larger file is ignored."""


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, slots=True, kw_only=True)
class NewTrials:
    """Trials to add: as many as the sampler is to draw, or one that is given."""

    count: int = 0
    """How many the sampler draws; 0: one is given."""
    configuration: dict[str, Any] = field(default_factory=dict)
    """Values of the one; what they leave out is drawn, or as in the trial that it is a clone of."""
    clone_of: int | None = None
    """The trial whose configuration that changes."""
    from_checkpoint: bool = False
    """Whether it goes on from that trial's latest checkpoint, instead of from the beginning."""


@with_config(ConfigDict(extra="forbid"))  # one of a newer version is left alone, not half carried out
@dataclass(frozen=True, slots=True, kw_only=True)
class DriverRequest:
    """A request to the driver."""

    id: str
    """Up to 80 letters, digits and -. Two requests of one id are one."""
    kind: Literal["add", "cancel", "extend", "limit", "stop"]
    asked_at: float
    """Unix time; in an inbox, later than that of every request before it."""
    deadline_s: float | None = None
    """For `extend`: the new deadline, from Started as in `Job.deadline_s`; None: unchanged."""
    max_cost_usd: float | None = None
    """For `extend`: the new cap, as in `Job.max_cost_usd`; None: unchanged."""
    target: float | None = None
    """For `extend`: the new value of the metric that ends the search; None: unchanged."""
    max_instances: int | None = None
    """For `limit`: the most instances from then on; None: as many as the experiment's file allows."""
    promised_instances: int | None = None
    """For `limit`: the most that a pool promises it at any time, as in `AllotmentChanged`; None: no promise."""
    recall: Recall = "at_checkpoint"
    """For `limit`: when trials stop on the instances beyond it."""
    trial: int = 0
    """For `stop`: the trial."""
    trials: NewTrials | None = None
    """For `add`: the trials."""
    reason: str = ""
    """For `cancel`: why the service asks; empty: the user does."""


class Requests:
    """Source of a driver's requests; this one is empty."""

    def pending(self, done: Collection[str] = ()) -> list[DriverRequest]:
        """Return the requests that are not `done`, oldest first."""
        return []

    def discard(self, id: str) -> None:
        """Delete a request that is journalled. Idempotent."""

    def extensions(self) -> list[DriverRequest]:
        """Return the requests for trials or other limits, oldest first."""
        return [request for request in self.pending() if request.kind in ("add", "extend")]

    def withdraw_cancels(self, among: Iterable[DriverRequest] | None = None) -> None:
        """Delete every cancel request (`among` these). Called before a resume begins, and at the end."""
        for request in self.pending() if among is None else among:
            if request.kind == "cancel":
                self.discard(request.id)


class Inbox(Requests):
    """Requests to one driver, in a folder, which need not exist."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, request: DriverRequest) -> None:
        """Leave a request behind all that wait, by no clock. Idempotent by its id.

        Raises InputError if its id is invalid or it cannot be written.
        """
        path = self._path(request.id)
        if path.exists():
            return
        request = behind(request, self.pending())
        data = _stored.dump_json(request)
        if len(data) > _MOST_BYTES:
            raise InputError(f"the request has {len(data):,} bytes, more than {_MOST_BYTES:,}; give shorter values")
        try:
            make_directories(self._folder)
            write_atomically(path, data, durable=True)
        except OSError as error:
            reason = error.strerror or str(error)
            raise InputError(f"{self._folder} cannot be written ({reason}); make room or give access") from None

    def pending(self, done: Collection[str] = ()) -> list[DriverRequest]:
        """Return the requests that are not `done`, oldest first. Other files are ignored, and left alone."""
        ids = [id for id in self._ids() if id not in done]
        found = [request for id in ids if (request := self._read(id)) is not None]
        return sorted(found, key=by_age)

    def discard(self, id: str) -> None:
        """Delete a request that is journalled. Idempotent; the journal knows one that cannot be removed."""
        with suppress(OSError):
            self._path(id).unlink(missing_ok=True)

    def _path(self, id: str) -> Path:
        return self._folder / f"{checked_id(id)}.json"

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
    counts = (request.max_instances, request.promised_instances, request.trial)
    if any(count is not None and count < 0 for count in counts):
        return False
    if request.target is not None and not math.isfinite(request.target):
        return False
    return math.isfinite(request.asked_at) and all(math.isfinite(limit) and limit > 0.0 for limit in limits)


def checked_id(id: str) -> str:
    """Return the id of a request. Raises InputError for an invalid one."""
    if not _ID.fullmatch(id):
        raise InputError(f"{id!r} is not the id of a request; use 1 to 80 letters, digits and -")
    return id


def by_age(request: DriverRequest) -> tuple[float, str]:
    """Sort key of requests."""
    return request.asked_at, request.id


def behind(request: DriverRequest, waiting: Sequence[DriverRequest]) -> DriverRequest:
    """Return a request as asked after those that are `waiting`: a clock may have stepped back since."""
    latest = max((asked.asked_at for asked in waiting), default=-math.inf)
    return request if request.asked_at > latest else replace(request, asked_at=math.nextafter(latest, math.inf))


def _read(path: Path) -> bytes:
    """Return the content of a plain file. The folder may hold anything: follow no link, and wait for no pipe."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return b""
        data = file.read(_MOST_BYTES + 1)
    return data if len(data) <= _MOST_BYTES else b""


POLL_S = 0.5
"""The longest time that a request waits in the inbox of a running driver."""


Asked = LimitsChanged | AllotmentChanged | TrialsAdded
Add = Callable[[State, DriverRequest, float], TrialsAdded]
"""Makes the event of a request for trials: (state, request, instant) -> the event."""


def asked_first(
    requests: Requests, controller: Controller, now: float, add: Add | None, *, trials: bool
) -> Iterator[Asked]:
    """Yield the requested limits, instance caps and, with `trials`, trials that are not taken in yet.

    A caller who handles each before it takes the next one gets the trials that follow from it.
    """
    kinds = ("extend", "limit", "add") if trials else ("extend", "limit")
    for asked in requests.pending(controller.state.requests):
        if asked.kind in kinds:
            event = _as_event(asked, controller, now, add)
            if isinstance(event, Asked):
                yield event


class RequestQueue:
    """Turns requests to one driver into events. A request is deleted once the journal has it, not before."""

    def __init__(self, requests: Requests, cancelled: Callable[[], bool], add: Add | None = None) -> None:
        self._requests = requests
        self._cancelled = cancelled
        self._add = add
        self._is_signalled = False
        self._look_at = -math.inf
        self._taken: list[str] = []
        self._adds: list[DriverRequest] = []

    def open(self, controller: Controller, now: float) -> Iterator[Asked]:
        """Yield what applies before anything else, to be journalled one by one: also trials for a search that is over.

        Delete the requests that are already journalled.
        """
        for id in controller.state.requests:
            self._requests.discard(id)
        is_over = controller.state.course == "finished"
        for event in asked_first(self._requests, controller, now, self._add, trials=is_over):
            self._taken.append(event.request)
            yield event

    def asked(self, controller: Controller, now: float, *, at_once: bool) -> list[Event]:
        """Return the new requests, to be journalled in this order; `at_once` if they cannot wait for the next poll.

        Those for trials come by `added`, one after another.
        """
        events: list[Event] = []
        if not self._is_signalled and self._cancelled():
            self._is_signalled = True
            events.append(CancelRequested(occurred_at=now))
        if at_once or now >= self._look_at:
            self._look_at = now + POLL_S
            pending = self._requests.pending(controller.state.requests)
            self._adds = [request for request in pending if request.kind == "add"]
            pending = [request for request in pending if request.kind != "add"]
            self._taken += [request.id for request in pending]
            events += [_as_event(request, controller, now, self._add) for request in pending]
        return events

    def added(self, controller: Controller, now: float) -> Event | None:
        """Return the next request for trials, to be taken in once all that happened before has been."""
        if not self._adds or self._add is None:
            return None
        request = self._adds.pop(0)
        self._taken.append(request.id)
        return _added(request, controller, now, self._add)

    def journalled(self) -> None:
        """Delete the requests, which are journalled now."""
        for id in self._taken:
            self._requests.discard(id)
        self._taken.clear()

    def close(self) -> None:
        """Delete cancel requests, since the experiment has ended."""
        self._requests.withdraw_cancels()


def _added(asked: DriverRequest, controller: Controller, now: float, add: Add | None) -> TrialsAdded:
    """Return the event of a request for trials: of none, with the reason, where these can no longer be added."""
    assert add is not None, "a driver of a search can add trials"
    try:
        return add(controller.state, asked, now)
    except InputError as error:
        return TrialsAdded(occurred_at=now, request=asked.id, configurations=(), reason=str(error))


def _as_event(asked: DriverRequest, controller: Controller, now: float, add: Add | None) -> Event:
    match asked.kind:
        case "cancel":
            return CancelRequested(occurred_at=now, request=asked.id, reason=asked.reason)
        case "stop":
            return TrialStopRequested(occurred_at=now, request=asked.id, trial=asked.trial)
        case "add":
            return _added(asked, controller, now, add)
        case "limit":
            return AllotmentChanged(
                occurred_at=now,
                request=asked.id,
                max_instances=asked.max_instances,
                promised_instances=asked.promised_instances,
                recall=asked.recall,
            )
        case _:
            job = controller.job
            deadline_s = job.deadline_s if asked.deadline_s is None else asked.deadline_s
            max_cost_usd = job.max_cost_usd if asked.max_cost_usd is None else asked.max_cost_usd
            return LimitsChanged(
                occurred_at=now,
                request=asked.id,
                deadline_s=raised(job.deadline_s, deadline_s),
                max_cost_usd=raised(job.max_cost_usd, max_cost_usd),
                target=asked.target,
            )


# Between the service and the process of an experiment is no pipe, but files, each with the number of its attempt:
# * `order.json`: the service's order, written before it starts a process.
# * `process.lock`: locked (flock) by the process for all its life; the service locks it first and hands it down. Its
#   text is the mark of its latest holder.
# * `ending.json`: how that process ended.

_LAST_S = 2.0
"""The wait for a process that is just ending."""


@with_config(ConfigDict(extra="forbid"))  # a limit that is not known must not be dropped
@dataclass(frozen=True, slots=True, kw_only=True)
class HostedRun:
    """Order to the process of an experiment."""

    attempt: int
    resume: bool
    """Whether to resume the journalled run; `words` are ignored then."""
    words: dict[str, Any]
    """The experiment as in its file."""
    submitted_at: float | None = None
    """Unix time of its submission."""
    policy: Policy = "optimal"
    code: tuple[str, ...] = ()
    """Folders that are searched for the entry point."""
    entrypoints: tuple[str, ...] = ()
    """Entry points that may run: `module:attribute`, or `module:*` for those that the module itself defines."""
    most_usd: float | None = None
    """The highest max_cost to suggest."""
    pool: str | None = None
    """Folder of the pool whose instances it shares; None: its instances are its own."""
    waits: bool = False
    """Whether it waits for a checkpoint store that is away, and then resumes."""
    store: str | None = None
    """URL of the journal's store; None: a file in the experiment's folder. `order.json` lacks it, since it may hold a
    password: the process gets it as RUBBERBAND_STORE."""

    @classmethod
    def of(cls, **values: Any) -> HostedRun:
        """Return an order of values from the service's store. Raises ValidationError for invalid ones."""
        return TypeAdapter(cls).validate_python(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMark:
    """Identity of the process that holds the lock, or held it last."""

    pid: int
    attempt: int
    started_at: float
    """Unix time."""
    waits_for: str = ""
    """The checkpoint store for which it waits, holding no instances, in one line. Empty while it runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a process ended."""

    attempt: int
    exit_code: int
    """The command line's."""
    error: str
    """One line; empty if all went well."""
    at: float
    """Unix time."""
    spent_usd: float = 0.0
    """At most what measuring a profile cost, where the run did not begin after it."""


_Note = TypeVar("_Note", HostedRun, HostMark, Ending)


def write_order(folder: ExperimentFolder, order: HostedRun) -> None:
    """Write an order, without the store, readable by this user alone. Raises InputError."""
    try:
        make_directories(folder.path)
        data = TypeAdapter(HostedRun).dump_json(order, exclude={"store"})
        write_atomically(folder.order, data, durable=True, mode=0o600)
    except OSError as error:
        raise InputError(f"{folder.path} cannot be written ({error.strerror}); make room or give access") from None


def read_order(folder: ExperimentFolder) -> HostedRun:
    """Return the order. Raises InputError if there is none, or if it is of a newer version."""
    try:
        order: HostedRun = TypeAdapter(HostedRun).validate_json(folder.order.read_bytes())
    except (OSError, ValidationError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else None
        if first is not None and first["type"] == "unexpected_keyword_argument":
            raise InputError(
                f"{folder.order} has {first['loc'][0]!r}, unknown to this version of rubberband "
                f"({rubberband.__version__}); install the version of the service, and resume the experiment"
            ) from None
        raise InputError(
            f"{folder.order} is not a submission of the service; submit the experiment again, or resume it"
        ) from None
    return order


def pool_of(folder: ExperimentFolder) -> str | None:
    """Return the folder of the pool that a service makes an experiment share; None: none, or it is run by hand."""
    order = _read_note(folder.order, HostedRun)
    return None if order is None else order.pool


def write_ending(folder: ExperimentFolder, ending: Ending) -> None:
    """Write how the process ended. Raises OSError."""
    write_atomically(folder.ending, TypeAdapter(Ending).dump_json(ending), durable=True, mode=0o600)


def read_ending(folder: ExperimentFolder) -> Ending | None:
    """Return how the latest process ended; None if it has not."""
    return _read_note(folder.ending, Ending)


def read_mark(folder: ExperimentFolder) -> HostMark | None:
    """Return the process that runs, or ran last; None before the first one."""
    return _read_note(folder.process_lock, HostMark)


def write_mark(lock: int, mark: HostMark) -> None:
    """Write the mark into the lock file (descriptor `lock`). A reader finds the mark before or this one, never none."""
    os.pwrite(lock, TypeAdapter(HostMark).dump_json(mark).ljust(os.fstat(lock).st_size), 0)


def is_hosted(folder: ExperimentFolder) -> bool:
    """Whether a process that the service started runs. The check is harmless.

    False for another user's lock, which this one cannot take either. Raises OSError if that is not known (say, too many
    open files): a living process must not be taken for gone.
    """
    try:
        lock = os.open(folder.process_lock, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return False
    try:
        return not locked(lock, SHARED)
    finally:
        os.close(lock)


@contextmanager
def holding(folder: ExperimentFolder, wait_s: float = _LAST_S) -> Iterator[int | None]:
    """Hold the lock: gives its descriptor, or None if a process runs. A child that inherits it keeps holding the lock.

    Raises InputError if the folder cannot be written.
    """
    try:
        make_directories(folder.path)
        lock = os.open(folder.process_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise InputError(f"{folder.path} cannot be written ({error.strerror}); make room or give access") from None
    try:
        yield lock if locked(lock, EXCLUSIVE, wait_s) else None
    finally:
        os.close(lock)


def _read_note(path: Path, kind: type[_Note]) -> _Note | None:
    try:
        note: _Note = TypeAdapter(kind).validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
    return note
