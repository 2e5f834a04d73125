"""Who asks: by a token (Authorization: Bearer), or by the cookie of a browser that signed in with one.

A secret has 256 random bits: nobody guesses one. So wrong tokens are limited not for what they might find, but so that
a client that has a wrong one lets go; and only they are, never a right one of the same address: behind it may be a
whole office. What they cost is bounded by how they are looked up (rubberband.api.security.looking).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rubberband.api.problems import UNAUTHENTICATED, Problem
from rubberband.api.security.access import SIGN_IN, STRANGER
from rubberband.api.security.limits import Buckets, address_key
from rubberband.api.security.looking import Looks
from rubberband.api.security.tokens import Bearer, Cookie, Credential, Tokens
from rubberband.api.store.records import NOBODY, Principal

COOKIE = "rubberband_session"
_FAILURES_PER_S, _FAILURES_AT_ONCE = 0.5, 20
"""Wrong tokens from one address; more are told to wait."""

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
        self._looks = Looks(tokens)

    async def who(self, headers: Mapping[str, str], address: str) -> Visitor:
        """Who sent these headers: STRANGER if that was not told.

        Raises Problem if the token is wrong (UNAUTHENTICATED, or RATE after too many), JournalError.
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
        found = await self._looks.who(session)
        return UNKNOWN if found is None else Visitor(principal=found, way="cookie", credential=session)

    async def still_good(self, credential: Credential | None) -> bool:
        """Whether who was let in with this may stay. Raises JournalError."""
        return credential is None or await self._looks.who(credential) is not None

    async def sign_in(self, token: str, address: str) -> str | None:
        """Begin a browser's session: the value of its cookie; None if the token is wrong.

        Raises Problem (RATE) if it is wrong after too many were, JournalError.
        """
        principal = await self._looks.who(Bearer(token.strip()))
        if principal is None:
            self._note_wrong(address)
            return None
        return await asyncio.to_thread(self.tokens.sign_in, principal)

    async def sign_out(self, session: str) -> None:
        """End a browser's session."""
        await asyncio.to_thread(self.tokens.sign_out, session)

    async def _bearer(self, token: Bearer, address: str) -> Principal:
        principal = await self._looks.who(token)
        if principal is None:
            self._note_wrong(address)
            raise _wrong()
        return principal

    def _note_wrong(self, address: str) -> None:
        wait_s = self._failures.take(address_key(address))
        if wait_s:
            raise self._failures.refuse(wait_s, "the token is wrong, as were too many from this address")


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
