"""Tokens, and the browsers that signed in with one, in the store. Secrets are here as their hashes only."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import sqlalchemy as sql

from rubberband.api.settings import Keeping
from rubberband.api.store.records import TokenRecord
from rubberband.api.store.schema import SESSIONS, TOKENS
from rubberband.executor.database import Database


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
