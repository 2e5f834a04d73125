"""Files by which the service and the process of an experiment communicate; there is no pipe between them.

* `order.json`: the service's order, written before it starts a process.
* `process.lock`: locked (flock) by the process for all its life; the service locks it first and hands it down. Its text
  is the mark of its latest holder.
* `ending.json`: how that process ended.

Each file carries the number of its attempt.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

import rubberband
from rubberband.errors import InputError
from rubberband.executor.journal.folder import ExperimentFolder
from rubberband.files import EXCLUSIVE, SHARED, locked, make_directories, write_atomically
from rubberband.values.plan import Policy

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
    order = _read(folder.order, HostedRun)
    return None if order is None else order.pool


def write_ending(folder: ExperimentFolder, ending: Ending) -> None:
    """Write how the process ended. Raises OSError."""
    write_atomically(folder.ending, TypeAdapter(Ending).dump_json(ending), durable=True, mode=0o600)


def read_ending(folder: ExperimentFolder) -> Ending | None:
    """Return how the latest process ended; None if it has not."""
    return _read(folder.ending, Ending)


def read_mark(folder: ExperimentFolder) -> HostMark | None:
    """Return the process that runs, or ran last; None before the first one."""
    return _read(folder.process_lock, HostMark)


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


def _read(path: Path, kind: type[_Note]) -> _Note | None:
    try:
        note: _Note = TypeAdapter(kind).validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
    return note
