"""A database by its URL: SQLite or PostgreSQL, one pool of connections per server and process, errors of one line.

Writes are durable and atomic. The password in a URL is never shown.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import sqlalchemy as sql
from sqlalchemy.dialects import sqlite
from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, OperationalError, SQLAlchemyError

from rubberband.errors import InputError, JournalError
from rubberband.files import is_remote, make_directories
from rubberband.installation import install_hint

if TYPE_CHECKING:
    from sqlalchemy.dialects import postgresql

EXAMPLES = "sqlite:////folder/file.db or postgresql+psycopg://user:password@host/database"
_SQLITE_WAIT_S = 30.0
"""How long a writer waits for another one."""
_RETRY_S = 0.2
_POSTGRESQL = {
    "connect_timeout": 10,
    "tcp_user_timeout": 30_000,
    "keepalives_idle": 20,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "client_encoding": "utf8",
    "application_name": "rubberband",
}
"""Defaults for libpq, which the URL overrides; a server that is gone is noticed within half a minute."""
PATIENCE_S = 180.0
"""A database server restarts, or fails over, in less, so that a run need not end for it.

Leases are renewed meanwhile, within the reserved budget.
"""
_FILE_ACCESS = "its folder must exist, be writable and have room"
_SERVER_ACCESS = "check that the server runs and accepts this user"
_MAKING = 0x52424244
"""The advisory lock (PostgreSQL) for making tables."""


class Database:
    """A handle on the database at a URL. Safe to use from several threads."""

    def __init__(self, url: str | sql.URL, *, what: str, remedy: str, patience_s: float = 0.0) -> None:
        """Connect to nothing yet. `what` names the content ("the journal of 'x'") and `remedy` the fix, for errors.

        A writer waits up to `patience_s` for a server that refuses connections, such as one that restarts. Raises
        InputError for a URL that cannot be used.
        """
        self._url = parse_url(url)
        self._what, self._remedy, self._patience_s = what, remedy, patience_s
        self.shown = shown_url(self._url)
        self.engine: sql.Engine = _acquire(self._url)
        self._reader = self.engine if self.is_sqlite else self.engine.execution_options(isolation_level="AUTOCOMMIT")
        self._open = True
        self._one_writer = threading.Lock() if self.is_sqlite else None
        self._inserter: sql.PoolProxiedConnection | None = None

    @property
    def is_sqlite(self) -> bool:
        return self.engine.dialect.name == "sqlite"

    @property
    def streams(self) -> bool:
        """Whether rows may be fetched bit by bit: a reader of a file without a write-ahead log keeps writers out."""
        return self.is_sqlite and not _is_shared(self._url)

    @property
    def path(self) -> str | None:
        return self._url.database if self.is_sqlite else None

    @contextmanager
    def reading(self) -> Iterator[sql.Connection]:
        """Give a connection to read; each query sees the latest data. Raises JournalError, in the block as well."""
        try:
            with self._reader.connect() as connection:
                yield connection
        except SQLAlchemyError as error:
            raise JournalError(f"{self._what} cannot be read: {self._explained(error)}") from error

    @contextmanager
    def writing(self, *, durable: bool = True) -> Iterator[sql.Connection]:
        """Give a connection in a transaction. Raises JournalError if it fails.

        A write that is not `durable` may be lost, as a whole, in a power failure.
        """
        try:
            with self._one_writer or nullcontext(), self._begin(durable) as connection:
                yield connection
        except SQLAlchemyError as error:
            remedy = self.remedy_of(error, self._remedy)
            raise JournalError(f"{self._what} cannot be written: {self._explained(error)}; {remedy}") from error

    @contextmanager
    def _begin(self, durable: bool) -> Iterator[sql.Connection]:
        with self._connect() as connection:
            connection = connection.execution_options(rubberband_writes=durable)
            with connection.begin():
                if not durable and not self.is_sqlite:
                    connection.exec_driver_sql("SET LOCAL synchronous_commit TO off")
                yield connection

    def _connect(self) -> sql.Connection:
        deadline = time.monotonic() + (0.0 if self.is_sqlite else self._patience_s)
        while True:
            try:
                return self.engine.connect()
            except OperationalError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_RETRY_S)

    def insert(self, table: sql.Table, rows: Sequence[Mapping[str, Any]], *, durable: bool = True) -> None:
        """Add rows to a table of a SQLite file, at a tenth of the cost of `writing`."""
        names = list(rows[0])
        statement = f"INSERT INTO {table.name} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"
        assert self._one_writer is not None, "it is a SQLite file"
        try:
            with self._one_writer:
                connection = self._inserter = self._inserter or self.engine.raw_connection()
                cursor = connection.cursor()
                try:
                    _begin_immediate(cursor.execute, connection.info, durable)
                    cursor.executemany(statement, [tuple(row.values()) for row in rows])
                    cursor.execute("COMMIT")
                except BaseException:
                    connection.rollback()
                    raise
        except sqlite3.Error as error:
            wrapped = DBAPIError.instance(statement, None, error, sqlite3.Error)
            raise JournalError(
                f"{self._what} cannot be written: {self._explained(wrapped)}; {self.remedy_of(wrapped, self._remedy)}"
            ) from wrapped

    def write(self, work: Callable[[sql.Connection, bool], None]) -> None:
        """Let `work` write in a transaction, and retry within the patience if the connection was lost.

        A lost transaction may have been committed: `work` gets True if its rows may be there already. Raises
        JournalError.
        """
        deadline = time.monotonic() + self._patience_s
        again = False
        while True:
            try:
                with self.writing() as connection:
                    work(connection, again)
                return
            except JournalError as error:
                lost = isinstance(error.__cause__, DBAPIError) and error.__cause__.connection_invalidated
                if not lost or time.monotonic() >= deadline:
                    raise
            again = True
            time.sleep(_RETRY_S)

    def make(self, metadata: sql.MetaData) -> None:
        """Make the missing tables; others may do so at the same time. Raises JournalError."""
        if self.has(metadata):
            return
        with self.writing() as connection:
            if not self.is_sqlite:
                _require_utf8(connection)
                connection.execute(sql.select(sql.func.pg_advisory_xact_lock(_MAKING)))
            metadata.create_all(connection)

    def has(self, metadata: sql.MetaData) -> bool:
        """Whether the tables exist; that they do is cached. Raises JournalError."""
        wanted, known = set(metadata.tables), _tables.setdefault(self.engine, set())
        if not wanted <= known:
            with self.reading() as connection:
                known.update(sql.inspect(connection).get_table_names())
        return wanted <= known

    def if_absent(self, table: sql.Table) -> sqlite.Insert | postgresql.Insert:
        """Return an INSERT that can do nothing, or something else, if the row exists."""
        if self.is_sqlite:
            return sqlite.insert(table)
        from sqlalchemy.dialects import postgresql

        return postgresql.insert(table)

    @property
    def access(self) -> str:
        """Conditions for opening it."""
        return _FILE_ACCESS if self.is_sqlite else _SERVER_ACCESS

    def remedy_of(self, error: BaseException, otherwise: str) -> str:
        """Return the remedy of an error: of a file that is locked, to end the program that holds it."""
        is_held = self.is_sqlite and "database is locked" in str(error)
        return f"end the program that holds it, which `fuser {self.path}` names" if is_held else otherwise

    def _explained(self, error: SQLAlchemyError) -> str:
        line = first_line(error)
        return line if self.is_sqlite else f"{line} ({self.shown}: {_SERVER_ACCESS})"

    def close(self) -> None:
        """Release the connections. Idempotent."""
        if self._open:
            self._open = False
            if self._inserter is not None:
                self._inserter.close()
            _release(self._url, self.engine)


def was_lost(error: BaseException | None) -> bool:
    """Whether an error comes from a connection to a server that was lost or refused, as while the server restarts."""
    while error is not None and not isinstance(error, OperationalError | InterfaceError):
        error = error.__cause__ or error.__context__
    return error is not None


def parse_url(url: str | sql.URL) -> sql.URL:
    """Return a URL that names its driver. Raises InputError for an unknown kind of database."""
    try:
        parsed = sql.make_url(url)
    except (ArgumentError, ValueError):
        raise InputError(f"the store's URL cannot be read; write it as {EXAMPLES}") from None
    path = parsed.database if isinstance(url, str) and parsed.get_backend_name() == "sqlite" else None
    if path not in (None, "", ":memory:") and not os.path.isabs(path):
        raise InputError(f"the store {shown_url(parsed)} is a relative path; use an absolute one: {EXAMPLES}")
    if parsed.drivername in ("postgres", "postgresql"):
        parsed = parsed.set(drivername="postgresql+psycopg")
    if parsed.get_backend_name() not in ("sqlite", "postgresql"):
        raise InputError(f"the store {shown_url(parsed)} is of an unknown kind; use {EXAMPLES}")
    return parsed


def make_private(url: sql.URL) -> None:
    """Create the file with access for its user alone; SQLite gives its other files the same permissions."""
    if url.database in (None, "", ":memory:"):
        raise InputError("a store in memory is lost when the service ends; name a file: sqlite:////folder/file.db")
    path = Path(url.database)
    try:
        make_directories(path.parent)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        text = error.strerror or str(error)
        raise JournalError(f"the store {path} cannot be made ({text}); make room or give access") from None


def shown_url(url: str | sql.URL) -> str:
    """Return a URL without its password and query."""
    return sql.make_url(url).set(query={}).render_as_string(hide_password=True)


def first_line(error: BaseException) -> str:
    """Return the first line of the error's text, or its type if there is none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _require_utf8(connection: sql.Connection) -> None:
    encoding = connection.exec_driver_sql("SHOW server_encoding").scalar()
    if encoding != "UTF8":
        raise InputError(
            f"the database {shown_url(connection.engine.url)} stores text as {encoding}; create one with UTF8: "
            "createdb --encoding=UTF8 --template=template0 NAME"
        )


_shared: dict[tuple[int, str], tuple[sql.Engine, int]] = {}
_sharing = threading.Lock()


_tables: WeakKeyDictionary[sql.Engine, set[str]] = WeakKeyDictionary()
"""Tables that were seen."""


def _acquire(url: sql.URL) -> sql.Engine:
    """Return the engine of a server, shared in this process. A SQLite file may have been replaced: open it again."""
    if url.get_backend_name() == "sqlite":
        return _sqlite(url)
    key = (os.getpid(), url.render_as_string(hide_password=False))
    with _sharing:
        engine, users = _shared.get(key, (None, 0))
        engine = _postgresql(url) if engine is None else engine
        _shared[key] = (engine, users + 1)
    return engine


def _release(url: sql.URL, engine: sql.Engine) -> None:
    key = (os.getpid(), url.render_as_string(hide_password=False))
    with _sharing:
        kept, users = _shared.pop(key, (engine, 1))
        if kept is engine and users > 1:
            _shared[key] = (kept, users - 1)
            return
    engine.dispose()


def _sqlite(url: sql.URL) -> sql.Engine:
    engine = sql.create_engine(url, connect_args={"timeout": _SQLITE_WAIT_S})
    sql.event.listen(engine, "connect", _prepare_shared if _is_shared(url) else _prepare)
    sql.event.listen(engine, "begin", _begin_writing)
    return engine


def _is_shared(url: sql.URL) -> bool:
    return url.database not in (None, "", ":memory:") and is_remote(Path(str(url.database)))


def _prepare(connection: Any, _record: object, mode: str = "WAL") -> None:
    connection.isolation_level = None
    cursor = connection.cursor()
    _set_journal_mode(cursor, mode)
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()


def _prepare_shared(connection: Any, record: Any) -> None:
    """Prepare a file that other machines may open: a write-ahead log needs memory that all share.

    "WAL does not work over a network filesystem" (SQLite, Write-Ahead Logging, 1). Without it, a write that is not
    synced may damage the file in a power failure.
    """
    record.info[_ALWAYS_SYNCED] = True
    _prepare(connection, record, "TRUNCATE")


_ALWAYS_SYNCED = "rubberband_always_synced"


def _set_journal_mode(cursor: sqlite3.Cursor, mode: str) -> None:
    """Set the mode. If several open a new file at once, SQLite refuses some without waiting."""
    deadline = time.monotonic() + _SQLITE_WAIT_S
    while True:
        try:
            cursor.execute(f"PRAGMA journal_mode={mode}")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() >= deadline:
                raise
            time.sleep(0.01)
        else:
            return


def _begin_writing(connection: sql.Connection) -> None:
    """Make a writer the only one from its start, so that its reads stay true until it writes."""
    durable = connection.get_execution_options().get("rubberband_writes")
    if durable is not None:
        _begin_immediate(connection.exec_driver_sql, connection.info, durable)


def _begin_immediate(execute: Callable[[str], object], info: dict[Any, Any], durable: bool) -> None:
    """Begin to write; `info` lives as long as its connection."""
    synchronous = "FULL" if durable or _ALWAYS_SYNCED in info else "NORMAL"
    if info.get("synchronous", "FULL") != synchronous:
        execute(f"PRAGMA synchronous={synchronous}")
        info["synchronous"] = synchronous
    execute("BEGIN IMMEDIATE")


def _postgresql(url: sql.URL) -> sql.Engine:
    defaults = {name: value for name, value in _POSTGRESQL.items() if name not in url.query}
    try:
        return sql.create_engine(url, pool_pre_ping=True, connect_args=defaults)
    except ImportError as error:
        ours = url.drivername == "postgresql+psycopg"
        remedy = f"install it: {install_hint('postgres')}" if ours else "install it, or begin with postgresql://"
        raise InputError(
            f"the store {shown_url(url)} needs a driver that is not installed ({error.name}); {remedy}"
        ) from None
    except SQLAlchemyError as error:
        raise InputError(
            f"the store {shown_url(url)} cannot be used: {first_line(error)}; write it as {EXAMPLES}"
        ) from None
