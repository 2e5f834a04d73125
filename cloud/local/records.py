"""Look at an instance's record and end the instance, from outside of its own process."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from rubberband.cloud.local.instance import Record, end_tagged, finish, load, lock, release_marker
from rubberband.cloud.steady import time_of

_SPAWN_S = 120.0
"""A recorded process that has not appeared by then never will: its driver died in between."""
_END_S = 3.0


def observe(path: Path) -> Record:
    """The record at `path`, brought up to date if its process died without a word; what it left running is ended."""
    record = load(path)
    if record.ended_at is not None:
        return record
    with lock(path) as held:
        record = load(path)
        if not held or record.ended_at is not None:
            return record
        if record.pid is not None:
            last_sign = path.stat().st_mtime
            return finish(path, record, ended_at=lambda: last_sign, reason="its process died")
        if _clock(record)() > record.requested_at + _SPAWN_S:
            return finish(path, record, ended_at=_clock(record), reason="its process never started")
        return record


def ask_to_end(path: Path, reason: str) -> None:
    """Tell the process of the record at `path` to end, and do not wait for it."""
    release_marker(path).write_text(reason)


def end(path: Path, reason: str) -> Record:
    """End the instance recorded at `path` for `reason` ('': released) and return its last record; idempotent.

    Where nothing can be written (a full disk), the instance is ended all the same, and who looks next records it.
    """
    record = load(path)
    try:
        return _end(path, reason)
    except OSError:
        end_tagged(record.directory, record.name)
        return replace(record, ended_at=_clock(record)(), reason=reason)


def end_all(folder: Path) -> None:
    """Release all whose records lie in `folder`: they are told first, then waited for. Idempotent."""
    living = [path for path in folder.glob("*.json") if load(path).ended_at is None]
    for path in living:
        with contextlib.suppress(OSError):  # a full disk; `end` needs none of it
            ask_to_end(path, "")
    for path in living:
        end(path, "")


def _end(path: Path, reason: str) -> Record:
    record = observe(path)
    if record.ended_at is not None:
        return record
    with contextlib.suppress(OSError):
        ask_to_end(path, reason)
    if record.pid is not None:  # alive just now: it holds the lock
        with contextlib.suppress(ProcessLookupError):
            os.kill(record.pid, signal.SIGTERM)
    with lock(path, wait_s=_END_S):
        record = load(path)
        return record if record.ended_at is not None else finish(path, record, ended_at=_clock(record), reason=reason)


def _clock(record: Record) -> Callable[[], float]:
    return partial(time_of, Path(record.directory))
