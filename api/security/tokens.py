"""Tokens and the dashboard's sessions: random, stored as hashes, compared in constant time.

A token reads `rb_ID_SECRET`. It is found by its id and proved by its secret, of which only the SHA-256 is stored (256
random bits need no slower hash). Lookups are cached for seconds: a revocation by another process, such as `rubberband
token revoke`, takes effect that soon, and one by this process at once.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rubberband.api.settings import KEEPING
from rubberband.api.store.schema import Principal, Scope, TokenRecord
from rubberband.api.store.sql import Store

REMEMBERED_S = 5.0
"""Longest delay of a revocation by another process."""
_TOUCHED_S = 60.0
"""Shortest interval of recording a use."""
_REMEMBERED = 1024
"""Cached tokens and sessions, the most recently used."""
_FORM = re.compile(r"rb_([0-9a-f]{12})_([0-9a-f]{64})", re.ASCII)
_NO_HASH = hashlib.sha256(b"no token has this").hexdigest()


@dataclass(frozen=True, slots=True)
class Bearer:
    """Token, as a client sends it."""

    text: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Cookie:
    """Session, as a browser sends it."""

    text: str = field(repr=False)


Credential = Bearer | Cookie


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    record: TokenRecord
    secret_hash: str
    """Hash of a token's secret; empty for a session, which is found by its hash."""
    read_at: float


class Tokens:
    """Tokens of one store. Thread-safe; all methods but `recall` may wait for the store."""

    def __init__(
        self,
        store: Store,
        *,
        session_s: float = KEEPING.sessions_s,
        clock: Callable[[], float] = time.time,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        """`session_s` is the lifetime of sessions; `ended` is called after a token or session ended."""
        self._store, self._clock, self._tell_ended = store, clock, ended
        self.session_s = session_s
        self._found: OrderedDict[str, _Found] = OrderedDict()
        self._lock = threading.Lock()
        self._ended = 0
        """Number of endings; lookups that began before one are not cached."""

    def create(self, name: str, scope: Scope, *, lasts_s: float | None = None) -> tuple[TokenRecord, str]:
        """Make a token; return its record and the token itself, which cannot be shown again."""
        now, id, secret = self._clock(), secrets.token_hex(6), secrets.token_hex(32)
        expires_at = None if lasts_s is None else now + lasts_s
        record = TokenRecord(id=id, name=name, scope=scope, created_at=now, expires_at=expires_at)
        self._store.add_token(record, _hash(secret))
        return record, f"rb_{id}_{secret}"

    def records(self) -> Sequence[TokenRecord]:
        """Return all tokens, oldest first."""
        return self._store.tokens()

    def revoke(self, id: str) -> bool:
        """End a token and its sessions; return False if none has this id."""
        revoked = self._store.revoke_token(id, at=self._clock())
        with self._lock:
            self._ended += 1
            for key in [key for key, found in self._found.items() if found.record.id == id]:
                del self._found[key]
        self._tell_ended()
        return revoked

    def recall(self, credential: Credential) -> Principal | None:
        """Return the holder of a credential from the cache; None if it is not cached."""
        now = self._clock()
        key, secret = _parts(credential)
        with self._lock:
            found = self._found.get(key)
            if found is None or not 0 <= now - found.read_at < REMEMBERED_S:
                return None
            self._found.move_to_end(key)
        return _principal(found, secret, now)

    def look_up(self, credentials: Collection[Credential]) -> Mapping[Credential, Principal]:
        """Return the holders of credentials, in at most two queries; invalid credentials are missing.

        Raises JournalError if the store cannot be read.
        """
        now, ended = self._clock(), self._ended
        found = self._read(credentials, now)
        principals = {}
        for credential in credentials:
            key, secret = _parts(credential)
            principal = _principal(found.get(key), secret, now)
            if principal is not None:
                principals[credential] = principal
                self._remember(key, found[key], ended)
        return principals

    def note_use(self, credentials: Iterable[Credential]) -> None:
        """Record the use of credentials that were just looked up. Raises JournalError."""
        now = self._clock()
        with self._lock:
            found = [self._found.get(_parts(credential)[0]) for credential in credentials]
        used = {one.record.id: one.record.last_used_at for one in found if one is not None}
        for id, last_used_at in used.items():
            if last_used_at is None or now - last_used_at >= _TOUCHED_S:
                self._store.touch_token(id, at=now)

    def sign_in(self, principal: Principal) -> str:
        """Begin a browser's session; return its cookie."""
        session = secrets.token_urlsafe(32)
        self._store.add_session(_hash(session), token=principal.token, expires_at=self._clock() + self.session_s)
        return session

    def sign_out(self, session: str) -> None:
        """End a browser's session. Idempotent."""
        key = _hash(session)
        self._store.end_session(key)
        with self._lock:
            self._ended += 1
            self._found.pop(key, None)
        self._tell_ended()

    def _read(self, credentials: Collection[Credential], now: float) -> Mapping[str, _Found]:
        ids = {_parts(one)[0] for one in credentials if isinstance(one, Bearer)} - {""}
        hashes = {_parts(one)[0] for one in credentials if isinstance(one, Cookie)}
        found = {}
        if ids:
            for id, (record, secret_hash) in self._store.find_tokens(ids).items():
                found[id] = _Found(record=record, secret_hash=secret_hash, read_at=now)
        if hashes:
            for hash, record in self._store.find_sessions(hashes, at=now).items():
                found[hash] = _Found(record=record, secret_hash="", read_at=now)
        return found

    def _remember(self, key: str, found: _Found, ended: int) -> None:
        with self._lock:
            if ended != self._ended:
                return
            self._found[key] = found
            self._found.move_to_end(key)
            while len(self._found) > _REMEMBERED:
                self._found.popitem(last=False)


def _parts(credential: Credential) -> tuple[str, str | None]:
    """Return the key of the lookup (empty: invalid), and the secret (None for a session: its hash is proof)."""
    if isinstance(credential, Cookie):
        return _hash(credential.text), None
    match = _FORM.fullmatch(credential.text)
    return (match[1], match[2]) if match else ("", credential.text)


def _principal(found: _Found | None, secret: str | None, now: float) -> Principal | None:
    """Return the holder. An unknown token takes as long to refuse as one with a wrong secret."""
    if secret is not None and not hmac.compare_digest(_hash(secret), found.secret_hash if found else _NO_HASH):
        return None
    if found is None or not is_live(found.record, at=now):
        return None
    return Principal(token=found.record.id, name=found.record.name, scope=found.record.scope)


def is_live(record: TokenRecord, *, at: float) -> bool:
    """Whether a token is valid at `at` (Unix time)."""
    return record.revoked_at is None and (record.expires_at is None or at < record.expires_at)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
