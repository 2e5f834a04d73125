"""The feed in the store: what happened to all experiments, in one order that readers can rely on."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import sqlalchemy as sql

from rubberband.api.store.records import Entry, FeedEvent
from rubberband.api.store.schema import FEED, NUMBERS
from rubberband.executor.database import Database

MAX_ID = 2**63 - 1
_columns = FEED.c


class FeedRows:
    """The part of the store that is about the feed."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def append(self, entries: Sequence[Entry]) -> None:
        """See `Store.append`."""
        if entries:
            with self._database.writing() as connection:
                self._extend(connection, entries)

    def _extend(self, connection: sql.Connection, entries: Sequence[Entry]) -> None:
        """Add to the feed in the caller's transaction; other writers of the feed wait for its end."""
        last = sql.update(NUMBERS).where(NUMBERS.c.name == "feed")
        last_id = connection.execute(
            last.values(value=NUMBERS.c.value + len(entries)).returning(NUMBERS.c.value)
        ).scalar_one()
        first_id = last_id - len(entries) + 1
        rows = [
            {
                "id": first_id + place,
                "experiment": entry.experiment,
                "seq": entry.seq,
                "kind": entry.kind,
                "occurred_at": entry.occurred_at,
                "data": entry.data,
            }
            for place, entry in enumerate(entries)
        ]
        connection.execute(
            self._database.if_absent(FEED).on_conflict_do_nothing(index_elements=["experiment", "seq"]), rows
        )

    def last_seqs(self, experiments: Collection[str] | None = None) -> Mapping[str, int]:
        """See `Store.last_seqs`."""
        last = sql.select(sql.func.max(_columns.seq)).where(_columns.experiment == sql.bindparam("name"))
        every = sql.select(_columns.experiment).distinct()
        with self._database.reading() as connection:
            names = connection.scalars(every).all() if experiments is None else experiments
            found = {name: connection.scalar(last, {"name": name}) for name in names}
        return {name: int(seq) for name, seq in found.items() if seq is not None}

    def feed(self, *, after: int = 0, experiment: str | None = None, limit: int = 500) -> Sequence[FeedEvent]:
        """See `Store.feed`."""
        query = sql.select(FEED).where(_columns.id > min(after, MAX_ID)).order_by(_columns.id).limit(limit)
        if experiment is not None:
            query = query.where(_columns.experiment == experiment)
        with self._database.reading() as connection:
            return [FeedEvent(**row._mapping) for row in connection.execute(query)]

    def last_feed_id(self) -> int:
        """See `Store.last_feed_id`."""
        with self._database.reading() as connection:
            return connection.execute(sql.select(sql.func.max(_columns.id))).scalar() or 0
