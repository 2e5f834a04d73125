"""The experiments in the store, and how a list of them is told page by page."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import sqlalchemy as sql

from rubberband.api.store.act_rows import ActRows
from rubberband.api.store.feed_rows import FeedRows
from rubberband.api.store.records import Entry, Page, Submission, Summary, TakenIn
from rubberband.api.store.schema import SUBMISSIONS
from rubberband.errors import InputError
from rubberband.states import ExperimentState

_SUMMARY = frozenset(field.name for field in fields(Summary))
_columns = SUBMISSIONS.c


class SubmissionRows(FeedRows, ActRows):
    """The part of the store that is about experiments."""

    def add(self, submission: Submission) -> bool:
        """See `Store.add`."""
        with self._database.writing() as connection:
            insert = self._database.if_absent(SUBMISSIONS).on_conflict_do_nothing(index_elements=["name"])
            if connection.execute(insert.values(_row(submission)).returning(_columns.name)).first() is None:
                return False
            self._extend(connection, [_first_entry(submission)])
        return True

    def take_in(self, taken: Sequence[TakenIn]) -> Collection[str]:
        """See `Store.take_in`."""
        if not taken:
            return []
        insert = self._database.if_absent(SUBMISSIONS).on_conflict_do_nothing(index_elements=["name"])
        with self._database.writing() as connection:
            rows = [_row(one.submission) for one in taken]
            new = set(connection.scalars(insert.returning(_columns.name), rows))
            fresh = [one for one in taken if one.submission.name in new]
            if not fresh:
                return new
            self._mark(connection, {one.submission.name: (0, one.last_seq) for one in fresh if not one.entries})
            self._extend(connection, [entry for one in fresh for entry in (*one.entries, _first_entry(one.submission))])
        return new

    def submission(self, name: str) -> Submission | None:
        """See `Store.submission`."""
        with self._database.reading() as connection:
            row = connection.execute(sql.select(SUBMISSIONS).where(_columns.name == name)).first()
        return None if row is None else _submission(row)

    def submissions(
        self, *, states: Collection[ExperimentState] | None = None, limit: int = 50, after: str | None = None
    ) -> Page:
        """See `Store.submissions`."""
        query = sql.select(SUBMISSIONS).order_by(_columns.created_at.desc(), _columns.name.desc()).limit(limit + 1)
        if states is not None:
            query = query.where(_columns.state.in_(list(states)))
        if after is not None:
            created_at, name = read_cursor(after)
            older = sql.and_(_columns.created_at == created_at, _columns.name < name)
            query = query.where(sql.or_(_columns.created_at < created_at, older))
        with self._database.reading() as connection:
            found = [_submission(row) for row in connection.execute(query)]
        items = found[:limit]
        return Page(items=items, next=cursor_of(items[-1]) if items and len(found) > limit else None)

    def count_states(self) -> Mapping[str, int]:
        """See `Store.count_states`."""
        query = sql.select(_columns.state, sql.func.count()).group_by(_columns.state)
        with self._database.reading() as connection:
            return {str(state): int(count) for state, count in connection.execute(query)}

    def change(
        self,
        name: str,
        *,
        at: float,
        state: ExperimentState | None = None,
        expected: Collection[ExperimentState] | None = None,
        reason: str | None = None,
        summary: Summary | None = None,
        attempt: int | None = None,
        words: Mapping[str, Any] | None = None,
        request: str = "",
    ) -> bool:
        """See `Store.change`."""
        given = {
            "state": state,
            "reason": reason,
            "summary": None if summary is None else asdict(summary),
            "attempt": attempt,
            "words": words,
        }
        changed = {column: value for column, value in given.items() if value is not None}
        with self._database.writing() as connection:
            now = sql.select(_columns.state, _columns.reason).where(_columns.name == name).with_for_update()
            row = connection.execute(now).first()
            if row is None or (expected is not None and row.state not in expected):
                return False
            update = sql.update(SUBMISSIONS).where(_columns.name == name)
            connection.execute(update.values(changed_at=at, **changed))
            if state is not None and row.state != state:
                told = _state_entry(name, at, state, row.state, row.reason if reason is None else reason)
                self._extend(connection, [told])
            if request:
                self._act(connection, request, at)
        return True


def _row(submission: Submission) -> dict[str, Any]:
    row = {field.name: getattr(submission, field.name) for field in fields(Submission)}
    return row | {"summary": asdict(submission.summary)}


def _first_entry(submission: Submission) -> Entry:
    return _state_entry(submission.name, submission.changed_at, submission.state, None, submission.reason)


def _state_entry(name: str, at: float, state: ExperimentState, before: str | None, reason: str) -> Entry:
    data = {"state": state, "before": before, "reason": reason}
    return Entry(experiment=name, seq=None, kind="state", occurred_at=at, data=data)


def _submission(row: Any) -> Submission:
    plain = dict(row._mapping)
    summary = {name: value for name, value in plain["summary"].items() if name in _SUMMARY}
    return Submission(**plain | {"state": ExperimentState(row.state), "summary": Summary(**summary)})


def cursor_of(submission: Submission) -> str:
    """What names the place after an experiment in the list; opaque to whoever is given it."""
    return base64.urlsafe_b64encode(json.dumps([submission.created_at, submission.name]).encode()).decode().rstrip("=")


def read_cursor(cursor: str) -> tuple[float, str]:
    """The place that `cursor_of` named. Raises InputError for anything else."""
    try:
        padded = cursor.encode("ascii") + b"=" * (-len(cursor) % 4)
        created_at, name = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
        if not (type(created_at) is float and math.isfinite(created_at) and type(name) is str):
            raise ValueError("another shape")
    except (ValueError, TypeError, RecursionError):
        raise InputError("the cursor is none that this service gave; leave it out for the first page") from None
    return created_at, name
