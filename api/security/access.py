"""Which scope a route needs: a dependency that routes declare, and that OpenAPI shows.

The middleware (rubberband.api.security.secured) has found out who asks; a route that is reached without it is open only
where the service needs no token.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import Depends, Request

from rubberband.api.problems import FORBIDDEN, UNAUTHENTICATED, Problem
from rubberband.api.store.records import NOBODY, Principal, Scope

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
