"""The feed in the store: what happened to all experiments, in one order that readers can rely on."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import sqlalchemy as sql

from rubberband.api.settings import Keeping
from rubberband.api.store.records import Entry, FeedEvent
from rubberband.api.store.schema import FEED, NUMBERS, PRUNED, SUBMISSIONS
from rubberband.executor.database import Database
from rubberband.states import ACTIVE

MAX_ID = 2**63 - 1
_PRUNED_AT_ONCE = 20
_columns = FEED.c


class FeedRows:
    """The part of the store that is about the feed."""

    def __init__(self, database: Database, keeping: Keeping) -> None:
        self._database, self._keeping = database, keeping

    @property
    def keeping(self) -> Keeping:
        """See `Store.keeping`."""
        return self._keeping

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
        gone = sql.select(PRUNED.c.last_seq).where(PRUNED.c.experiment == sql.bindparam("name"))
        every = sql.union(sql.select(_columns.experiment), sql.select(PRUNED.c.experiment))
        with self._database.reading() as connection:
            names = connection.scalars(every).all() if experiments is None else experiments
            # What was let go is looked at last: what goes meanwhile is counted there.
            found = {name: [connection.scalar(query, {"name": name}) for query in (last, gone)] for name in names}
        seqs = {name: max(-1 if seq is None else int(seq) for seq in told) for name, told in found.items()}
        return {name: seq for name, seq in seqs.items() if seq >= 0}

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
            kept = connection.execute(sql.select(sql.func.max(_columns.id))).scalar() or 0
            return max(kept, connection.execute(sql.select(sql.func.max(PRUNED.c.last_id))).scalar() or 0)

    def last_pruned_id(self, experiment: str | None = None) -> int:
        """See `Store.last_pruned_id`."""
        query = sql.select(sql.func.max(PRUNED.c.last_id))
        if experiment is not None:
            query = query.where(PRUNED.c.experiment == experiment)
        with self._database.reading() as connection:
            return connection.execute(query).scalar() or 0

    def prune_feed(self, *, at: float, limit: int = 1000) -> int:
        """See `Store.prune_feed`."""
        known = SUBMISSIONS.c
        told = sql.exists().where(_columns.experiment == known.name)
        over = sql.select(known.name).where(known.state.not_in(ACTIVE), known.changed_at <= at - self._keeping.events_s)
        # Held to the end, so that none of them goes on meanwhile.
        names = over.where(told).order_by(known.changed_at).limit(_PRUNED_AT_ONCE).with_for_update()
        gone = 0
        with self._database.writing() as connection:
            for name in connection.scalars(names).all():
                if gone < limit:
                    gone += self._let_go(connection, name, limit - gone)
        return gone

    def _mark(self, connection: sql.Connection, gone: Mapping[str, tuple[int, int]]) -> None:
        """Note of experiments up to which id, and which place of their journals, the feed tells nothing any more."""
        mark = self._database.if_absent(PRUNED)
        later = sql.case((PRUNED.c.last_seq > mark.excluded.last_seq, PRUNED.c.last_seq), else_=mark.excluded.last_seq)
        rows = [{"experiment": name, "last_id": id, "last_seq": seq} for name, (id, seq) in gone.items()]
        if rows:
            changed = {"last_id": mark.excluded.last_id, "last_seq": later}
            connection.execute(mark.on_conflict_do_update(index_elements=["experiment"], set_=changed), rows)

    def _let_go(self, connection: sql.Connection, experiment: str, limit: int) -> int:
        oldest = sql.select(_columns.id, _columns.seq).where(_columns.experiment == experiment)
        chosen = oldest.order_by(_columns.id).limit(limit).subquery()
        last = sql.select(sql.func.max(chosen.c.id), sql.func.coalesce(sql.func.max(chosen.c.seq), -1))
        last_id, last_seq = connection.execute(last).one()
        if last_id is None:  # another server has let them go just now
            return 0
        self._mark(connection, {experiment: (last_id, last_seq)})
        deleted = sql.delete(FEED).where(_columns.experiment == experiment, _columns.id <= last_id)
        return connection.execute(deleted).rowcount
