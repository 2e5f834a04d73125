"""Who asks: by a token (Authorization: Bearer), or by the cookie of a browser that signed in with one.

A secret has 256 random bits: nobody guesses one. So wrong tokens are limited not for what they might find, but so that
a client that has a wrong one lets go; and only they are, never a right one of the same address: behind it may be a
whole office. What they cost is bounded by how they are looked up (below).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Set
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Literal
from urllib.parse import quote

from fastapi import APIRouter, Depends, Form, Request
from fastapi.responses import RedirectResponse, Response

from rubberband.api.problems import FORBIDDEN, UNAUTHENTICATED, Problem
from rubberband.api.security.checks import Buckets, address_key, safe_next
from rubberband.api.security.tokens import Bearer, Cookie, Credential, Tokens
from rubberband.api.store.protocol import NOBODY, Principal, Scope
from rubberband.errors import JournalError

# Which scope a route needs: a dependency that routes declare, and that OpenAPI shows.
#
# The middleware (rubberband.api.security.middleware) has found out who asks; a route that is reached without it is open
# only where the service needs no token.


STRANGER = Principal(token="", name="", scope="read")
"""Who asks where a token is required and there was none: sees only what is public. Compare by identity."""
SIGN_IN = "this needs a token; send it as `Authorization: Bearer rb_...`, or sign in at /login"


def principal_of(request: Request) -> Principal:
    """Who asks, as the middleware found out; STRANGER if that is not known and the service asks for tokens."""
    found: Principal | None = getattr(request.state, "principal", None)
    if found is not None:
        return found
    service = getattr(request.app.state, "service", None)
    return STRANGER if service is not None and service.settings.auth else NOBODY


async def always() -> bool:
    """Who needs no token may stay."""
    return True


def still_allowed(request: Request) -> Callable[[], Awaitable[bool]]:
    """Tells whether what a request was let in with is still good: for one that is served for long.

    It may be asked often: it reads the store at most every few seconds. Raises JournalError if that cannot be read.
    """
    found: Callable[[], Awaitable[bool]] = getattr(request.state, "still_allowed", always)
    return found


def caller_of(request: Request) -> str:
    """By what a request is counted, and takes turns with others: the token's id, or the address."""
    found: str = getattr(request.state, "caller", "")
    return found


def needs(scope: Scope) -> Callable[[Request], Awaitable[Principal]]:
    """A dependency: who asks, if that one may do what needs `scope`; raises Problem otherwise.

    It is async, since FastAPI asks a thread for all that is not.
    """

    async def allowed(request: Request) -> Principal:
        principal = principal_of(request)
        if principal is STRANGER:
            raise Problem(UNAUTHENTICATED, SIGN_IN, headers={"WWW-Authenticate": "Bearer"})
        if not principal.may(scope):
            raise Problem(
                FORBIDDEN, f"this needs the scope {scope}; the token {principal.name!r} has {principal.scope}"
            )
        return principal

    allowed.__name__ = f"needs_{scope}"
    return allowed


Reader = Annotated[Principal, Depends(needs("read"))]
Submitter = Annotated[Principal, Depends(needs("submit"))]
Admin = Annotated[Principal, Depends(needs("admin"))]


# Finding out who shows what, for all that ask meanwhile in one look: the store has one at a time, however many ask.
#
# So a flood of wrong tokens costs the store no more than one after the other, and a right one waits for two looks at
# most, whoever else asks from its address.


AT_ONCE = 500
"""Credentials in one look; databases take some thousand values in a query."""

log = logging.getLogger("rubberband.server")


class Looks:
    """Looks credentials up. For one event loop."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._asked: dict[Credential, asyncio.Future[Principal | None]] = {}
        """What the next look is for: what is asked while one is under way may have changed since that one read."""
        self._looking: asyncio.Task[None] | None = None
        self._noting: asyncio.Task[None] | None = None

    async def who(self, credential: Credential) -> Principal | None:
        """Who shows this; None if nobody may by it. Raises JournalError if the store cannot be read."""
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
                    answer.exception()  # who asked may have left
            except asyncio.CancelledError:
                for answer in asked.values():
                    answer.cancel()
                raise
            else:
                for credential, answer in asked.items():
                    answer.set_result(found.get(credential))

    async def _found(self, asked: Set[Credential]) -> Mapping[Credential, Principal]:
        """Who shows these, but for what the look before has found out."""
        known = {one: principal for one in asked if (principal := self._tokens.recall(one)) is not None}
        if len(known) == len(asked):
            return known
        found = await asyncio.to_thread(self._tokens.look_up, asked - known.keys())
        if found and (self._noting is None or self._noting.done()):
            self._noting = asyncio.create_task(self._note(list(found)))
        return {**known, **found}

    async def _note(self, found: list[Credential]) -> None:
        """Write down that they were used: nobody waits for it."""
        try:
            await asyncio.to_thread(self._tokens.note_use, found)
        except JournalError as error:
            log.debug("the last use of tokens could not be saved: %s", error)


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
            raise self._failures.refuse(wait_s, "the token is wrong; too many wrong tokens came from this address")


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


# How a browser signs in with a token, and out: the two requests of the form at /login, which the dashboard shows.


router = APIRouter(include_in_schema=False)


@router.post("/login")
async def sign_in(
    request: Request,
    token: Annotated[str, Form(max_length=1000)] = "",
    next: Annotated[str, Form(max_length=2000)] = "/",
) -> Response:
    """Sign in, and go where it was meant to; with a wrong token back to the form, which says so (`problem=token`)."""
    address = request.client.host if request.client else ""
    doorkeeper = doorkeeper_of(request)
    wanted = safe_next(next)
    session = await doorkeeper.sign_in(token, address) if doorkeeper.required else ""
    if session is None:
        return RedirectResponse(f"/login?problem=token&next={quote(wanted, safe='')}", 303)
    answer = RedirectResponse(wanted, 303)
    if session:
        answer.set_cookie(
            COOKIE,
            session,
            max_age=int(doorkeeper.tokens.session_s),
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
    return answer


@router.post("/logout")
async def sign_out(request: Request) -> Response:
    """Sign out; the session is over wherever else its cookie was copied to."""
    session = cookie_of(request.headers.get("cookie", ""))
    if session is not None:
        await doorkeeper_of(request).sign_out(session)
    answer = RedirectResponse("/login", 303)
    answer.delete_cookie(COOKIE, httponly=True, samesite="strict", secure=request.url.scheme == "https")
    return answer


def doorkeeper_of(request: Request) -> Doorkeeper:
    """Who guards this app."""
    found: Doorkeeper = request.state.doorkeeper
    return found
