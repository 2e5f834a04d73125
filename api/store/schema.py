"""The values that the service stores, and their tables. All instants are Unix time in seconds.

Journals may be in the same database, in tables of their own.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import sqlalchemy as sql
from sqlalchemy.types import TypeDecorator

from rubberband.errors import InputError
from rubberband.executor.journal.database import Database
from rubberband.states import ACTIVE, ExperimentState
from rubberband.values.submission import Labels, Submission, Summary, same_case, search_words

Scope = Literal["read", "submit", "admin"]
"""read: see everything and preview plans; submit: also start, extend, resume and cancel; admin: also manage tokens."""
SCOPES: tuple[Scope, ...] = ("read", "submit", "admin")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Event to be added to the feed."""

    experiment: str
    seq: int | None
    """Place in the experiment's journal; None for a change of state, which the service adds."""
    kind: str
    """The journal's kind of event (`TrialReported`, …), or `state`."""
    occurred_at: float
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedEvent(Entry):
    """Event of the feed."""

    id: int
    """Place in the feed, greater than that of every event before it; the value of Last-Event-ID."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenIn:
    """Finished experiment that was run by hand, to be added to the store."""

    submission: Submission
    entries: Sequence[Entry]
    """All events of its journal, or none."""
    last_seq: int
    """Last place of its journal; -1 if it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPlan:
    """Preview of a plan."""

    id: str
    created_at: float
    words: Mapping[str, Any]
    options: Mapping[str, Any]
    """policy, frontier, size, seed, and the Unix time that its experiment would start at: `now`."""
    status: int
    """200, or 422 where no plan is feasible."""
    body: bytes
    """Body of the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRecord:
    """Token, without its secret."""

    id: str
    name: str
    """Owner or purpose."""
    scope: Scope
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None
    last_used_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """Caller of a request."""

    token: str
    """Id of the token; empty where none is required."""
    name: str
    scope: Scope

    def may(self, scope: Scope) -> bool:
        """Whether the caller has `scope`."""
        return SCOPES.index(self.scope) >= SCOPES.index(scope)


NOBODY = Principal(token="", name="", scope="admin")
"""Caller where no token is required."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """GPUs over time that a pool has promised to an experiment."""

    experiment: str
    start_at: float
    spans: Sequence[tuple[int, float]]
    """GPUs and seconds, one after the other."""
    cost_usd: float = 0.0
    """Cost (mean) of the plan that was promised. It stays when the promise moves."""

    @property
    def end_at(self) -> float:
        """Latest end."""
        return self.start_at + sum(duration_s for _, duration_s in self.spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptAnswer:
    """Answer to a request with an Idempotency-Key."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Page of a list of experiments."""

    items: Sequence[Submission]
    next: str | None
    """Cursor of the next page; None on the last one."""


def first_entry(submission: Submission) -> Entry:
    """Return the event of a new experiment."""
    return state_entry(submission.name, submission.changed_at, submission.state, None, submission.reason)


def state_entry(name: str, at: float, state: ExperimentState, before: str | None, reason: str) -> Entry:
    """Return the event of a change of state."""
    data = {"state": state, "before": before, "reason": reason}
    return Entry(experiment=name, seq=None, kind="state", occurred_at=at, data=data)


def cursor_of(submission: Submission) -> str:
    """Return the cursor of the place after an experiment in the list."""
    return base64.urlsafe_b64encode(json.dumps([submission.created_at, submission.name]).encode()).decode().rstrip("=")


def read_cursor(cursor: str) -> tuple[float, str]:
    """Return the place of a cursor. Raises InputError for anything but a result of `cursor_of`."""
    try:
        padded = cursor.encode("ascii") + b"=" * (-len(cursor) % 4)
        created_at, name = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
        if not (type(created_at) is float and math.isfinite(created_at) and type(name) is str):
            raise ValueError("another shape")
    except (ValueError, TypeError, RecursionError):
        raise InputError("the cursor was not issued by this service; leave it out for the first page") from None
    return created_at, name


MIGRATIONS: Sequence[Callable[[sql.Connection], None]] = ()
"""Each brings the tables from one version to the next, the first one from version 1, in the transaction it is given."""
VERSION = 1 + len(MIGRATIONS)
"""Version of the tables, which the store keeps. Any change of them is a migration."""


class StoredText(TypeDecorator[str]):
    """Text. NUL and lone surrogates, which no database stores, become a replacement character, in queries too."""

    impl = sql.Text
    cache_ok = True

    def process_bind_param(self, value: str | None, _dialect: sql.Dialect) -> str | None:
        return None if value is None else value.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


class Json(TypeDecorator[Any]):
    """JSON value. NaN and infinity become null."""

    impl = sql.Text
    cache_ok = True

    def process_bind_param(self, value: Any, _dialect: sql.Dialect) -> str | None:
        if value is None:
            return None
        try:
            return _encode(value)
        except (TypeError, ValueError):  # a mapping that is no dict, or a number that is not finite
            return _encode(json.loads(json.dumps(value, default=dict), parse_constant=lambda _: None))

    def process_result_value(self, value: str | None, _dialect: sql.Dialect) -> Any:
        return None if value is None else json.loads(value)


_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


METADATA = sql.MetaData()

NUMBERS = sql.Table(
    "service_numbers",
    METADATA,
    sql.Column("name", StoredText, primary_key=True),
    sql.Column("value", sql.BigInteger, nullable=False),
)
"""`version` of the tables; `server`: the number of the one that may change them (`rubberband.api.store.holding`);
`feed`: the id of the last event. A writer of the feed locks that row until its transaction ends, so that no event
becomes visible after one with a greater id."""

SUBMISSIONS = sql.Table(
    "service_submissions",
    METADATA,
    sql.Column("name", StoredText, primary_key=True),
    sql.Column("state", StoredText, nullable=False),
    sql.Column("created_at", sql.Double, nullable=False),
    sql.Column("changed_at", sql.Double, nullable=False),
    sql.Column("owner", StoredText, nullable=False),
    sql.Column("words", Json, nullable=False),
    sql.Column("policy", StoredText, nullable=False),
    sql.Column("plan", StoredText),
    sql.Column("request", StoredText, nullable=False),
    sql.Column("reason", StoredText, nullable=False),
    sql.Column("attempt", sql.Integer, nullable=False),
    sql.Column("summary", Json, nullable=False),
    sql.Column("home", StoredText, nullable=False),
    sql.Column("admitted_usd", sql.Double, nullable=False),
    sql.Column("tags", StoredText, nullable=False),
    sql.Column("note", StoredText, nullable=False),
    sql.Column("archived", sql.Integer, nullable=False),
    sql.Index("service_submissions_by_age", "created_at", "name"),
)
"""`tags`: each between blanks."""

DELETED = sql.Table(
    "service_deleted_bills",
    METADATA,
    sql.Column("id", StoredText, primary_key=True),
    sql.Column("owner", StoredText, nullable=False),
    sql.Column("provider", StoredText, nullable=False),
    sql.Column("created_at", sql.Double, nullable=False),
    sql.Column("changed_at", sql.Double, nullable=False, index=True),
    sql.Column("summary", Json, nullable=False),
)
"""Bills of deleted experiments, which count in the month in which they were spent."""


def label_columns(labels: Labels) -> dict[str, Any]:
    """Return labels as columns of `SUBMISSIONS`."""
    tags = f" {' '.join(labels.tags)} " if labels.tags else ""
    return {"tags": tags, "note": labels.note, "archived": int(labels.archived)}


def labels_of(columns: dict[str, Any]) -> Labels:
    """Return the labels of a row, and take them out of it."""
    tags, note, archived = (columns.pop(name) for name in ("tags", "note", "archived"))
    return Labels(tags=tuple(tags.split()), note=note, archived=bool(archived))


def summary_of(plain: Mapping[str, Any]) -> Summary:
    """Return a summary; what a newer version wrote beside it is left out."""
    return Summary(**{name: value for name, value in plain.items() if name in _SUMMARY})


_SUMMARY = frozenset(field.name for field in fields(Summary))


def found_by(search: str = "", tags: Sequence[str] = (), archived: bool | None = None) -> list[sql.ColumnElement[bool]]:
    """Return a condition for each word of a search, and each tag; `archived` None: whether it is or not."""
    row = SUBMISSIONS.c
    texts = (row.name, row.owner, row.state, row.tags, row.note)
    found = [sql.or_(*(text.icontains(word, autoescape=True) for text in texts)) for word in search_words(search)]
    found += [row.tags.contains(f" {same_case(tag)} ", autoescape=True) for tag in tags]
    if archived is not None:
        is_archived = sql.and_(row.archived != 0, row.state.not_in(ACTIVE))
        found.append(is_archived if archived else sql.not_(is_archived))
    return found


FEED = sql.Table(
    "service_feed",
    METADATA,
    sql.Column("id", sql.BigInteger, primary_key=True, autoincrement=False),
    sql.Column("experiment", StoredText, nullable=False),
    sql.Column("seq", sql.Integer),
    sql.Column("kind", StoredText, nullable=False),
    sql.Column("occurred_at", sql.Double, nullable=False),
    sql.Column("data", Json, nullable=False),
    sql.Index("service_feed_by_experiment", "experiment", "id"),
    sql.UniqueConstraint("experiment", "seq"),
)

PRUNED = sql.Table(
    "service_feed_pruned",
    METADATA,
    sql.Column("experiment", StoredText, primary_key=True),
    sql.Column("last_id", sql.BigInteger, nullable=False, index=True),
    sql.Column("last_seq", sql.Integer, nullable=False),
)
"""Greatest id, and greatest place in the journal (-1: none), among the deleted events of an experiment."""

PROMISES = sql.Table(
    "service_promises",
    METADATA,
    sql.Column("experiment", StoredText, primary_key=True),
    sql.Column("start_at", sql.Double, nullable=False),
    sql.Column("spans", Json, nullable=False),
    sql.Column("cost_usd", sql.Double, nullable=False),
)

PLANS = sql.Table(
    "service_plans",
    METADATA,
    sql.Column("id", StoredText, primary_key=True),
    sql.Column("created_at", sql.Double, nullable=False),
    sql.Column("words", Json, nullable=False),
    sql.Column("options", Json, nullable=False),
    sql.Column("status", sql.Integer, nullable=False),
    sql.Column("body", sql.LargeBinary, nullable=False),
    sql.Index("service_plans_by_age", "created_at", "id"),
)

TOKENS = sql.Table(
    "service_tokens",
    METADATA,
    sql.Column("id", StoredText, primary_key=True),
    sql.Column("name", StoredText, nullable=False),
    sql.Column("scope", StoredText, nullable=False),
    sql.Column("created_at", sql.Double, nullable=False),
    sql.Column("expires_at", sql.Double),
    sql.Column("revoked_at", sql.Double),
    sql.Column("last_used_at", sql.Double),
    sql.Column("secret_hash", StoredText, nullable=False),
)

SESSIONS = sql.Table(
    "service_sessions",
    METADATA,
    sql.Column("hash", StoredText, primary_key=True),
    sql.Column("token", StoredText, nullable=False, index=True),
    sql.Column("expires_at", sql.Double, nullable=False),
)

KEYS = sql.Table(
    "service_request_keys",
    METADATA,
    sql.Column("owner", StoredText, primary_key=True),
    sql.Column("key", StoredText, primary_key=True),
    sql.Column("request_hash", StoredText, nullable=False),
    sql.Column("claimed_at", sql.Double, nullable=False),
    sql.Column("status", sql.Integer),
    sql.Column("headers", Json),
    sql.Column("body", sql.LargeBinary),
)
"""`status`, `headers` and `body` are those of the answer; NULL while there is none."""

ACTS = sql.Table(
    "service_acts",
    METADATA,
    sql.Column("request", StoredText, primary_key=True),
    sql.Column("acted_at", sql.Double, nullable=False, index=True),
)


def require_version(database: Database) -> None:
    """Bring the tables of an older version up to this one. Raises InputError for those of a newer version."""
    rows = [{"name": "version", "value": VERSION}, {"name": "feed", "value": 0}]
    its_row = NUMBERS.c.name == "version"
    with database.writing() as connection:
        absent = database.if_absent(NUMBERS).on_conflict_do_nothing(index_elements=["name"])
        connection.execute(absent, rows)
        version = connection.execute(sql.select(NUMBERS.c.value).where(its_row).with_for_update()).scalar_one()
        for migrate in MIGRATIONS[version - 1 :]:
            migrate(connection)
        if version < VERSION:
            connection.execute(sql.update(NUMBERS).where(its_row).values(value=VERSION))
    if version > VERSION:
        raise InputError(
            f"the store {database.shown} was made by a newer version of rubberband (its tables have version "
            f"{version}; this version reads up to {VERSION}); install that version, or use another store"
        )
