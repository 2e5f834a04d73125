"""The store: SQLite in the service's home, or PostgreSQL by URL, through SQLAlchemy."""

from __future__ import annotations

import os
from pathlib import Path

import sqlalchemy as sql

from rubberband.api.settings import KEEPING, Keeping
from rubberband.api.store.request_rows import RequestRows
from rubberband.api.store.schema import METADATA, NUMBERS, SESSIONS, VERSION
from rubberband.api.store.submission_rows import SubmissionRows
from rubberband.api.store.token_rows import TokenRows
from rubberband.errors import InputError, JournalError
from rubberband.executor.database import Database, parse_url


class SqlStore(SubmissionRows, TokenRows, RequestRows):
    """A `Store` in a database. Safe to use from several threads, and by several processes at once."""

    def __init__(self, url: str | sql.URL, keeping: Keeping = KEEPING) -> None:
        """Open the database at `url`, a SQLAlchemy URL, and make what is missing in it. A SQLite file is private.

        Raises InputError for a URL that cannot be used or a store of a newer version, JournalError if it cannot be
        opened.
        """
        parsed = parse_url(url)
        if parsed.get_backend_name() == "sqlite":
            _make_private(parsed)
        remedy = "make room or give access, and try again"
        super().__init__(Database(parsed, what="the service's store", remedy=remedy), keeping)
        try:
            self._database.make(METADATA)
            self._require_version()
        except BaseException:
            self._database.close()
            raise

    def _require_version(self) -> None:
        rows = [{"name": "version", "value": VERSION}, {"name": "feed", "value": 0}]
        with self._database.writing() as connection:
            absent = self._database.if_absent(NUMBERS).on_conflict_do_nothing(index_elements=["name"])
            connection.execute(absent, rows)
            version = connection.execute(sql.select(NUMBERS.c.value).where(NUMBERS.c.name == "version")).scalar_one()
        if version > VERSION:
            raise InputError(
                f"the store {self._database.shown} was made by a newer version of rubberband (its tables are of "
                f"version {version}, known are those up to {VERSION}); install that version, or use another store"
            )

    def check(self) -> None:
        """See `Store.check`."""
        with self._database.reading() as connection:
            connection.execute(sql.select(NUMBERS.c.value).where(NUMBERS.c.name == "version")).scalar_one()

    def prune(self, *, at: float) -> None:
        """See `Store.prune`."""
        with self._database.writing() as connection:
            self._prune_requests(connection, at)
            self._prune_acts(connection, at)
            connection.execute(sql.delete(SESSIONS).where(SESSIONS.c.expires_at <= at))

    def close(self) -> None:
        """See `Store.close`."""
        self._database.close()


def open_store(url: str | None, home: Path, keeping: Keeping = KEEPING) -> SqlStore:
    """The store at `url`; without one, the SQLite file `server.db` in `home`. Raises as `SqlStore` does."""
    return SqlStore(url or sql.URL.create("sqlite", database=str(home / "server.db")), keeping)


def _make_private(url: sql.URL) -> None:
    """Make the file before SQLite does, for its user alone; what SQLite keeps beside it takes after it."""
    if url.database in (None, "", ":memory:"):
        raise InputError("a store in memory forgets; name a file: sqlite:////folder/file.db")
    path = Path(url.database)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        told = error.strerror or str(error)
        raise JournalError(f"the store {path} cannot be made ({told}); make room or give access") from None
