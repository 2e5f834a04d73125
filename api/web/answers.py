"""Errors as problem+json: those that routes raise, refusals of the framework, and unexpected ones."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rubberband.api.dashboard.frame import problem_page, wants_page
from rubberband.api.web.problems import (
    INTERNAL,
    INVALID,
    MALFORMED,
    MEDIA,
    MEDIA_TYPE,
    METHOD,
    NOT_FOUND,
    TOO_LARGE,
    UNAVAILABLE,
    HttpProblem,
    problem_of,
)
from rubberband.errors import RubberbandError
from rubberband.units import shown
from rubberband.views.experiment import plain, to_bytes

log = logging.getLogger("rubberband.api")

_MAX_TOLD = 20
"""Faults listed of one request."""
_KINDS = {400: MALFORMED, 413: TOO_LARGE, 415: MEDIA, 503: UNAVAILABLE}
_CLOSED_REQUEST = 499
"""Status in logs of a request whose sender left."""


def json_answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a result of `plain` as an answer."""
    return Response(to_bytes(value), status, headers, "application/json")


def problem_answer(problem: HttpProblem) -> Response:
    """Return a problem as an answer."""
    return Response(to_bytes(plain(problem.to_json())), problem.kind.status, problem.headers, MEDIA_TYPE)


def answer_errors(app: FastAPI, methods_of: Callable[[str], Sequence[str]]) -> None:
    """Answer every error of `app` as a problem; `methods_of` returns the methods of a path."""

    async def answer(request: Request, error: Exception) -> Response:
        match error:
            case HttpProblem():
                return _told(request, error)
            case RubberbandError():
                problem = problem_of(error)
                return _told(request, unforeseen(error) if problem.kind is INTERNAL else problem)
            case RequestValidationError():
                return _told(request, invalid(error.errors()))
            case HTTPException():
                return _told(request, _of_framework(request, error, methods_of))
        return Response(status_code=_CLOSED_REQUEST)

    for kind in (HttpProblem, RubberbandError, RequestValidationError, HTTPException, ClientDisconnect):
        app.add_exception_handler(kind, answer)


def _of_framework(request: Request, error: HTTPException, methods_of: Callable[[str], Sequence[str]]) -> HttpProblem:
    headers, path = dict(error.headers or {}), shown(request.url.path)
    match error.status_code:
        case 404:
            return HttpProblem(NOT_FOUND, f"there is no page at {path}; /openapi.json lists all paths")
        case 405:
            headers["Allow"] = allowed = ", ".join(methods_of(request.url.path)) or headers.get("Allow", "")
            return HttpProblem(
                METHOD, f"{shown(request.method)} is not allowed for {path}; allowed: {allowed}", headers=headers
            )
    kind = _KINDS.get(error.status_code, MALFORMED if error.status_code < 500 else INTERNAL)
    return HttpProblem(kind, str(error.detail), headers=headers)


def _told(request: Request, problem: HttpProblem) -> Response:
    """Return a problem as an answer, to browsers as a page."""
    return problem_page(request, problem) if wants_page(request) else problem_answer(problem)


def invalid(errors: Sequence[Any], *place: str) -> HttpProblem:
    """Return the problem of pydantic's errors; `place` (`query`, `body`) comes before their locations."""
    faults = [{"loc": [*place, *map(str, error["loc"])], "message": error["msg"]} for error in errors]
    first = faults[0]
    where = ".".join(first["loc"][1:]) or first["loc"][0]
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return HttpProblem(INVALID, f"{shown(where)}: {first['message']}{more}", errors=faults[:_MAX_TOLD])


def unforeseen(error: BaseException) -> HttpProblem:
    """Log an unexpected error; return a problem with the reference of its line in the log."""
    reference = secrets.token_hex(6)
    log.error("failure %s", reference, exc_info=error)
    return HttpProblem(
        INTERNAL, f"an internal error occurred; the service's log has details under {reference}", reference=reference
    )


class Failures:
    """Middleware: answers unexpected errors if no answer has begun. A client that disconnects is no error."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = False

        async def sending(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except ClientDisconnect:
            return
        except HttpProblem:
            raise
        except Exception as error:
            problem = unforeseen(error)
            if begun:
                raise
            try:
                answer = _told(Request(scope), problem)
            except Exception:
                log.exception("there is no page for %s", problem.kind.slug)
                answer = problem_answer(problem)
            await answer(scope, receive, send)


class Heads:
    """Middleware: answers HEAD as GET; the server leaves out the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET", HEAD: True}
        await self._app(scope, receive, send)


HEAD = "rubberband.head"
"""Key of the scope: the request was HEAD."""
