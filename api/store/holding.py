"""The right to change a PostgreSQL store: one service has it at a time.

It is an advisory lock, which lives as long as a connection: a restart of the database, a failover or a firewall that
ends idle connections frees it, and another service may take it. So does a pooler that gives the connection to others,
while it still answers. So its holder looks in each round, by that connection, whether it took the lock last, and takes
it again if it is free. Each write reads in its transaction who took the lock last, and is given up if
that is another service: no write of the earlier holder is committed after the later one has begun ("fencing").
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import ExitStack, suppress

import sqlalchemy as sql
from sqlalchemy.exc import SQLAlchemyError

from rubberband.api.store.schema import NUMBERS, SUBMISSIONS
from rubberband.errors import JournalError
from rubberband.executor.journal.database import Database
from rubberband.states import ExperimentState

_SERVING = 0x52424253
"""The advisory lock of the one server of a store."""
_HOLDER = sql.select(NUMBERS.c.value).where(NUMBERS.c.name == "server")
_NOTICE_THE_END = "SET tcp_keepalives_idle = 20; SET tcp_keepalives_interval = 5; SET tcp_keepalives_count = 3"
"""The database frees the lock of a machine that is gone after half a minute; its default is two hours."""
TAKEN = "another server uses this service's store; send the request there, or try again when that one has stopped"


UNNOTED = "where it began"
"""In the place of `HOST:PATH`, for an experiment of a store that was a home's own file, which notes no home."""


def id_of(home: str) -> str:
    """Return the id of a home, `ID HOST:PATH`."""
    return home.partition(" ")[0]


def elsewhere(home: str) -> str:
    """Return the words for an experiment that the service of another home drives, at `HOST:PATH`."""
    return f"it belongs to the home {home}: only the service there, or a command there, starts, changes and ends it"


def claim(connection: sql.Connection, home: str, is_here: Callable[[str], bool]) -> None:
    """Make experiments those of `home`: its own, which may have moved, and as `Store.take` says those of no home."""
    row = SUBMISSIONS.c
    moved = sql.update(SUBMISSIONS).where(row.home.startswith(id_of(home)), row.home != home)
    connection.execute(moved.values(home=home))
    unnoted = connection.execute(sql.select(row.name, row.state, row.attempt).where(row.home == "")).all()
    waiting = [one.name for one in unnoted if one.state == ExperimentState.QUEUED and not one.attempt]
    if found := {*waiting, *(one.name for one in unnoted if is_here(one.name))}:
        mine = sql.update(SUBMISSIONS).where(row.name == sql.bindparam("of")).values(home=home)
        connection.execute(mine, [{"of": name} for name in found])


class Holding:
    """The right to change a store, as one server asks for it. For one thread, but for `require`."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._id = secrets.randbits(62)
        self._stack = ExitStack()
        self._connection: sql.Connection | None = None
        """Holds the lock."""
        self.is_taken = False
        """Whether another server had it at the latest look."""

    def take(self) -> bool:
        """Return whether this server has it, after an attempt if it has not. Raises JournalError."""
        if self._answers():
            return True
        self.close()
        self.is_taken = False
        with ExitStack() as stack:
            connection = stack.enter_context(self._database.reading())
            try:
                self.is_taken = not self._lock(connection)
            except SQLAlchemyError:
                connection.invalidate()  # or the pool might keep it, with the lock
                raise
            if not self.is_taken:
                self._connection, self._stack = connection, stack.pop_all()
        return not self.is_taken

    def _lock(self, connection: sql.Connection) -> bool:
        """Take the lock, and sign on its connection, so that no one signs who has lost it; return False if it is taken.

        To sign waits for the open writes of others.
        """
        connection.exec_driver_sql(_NOTICE_THE_END)
        if not connection.execute(sql.select(sql.func.pg_try_advisory_lock(_SERVING))).scalar_one():
            return False
        signed = self._database.if_absent(NUMBERS).values(name="server", value=self._id)
        connection.execute(signed.on_conflict_do_update(index_elements=["name"], set_={"value": self._id}))
        return True

    def _answers(self) -> bool:
        try:
            return self._connection is not None and self._connection.execute(_HOLDER).scalar() == self._id
        except SQLAlchemyError:
            return False

    def require(self, connection: sql.Connection) -> None:
        """Raise JournalError, in the transaction of a write, if another server took it. None can until it ends."""
        if connection.execute(_HOLDER.with_for_update(read=True)).scalar() != self._id:
            raise JournalError(TAKEN)

    def close(self) -> None:
        """Give it back. Idempotent."""
        connection, self._connection = self._connection, None
        with suppress(JournalError, SQLAlchemyError):  # the connection was lost
            if connection is not None:
                connection.execute(sql.select(sql.func.pg_advisory_unlock(_SERVING)))
        with suppress(JournalError, SQLAlchemyError):
            if connection is not None:
                connection.invalidate()  # its socket is closed: the pool gives it to no one
        with suppress(JournalError):
            self._stack.close()
