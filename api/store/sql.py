"""The store: SQLite in the service's home, or PostgreSQL by URL, through SQLAlchemy."""

from __future__ import annotations

import base64
import json
import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import sqlalchemy as sql

from rubberband.api.settings import KEEPING, Keeping
from rubberband.api.store.protocol import Entry, FeedEvent, KeptAnswer, Page, StoredPlan, TakenIn, TokenRecord
from rubberband.api.store.schema import (
    FEED,
    KEYS,
    METADATA,
    NUMBERS,
    PLANS,
    PRUNED,
    SESSIONS,
    SUBMISSIONS,
    TOKENS,
    VERSION,
    StoredText,
)
from rubberband.errors import InputError, JournalError
from rubberband.executor.journal.database import Database, parse_url
from rubberband.states import ACTIVE, ExperimentState
from rubberband.values.submission import Submission, Summary

# Requests that took effect, by their ids: one that is sent again after its answer was lost is known by that.


ACT_KEPT_S = 30 * 24 * 3600.0

ACTS = sql.Table(
    "service_acts",
    METADATA,
    sql.Column("request", StoredText, primary_key=True),
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


# The feed in the store: what happened to all experiments, in one order that readers can rely on.


MAX_ID = 2**63 - 1
_PRUNED_AT_ONCE = 20
_feed = FEED.c


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
        last = sql.select(sql.func.max(_feed.seq)).where(_feed.experiment == sql.bindparam("name"))
        gone = sql.select(PRUNED.c.last_seq).where(PRUNED.c.experiment == sql.bindparam("name"))
        every = sql.union(sql.select(_feed.experiment), sql.select(PRUNED.c.experiment))
        with self._database.reading() as connection:
            names = connection.scalars(every).all() if experiments is None else experiments
            # What was let go is looked at last: what goes meanwhile is counted there.
            found = {name: [connection.scalar(query, {"name": name}) for query in (last, gone)] for name in names}
        seqs = {name: max(-1 if seq is None else int(seq) for seq in told) for name, told in found.items()}
        return {name: seq for name, seq in seqs.items() if seq >= 0}

    def feed(self, *, after: int = 0, experiment: str | None = None, limit: int = 500) -> Sequence[FeedEvent]:
        """See `Store.feed`."""
        query = sql.select(FEED).where(_feed.id > min(after, MAX_ID)).order_by(_feed.id).limit(limit)
        if experiment is not None:
            query = query.where(_feed.experiment == experiment)
        with self._database.reading() as connection:
            return [FeedEvent(**row._mapping) for row in connection.execute(query)]

    def last_feed_id(self) -> int:
        """See `Store.last_feed_id`."""
        with self._database.reading() as connection:
            kept = connection.execute(sql.select(sql.func.max(_feed.id))).scalar() or 0
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
        told = sql.exists().where(_feed.experiment == known.name)
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
        oldest = sql.select(_feed.id, _feed.seq).where(_feed.experiment == experiment)
        chosen = oldest.order_by(_feed.id).limit(limit).subquery()
        last = sql.select(sql.func.max(chosen.c.id), sql.func.coalesce(sql.func.max(chosen.c.seq), -1))
        last_id, last_seq = connection.execute(last).one()
        if last_id is None:  # another server has let them go just now
            return 0
        self._mark(connection, {experiment: (last_id, last_seq)})
        deleted = sql.delete(FEED).where(_feed.experiment == experiment, _feed.id <= last_id)
        return connection.execute(deleted).rowcount


# The experiments in the store, and how a list of them is told page by page.


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
        raise InputError("the cursor was not issued by this service; leave it out for the first page") from None
    return created_at, name


# Tokens, and the browsers that signed in with one, in the store. Secrets are here as their hashes only.


class TokenRows:
    """The part of the store that is about who may ask."""

    _database: Database
    _keeping: Keeping

    def add_token(self, record: TokenRecord, secret_hash: str) -> None:
        """See `Store.add_token`."""
        with self._database.writing() as connection:
            connection.execute(sql.insert(TOKENS).values(asdict(record) | {"secret_hash": secret_hash}))

    def find_tokens(self, ids: Collection[str]) -> Mapping[str, tuple[TokenRecord, str]]:
        """See `Store.find_tokens`."""
        with self._database.reading() as connection:
            rows = connection.execute(sql.select(TOKENS).where(TOKENS.c.id.in_(ids)))
            return {row.id: (_record(row), row.secret_hash) for row in rows}

    def tokens(self) -> Sequence[TokenRecord]:
        """See `Store.tokens`."""
        query = sql.select(TOKENS).order_by(TOKENS.c.created_at, TOKENS.c.id)
        with self._database.reading() as connection:
            return [_record(row) for row in connection.execute(query)]

    def revoke_token(self, id: str, *, at: float) -> bool:
        """See `Store.revoke_token`."""
        revoked = sql.update(TOKENS).where(TOKENS.c.id == id)
        with self._database.writing() as connection:
            revoked_at = sql.func.coalesce(TOKENS.c.revoked_at, at)
            found = connection.execute(revoked.values(revoked_at=revoked_at).returning(TOKENS.c.id)).first()
            connection.execute(sql.delete(SESSIONS).where(SESSIONS.c.token == id))
        return found is not None

    def touch_token(self, id: str, *, at: float) -> None:
        """See `Store.touch_token`."""
        with self._database.writing(durable=False) as connection:
            connection.execute(sql.update(TOKENS).where(TOKENS.c.id == id).values(last_used_at=at))

    def add_session(self, hash: str, *, token: str, expires_at: float) -> None:
        """See `Store.add_session`."""
        with self._database.writing() as connection:
            connection.execute(sql.insert(SESSIONS).values(hash=hash, token=token, expires_at=expires_at))
            mine = sql.select(SESSIONS.c.hash).where(SESSIONS.c.token == token).order_by(SESSIONS.c.expires_at.desc())
            beyond = mine.offset(self._keeping.sessions)
            connection.execute(sql.delete(SESSIONS).where(SESSIONS.c.hash.in_(beyond)))

    def find_sessions(self, hashes: Collection[str], *, at: float) -> Mapping[str, TokenRecord]:
        """See `Store.find_sessions`."""
        token = TOKENS.c
        query = sql.select(SESSIONS.c.hash, TOKENS).join(SESSIONS, SESSIONS.c.token == token.id)
        query = query.where(SESSIONS.c.hash.in_(hashes), SESSIONS.c.expires_at > at, token.revoked_at.is_(None))
        with self._database.reading() as connection:
            rows = connection.execute(query.where(sql.or_(token.expires_at.is_(None), token.expires_at > at)))
            return {row.hash: _record(row) for row in rows}

    def end_session(self, hash: str) -> None:
        """See `Store.end_session`."""
        with self._database.writing() as connection:
            connection.execute(sql.delete(SESSIONS).where(SESSIONS.c.hash == hash))


def _record(row: Any) -> TokenRecord:
    return TokenRecord(**{name: value for name, value in row._mapping.items() if name not in _HASHES})


_HASHES = {"secret_hash", "hash"}


# Plans that were previewed, and requests with an Idempotency-Key, in the store: what need not be done again.


SERVED_WITHIN_S = 60.0
"""After that, a request without an answer is taken for one that came to nothing."""
_PLAN = sql.select(PLANS).where(PLANS.c.id == sql.bindparam("id"))


class RequestRows:
    """The part of the store that is about requests sent again."""

    _database: Database
    _keeping: Keeping

    def keep_plans(self, plans: Sequence[StoredPlan]) -> None:
        """See `Store.keep_plans`."""
        names = PLANS.c.keys()
        insert = self._database.if_absent(PLANS)
        insert = insert.on_conflict_do_update(
            index_elements=["id"], set_={name: insert.excluded[name] for name in names}
        )
        with self._database.writing(durable=False) as connection:
            connection.execute(insert, [{name: getattr(plan, name) for name in names} for plan in plans])

    def plan(self, id: str) -> StoredPlan | None:
        """See `Store.plan`."""
        with self._database.reading() as connection:
            row = connection.execute(_PLAN, {"id": id}).first()
        return None if row is None else StoredPlan(**row._mapping)

    def plan_ids(self) -> list[str]:
        """See `Store.plan_ids`."""
        with self._database.reading() as connection:
            return list(connection.scalars(sql.select(PLANS.c.id).order_by(PLANS.c.created_at)))

    def claim_key(self, key: str, *, owner: str, request_hash: str, at: float) -> KeptAnswer | str | None:
        """See `Store.claim_key`."""
        claim = {"owner": owner, "key": key, "request_hash": request_hash, "claimed_at": at}
        with self._database.writing() as connection:
            stale = KEYS.c.claimed_at <= at - self._keeping.answers_s
            connection.execute(sql.delete(KEYS).where(_of(key, owner), stale))
            insert = self._database.if_absent(KEYS).on_conflict_do_nothing(index_elements=["owner", "key"])
            if connection.execute(insert.values(claim).returning(KEYS.c.key)).first() is not None:
                return None
            row = connection.execute(sql.select(KEYS).where(_of(key, owner)).with_for_update()).one()
            if row.request_hash != request_hash:
                return "reused"
            if row.status is not None:
                return KeptAnswer(status=row.status, headers=row.headers, body=row.body)
            if row.claimed_at > at - SERVED_WITHIN_S:
                return "busy"
            connection.execute(sql.update(KEYS).where(_of(key, owner)).values(claimed_at=at))
        return None

    def keep_answer(self, key: str, *, owner: str, answer: KeptAnswer, at: float) -> None:
        """See `Store.keep_answer`."""
        unanswered = sql.update(KEYS).where(_of(key, owner), KEYS.c.status.is_(None))
        with self._database.writing() as connection:
            connection.execute(unanswered.values(claimed_at=at, **asdict(answer)))

    def free_key(self, key: str, *, owner: str) -> None:
        """See `Store.free_key`."""
        with self._database.writing() as connection:
            connection.execute(sql.delete(KEYS).where(_of(key, owner), KEYS.c.status.is_(None)))

    def free_keys(self) -> None:
        """See `Store.free_keys`."""
        with self._database.writing() as connection:
            connection.execute(sql.delete(KEYS).where(KEYS.c.status.is_(None)))

    def _prune_requests(self, connection: sql.Connection, at: float) -> None:
        keeping, made_at = self._keeping, PLANS.c.created_at
        connection.execute(sql.delete(KEYS).where(KEYS.c.claimed_at <= at - keeping.answers_s))
        connection.execute(sql.delete(PLANS).where(made_at <= at - keeping.plans_s))
        beyond = sql.select(PLANS.c.id).order_by(made_at.desc(), PLANS.c.id.desc()).offset(keeping.plans)
        connection.execute(sql.delete(PLANS).where(PLANS.c.id.in_(beyond)))


def _of(key: str, owner: str) -> sql.ColumnElement[bool]:
    return sql.and_(KEYS.c.owner == owner, KEYS.c.key == key)


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
                f"the store {self._database.shown} was made by a newer version of rubberband (its tables have version "
                f"{version}; this version reads up to {VERSION}); install that version, or use another store"
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
        raise InputError("a store in memory is lost when the service ends; name a file: sqlite:////folder/file.db")
    path = Path(url.database)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        told = error.strerror or str(error)
        raise JournalError(f"the store {path} cannot be made ({told}); make room or give access") from None
