"""How a browser signs in with a token, and out: the two requests of the form at /login, which the dashboard shows."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

from fastapi import APIRouter, Form, Request
from fastapi.responses import RedirectResponse, Response

from rubberband.api.security.authentication import COOKIE, Doorkeeper, cookie_of
from rubberband.api.security.hosts import safe_next

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
