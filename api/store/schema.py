"""The tables of the service's store. Journals may be in the same database, in tables of their own."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sql
from sqlalchemy.types import TypeDecorator

VERSION = 1
"""Of these tables. One that is greater was made by a newer version of rubberband."""


class StoredText(TypeDecorator[str]):
    """Text. What no database keeps (NUL, half a surrogate pair) becomes a replacement character, in queries too."""

    impl = sql.Text
    cache_ok = True

    def process_bind_param(self, value: str | None, _dialect: sql.Dialect) -> str | None:
        return None if value is None else value.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


class Json(TypeDecorator[Any]):
    """A JSON value. NaN and infinity, which JSON does not have, become null."""

    impl = sql.Text
    cache_ok = True

    def process_bind_param(self, value: Any, _dialect: sql.Dialect) -> str | None:
        if value is None:
            return None
        try:
            return _encode(value)
        except (TypeError, ValueError):  # it is no plain JSON value yet
            return _encode(_plain(value))

    def process_result_value(self, value: str | None, _dialect: sql.Dialect) -> Any:
        return None if value is None else json.loads(value)


_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value


METADATA = sql.MetaData()

NUMBERS = sql.Table(
    "service_numbers",
    METADATA,
    sql.Column("name", StoredText, primary_key=True),
    sql.Column("value", sql.BigInteger, nullable=False),
)
"""`version` of the tables, and `feed`: the id of the last event. Who adds to the feed holds that row to the end of the
transaction, so that no event becomes visible after one with a greater id."""

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
    sql.Index("service_submissions_by_age", "created_at", "name"),
)

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
"""How far the feed of an experiment was let go: the greatest id, and the greatest place in its journal (-1: none)."""

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
