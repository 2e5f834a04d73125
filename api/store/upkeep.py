"""Labels of experiments, and the end of all that the service's store keeps of one, but for its bill."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict

import sqlalchemy as sql

from rubberband.api.store.schema import DELETED, FEED, PROMISES, PRUNED, SUBMISSIONS, label_columns, labels_of
from rubberband.executor.journal.database import Database
from rubberband.states import ExperimentState
from rubberband.values.submission import LabelChange, Labels, Submission

_NO_EXPERIMENT = ""
"""Name in `PRUNED` of all deleted experiments: their events are gone, and their names are free."""


class Upkeep:
    """Writes that people ask for long after a run. Methods raise JournalError."""

    def __init__(self, database: Database, writing: Callable[[], AbstractContextManager[sql.Connection]]) -> None:
        self._database, self._writing = database, writing

    def label(self, name: str, change: LabelChange) -> Labels | None:
        """Change the labels of an experiment, and return them; None if none has this name. Raises InputError."""
        row = SUBMISSIONS.c
        mine = sql.select(row.tags, row.note, row.archived).where(row.name == name).with_for_update()
        with self._writing() as connection:
            before = connection.execute(mine).first()
            if before is None:
                return None
            labels = change.applied(labels_of(dict(before._mapping)))
            connection.execute(sql.update(SUBMISSIONS).where(row.name == name).values(label_columns(labels)))
        return labels

    def delete(self, submission: Submission, *, expected: Collection[ExperimentState]) -> bool:
        """Delete an experiment with its events; return False if its state is not among `expected`. Its bill stays."""
        name, summary, row = submission.name, submission.summary, SUBMISSIONS.c
        bill = {
            "id": secrets.token_hex(8),
            "owner": submission.owner,
            "provider": submission.words.get("resources", {}).get("provider", ""),
            "created_at": submission.created_at,
            "changed_at": submission.changed_at,
            "summary": asdict(summary),
        }
        with self._writing() as connection:
            same = sql.and_(row.name == name, row.changed_at == submission.changed_at, row.state.in_(expected))
            if not connection.execute(sql.delete(SUBMISSIONS).where(same)).rowcount:
                return False
            if summary.cost_usd:
                connection.execute(sql.insert(DELETED).values(bill))
            self._delete_events(connection, name)
            connection.execute(sql.delete(PROMISES).where(PROMISES.c.experiment == name))
        return True

    def _delete_events(self, connection: sql.Connection, name: str) -> None:
        """Delete events and their marks. A reader that is behind still learns that it missed some."""
        last_ids = [
            connection.scalar(sql.select(sql.func.max(id)).where(experiment == name))
            for id, experiment in ((FEED.c.id, FEED.c.experiment), (PRUNED.c.last_id, PRUNED.c.experiment))
        ]
        connection.execute(sql.delete(FEED).where(FEED.c.experiment == name))
        connection.execute(sql.delete(PRUNED).where(PRUNED.c.experiment == name))
        if last_id := max(id or 0 for id in last_ids):
            mark_deleted(self._database, connection, {_NO_EXPERIMENT: (last_id, -1)})


def mark_deleted(database: Database, connection: sql.Connection, gone: Mapping[str, tuple[int, int]]) -> None:
    """Record up to which id and which place of its journal the feed of an experiment was deleted."""
    mark = database.if_absent(PRUNED)
    pairs = {"last_id": PRUNED.c.last_id, "last_seq": PRUNED.c.last_seq}
    later = {
        name: sql.case((known > mark.excluded[name], known), else_=mark.excluded[name]) for name, known in pairs.items()
    }
    rows = [{"experiment": name, "last_id": id, "last_seq": seq} for name, (id, seq) in gone.items()]
    if rows:
        connection.execute(mark.on_conflict_do_update(index_elements=["experiment"], set_=later), rows)


def deleted_bills(since: float, owner: str | None, provider: str) -> sql.Select[tuple[object]]:
    """Return the query of the bills of deleted experiments, as `Store.bills` asks for those of the others."""
    bill = DELETED.c
    query = sql.select(bill.summary).where(bill.changed_at >= since)
    if owner is not None:
        query = query.where(bill.owner == owner)
    return query.where(bill.provider == provider) if provider else query
