"""Who asks: by a token (Authorization: Bearer), or by the cookie of a browser that signed in with one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from rubberband.api.problems import UNAUTHENTICATED, Problem
from rubberband.api.security.access import SIGN_IN, STRANGER
from rubberband.api.security.limits import Buckets, address_key
from rubberband.api.security.tokens import Bearer, Cookie, Credential, Tokens
from rubberband.api.store.records import NOBODY, Principal

COOKIE = "rubberband_session"
_FAILURES_PER_S, _FAILURES_AT_ONCE = 0.5, 20
"""Wrong tokens from one address; more are not even looked at."""
_STALE_PER_S, _STALE_AT_ONCE = 20.0, 100
"""Sessions that are over, from one address: pages that stay open ask with them again and again."""

Way = Literal["bearer", "cookie", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Visitor:
    """Who asks, and how that was told."""

    principal: Principal
    way: Way = "none"
    credential: Credential | None = None
    """What was shown; None where nothing is needed, and of who has shown nothing that is good."""


UNKNOWN = Visitor(principal=STRANGER)


class Doorkeeper:
    """Finds out who asks, and lets browsers sign in and out."""

    def __init__(self, tokens: Tokens, *, required: bool) -> None:
        self.tokens, self.required = tokens, required
        self._failures = Buckets(per_s=_FAILURES_PER_S, burst=_FAILURES_AT_ONCE)
        self._stale = Buckets(per_s=_STALE_PER_S, burst=_STALE_AT_ONCE)
        self._looks: dict[Credential, asyncio.Future[Principal | None]] = {}

    async def who(self, headers: Mapping[str, str], address: str) -> Visitor:
        """Who sent these headers: STRANGER if that was not told.

        Raises Problem if a token is wrong (UNAUTHENTICATED) or too many were (RATE).
        """
        if not self.required:
            return Visitor(principal=NOBODY)
        authorization = headers.get("authorization")
        if authorization is not None:
            token = Bearer(_token_of(authorization))
            return Visitor(principal=await self._bearer(token, address), way="bearer", credential=token)
        text = cookie_of(headers.get("cookie", ""))
        if text is None:
            return UNKNOWN
        session = Cookie(text)
        found = await self._browser(session, address)
        return UNKNOWN if found is None else Visitor(principal=found, way="cookie", credential=session)

    async def still_good(self, credential: Credential | None) -> bool:
        """Whether who was let in with this may stay. Of many that ask at once one looks. Raises JournalError."""
        if credential is None or self.tokens.recall(credential) is not None:
            return True
        look = self._looks.get(credential)
        if look is None:
            look = self._looks[credential] = asyncio.ensure_future(asyncio.to_thread(self.tokens.look_up, credential))
            look.add_done_callback(partial(self._looked, credential))
        return await asyncio.shield(look) is not None

    def _looked(self, credential: Credential, look: asyncio.Future[Principal | None]) -> None:
        del self._looks[credential]
        if not look.cancelled():
            look.exception()  # is raised where it is awaited, if it still is

    async def sign_in(self, token: str, address: str) -> str | None:
        """Begin a browser's session: the value of its cookie; None if the token is wrong. Raises Problem (RATE)."""
        self._require_patience(address)
        session = await asyncio.to_thread(self.tokens.sign_in, token.strip())
        if session is None:
            self._failures.take(address_key(address))
        return session

    async def sign_out(self, session: str) -> None:
        """End a browser's session."""
        await asyncio.to_thread(self.tokens.sign_out, session)

    async def _bearer(self, token: Bearer, address: str) -> Principal:
        principal = self.tokens.recall(token)
        if principal is not None:
            return principal
        self._require_patience(address)
        principal = await asyncio.to_thread(self.tokens.look_up, token)
        if principal is None:
            self._failures.take(address_key(address))
            raise _wrong()
        return principal

    async def _browser(self, session: Cookie, address: str) -> Principal | None:
        principal = self.tokens.recall(session)
        if principal is not None or self._stale.wait_s(address_key(address)):
            return principal
        principal = await asyncio.to_thread(self.tokens.look_up, session)
        if principal is None:
            self._stale.take(address_key(address))
        return principal

    def _require_patience(self, address: str) -> None:
        wait_s = self._failures.wait_s(address_key(address))
        if wait_s:
            raise self._failures.refuse(wait_s, "too many wrong tokens came from this address")


def cookie_of(header: str) -> str | None:
    """The session in a Cookie header."""
    for part in header.split(";"):
        name, _, value = part.strip().partition("=")
        if name == COOKIE and value:
            return value
    return None


def stranger_refused() -> Problem:
    """The answer to who has shown no token."""
    return Problem(UNAUTHENTICATED, SIGN_IN, headers={"WWW-Authenticate": 'Bearer realm="rubberband"'})


def _wrong() -> Problem:
    challenge = 'Bearer realm="rubberband", error="invalid_token"'
    detail = "the token is unknown, revoked or expired; make one by `rubberband token create NAME`"
    return Problem(UNAUTHENTICATED, detail, headers={"WWW-Authenticate": challenge})


def _token_of(authorization: str) -> str:
    """The token in the header; empty, which no token is, where it is of another kind."""
    scheme, _, token = authorization.strip().partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""
