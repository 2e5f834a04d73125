"""Copies of a store for backups: a SQLite file with the same tables, from any database."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

import sqlalchemy as sql

from rubberband.api.store import Store
from rubberband.api.store.schema import METADATA, NUMBERS, SUBMISSIONS
from rubberband.errors import JournalError
from rubberband.executor.journal.database import Database, first_line, parse_url
from rubberband.executor.journal.journal import TABLES as JOURNALS
from rubberband.executor.journal.journal import journalled, sqlite_url

_AT_ONCE = 1000
"""Rows per statement."""
_OWN = NUMBERS.c.name == "server"
"""The row of the server that has the store, which is no part of a copy."""


def copy_file(source: Path, target: Path) -> None:
    """Copy a SQLite file as it is at one instant, while others write to it (SQLite's online backup).

    The copy is private and has no log beside it. Raises sqlite3.Error, OSError.
    """
    os.close(os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    place = f"file:{quote(str(source.absolute()))}?mode=rw"
    try:
        with closing(sqlite3.connect(place, uri=True, timeout=30.0)) as live, closing(sqlite3.connect(target)) as copy:
            live.backup(copy)
            copy.execute("PRAGMA journal_mode=DELETE")
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_CANTOPEN or not source.exists():
            raise
        raise PermissionError(errno.EACCES, str(error), str(source)) from None


def dump(url: str, target: Path, begun: Callable[[], None]) -> None:
    """Copy the store at `url`, with the journals in it, as it is at one instant; call `begun` right after that.

    Raises JournalError, sqlite3.Error or OSError.
    """
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite":
        if not Path(str(parsed.database)).exists():
            raise JournalError(f"the store {parsed.database} does not exist; name the one that the service uses")
        copy_file(Path(str(parsed.database)), target)
        begun()
        return
    with closing(Store(url)):  # its tables are of this version then
        pass
    with closing(Database(url, what="the service's store", remedy="")) as store, _made(target) as copy:
        store.make(JOURNALS)
        try:
            with store.engine.connect().execution_options(isolation_level="REPEATABLE READ") as reader:
                reader.execute(sql.select(NUMBERS)).all()  # the instant of all that follows
                begun()
                with copy.begin() as writer:
                    _copy_rows(reader, writer)
        except sql.exc.SQLAlchemyError as error:
            raise JournalError(f"the store {store.shown} cannot be copied: {first_line(error)}") from error
        with copy.begin() as writer:
            writer.execute(sql.delete(NUMBERS).where(_OWN))


def load(source: Path, url: str) -> None:
    """Replace all rows of a store that is no SQLite file by those of a copy, at once. Raises JournalError."""
    with closing(Database(url, what="the service's store", remedy="the store is unchanged")) as store:
        store.make(METADATA)
        store.make(JOURNALS)
        copied = sql.create_engine(sqlite_url(source))
        try:
            with copied.connect() as reader, store.writing() as writer:
                for table in reversed(_tables()):
                    kept = sql.delete(table).where(~_OWN) if table is NUMBERS else sql.delete(table)
                    writer.execute(kept)
                _copy_rows(reader, writer)
        finally:
            copied.dispose()


@contextmanager
def _made(path: Path) -> Iterator[sql.Engine]:
    """Make a private SQLite file with the tables of a store."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    engine = sql.create_engine(sqlite_url(path))
    try:
        METADATA.create_all(engine)
        JOURNALS.create_all(engine)
        yield engine
    finally:
        engine.dispose()


def _tables() -> list[sql.Table]:
    return [*METADATA.sorted_tables, *JOURNALS.sorted_tables]


def _copy_rows(reader: sql.Connection, writer: sql.Connection) -> None:
    for table in _tables():
        rows = reader.execution_options(yield_per=_AT_ONCE).execute(sql.select(table)).mappings()
        for some in rows.partitions(_AT_ONCE):
            writer.execute(sql.insert(table), [dict(row) for row in some])


def experiments(url: str) -> set[str]:
    """Return the names of all experiments of a store, of every home that uses it. Raises JournalError."""
    with closing(Database(url, what="the service's store", remedy="")) as store, store.reading() as connection:
        return {*connection.scalars(sql.select(SUBMISSIONS.c.name)), *journalled(url)}


def revoked(store: Store) -> Mapping[str, bool]:
    """Return token id -> whether it is revoked."""
    return {record.id: record.revoked_at is not None for record in store.tokens()}


def limit_access(store: Store, known: Mapping[str, bool], *, keep: bool, at: float) -> int:
    """End the sessions of a restored store, and revoke the tokens that may have been revoked since its backup.

    Those are the tokens that `known` (`revoked` of the present store) has as revoked or, without `keep`, does not have.
    Returns how many this revoked.
    """
    store.end_sessions()
    ended = [record.id for record in store.tokens() if record.revoked_at is None and known.get(record.id, not keep)]
    for id in ended:
        store.revoke_token(id, at=at)
    return len(ended)
