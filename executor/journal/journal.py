"""The journal: every event of an experiment, in order and durable before its commands run (SQLAlchemy).

`state = fold(events)`; a resume replays it. SQLite by default, in the experiment's directory; or all experiments in one
store by its URL, such as PostgreSQL.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import sqlalchemy as sql
from pydantic import TypeAdapter, ValidationError

from rubberband.atomic import sync_directory
from rubberband.errors import DamagedJournalError, JournalError, NameTakenError
from rubberband.executor.core.events import Event
from rubberband.executor.core.state import Job
from rubberband.executor.journal.database import Database, first_line
from rubberband.values.kinds import KINDS, ProviderKind

# Events and jobs as JSON, and back. The journal holds nothing else; an unknown or broken record is refused.


_KINDS: dict[str, type[Event]] = {kind.__name__: kind for kind in Event.__subclasses__()}


_adapters: dict[str, TypeAdapter[Any]] = {}


def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    if kind.__name__ not in _adapters:
        _adapters[kind.__name__] = TypeAdapter(kind)
    return _adapters[kind.__name__]


def encode_event(event: Event) -> tuple[str, str]:
    """An event as (kind, JSON object)."""
    return type(event).__name__, _adapter(type(event)).serializer.to_json(event).decode()


def decode_event(kind: str, body: str) -> Event:
    """The event that `encode_event` made these of. Raises JournalError if it is none that is known, or broken."""
    if kind not in _KINDS:
        raise JournalError(f"the journal holds an event {kind!r}, unknown to this version; use the newer one")
    event: Event = _decode(_KINDS[kind], body)
    return event


def encode_job(job: Job) -> str:
    """A job as a JSON object."""
    return _adapter(Job).dump_json(job).decode()


def decode_job(body: str) -> Job:
    """The job that `encode_job` made this of. Raises JournalError if it is none.

    A job without `replan` is of a version that did not plan again: its journal goes on from SYNC to stage at once.
    """
    job: Job = _decode(Job, body)
    return job if '"replan":' in body else replace(job, replan=False)


def _decode(kind: type[Any], body: str) -> Any:
    try:
        return _adapter(kind).validator.validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the record"
        raise DamagedJournalError(f"it has a broken {kind.__name__}: {where}: {first['msg']}") from None


_PATIENCE_S = 180.0
"""A database server is restarted, or replaced by its standby, in less; a run, which costs money, need not end for that.

Leases are renewed meanwhile, as far as the budget is reserved.
"""

_AT_ONCE = 1000
"""Rows that are fetched at a time."""

_metadata = sql.MetaData()
_experiments = sql.Table(
    "experiments",
    _metadata,
    sql.Column("name", sql.String(63), primary_key=True),
    sql.Column("created_at", sql.Float, nullable=False),
    sql.Column("job", sql.Text, nullable=False),
    sql.Column("setup", sql.JSON, nullable=False),
)
_events = sql.Table(
    "events",
    _metadata,
    sql.Column("experiment", sql.String(63), sql.ForeignKey("experiments.name"), primary_key=True),
    sql.Column("seq", sql.Integer, primary_key=True, autoincrement=False),
    sql.Column("occurred_at", sql.Float, nullable=False),
    sql.Column("kind", sql.String(40), nullable=False),
    sql.Column("body", sql.Text, nullable=False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What an experiment was before its first event."""

    name: str
    created_at: float
    """Unix time."""
    job: Job
    setup: Mapping[str, Any]
    """What the driver needs beside the job: configurations, entry point, stores, … as plain JSON values."""

    @property
    def kind(self) -> ProviderKind:
        """What its provider is."""
        return KINDS[self.setup["provider"]]

    @property
    def offset_s(self) -> float:
        """What makes an instant on the clock of its events one in Unix time."""
        return self.created_at if self.kind.is_simulated else 0.0


class EventLog(Protocol):
    """What the driver loop needs of a journal."""

    def append(self, events: Sequence[Event]) -> None:
        """Keep events, in order, all or none, before anything is done about them. Raises JournalError if that fails."""
        ...

    def events(self, after: int = -1) -> Iterator[tuple[int, Event]]:
        """(sequence number, event) of all events past `after`, in order. Raises JournalError if they cannot be read."""
        ...


class MemoryJournal:
    """An `EventLog` that lives as long as its process: for virtual runs by the thousand."""

    def __init__(self) -> None:
        self._events: list[Event] = []

    def append(self, events: Sequence[Event]) -> None:
        """Keep events, in order."""
        self._events.extend(events)

    def events(self, after: int = -1) -> Iterator[tuple[int, Event]]:
        """(sequence number, event) of all events past `after`, in order."""
        return iter(list(enumerate(self._events))[after + 1 :])


class Journal:
    """The events of one experiment. One writer at a time; readers see what was appended."""

    def __init__(self, url: str | sql.URL, name: str, *, create: bool = False) -> None:
        """Open the store at `url`, a SQLAlchemy URL, for the experiment `name`; with `create`, make its tables first.

        Only the writer that begins an experiment creates: a reader that did would get in its way.
        Raises JournalError if it cannot be opened (DamagedJournalError if it is none any more), InputError for a URL
        that cannot be used.
        """
        self.name = name
        self.durable = True
        """Whether what is appended outlives the machine's power, and not only its process."""
        remedy = (
            f"make room or give access, then continue with `rubberband resume {name}`, or run it again if it had not "
            "started"
        )
        self._database = Database(url, what=f"the journal of {name!r}", remedy=remedy, patience_s=_PATIENCE_S)
        try:
            if create:
                self._database.make(_metadata)
            with self._noticing_damage():
                _require_file(self._database)
                self._next_seq = self._count()
        except DamagedJournalError:
            self._database.close()
            raise
        except JournalError as error:
            self._database.close()
            told = first_line(error.__cause__ or error)
            raise JournalError(
                f"the journal {self._database.shown} cannot be opened: {told}; {self._database.access}"
            ) from error
        except BaseException:
            self._database.close()
            raise

    def _count(self) -> int:
        mine = sql.select(sql.func.max(_events.c.seq)).where(_events.c.experiment == self.name)
        with self._database.reading() as connection:
            latest = connection.execute(mine).scalar()
        return 0 if latest is None else int(latest) + 1

    def create(self, *, created_at: float, job: Job, setup: Mapping[str, Any]) -> None:
        """Write the header. Raises NameTakenError if the name has one; of several at once, one succeeds."""
        row = {"name": self.name, "created_at": created_at, "job": encode_job(job), "setup": dict(setup)}
        insert = self._database.if_absent(_experiments).values(row).on_conflict_do_nothing(index_elements=["name"])
        with self._database.writing() as connection:
            made = connection.execute(insert.returning(_experiments.c.name)).first()
        if made is None:
            raise NameTakenError(
                f"the name {self.name!r} is taken by another experiment; resume it with `rubberband resume {self.name}`"
                f", or run this one under another name: -s name={self.name}-2"
            )

    def header(self) -> Header | None:
        """The header; None if the experiment is not here. Raises JournalError if it cannot be read."""
        with self._noticing_damage(), self._database.reading() as connection:
            row = connection.execute(sql.select(_experiments).where(_experiments.c.name == self.name)).first()
        if row is None:
            return None
        return Header(name=row.name, created_at=row.created_at, job=decode_job(row.job), setup=row.setup)

    def append(self, events: Sequence[Event]) -> None:
        """Make events durable, in order, all or none. Raises JournalError if that fails: nothing may be done then."""
        rows = []
        for offset, event in enumerate(events):
            kind, body = encode_event(event)
            seq = self._next_seq + offset
            row = {"experiment": self.name, "seq": seq, "occurred_at": event.occurred_at, "kind": kind, "body": body}
            rows.append(row)
        if not rows:
            return
        if self._database.is_sqlite:
            self._database.insert(_events, rows, durable=self.durable)
        else:
            self._database.write(lambda connection, again: self._keep(rows, connection, again), durable=self.durable)
        self._next_seq += len(rows)

    def _keep(self, rows: list[dict[str, Any]], connection: sql.Connection, again: bool) -> None:
        if not again:
            connection.execute(sql.insert(_events), rows)
            return
        connection.execute(self._database.if_absent(_events).on_conflict_do_nothing(), rows)
        ours = sql.select(_events).where(_events.c.experiment == self.name, _events.c.seq >= self._next_seq)
        if [dict(row) for row in connection.execute(ours.order_by(_events.c.seq)).mappings()] != rows:
            raise JournalError(
                f"the journal of {self.name!r} has events of another process; let only one process run it"
            )

    def events(self, after: int = -1) -> Iterator[tuple[int, Event]]:
        """(sequence number, event) of all events past `after`, in order. Raises JournalError if they cannot be read.

        One that is missing, or broken, raises DamagedJournalError after those before it.
        """
        query = (
            sql.select(_events.c.seq, _events.c.kind, _events.c.body)
            .where(_events.c.experiment == self.name, _events.c.seq > after)
            .order_by(_events.c.seq)
        )
        with self._noticing_damage(), self._database.reading() as connection:
            if self._database.is_sqlite:  # a server would want a transaction for that
                connection = connection.execution_options(yield_per=_AT_ONCE)
            rows = connection.execute(query)
            for expected, (seq, kind, body) in enumerate(rows, start=after + 1):
                if seq != expected:
                    raise DamagedJournalError(f"event {expected} is missing before event {seq}")
                yield seq, decode_event(kind, body)

    def require_whole(self) -> None:
        """Look through all of a SQLite file, before more is written to it. Raises DamagedJournalError."""
        if self._database.is_sqlite:
            with self._noticing_damage(), self._database.reading() as connection:
                told = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
                if told != "ok":
                    raise DamagedJournalError(str(told).splitlines()[-1])

    @contextmanager
    def _noticing_damage(self) -> Iterator[None]:
        """Tell what is broken from what cannot be reached."""
        try:
            yield
        except DamagedJournalError as error:
            raise DamagedJournalError(f"the journal of {self.name!r} is damaged ({error})") from error
        except JournalError as error:
            cause = getattr(error.__cause__, "orig", None)
            if isinstance(cause, sqlite3.Error) and _is_damage(cause):
                raise DamagedJournalError(f"the journal of {self.name!r} is damaged ({cause})") from error
            raise

    def last_event_at(self) -> float | None:
        """The latest instant in the journal; None if nothing has happened yet."""
        latest = sql.select(sql.func.max(_events.c.occurred_at)).where(_events.c.experiment == self.name)
        with self._database.reading() as connection:
            found: float | None = connection.execute(latest).scalar()
        return found

    def close(self) -> None:
        """Let go of the store. Idempotent."""
        self._database.close()


def _is_damage(error: sqlite3.Error) -> bool:
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK)
    broken = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
    return code & 0xFF in broken or code == sqlite3.SQLITE_IOERR_SHORT_READ or str(error).startswith("no such table")


def _require_file(database: Database) -> None:
    """Raise JournalError for a file that SQLite would take for a new one, and write to.

    It is not opened: a process that closes a file lets go of all locks that it has on it, those of SQLite too, and
    another process would then take away the log that this one follows (SQLite, How To Corrupt, 2.2).
    """
    path = database.path
    if path is None:
        return
    try:
        size_bytes = os.stat(path).st_size
    except OSError as error:
        raise JournalError(error.strerror or str(error)) from None
    if size_bytes == 0:
        raise DamagedJournalError("it is empty")


def journalled(url: str, name: str | None = None) -> list[str]:
    """The experiments in the store at `url`, by name; with `name`, that one if it is there. Makes nothing.

    Raises JournalError if it cannot be read, InputError for a URL that cannot be used.
    """
    database = Database(url, what="the store of the journals", remedy="")
    query = sql.select(_experiments.c.name).order_by(_experiments.c.name)
    try:
        if not database.has(_metadata):
            return []
        with database.reading() as connection:
            return list(connection.scalars(query if name is None else query.where(_experiments.c.name == name)))
    finally:
        database.close()


def begin(place: Path | str, name: str, *, created_at: float, job: Job, setup: Mapping[str, Any]) -> None:
    """Make the journal of an experiment, header included, whole or not at all: in a store, or a SQLite file of its own.

    `place` is the file, or the store's URL. Where it is a file, the caller sees to it that there is none, and that
    nobody else begins one. Raises NameTakenError, if it is in the store already, or JournalError.
    """
    if isinstance(place, Path):
        _begin_file(place, name, created_at, job, setup)
    else:
        _begin_at(place, name, created_at, job, setup)


def _begin_at(url: str | sql.URL, name: str, created_at: float, job: Job, setup: Mapping[str, Any]) -> None:
    journal = Journal(url, name, create=True)
    try:
        journal.create(created_at=created_at, job=job, setup=setup)
    finally:
        journal.close()


def _begin_file(path: Path, name: str, created_at: float, job: Job, setup: Mapping[str, Any]) -> None:
    unborn = path.with_name(f".{path.name}.new")
    _remove(unborn, *_LOGS, "")
    try:
        _begin_at(sqlite_url(unborn), name, created_at, job, setup)
        _remove(path, *_LOGS)
        os.replace(unborn, path)
    except OSError as error:
        told = error.strerror or str(error)
        raise JournalError(f"the journal {path} cannot be made ({told}); make room or give access") from error
    finally:
        _remove(unborn, *_LOGS, "")
    with suppress(OSError):
        sync_directory(path.parent)


_LOGS = ("-wal", "-shm", "-journal")
"""What SQLite keeps beside a file; left over, it would be taken for that of the next file of the name."""


def _remove(path: Path, *suffixes: str) -> None:
    for suffix in suffixes:
        with suppress(OSError):
            os.unlink(f"{path}{suffix}")


def sqlite_url(path: Path) -> sql.URL:
    """The SQLAlchemy URL of a SQLite file, whatever characters its path has."""
    return sql.URL.create("sqlite", database=str(path))
