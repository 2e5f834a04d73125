"""Requests that took effect, by their ids: one that is sent again after its answer was lost is known by that."""

from __future__ import annotations

import sqlalchemy as sql

from rubberband.api.store.schema import METADATA, Words
from rubberband.executor.database import Database

ACT_KEPT_S = 30 * 24 * 3600.0

ACTS = sql.Table(
    "service_acts",
    METADATA,
    sql.Column("request", Words, primary_key=True),
    sql.Column("acted_at", sql.Double, nullable=False, index=True),
)


class ActRows:
    """The part of the store that is about what was done already."""

    _database: Database

    def has_acted(self, request: str, *, since: float) -> bool:
        """See `Store.has_acted`."""
        acted = sql.select(ACTS).where(ACTS.c.request == request, ACTS.c.acted_at >= since)
        with self._database.reading() as connection:
            return connection.execute(acted).first() is not None

    def note_act(self, request: str, *, at: float) -> None:
        """See `Store.note_act`."""
        with self._database.writing() as connection:
            self._act(connection, request, at)

    def _act(self, connection: sql.Connection, request: str, at: float) -> None:
        """Note it in the transaction that makes the effect."""
        absent = self._database.if_absent(ACTS).on_conflict_do_update(index_elements=["request"], set_={"acted_at": at})
        connection.execute(absent.values(request=request, acted_at=at))

    def _prune_acts(self, connection: sql.Connection, at: float) -> None:
        connection.execute(sql.delete(ACTS).where(ACTS.c.acted_at <= at - ACT_KEPT_S))
