"""The service's store: SQLite in its home, or PostgreSQL by URL, through SQLAlchemy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import sqlalchemy as sql

from rubberband.api.settings import KEEPING, Keeping
from rubberband.api.store.holding import TAKEN, UNNOTED, Holding, claim, elsewhere, id_of
from rubberband.api.store.schema import (
    ACTS,
    DELETED,
    FEED,
    KEYS,
    METADATA,
    NUMBERS,
    PLANS,
    PROMISES,
    PRUNED,
    SESSIONS,
    SUBMISSIONS,
    TOKENS,
    Entry,
    FeedEvent,
    KeptAnswer,
    Page,
    Promise,
    StoredPlan,
    TakenIn,
    TokenRecord,
    cursor_of,
    first_entry,
    found_by,
    label_columns,
    labels_of,
    read_cursor,
    require_version,
    state_entry,
    summary_of,
)
from rubberband.api.store.upkeep import Upkeep, deleted_bills, mark_deleted
from rubberband.errors import InputError, JournalError
from rubberband.executor.journal.database import Database, make_private, parse_url
from rubberband.states import ACTIVE, OVER, ExperimentState
from rubberband.values.submission import Submission, Summary

ACT_KEPT_S = 30 * 24 * 3600.0
MAX_ID = 2**63 - 1
SERVED_WITHIN_S = 60.0
"""After that, a request without an answer counts as failed."""
_PRUNED_AT_ONCE = 20
_PLAN = sql.select(PLANS).where(PLANS.c.id == sql.bindparam("id"))
_ENTRY = tuple(field.name for field in fields(Entry))
_HASHES = {"secret_hash", "hash"}
_feed = FEED.c
_columns = SUBMISSIONS.c
_GOING_ON = _columns.state.in_([*ACTIVE, ExperimentState.INTERRUPTED])


class Store:
    """The service's data in a database. Several threads and several processes may use it at once.

    Every write is whole and durable when it returns. Methods raise JournalError if the database cannot be reached, read
    or written. JSON values come back as JSON has them: NaN and infinity as None, tuples as lists.
    """

    def __init__(self, url: str | sql.URL, keeping: Keeping = KEEPING) -> None:
        """Open the database at `url`, a SQLAlchemy URL, and create missing tables. A SQLite file is private.

        Raises InputError for an unusable URL or a store of a newer version, JournalError if it cannot be opened.
        """
        parsed = parse_url(url)
        if parsed.get_backend_name() == "sqlite":
            make_private(parsed)
        remedy = "make room or give access, and try again"
        self._database = Database(parsed, what="the service's store", remedy=remedy)
        self.keeping = keeping
        """How long each kind of data is kept."""
        self.upkeep = Upkeep(self._database, self._writing)
        self._home = ""
        self._holding: Holding | None = None
        try:
            self._database.make(METADATA)
            require_version(self._database)
        except BaseException:
            self._database.close()
            raise

    def check(self) -> None:
        """Raise JournalError if the store does not answer."""
        with self._database.reading() as connection:
            connection.execute(sql.select(NUMBERS.c.value).where(NUMBERS.c.name == "version")).scalar_one()

    # One server at a time, and whose experiments it drives

    def take(self, home: str, is_here: Callable[[str], bool] = lambda _: False) -> None:
        """Become the one server of this store, for the experiments of `home` (`ID HOST:PATH`; empty: for all).

        A home's own file notes no home: what `is_here` by its name, or never began, becomes this one's. Raises
        InputError if another server has the store.
        """
        self._home = home
        if not self._database.is_sqlite:
            self._holding = Holding(self._database)
            if not self._holding.take():
                shown = self._database.shown
                raise InputError(f"another server uses the store {shown}; stop that one, or give another --store")
        if home:
            with self._writing() as connection:
                claim(connection, home, is_here)

    def keep(self) -> None:
        """Look whether this server still has the store, or take it again. Raises JournalError if another one has it."""
        if self._holding is not None and not self._holding.take():
            raise JournalError(TAKEN)

    @property
    def is_taken(self) -> bool:
        """Whether another server had it at the latest look: this one changes no experiment."""
        return self._holding is not None and self._holding.is_taken

    @contextmanager
    def _writing(self) -> Iterator[sql.Connection]:
        """Give a connection in a transaction that changes experiments. Raises JournalError if another server has it."""
        with self._database.writing() as connection:
            if self._holding is not None:
                self._holding.require(connection)
            yield connection

    def prune(self, *, at: float) -> None:
        """Delete what `Keeping` calls old: keys, sessions, plans. `prune_feed` deletes events."""
        keeping, made_at = self.keeping, PLANS.c.created_at
        beyond = sql.select(PLANS.c.id).order_by(made_at.desc(), PLANS.c.id.desc()).offset(keeping.plans)
        with self._writing() as connection:
            connection.execute(sql.delete(KEYS).where(KEYS.c.claimed_at <= at - keeping.answers_s))
            connection.execute(sql.delete(PLANS).where(made_at <= at - keeping.plans_s))
            connection.execute(sql.delete(PLANS).where(PLANS.c.id.in_(beyond)))
            connection.execute(sql.delete(ACTS).where(ACTS.c.acted_at <= at - ACT_KEPT_S))
            connection.execute(sql.delete(SESSIONS).where(SESSIONS.c.expires_at <= at))

    def close(self) -> None:
        """Close the store. Idempotent."""
        if self._holding is not None:
            self._holding.close()
        self._database.close()

    # Experiments

    def add(self, submission: Submission, promise: Promise | None = None) -> bool:
        """Add a new experiment, its state to the feed and its promise; return False if the name is known already."""
        with self._writing() as connection:
            insert = self._database.if_absent(SUBMISSIONS).on_conflict_do_nothing(index_elements=["name"])
            if connection.execute(insert.values(self._row(submission)).returning(_columns.name)).first() is None:
                return False
            self._extend(connection, [first_entry(submission)])
            if promise is not None:
                connection.execute(sql.insert(PROMISES).values(asdict(promise)))
        return True

    def _row(self, submission: Submission) -> dict[str, Any]:
        row = {field.name: getattr(submission, field.name) for field in fields(Submission)}
        labels = label_columns(row.pop("labels"))
        return row | labels | {"summary": asdict(submission.summary), "home": self._home}

    def _submission(self, row: Any) -> Submission:
        """Return an experiment; the reason of one that another home drives says so, while that can change it."""
        plain = dict(row._mapping)
        state, (id, _, home) = ExperimentState(row.state), row.home.partition(" ")
        home = "" if id == id_of(self._home) or not self._home else home or UNNOTED
        if home and state not in OVER:
            plain["reason"] = "; ".join(part for part in (elsewhere(home), row.reason) if part)
        plain |= {"labels": labels_of(plain), "summary": summary_of(plain["summary"])}
        return Submission(**plain | {"state": state, "home": home})

    def going_on(self, owner: str | None = None) -> Sequence[Submission]:
        """Return the experiments that are not over, of one token or of all."""
        mine = sql.true() if owner is None else _columns.owner == owner
        with self._database.reading() as connection:
            return [self._submission(row) for row in connection.execute(sql.select(SUBMISSIONS).where(_GOING_ON, mine))]

    def bills(self, *, since: float, owner: str | None = None, provider: str = "") -> Sequence[Summary]:
        """Return the summaries of the experiments that may cost money since an instant (Unix time).

        Those of a token, or of a provider; also of those that were deleted.
        """
        chosen = [_columns.summary, *([_columns.words] if provider else [])]
        mine = sql.true() if owner is None else _columns.owner == owner
        query = sql.select(*chosen).where(sql.or_(_columns.changed_at >= since, _GOING_ON), mine)
        with self._database.reading() as connection:
            rows = [*connection.execute(query)]
            if provider:
                rows = [row for row in rows if row.words.get("resources", {}).get("provider") == provider]
            rows += connection.execute(deleted_bills(since, owner, provider)).all()
        return [summary_of(row.summary) for row in rows]

    def submitted_by(self, owner: str, *, since: float) -> Sequence[Submission]:
        """Return the experiments that a token submitted since an instant (Unix time)."""
        query = sql.select(SUBMISSIONS).where(_columns.owner == owner, _columns.created_at >= since)
        with self._database.reading() as connection:
            return [self._submission(row) for row in connection.execute(query)]

    def owners(self, *, since: float) -> Sequence[str]:
        """Return the tokens that submitted experiments since an instant (Unix time), also deleted ones, by name."""
        mine = sql.select(_columns.owner).where(_columns.created_at >= since)
        query = mine.union(sql.select(DELETED.c.owner).where(DELETED.c.created_at >= since))
        with self._database.reading() as connection:
            return sorted(connection.scalars(query))

    def move(self, promise: Promise) -> None:
        """Replace the promise of an experiment that has one."""
        with self._writing() as connection:
            values = {"start_at": promise.start_at, "spans": promise.spans}
            of_it = PROMISES.c.experiment == promise.experiment
            connection.execute(sql.update(PROMISES).where(of_it).values(values))

    def lapse(self, *, before: float, note: str) -> None:
        """End the promises to experiments that were interrupted before an instant; `note` extends their reasons."""
        is_late = sql.and_(_columns.state == ExperimentState.INTERRUPTED.value, _columns.changed_at <= before)
        ours = sql.and_(_columns.home == self._home, _columns.name.in_(sql.select(PROMISES.c.experiment)))
        query = sql.select(_columns.name).where(is_late, ours)
        with self._database.reading() as connection:
            if connection.scalars(query).first() is None:
                return
        with self._writing() as connection:  # none of them resumes meanwhile
            names = connection.scalars(query.with_for_update()).all()
            of_them = sql.update(SUBMISSIONS).where(_columns.name.in_(names))
            connection.execute(of_them.values(reason=_columns.reason + note))
            connection.execute(sql.delete(PROMISES).where(PROMISES.c.experiment.in_(names)))

    def promises(self) -> Sequence[Promise]:
        """Return the promises to experiments of this home that are not over, the earliest first."""
        states = [state.value for state in (*ACTIVE, ExperimentState.INTERRUPTED)]
        query = (
            sql.select(PROMISES)
            .join(SUBMISSIONS, _columns.name == PROMISES.c.experiment)
            .where(_columns.state.in_(states), _columns.home == self._home)
            .order_by(PROMISES.c.start_at, PROMISES.c.experiment)
        )
        with self._database.reading() as connection:
            return [Promise(**row._mapping) for row in connection.execute(query)]

    def take_in(self, taken: Sequence[TakenIn]) -> Collection[str]:
        """Add experiments that were run by hand, and their events, in one write; return the names that were new.

        A journal without `entries` counts as already deleted from the feed.
        """
        if not taken:
            return []
        insert = self._database.if_absent(SUBMISSIONS).on_conflict_do_nothing(index_elements=["name"])
        with self._writing() as connection:
            rows = [self._row(one.submission) for one in taken]
            new = set(connection.scalars(insert.returning(_columns.name), rows))
            fresh = [one for one in taken if one.submission.name in new]
            if not fresh:
                return new
            mark_deleted(
                self._database, connection, {one.submission.name: (0, one.last_seq) for one in fresh if not one.entries}
            )
            self._extend(connection, [entry for one in fresh for entry in (*one.entries, first_entry(one.submission))])
        return new

    def submission(self, name: str) -> Submission | None:
        """Return an experiment; None if none has this name."""
        with self._database.reading() as connection:
            row = connection.execute(sql.select(SUBMISSIONS).where(_columns.name == name)).first()
        return None if row is None else self._submission(row)

    def existing(self, names: Collection[str]) -> set[str]:
        """Return those names that experiments have."""
        with self._database.reading() as connection:
            return set(connection.scalars(sql.select(_columns.name).where(_columns.name.in_(sorted(names)))))

    def submissions(
        self,
        *,
        states: Collection[ExperimentState] | None = None,
        search: str = "",
        tags: Sequence[str] = (),
        archived: bool | None = None,
        limit: int = 50,
        after: str | None = None,
    ) -> Page:
        """Return a page, newest first; `after` is the cursor of the page before. Raises InputError for a bad cursor.

        Every word of `search` is part of the name, owner, state, note or a tag, and it has all `tags`. `archived`: only
        those that are, or are not (`Submission.is_archived`).
        """
        query = sql.select(SUBMISSIONS).order_by(_columns.created_at.desc(), _columns.name.desc()).limit(limit + 1)
        query = query.where(*found_by(search, tags, archived))
        if states is not None:
            query = query.where(_columns.state.in_(list(states)))
        if after is not None:
            created_at, name = read_cursor(after)
            older = sql.and_(_columns.created_at == created_at, _columns.name < name)
            query = query.where(sql.or_(_columns.created_at < created_at, older))
        with self._database.reading() as connection:
            found = [self._submission(row) for row in connection.execute(query)]
        items = found[:limit]
        return Page(items=items, next=cursor_of(items[-1]) if items and len(found) > limit else None)

    def count_states(
        self, *, search: str = "", tags: Sequence[str] = (), archived: bool | None = None
    ) -> Mapping[str, int]:
        """Return state -> number of the experiments that `submissions` finds; states without any are missing."""
        found = found_by(search, tags, archived)
        query = sql.select(_columns.state, sql.func.count()).group_by(_columns.state).where(*found)
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
        admitted_usd: float | None = None,
        request: str = "",
    ) -> bool:
        """Change the given values; return False, and change nothing, if its state is not among `expected`.

        A new state is added to the feed (kind `state`, data `{"state", "before", "reason"}`) in the same write. With
        one at the end its promise ends, also for a later resume: others may have been promised its GPUs. None leaves a
        value as it is, and `changed_at` becomes `at`. `request` is recorded as by `note_act`.
        """
        given: dict[str, Any] = {"state": state, "reason": reason, "attempt": attempt, "words": words}
        given |= {"admitted_usd": admitted_usd, "summary": None if summary is None else asdict(summary)}
        changed = {column: value for column, value in given.items() if value is not None}
        with self._writing() as connection:
            now = sql.select(_columns.state, _columns.reason).where(_columns.name == name).with_for_update()
            row = connection.execute(now).first()
            if row is None or (expected is not None and row.state not in expected):
                return False
            update = sql.update(SUBMISSIONS).where(_columns.name == name)
            connection.execute(update.values(changed_at=at, **changed))
            if state is not None and row.state != state:
                entry = state_entry(name, at, state, row.state, row.reason if reason is None else reason)
                self._extend(connection, [entry])
            if state in OVER:
                connection.execute(sql.delete(PROMISES).where(PROMISES.c.experiment == name))
            if request:
                self._act(connection, request, at)
        return True

    # The feed

    def append(self, entries: Sequence[Entry]) -> None:
        """Add to the feed, in order, all or none. An (experiment, seq) that the feed already has is skipped."""
        if entries:
            with self._writing() as connection:
                self._extend(connection, entries)

    def _extend(self, connection: sql.Connection, entries: Sequence[Entry]) -> None:
        """Add to the feed in the caller's transaction; other writers wait for its end."""
        last = sql.update(NUMBERS).where(NUMBERS.c.name == "feed")
        last_id = connection.execute(
            last.values(value=NUMBERS.c.value + len(entries)).returning(NUMBERS.c.value)
        ).scalar_one()
        first_id = last_id - len(entries) + 1
        rows = [
            {"id": id} | {name: getattr(entry, name) for name in _ENTRY} for id, entry in enumerate(entries, first_id)
        ]
        connection.execute(
            self._database.if_absent(FEED).on_conflict_do_nothing(index_elements=["experiment", "seq"]), rows
        )

    def last_seqs(self, experiments: Collection[str] | None = None) -> Mapping[str, int]:
        """Return experiment -> last journal place that the feed ever had; experiments without events are missing."""
        last = sql.select(sql.func.max(_feed.seq)).where(_feed.experiment == sql.bindparam("name"))
        gone = sql.select(PRUNED.c.last_seq).where(PRUNED.c.experiment == sql.bindparam("name"))
        every = sql.union(sql.select(_feed.experiment), sql.select(PRUNED.c.experiment))
        with self._database.reading() as connection:
            names = connection.scalars(every).all() if experiments is None else experiments
            # PRUNED is read last: it counts events that are deleted meanwhile.
            found = {name: [connection.scalar(query, {"name": name}) for query in (last, gone)] for name in names}
        seqs = {name: max(-1 if seq is None else int(seq) for seq in both) for name, both in found.items()}
        return {name: seq for name, seq in seqs.items() if seq >= 0}

    def feed(self, *, after: int = 0, experiment: str | None = None, limit: int = 500) -> Sequence[FeedEvent]:
        """Return events past `after`, in order. No event appears later with a smaller id than one returned here."""
        query = sql.select(FEED).where(_feed.id > min(after, MAX_ID)).order_by(_feed.id).limit(limit)
        if experiment is not None:
            query = query.where(_feed.experiment == experiment)
        with self._database.reading() as connection:
            return [FeedEvent(**row._mapping) for row in connection.execute(query)]

    def last_feed_id(self) -> int:
        """Return the id of the last event; 0 if there never was one."""
        with self._database.reading() as connection:
            kept = connection.execute(sql.select(sql.func.max(_feed.id))).scalar() or 0
            return max(kept, connection.execute(sql.select(sql.func.max(PRUNED.c.last_id))).scalar() or 0)

    def last_pruned_id(self, experiment: str | None = None) -> int:
        """Return the greatest id of all deleted events (of an experiment); 0 if none was deleted."""
        query = sql.select(sql.func.max(PRUNED.c.last_id))
        if experiment is not None:
            query = query.where(PRUNED.c.experiment == experiment)
        with self._database.reading() as connection:
            return connection.execute(query).scalar() or 0

    def prune_feed(self, *, at: float, limit: int = 1000) -> int:
        """Delete up to `limit` events of experiments that ended long ago (`Keeping.events_s`); return how many.

        The oldest events of each go first. Only the process that appends calls this, until it returns 0.
        """
        known = SUBMISSIONS.c
        has_events = sql.exists().where(_feed.experiment == known.name)
        over = sql.select(known.name).where(known.state.not_in(ACTIVE), known.changed_at <= at - self.keeping.events_s)
        # Locked until the end, so that none of them resumes meanwhile.
        names = over.where(has_events).order_by(known.changed_at).limit(_PRUNED_AT_ONCE).with_for_update()
        gone = 0
        with self._writing() as connection:
            for name in connection.scalars(names).all():
                if gone < limit:
                    gone += self._let_go(connection, name, limit - gone)
        return gone

    def _let_go(self, connection: sql.Connection, experiment: str, limit: int) -> int:
        oldest = sql.select(_feed.id, _feed.seq).where(_feed.experiment == experiment)
        chosen = oldest.order_by(_feed.id).limit(limit).subquery()
        last = sql.select(sql.func.max(chosen.c.id), sql.func.coalesce(sql.func.max(chosen.c.seq), -1))
        last_id, last_seq = connection.execute(last).one()
        if last_id is None:  # another server has just deleted them
            return 0
        mark_deleted(self._database, connection, {experiment: (last_id, last_seq)})
        deleted = sql.delete(FEED).where(_feed.experiment == experiment, _feed.id <= last_id)
        return connection.execute(deleted).rowcount

    # Tokens and browser sessions; secrets only as hashes

    def add_token(self, record: TokenRecord, secret_hash: str) -> None:
        """Store a token."""
        with self._database.writing() as connection:
            connection.execute(sql.insert(TOKENS).values(asdict(record) | {"secret_hash": secret_hash}))

    def find_tokens(self, ids: Collection[str]) -> Mapping[str, tuple[TokenRecord, str]]:
        """Return id -> token and hash of its secret; unknown ids are missing."""
        with self._database.reading() as connection:
            rows = connection.execute(sql.select(TOKENS).where(TOKENS.c.id.in_(ids)))
            return {row.id: (_record(row), row.secret_hash) for row in rows}

    def tokens(self) -> Sequence[TokenRecord]:
        """Return all tokens, revoked ones included, oldest first."""
        query = sql.select(TOKENS).order_by(TOKENS.c.created_at, TOKENS.c.id)
        with self._database.reading() as connection:
            return [_record(row) for row in connection.execute(query)]

    def revoke_token(self, id: str, *, at: float) -> bool:
        """Revoke a token and end its sessions; return False if there is none."""
        revoked = sql.update(TOKENS).where(TOKENS.c.id == id)
        with self._database.writing() as connection:
            revoked_at = sql.func.coalesce(TOKENS.c.revoked_at, at)
            found = connection.execute(revoked.values(revoked_at=revoked_at).returning(TOKENS.c.id)).first()
            connection.execute(sql.delete(SESSIONS).where(SESSIONS.c.token == id))
        return found is not None

    def touch_token(self, id: str, *, at: float) -> None:
        """Record the last use of a token. A power failure may lose this write."""
        with self._database.writing(durable=False) as connection:
            connection.execute(sql.update(TOKENS).where(TOKENS.c.id == id).values(last_used_at=at))

    def add_session(self, hash: str, *, token: str, expires_at: float) -> None:
        """Store the session of a browser that signed in with a token."""
        with self._database.writing() as connection:
            connection.execute(sql.insert(SESSIONS).values(hash=hash, token=token, expires_at=expires_at))
            mine = sql.select(SESSIONS.c.hash).where(SESSIONS.c.token == token).order_by(SESSIONS.c.expires_at.desc())
            beyond = mine.offset(self.keeping.sessions)
            connection.execute(sql.delete(SESSIONS).where(SESSIONS.c.hash.in_(beyond)))

    def find_sessions(self, hashes: Collection[str], *, at: float) -> Mapping[str, TokenRecord]:
        """Return hash -> token of a browser's session; sessions that ended, or whose token did, are missing."""
        token = TOKENS.c
        query = sql.select(SESSIONS.c.hash, TOKENS).join(SESSIONS, SESSIONS.c.token == token.id)
        query = query.where(SESSIONS.c.hash.in_(hashes), SESSIONS.c.expires_at > at, token.revoked_at.is_(None))
        with self._database.reading() as connection:
            rows = connection.execute(query.where(sql.or_(token.expires_at.is_(None), token.expires_at > at)))
            return {row.hash: _record(row) for row in rows}

    def end_sessions(self) -> None:
        """End all sessions of browsers."""
        with self._database.writing() as connection:
            connection.execute(sql.delete(SESSIONS))

    def end_session(self, hash: str) -> None:
        """End the session of a browser. Idempotent."""
        with self._database.writing() as connection:
            connection.execute(sql.delete(SESSIONS).where(SESSIONS.c.hash == hash))

    # Plans, and requests with an Idempotency-Key

    def keep_plans(self, plans: Sequence[StoredPlan]) -> None:
        """Store previews, or store them again. A power failure may lose this write; `prune` deletes old ones."""
        names = PLANS.c.keys()
        insert = self._database.if_absent(PLANS)
        insert = insert.on_conflict_do_update(
            index_elements=["id"], set_={name: insert.excluded[name] for name in names}
        )
        with self._database.writing(durable=False) as connection:
            connection.execute(insert, [{name: getattr(plan, name) for name in names} for plan in plans])

    def plan(self, id: str) -> StoredPlan | None:
        """Return a preview; None if there is none."""
        with self._database.reading() as connection:
            row = connection.execute(_PLAN, {"id": id}).first()
        return None if row is None else StoredPlan(**row._mapping)

    def plan_ids(self) -> list[str]:
        """Return the ids of all previews, the latest last."""
        with self._database.reading() as connection:
            return list(connection.scalars(sql.select(PLANS.c.id).order_by(PLANS.c.created_at)))

    def claim_key(self, key: str, *, owner: str, request_hash: str, at: float) -> KeptAnswer | str | None:
        """Claim an Idempotency-Key: None if it was free, the answer if one was given already.

        `busy` if a request with it has been served for less than a minute, `reused` if another request has it.
        """
        claim = {"owner": owner, "key": key, "request_hash": request_hash, "claimed_at": at}
        with self._database.writing() as connection:
            stale = KEYS.c.claimed_at <= at - self.keeping.answers_s
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
        """Store the answer of a request whose key was claimed."""
        unanswered = sql.update(KEYS).where(_of(key, owner), KEYS.c.status.is_(None))
        with self._database.writing() as connection:
            connection.execute(unanswered.values(claimed_at=at, **asdict(answer)))

    def free_key(self, key: str, *, owner: str) -> None:
        """Free the key of a request that failed."""
        with self._database.writing() as connection:
            connection.execute(sql.delete(KEYS).where(_of(key, owner), KEYS.c.status.is_(None)))

    def free_keys(self) -> None:
        """Free all keys of requests without an answer, for the start of a server."""
        with self._database.writing() as connection:
            connection.execute(sql.delete(KEYS).where(KEYS.c.status.is_(None)))

    # Requests that took effect, by their ids: a request sent again after a lost answer is known by its id

    def has_acted(self, request: str, *, since: float) -> bool:
        """Whether the request with this id took effect at `since` or later (see `change` and `note_act`).

        Requests older than 30 days are forgotten.
        """
        acted = sql.select(ACTS).where(ACTS.c.request == request, ACTS.c.acted_at >= since)
        with self._database.reading() as connection:
            return connection.execute(acted).first() is not None

    def note_act(self, request: str, *, at: float) -> None:
        """Record that the request with this id took effect. Idempotent."""
        with self._database.writing() as connection:
            self._act(connection, request, at)

    def _act(self, connection: sql.Connection, request: str, at: float) -> None:
        """Record it in the transaction that has the effect."""
        absent = self._database.if_absent(ACTS).on_conflict_do_update(index_elements=["request"], set_={"acted_at": at})
        connection.execute(absent.values(request=request, acted_at=at))


def _record(row: Any) -> TokenRecord:
    return TokenRecord(**{name: value for name, value in row._mapping.items() if name not in _HASHES})


def _of(key: str, owner: str) -> sql.ColumnElement[bool]:
    return sql.and_(KEYS.c.owner == owner, KEYS.c.key == key)


def open_store(url: str | None, home: Path, keeping: Keeping = KEEPING) -> Store:
    """Open the store at `url`; without one, the SQLite file `server.db` in `home`. Raises as `Store` does."""
    return Store(url or sql.URL.create("sqlite", database=str(home / "server.db")), keeping)
