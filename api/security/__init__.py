"""Authentication by a token (Authorization: Bearer), or by the cookie of a browser that signed in with one.

Tokens and sessions are random (256 bits, so guessing is hopeless), stored as hashes, and compared in constant time. A
token reads `rb_ID_SECRET`. It is found by its id and proved by its secret, of which only the SHA-256 is stored (256
random bits need no slower hash). Lookups are cached for seconds: a revocation by another process, such as `rubberband
token revoke`, takes effect that soon, and one by this process at once. The rate of wrong tokens is limited only to stop
misconfigured clients; valid tokens from the same address are never limited. `CredentialLookup` bounds the load of wrong
ones on the store.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import math
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import islice

from rubberband.api.problems import RATE, UNAUTHENTICATED, HttpProblem
from rubberband.api.settings import KEEPING
from rubberband.api.store import Store
from rubberband.api.store.schema import NOBODY, Principal, Scope, TokenRecord
from rubberband.errors import JournalError

# Tokens and the dashboard's sessions: random, stored as hashes, compared in constant time.

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


STRANGER = Principal(token="", name="", scope="read")
"""Caller without the required token, who may see only public paths. Compare by identity."""
SIGN_IN = "this needs a token; send it as `Authorization: Bearer rb_...`, or sign in at /login"


AT_ONCE = 500
"""Credentials in one query; databases allow some thousand values."""

log = logging.getLogger("rubberband.server")


class CredentialLookup:
    """Looks credentials up, all waiting ones in one query, one query at a time. For one event loop.

    So a flood of wrong tokens costs the store one query after the other, and a valid token waits for two at most.
    """

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._asked: dict[Credential, asyncio.Future[Principal | None]] = {}
        """Credentials of the next query. A running query may have read before they changed."""
        self._looking: asyncio.Task[None] | None = None
        self._noting: asyncio.Task[None] | None = None

    async def who(self, credential: Credential) -> Principal | None:
        """Return the holder of a credential; None if it is invalid. Raises JournalError if the store cannot be read."""
        known = self._tokens.recall(credential)
        if known is not None:
            return known
        if credential not in self._asked:
            self._asked[credential] = asyncio.get_running_loop().create_future()
        answer = self._asked[credential]
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        return await asyncio.shield(answer)

    async def _look(self) -> None:
        while self._asked:
            asked = dict(islice(self._asked.items(), AT_ONCE))
            for credential in asked:
                del self._asked[credential]
            try:
                found = await self._found(asked.keys())
            except Exception as error:
                for answer in asked.values():
                    answer.set_exception(error)
                    answer.exception()  # the caller may have left
            except asyncio.CancelledError:
                for answer in asked.values():
                    answer.cancel()
                raise
            else:
                for credential, answer in asked.items():
                    answer.set_result(found.get(credential))

    async def _found(self, asked: Set[Credential]) -> Mapping[Credential, Principal]:
        """Look up the credentials that the query before did not find."""
        known = {one: principal for one in asked if (principal := self._tokens.recall(one)) is not None}
        if len(known) == len(asked):
            return known
        found = await asyncio.to_thread(self._tokens.look_up, asked - known.keys())
        if found and (self._noting is None or self._noting.done()):
            self._noting = asyncio.create_task(self._note(list(found)))
        return {**known, **found}

    async def _note(self, found: list[Credential]) -> None:
        """Record their use, in the background."""
        try:
            await asyncio.to_thread(self._tokens.note_use, found)
        except JournalError as error:
            log.debug("the last use of tokens could not be saved: %s", error)


COOKIE = "rubberband_session"
_FAILURES_PER_S, _FAILURES_AT_ONCE = 0.5, 20
"""Rate of wrong tokens from one address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visitor:
    """Caller, and its credential."""

    principal: Principal
    credential: Credential | None = None
    """Valid credential; None without one."""


UNKNOWN = Visitor(principal=STRANGER)


class Authenticator:
    """Authenticates callers, and signs browsers in and out."""

    def __init__(self, tokens: Tokens, *, required: bool) -> None:
        self.tokens, self.required = tokens, required
        self._failures = Buckets(per_s=_FAILURES_PER_S, burst=_FAILURES_AT_ONCE)
        self._lookup = CredentialLookup(tokens)

    async def who(self, headers: Mapping[str, str], address: str) -> Visitor:
        """Return the sender of these headers; UNKNOWN without a credential.

        Raises Problem if the token is wrong (UNAUTHENTICATED, or RATE after too many), JournalError.
        """
        if not self.required:
            return Visitor(principal=NOBODY)
        authorization = headers.get("authorization")
        if authorization is not None:
            token = Bearer(_token_of(authorization))
            principal = await self._lookup.who(token)
            if principal is None:
                self._note_wrong(address)
                raise _wrong()
            return Visitor(principal=principal, credential=token)
        text = cookie_of(headers.get("cookie", ""))
        if text is None:
            return UNKNOWN
        session = Cookie(text)
        found = await self._lookup.who(session)
        return UNKNOWN if found is None else Visitor(principal=found, credential=session)

    async def still_good(self, credential: Credential | None) -> bool:
        """Whether the credential is still valid. Raises JournalError."""
        return credential is None or await self._lookup.who(credential) is not None

    async def sign_in(self, token: str, address: str) -> str | None:
        """Begin a browser's session and return its cookie; None if the token is wrong.

        Raises Problem (RATE) after too many wrong tokens, JournalError.
        """
        principal = await self._lookup.who(Bearer(token.strip()))
        if principal is None:
            self._note_wrong(address)
            return None
        return await asyncio.to_thread(self.tokens.sign_in, principal)

    async def sign_out(self, session: str) -> None:
        """End a browser's session."""
        await asyncio.to_thread(self.tokens.sign_out, session)

    def _note_wrong(self, address: str) -> None:
        wait_s = self._failures.take(address_key(address))
        if wait_s:
            raise self._failures.refuse(wait_s, "the token is wrong; too many wrong tokens came from this address")


def cookie_of(header: str) -> str | None:
    """Return the session in a Cookie header."""
    for part in header.split(";"):
        name, _, value = part.strip().partition("=")
        if name == COOKIE and value:
            return value
    return None


def stranger_refused() -> HttpProblem:
    """Return the problem for a caller without a token."""
    return HttpProblem(UNAUTHENTICATED, SIGN_IN, headers={"WWW-Authenticate": 'Bearer realm="rubberband"'})


def _wrong() -> HttpProblem:
    challenge = 'Bearer realm="rubberband", error="invalid_token"'
    detail = "the token is unknown, revoked or expired; make one by `rubberband token create NAME`"
    return HttpProblem(UNAUTHENTICATED, detail, headers={"WWW-Authenticate": challenge})


def _token_of(authorization: str) -> str:
    """Return the token in the header; empty for another scheme."""
    scheme, _, token = authorization.strip().partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


# Rates of callers, and addresses.

_MOST_KEYS = 10_000
"""Callers remembered. A forgotten one has its whole burst again."""


class Buckets:
    """Token bucket for each caller. `per_s` of zero sets no limit."""

    def __init__(self, *, per_s: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_s, self.burst, self._clock = per_s, burst, clock
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, key: str) -> float:
        """Take one token and return 0, or return the seconds to wait for one."""
        if not self.per_s:
            return 0.0
        level, at = self._levels.get(key, (float(self.burst), 0.0))
        now = self._clock()
        level = min(float(self.burst), level + (now - at) * self.per_s)
        if level < 1.0:
            return (1.0 - level) / self.per_s
        self._levels[key] = (level - 1.0, now)
        self._levels.move_to_end(key)
        if len(self._levels) > _MOST_KEYS:
            self._levels.popitem(last=False)
        return 0.0

    def refuse(self, wait_s: float, detail: str) -> HttpProblem:
        """Return the problem for a caller that must wait."""
        seconds = max(1, math.ceil(wait_s))
        window_s = max(1, math.ceil(self.burst / self.per_s))
        headers = {
            "Retry-After": str(seconds),
            "RateLimit-Policy": f'"requests";q={self.burst};w={window_s}',
            "RateLimit": f'"requests";r=0;t={seconds}',
        }
        return HttpProblem(RATE, f"{detail}; ask again in {seconds} s", headers=headers)


def address_key(address: str) -> str:
    """Return the key of an address: itself, or for IPv6 its network of 64 bits, which belongs to one site."""
    if ":" not in address:
        return address
    try:
        return str(ipaddress.ip_network((address.partition("%")[0], 64), strict=False))
    except ValueError:
        return address


def safe_next(wanted: str | None) -> str:
    """Return the path to show after signing in: `wanted` if it is a path of this service, else `/`."""
    path = wanted or "/"
    plain = path.isascii() and path.isprintable() and "\\" not in path and " " not in path
    inside = path.startswith("/") and not path.startswith("//")
    return path if plain and inside and len(path) <= 2000 else "/"
