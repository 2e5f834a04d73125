"""The journal: every event of an experiment, in order and durable before its commands run (SQLAlchemy).

`state = fold(events)`; a resume replays it. SQLite by default, in the experiment's directory; or all experiments in one
store by its URL, such as PostgreSQL.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import sqlalchemy as sql
from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

import rubberband
from rubberband.errors import DamagedJournalError, JournalError, NameTakenError
from rubberband.executor.core.events import Event
from rubberband.executor.core.job import Job
from rubberband.executor.journal.database import PATIENCE_S, Database, first_line
from rubberband.files import sync_directory
from rubberband.values.kinds import KINDS, NOT_INSTALLED, ProviderKind

VERSION = 1
"""Version of what a journal means. A newer version of rubberband writes a greater one, but not for a new field."""

_KINDS: dict[str, type[Event]] = {kind.__name__: kind for kind in Event.__subclasses__()}
_SIGNED = re.compile(r'\{"version":(?P<version>\d+),"written_by":"(?P<by>[^"]*)",')
_FOREIGN = {"unexpected_keyword_argument", "literal_error"}
"""Errors of pydantic about values that only another version writes."""

with_config(ConfigDict(extra="forbid"))(Event)  # a limit that is not known must not be dropped


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, slots=True)
class _Signed:
    job: Job


_adapters: dict[str, TypeAdapter[Any]] = {}


def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    if kind.__name__ not in _adapters:
        _adapters[kind.__name__] = TypeAdapter(kind)
    return _adapters[kind.__name__]


class UnknownWordsError(JournalError):
    """The journal has words that this version does not know."""


def encode_event(event: Event) -> tuple[str, str]:
    """Return an event as (kind, JSON object)."""
    return type(event).__name__, _adapter(type(event)).serializer.to_json(event).decode()


def decode_event(kind: str, body: str) -> Event:
    """Return the event that was encoded. Raises UnknownWordsError for those of another version, JournalError."""
    if kind not in _KINDS:
        raise UnknownWordsError(f"an event {kind!r}")
    event: Event = _decode(_KINDS[kind], body)
    return event


def encode_job(job: Job) -> str:
    """Return the job as JSON, signed by this version, for `decode_job`."""
    signature = f'{{"version":{VERSION},"written_by":"{rubberband.__version__}",'
    return signature + _adapter(Job).dump_json(job).decode()[1:]


def decode_job(body: str) -> Job:
    """Return the job that was encoded. Raises UnknownWordsError for that of a newer version, JournalError."""
    signed = _SIGNED.match(body)
    if signed is None:
        raise DamagedJournalError("its Job does not begin with the version that wrote it")
    if int(signed["version"]) > VERSION:
        raise UnknownWordsError(f"version {signed['version']} (this one reads up to {VERSION})")
    job: Job = _decode(_Signed, f'{{"job":{{{body[signed.end() :]}}}').job
    return job


def written_by(job: str) -> str:
    """Return the version of rubberband that wrote to a journal last, by its encoded job; empty if it is damaged."""
    signed = _SIGNED.match(job)
    return "" if signed is None else signed["by"]


def from_elsewhere(name: str, error: UnknownWordsError, by: str) -> JournalError:
    """Return the error of a journal with words that this version does not know, as `by` wrote it."""
    which = f"version {by}" if by else "another version"
    return JournalError(
        f"the journal of {name!r} was written by {which} of rubberband and has {error}, unknown to this version "
        f"({rubberband.__version__}); install that version, or a newer one"
    )


def _decode(kind: type[Any], body: str) -> Any:
    try:
        return _adapter(kind).validator.validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the record"
        what = "Job" if kind is _Signed else kind.__name__
        if first["type"] in _FOREIGN:
            raise UnknownWordsError(f"{where}={first['input']!r} in its {what}") from None
        raise DamagedJournalError(f"it has a broken {what}: {where}: {first['msg']}") from None


_AT_ONCE = 1000
"""Rows per fetch."""

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


TABLES = _metadata
"""Tables of journals, for copies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The experiment before its first event."""

    name: str
    created_at: float
    """Unix time."""
    job: Job
    setup: Mapping[str, Any]
    """Other needs of the driver: configurations, entry point, stores, … as plain JSON values."""

    @property
    def kind(self) -> ProviderKind:
        return KINDS.get(self.setup["provider"], NOT_INSTALLED)

    @property
    def offset_s(self) -> float:
        """Difference between Unix time and the clock of its events."""
        return self.created_at if self.kind.is_simulated else 0.0


class EventLog(Protocol):
    """A journal as the driver loop uses it."""

    def append(self, events: Sequence[Event]) -> None:
        """Keep events, in order, all or none, before they take effect. Raises JournalError if that fails."""

    def events(self, after: int = -1) -> Iterator[tuple[int, Event]]:
        """(sequence number, event) of all events past `after`, in order. Raises JournalError if they cannot be read."""


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
        """Whether what is appended to a file outlives the machine's power, and not only its process."""
        remedy = (
            f"make room or give access, then continue with `rubberband resume {name}`, or run it again if it had not "
            "started"
        )
        self._database = Database(url, what=f"the journal of {name!r}", remedy=remedy, patience_s=PATIENCE_S)
        try:
            if create:
                self._database.make(_metadata)
            with self._noticing_damage():
                _require_file(self._database)
                mine = sql.select(sql.func.max(_events.c.seq)).where(_events.c.experiment == self.name)
                with self._database.reading() as connection:
                    latest = connection.execute(mine).scalar()
                self._next_seq = 0 if latest is None else int(latest) + 1
        except BaseException as error:
            self._database.close()
            if not isinstance(error, JournalError) or isinstance(error, DamagedJournalError):
                raise
            reason = first_line(error.__cause__ or error)
            remedy = self._database.remedy_of(error, self._database.access)
            raise JournalError(f"the journal {self._database.shown} cannot be opened: {reason}; {remedy}") from error

    def create(self, *, created_at: float, job: Job, setup: Mapping[str, Any]) -> None:
        """Write the header. Raises NameTakenError if the name is taken; if several try at once, one succeeds."""
        row = {"name": self.name, "created_at": created_at, "job": encode_job(job), "setup": dict(setup)}
        insert = self._database.if_absent(_experiments).values(row).on_conflict_do_nothing(index_elements=["name"])
        with self._database.writing() as connection:
            made = connection.execute(insert.returning(_experiments.c.name)).first()
        if made is None:
            raise NameTakenError(
                f"the name {self.name!r} is taken by another experiment; resume it with `rubberband resume {self.name}`"
                ", or use another name"
            )

    def header(self) -> Header | None:
        """Return the header; None without the experiment. Raises JournalError if it cannot be read."""
        with self._noticing_damage(), self._database.reading() as connection:
            row = connection.execute(sql.select(_experiments).where(_experiments.c.name == self.name)).first()
            if row is None:
                return None
            try:
                job = decode_job(row.job)
            except UnknownWordsError as error:
                raise from_elsewhere(self.name, error, written_by(row.job)) from None
        return Header(name=row.name, created_at=row.created_at, job=job, setup=row.setup)

    def sign(self, job: Job) -> None:
        """Note that this version writes to it from now on, if another one did. Raises JournalError."""
        mine = _experiments.c.name == self.name
        with self._database.reading() as connection:
            known = written_by(connection.execute(sql.select(_experiments.c.job).where(mine)).scalar_one())
        if known != rubberband.__version__:
            with self._database.writing() as connection:
                connection.execute(sql.update(_experiments).where(mine).values(job=encode_job(job)))

    def append(self, events: Sequence[Event]) -> None:
        """Make events durable, in order, all or none. Raises JournalError if that fails; no command may run then."""
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
            # Always durable: a driver outlives a crash of the server, and would append after events that were lost.
            self._database.write(lambda connection, again: self._keep(rows, connection, again))
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
            if self._database.streams:  # a server would want a transaction for that
                connection = connection.execution_options(yield_per=_AT_ONCE)
            rows = connection.execute(query)
            for expected, (seq, kind, body) in enumerate(rows, start=after + 1):
                if seq != expected:
                    raise DamagedJournalError(f"event {expected} is missing before event {seq}")
                try:
                    event = decode_event(kind, body)
                except UnknownWordsError as error:
                    job = connection.execute(sql.select(_experiments.c.job).where(_experiments.c.name == self.name))
                    raise from_elsewhere(self.name, error, written_by(job.scalar() or "")) from None
                yield seq, event

    def require_whole(self) -> None:
        """Check all of a SQLite file, before more is written to it. Raises DamagedJournalError."""
        if self._database.is_sqlite:
            with self._noticing_damage(), self._database.reading() as connection:
                found = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
                if found != "ok":
                    raise DamagedJournalError(str(found).splitlines()[-1])

    @contextmanager
    def _noticing_damage(self) -> Iterator[None]:
        """Distinguish a damaged journal from one that cannot be reached."""
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
        """Return the latest instant in the journal; None before the first event."""
        latest = sql.select(sql.func.max(_events.c.occurred_at)).where(_events.c.experiment == self.name)
        with self._database.reading() as connection:
            found: float | None = connection.execute(latest).scalar()
        return found

    def close(self) -> None:
        """Close the store. Idempotent."""
        self._database.close()


def _is_damage(error: sqlite3.Error) -> bool:
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK)
    broken = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
    return code & 0xFF in broken or code == sqlite3.SQLITE_IOERR_SHORT_READ or str(error).startswith("no such table")


def _require_file(database: Database) -> None:
    """Raise JournalError for a missing or empty file, which SQLite would write to as a new one.

    It is not opened: a process that closes a file drops all its locks on it, SQLite's included, and another process
    would then remove the log that this one follows (SQLite, How To Corrupt, 2.2).
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
    """Return the experiments in the store at `url`, by name; with `name`, that one if it is there. Makes nothing.

    Raises JournalError if it cannot be read, InputError for a URL that cannot be used.
    """
    query = sql.select(_experiments.c.name).order_by(_experiments.c.name)
    with closing(Database(url, what="the store of the journals", remedy="")) as database:
        if not database.has(_metadata):
            return []
        with database.reading() as connection:
            return list(connection.scalars(query if name is None else query.where(_experiments.c.name == name)))


def erase(url: str, name: str) -> None:
    """Delete the journal of an experiment from the store at `url`. Idempotent. Raises JournalError."""
    with (
        closing(Database(url, what=f"the journal of {name!r}", remedy="then delete it again")) as database,
        database.writing() as connection,
    ):
        connection.execute(sql.delete(_events).where(_events.c.experiment == name))
        connection.execute(sql.delete(_experiments).where(_experiments.c.name == name))


def begin(place: Path | str, name: str, *, created_at: float, job: Job, setup: Mapping[str, Any]) -> None:
    """Make the journal of an experiment, header included, atomically: in a store (URL), or its own SQLite file (path).

    For a file, the caller ensures that there is none yet, and that no other process makes one. Raises NameTakenError
    if it is in the store already, or JournalError.
    """
    if isinstance(place, Path):
        _begin_file(place, name, created_at, job, setup)
    else:
        _begin_at(place, name, created_at, job, setup)


def _begin_at(url: str | sql.URL, name: str, created_at: float, job: Job, setup: Mapping[str, Any]) -> None:
    with closing(Journal(url, name, create=True)) as journal:
        journal.create(created_at=created_at, job=job, setup=setup)


def _begin_file(path: Path, name: str, created_at: float, job: Job, setup: Mapping[str, Any]) -> None:
    unborn = path.with_name(f".{path.name}.new")
    _remove(unborn, *_LOGS, "")
    try:
        os.close(os.open(unborn, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))  # its logs are as private
        _begin_at(sqlite_url(unborn), name, created_at, job, setup)
        _remove(path, *_LOGS)
        os.replace(unborn, path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise JournalError(f"the journal {path} cannot be made ({reason}); make room or give access") from error
    finally:
        _remove(unborn, *_LOGS, "")
    with suppress(OSError):
        sync_directory(path.parent)


_LOGS = ("-wal", "-shm", "-journal")
"""SQLite's logs beside a file; a leftover would be taken for that of the next file of the name."""


def _remove(path: Path, *suffixes: str) -> None:
    for suffix in suffixes:
        with suppress(OSError):
            os.unlink(f"{path}{suffix}")


def sqlite_url(path: Path) -> sql.URL:
    """Return the SQLAlchemy URL of a SQLite file; its path may have any characters."""
    return sql.URL.create("sqlite", database=str(path))
