"""The files of a pool: its journal, which is written before anything that costs money, and its tenants' leases."""

from __future__ import annotations

import errno
import json
import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from rubberband.atomic import write_atomically
from rubberband.cloud.pool.broker import Lease
from rubberband.cloud.pool.events import PoolEvent, from_line, to_line
from rubberband.errors import JournalError


class PoolJournal(Protocol):
    """Events and leases, as they survive the broker."""

    def events(self) -> Iterator[PoolEvent]:
        """Yield the events in order."""

    def append(self, events: Sequence[PoolEvent]) -> None:
        """Add events; they are durable once this returns."""

    def replace(self, event: PoolEvent) -> None:
        """Keep this event in place of all others; durable once this returns, and whole if it is cut off."""

    def leases(self) -> dict[str, Lease]:
        """Return the latest lease of each tenant."""

    def renew(self, tenant: str, lease: Lease) -> None:
        """Keep the latest lease of a tenant."""


class MemoryJournal:
    """A journal in memory, for virtual runs. It survives its broker, as the text that a file would hold."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._leases: dict[str, Lease] = {}

    def events(self) -> Iterator[PoolEvent]:
        """Yield the events in order."""
        return map(from_line, self._lines)

    def append(self, events: Sequence[PoolEvent]) -> None:
        """Add events."""
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


class FileJournal:
    """A journal in a folder: a line of JSON for each event, and a small file for each tenant's lease."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "journal.jsonl"
        self._leases = folder / "leases"

    def events(self) -> Iterator[PoolEvent]:
        """Yield the events in order; a last line that was cut off by a crash is removed. Raises JournalError."""
        if not self._path.exists():
            return
        data = self._path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(self._path, whole)
        yield from self._parsed(data[:whole])

    def require_sound(self) -> None:
        """Raise JournalError for a damaged line. Changes nothing: a broker may be writing."""
        with suppress(OSError):
            data = self._path.read_bytes()
            deque(self._parsed(data[: data.rfind(b"\n") + 1]), maxlen=0)

    def _parsed(self, data: bytes) -> Iterator[PoolEvent]:
        for number, line in enumerate(data.split(b"\n")[:-1], start=1):
            try:
                yield from_line(line.decode())
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise JournalError(
                    f"{self._path}:{number} is no event of a pool ({error}); was it written by a newer version? move "
                    "the file away to begin a new pool"
                ) from None

    def append(self, events: Sequence[PoolEvent]) -> None:
        """Add events; they are durable once this returns. Raises OSError, and adds none then."""
        if not events:
            return
        is_new = not self._path.exists()
        data = "".join(f"{to_line(event)}\n" for event in events).encode()
        with open(self._path, "ab", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            try:
                if file.write(data) < len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(file.fileno())
            except OSError:  # a full disk: the next line must not begin within this one
                file.truncate(size)
                raise
        if is_new:
            descriptor = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
            os.fsync(descriptor)
            os.close(descriptor)

    def replace(self, event: PoolEvent) -> None:
        """Keep this event in place of all others, durably; after a crash there is either. Raises OSError."""
        write_atomically(self._path, f"{to_line(event)}\n".encode(), durable=True)

    def leases(self) -> dict[str, Lease]:
        """Return the latest lease of each tenant; unreadable files count as none."""
        found = {}
        for path in self._leases.glob("*.json"):
            with suppress(OSError, ValueError, TypeError):
                found[path.stem] = Lease(**json.loads(path.read_text()))
        return found

    def renew(self, tenant: str, lease: Lease) -> None:
        """Keep the latest lease of a tenant. A full disk keeps none."""
        words = json.dumps(asdict(lease))
        with suppress(OSError):
            self._leases.mkdir(exist_ok=True)
            write_atomically(self._leases / f"{tenant}.json", words.encode(), durable=False)
