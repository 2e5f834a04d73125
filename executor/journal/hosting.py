"""What the service and the process of an experiment leave for one another in its folder. No pipe is between them.

* `order.json`: what the process is to run; written by the service before it starts one.
* `process.lock`: locked (flock) by the process for all its life, and from before it was started: the service locks it
  and hands it down. Its text is the mark of the process that held it last.
* `ending.json`: how that process ended.

Each file carries the number of the attempt that it belongs to.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from rubberband.atomic import write_atomically
from rubberband.errors import InputError
from rubberband.executor.journal.folder import EXCLUSIVE, SHARED, ExperimentFolder, locked
from rubberband.values.plan import Policy

_LAST_S = 2.0
"""A process that ends just now is waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedRun:
    """What the process of an experiment is to run."""

    attempt: int
    resume: bool
    """Whether to go on with what is journalled; `words` are not looked at then."""
    words: dict[str, Any]
    """The experiment as its file describes it."""
    policy: Policy = "optimal"
    code: tuple[str, ...] = ()
    """Folders in which the entry point is found."""
    entrypoints: tuple[str, ...] = ()
    """What may be run: `module:attribute`, or `module:*` for what the module itself defines."""
    most_usd: float | None = None
    """The highest max_cost that may be advised."""
    waits: bool = False
    """Whether it waits for a checkpoint store that is away, and goes on once that is back."""
    store: str | None = None
    """URL of the store of the journal; None: a file in the experiment's folder. `order.json` does not have it, since it
    may hold a password: the process has it as RUBBERBAND_STORE."""

    @classmethod
    def of(cls, **values: Any) -> HostedRun:
        """An order of values as the service's store keeps them. Raises ValidationError for what is none."""
        return TypeAdapter(cls).validate_python(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The process that holds the lock, or held it last."""

    pid: int
    attempt: int
    started_at: float
    """Unix time."""
    waits_for: str = ""
    """What it waits for, holding nothing, in one line: its checkpoint store is away. Empty while it runs."""


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


_Note = TypeVar("_Note", HostedRun, Mark, Ending)


def write_order(folder: ExperimentFolder, order: HostedRun) -> None:
    """Leave an order, without the store, for this user alone. Raises InputError."""
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        data = TypeAdapter(HostedRun).dump_json(order, exclude={"store"})
        write_atomically(folder.order, data, durable=True, mode=0o600)
    except OSError as error:
        raise InputError(f"{folder.path} cannot be written ({error.strerror}); make room or give access") from None


def read_order(folder: ExperimentFolder) -> HostedRun:
    """The order. Raises InputError if there is none."""
    order = _read(folder.order, HostedRun)
    if order is None:
        raise InputError(
            f"{folder.order} is not a submission of the service; submit the experiment again, or resume it"
        )
    return order


def write_ending(folder: ExperimentFolder, ending: Ending) -> None:
    """Tell how the process ended. Raises OSError."""
    write_atomically(folder.ending, TypeAdapter(Ending).dump_json(ending), durable=True, mode=0o600)


def read_ending(folder: ExperimentFolder) -> Ending | None:
    """How the latest process that told ended; None if none told."""
    return _read(folder.ending, Ending)


def read_mark(folder: ExperimentFolder) -> Mark | None:
    """The process that is at work, or was last; None before the first one."""
    return _read(folder.process_lock, Mark)


def write_mark(lock: int, mark: Mark) -> None:
    """Sign the lock file, whose descriptor is `lock`. Who reads it finds the mark before or this one, never none."""
    os.pwrite(lock, TypeAdapter(Mark).dump_json(mark).ljust(os.fstat(lock).st_size), 0)


def is_hosted(folder: ExperimentFolder) -> bool:
    """Whether a process that the service started is at work. Looking is harmless.

    Of another user's lock, which nobody here can take either, the answer is no. Raises OSError where that cannot be
    told (too many open files, say): what is alive must not be taken for gone.
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
    """Hold the lock: gives its descriptor, which a child may inherit, or None if a process is at work.

    Whoever inherited it goes on holding it. Raises InputError if the folder cannot be written.
    """
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
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
