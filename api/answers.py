"""Whatever goes wrong, as problem+json: what routes raise, what the framework refuses, and what nobody foresaw."""

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
from rubberband.api.problems import (
    INTERNAL,
    INVALID,
    MALFORMED,
    MEDIA,
    MEDIA_TYPE,
    METHOD,
    NOT_FOUND,
    TOO_LARGE,
    UNAVAILABLE,
    Problem,
    problem_of,
)
from rubberband.errors import RubberbandError
from rubberband.units import shown
from rubberband.views.experiment import plain, to_bytes

log = logging.getLogger("rubberband.api")

_MAX_TOLD = 20
"""So many faults of one request are listed."""
_KINDS = {400: MALFORMED, 413: TOO_LARGE, 415: MEDIA, 503: UNAVAILABLE}
_CLOSED_REQUEST = 499
"""What logs call a request whose sender left; nobody reads the answer."""


def json_answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A value of `plain` as an answer."""
    return Response(to_bytes(value), status, headers, "application/json")


def problem_answer(problem: Problem) -> Response:
    """A problem as an answer."""
    return Response(to_bytes(plain(problem.to_json())), problem.kind.status, problem.headers, MEDIA_TYPE)


def answer_errors(app: FastAPI, methods_of: Callable[[str], Sequence[str]]) -> None:
    """Have every error of `app` answered as a problem; `methods_of` tells what may be done with a path."""

    async def of_framework(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "registered for these"
        headers = dict(error.headers or {})
        if error.status_code == 405 and (methods := methods_of(request.url.path)):
            headers["Allow"] = ", ".join(methods)
        return _told(request, _of_framework(request, error, headers))

    app.add_exception_handler(Problem, _of_problem)
    app.add_exception_handler(RubberbandError, _of_error)
    app.add_exception_handler(RequestValidationError, _of_validation)
    app.add_exception_handler(HTTPException, of_framework)
    app.add_exception_handler(ClientDisconnect, _of_leaving)


def _told(request: Request, problem: Problem) -> Response:
    """A problem as who asks can read it: people's browsers are shown a page."""
    return problem_page(request, problem) if wants_page(request) else problem_answer(problem)


def _surely(request: Request, problem: Problem) -> Response:
    """As `_told`; where no page can be made either, as JSON."""
    try:
        return _told(request, problem)
    except Exception:
        log.exception("there is no page for %s", problem.kind.slug)
        return problem_answer(problem)


async def _of_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, Problem), "registered for problems"
    return _told(request, error)


async def _of_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RubberbandError), "registered for these"
    problem = problem_of(error)
    return _told(request, unforeseen(error) if problem.kind is INTERNAL else problem)


async def _of_validation(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError), "registered for these"
    faults = [{"loc": [str(part) for part in fault["loc"]], "message": fault["msg"]} for fault in error.errors()]
    return _told(request, invalid(faults))


async def _of_leaving(_request: Request, _error: Exception) -> Response:
    return Response(status_code=_CLOSED_REQUEST)


def invalid(faults: Sequence[dict[str, Any]]) -> Problem:
    """What does not fit in a request: `loc` (`["query", "limit"]`) and `message` of each fault."""
    first = faults[0]
    where = ".".join(first["loc"][1:]) or first["loc"][0]
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return Problem(INVALID, f"{shown(where)}: {first['message']}{more}", errors=list(faults[:_MAX_TOLD]))


def _of_framework(request: Request, error: HTTPException, headers: dict[str, str]) -> Problem:
    method, path = request.method, shown(request.url.path)
    match error.status_code:
        case 404:
            return Problem(NOT_FOUND, f"there is no page at {path}; /openapi.json lists all paths")
        case 405:
            allowed = headers.get("Allow", "")
            return Problem(METHOD, f"{shown(method)} is not allowed for {path}; allowed: {allowed}", headers=headers)
    kind = _KINDS.get(error.status_code, MALFORMED if error.status_code < 500 else INTERNAL)
    return Problem(kind, str(error.detail), headers=headers)


def unforeseen(error: BaseException) -> Problem:
    """What nobody foresaw: the answer has a reference, the log has it too with the trace-back."""
    reference = secrets.token_hex(6)
    log.error("failure %s", reference, exc_info=error)
    return Problem(
        INTERNAL, f"an internal error occurred; the service's log has details under {reference}", reference=reference
    )


class Failures:
    """Middleware: answers what nobody foresaw, where nothing was sent yet. A sender who leaves is no error."""

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
        except Problem:
            raise
        except Exception as error:
            problem = unforeseen(error)
            if begun:
                raise
            await _surely(Request(scope), problem)(scope, receive, send)


class Heads:
    """Middleware: HEAD is answered as GET would be, without the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        await self._app({**scope, "method": "GET", HEAD: True}, receive, sending)


HEAD = "rubberband.head"
"""Key of the scope: only the head of the answer is wanted."""
