"""Signing in and out."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

from fastapi import APIRouter, Form, Query, Request
from fastapi.responses import RedirectResponse, Response

from rubberband.api.dashboard.frame import render
from rubberband.api.routes import authenticator_of, principal_of
from rubberband.api.security import COOKIE, STRANGER, cookie_of, safe_next

router = APIRouter(include_in_schema=False)


@router.get("/login")
def login(
    request: Request,
    next: Annotated[str, Query(max_length=2000)] = "/",
    problem: Annotated[str, Query(max_length=20)] = "",
) -> Response:
    """Form that signs in; a signed-in browser is redirected."""
    wanted = safe_next(next)
    if principal_of(request) is not STRANGER and not problem:
        return RedirectResponse(wanted, 303)
    text = "The token is unknown, expired or revoked; check it, or ask for another." if problem else ""
    return render(request, "login.html", next=wanted, problem=text)


@router.post("/login")
async def sign_in(
    request: Request,
    token: Annotated[str, Form(max_length=1000)] = "",
    next: Annotated[str, Form(max_length=2000)] = "/",
) -> Response:
    """Sign in and redirect to `next`; with a wrong token back to the form (`problem=token`)."""
    address = request.client.host if request.client else ""
    authenticator = authenticator_of(request)
    wanted = safe_next(next)
    session = await authenticator.sign_in(token, address) if authenticator.required else ""
    if session is None:
        return RedirectResponse(f"/login?problem=token&next={quote(wanted, safe='')}", 303)
    answer = RedirectResponse(wanted, 303)
    if session:
        answer.set_cookie(
            COOKIE,
            session,
            max_age=int(authenticator.tokens.session_s),
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
    return answer


@router.post("/logout")
async def sign_out(request: Request) -> Response:
    """Sign out. Copies of the cookie are invalid, too."""
    session = cookie_of(request.headers.get("cookie", ""))
    if session is not None:
        await authenticator_of(request).sign_out(session)
    answer = RedirectResponse("/login", 303)
    answer.delete_cookie(COOKIE, httponly=True, samesite="strict", secure=request.url.scheme == "https")
    return answer
