"""Which scope a route needs: a dependency that routes declare, and that OpenAPI shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import Depends, Request

from rubberband.api.problems import FORBIDDEN, Problem
from rubberband.api.store.records import NOBODY, Principal, Scope


def principal_of(request: Request) -> Principal:
    """Who asks, as the middleware found out."""
    found: Principal = getattr(request.state, "principal", NOBODY)
    return found


def needs(scope: Scope) -> Callable[[Principal], Principal]:
    """A dependency: who asks, if that one may do what needs `scope`; raises Problem otherwise."""

    def allowed(principal: Annotated[Principal, Depends(principal_of)]) -> Principal:
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
