"""Tokens and the dashboard's sessions: made at random, kept as hashes, compared in constant time.

A token reads `rb_ID_SECRET`: found by its id, proved by its secret, of which only the SHA-256 is kept (it has 256
random bits: nothing slower is needed). What was found is remembered for seconds, so that a revocation by another
process, such as `rubberband token revoke`, takes effect that soon, and one by this process at once.
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
from dataclasses import dataclass

from rubberband.api.settings import KEEPING
from rubberband.api.store.protocol import Principal, Scope, Store, TokenRecord

REMEMBERED_S = 5.0
"""So long another process's revocation may go unnoticed."""
_TOUCHED_S = 60.0
"""A use is noted at most this often."""
_REMEMBERED = 1024
"""Tokens and sessions that are remembered, most recently asked first."""
_FORM = re.compile(r"rb_([0-9a-f]{12})_([0-9a-f]{64})", re.ASCII)
_NO_HASH = hashlib.sha256(b"no token has this").hexdigest()


@dataclass(frozen=True, slots=True)
class Bearer:
    """A token, as a client sends it."""

    text: str

    def __repr__(self) -> str:
        return "Bearer(...)"


@dataclass(frozen=True, slots=True)
class Cookie:
    """A browser's session, as it sends it."""

    text: str

    def __repr__(self) -> str:
        return "Cookie(...)"


Credential = Bearer | Cookie


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    record: TokenRecord
    secret_hash: str
    """Of a token; empty for a session, which is found by its hash."""
    read_at: float


class Tokens:
    """The tokens of one store. Safe to call from several threads; all but `recall` may wait for the store."""

    def __init__(
        self,
        store: Store,
        *,
        session_s: float = KEEPING.sessions_s,
        clock: Callable[[], float] = time.time,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        """A browser stays signed in for `session_s`.

        `ended` is called when a token or a session was ended, so that who was let in by it is looked at again.
        """
        self._store, self._clock, self._tell_ended = store, clock, ended
        self.session_s = session_s
        self._found: OrderedDict[str, _Found] = OrderedDict()
        self._lock = threading.Lock()
        self._ended = 0
        """How often something was ended; what was read before is not remembered after."""

    def create(self, name: str, scope: Scope, *, lasts_s: float | None = None) -> tuple[TokenRecord, str]:
        """A new token: what is kept of it, and the token itself, which cannot be shown again."""
        now, id, secret = self._clock(), secrets.token_hex(6), secrets.token_hex(32)
        expires_at = None if lasts_s is None else now + lasts_s
        record = TokenRecord(id=id, name=name, scope=scope, created_at=now, expires_at=expires_at)
        self._store.add_token(record, _hash(secret))
        return record, f"rb_{id}_{secret}"

    def records(self) -> Sequence[TokenRecord]:
        """All tokens, oldest first."""
        return self._store.tokens()

    def revoke(self, id: str) -> bool:
        """End a token and its sessions; False if there is none of the id."""
        revoked = self._store.revoke_token(id, at=self._clock())
        with self._lock:
            self._ended += 1
            for key in [key for key, found in self._found.items() if found.record.id == id]:
                del self._found[key]
        self._tell_ended()
        return revoked

    def recall(self, credential: Credential) -> Principal | None:
        """Who shows this, if that was found out a moment ago; None says nothing."""
        now = self._clock()
        key, secret = _parts(credential)
        with self._lock:
            found = self._found.get(key)
            if found is None or not 0 <= now - found.read_at < REMEMBERED_S:
                return None
            self._found.move_to_end(key)
        return _principal(found, secret, now)

    def look_up(self, credentials: Collection[Credential]) -> Mapping[Credential, Principal]:
        """Who shows these; those by which nobody may are left out. Raises JournalError if the store cannot be read.

        However many they are, the store is asked at most twice.
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
        """Note when these, which were just looked up, were used. Raises JournalError."""
        now = self._clock()
        with self._lock:
            found = [self._found.get(_parts(credential)[0]) for credential in credentials]
        used = {one.record.id: one.record.last_used_at for one in found if one is not None}
        for id, last_used_at in used.items():
            if last_used_at is None or now - last_used_at >= _TOUCHED_S:
                self._store.touch_token(id, at=now)

    def sign_in(self, principal: Principal) -> str:
        """Begin a browser's session of a token's holder: the value of its cookie."""
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
    """By what it is found (empty: by nothing), and the secret that proves it (a session's hash is proof)."""
    if isinstance(credential, Cookie):
        return _hash(credential.text), None
    match = _FORM.fullmatch(credential.text)
    return (match[1], match[2]) if match else ("", credential.text)


def _principal(found: _Found | None, secret: str | None, now: float) -> Principal | None:
    """Who that is. A token that is unknown takes as long to refuse as one whose secret is wrong."""
    if secret is not None and not hmac.compare_digest(_hash(secret), found.secret_hash if found else _NO_HASH):
        return None
    if found is None or not is_live(found.record, at=now):
        return None
    return Principal(token=found.record.id, name=found.record.name, scope=found.record.scope)


def is_live(record: TokenRecord, *, at: float) -> bool:
    """Whether it opens anything at that time."""
    return record.revoked_at is None and (record.expires_at is None or at < record.expires_at)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
