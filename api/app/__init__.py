"""The ASGI app: routes, pages, errors and middleware around the parts of the service."""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from prometheus_client import CollectorRegistry, ProcessCollector
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import rubberband
from rubberband.api.dashboard import compare, experiment, form, frame, listing, pool, reference, signing_in
from rubberband.api.dashboard.frame import problem_page, wants_page
from rubberband.api.experiments import ExperimentRuns
from rubberband.api.plans.previews import Plans
from rubberband.api.problems import (
    INTERNAL,
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
from rubberband.api.routes import Service, changes, details, events, experiments, metrics, plans, trials
from rubberband.api.routes import service as about_service
from rubberband.api.routes.answers import HEAD, DocumentedApp, invalid
from rubberband.api.routes.events import EventFeed
from rubberband.api.routes.metrics import ExperimentMeasures, PoolMeasures, RequestMeasures
from rubberband.api.security import Tokens
from rubberband.api.security.middleware import secure
from rubberband.api.settings import Settings
from rubberband.api.store import Store
from rubberband.errors import RubberbandError
from rubberband.units import shown
from rubberband.views.experiment import plain, to_bytes

_ROUTERS = (
    plans.router,
    experiments.router,
    changes.router,
    details.router,
    trials.router,
    events.router,
    about_service.router,
    metrics.router,
    experiment.router,
    compare.router,
    pool.router,
    frame.router,
    listing.router,
    form.router,
    reference.router,
    signing_in.router,
)


def create_app(settings: Settings, *, store: Store) -> FastAPI:
    """Return the app. Its parts start and end with its lifespan; experiments continue."""
    feed = EventFeed()
    return app_of(
        Service(
            settings=settings,
            store=store,
            plans=Plans(settings, store),
            runs=ExperimentRuns(settings, store, feed.wake),
            feed=feed,
        )
    )


def document() -> dict[str, Any]:
    """Return the OpenAPI document, which all services have."""
    return _routed().openapi()


def _routed(**options: Any) -> DocumentedApp:
    app = DocumentedApp(
        title="RubberBand",
        version=rubberband.__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        **options,
    )
    # As they are: `include_router` would build each route anew for each app, at its first requests.
    for router in _ROUTERS:
        app.router.routes.extend(router.routes)
    return app


def app_of(service: Service) -> FastAPI:
    """Return the app around given parts."""
    app = _routed(lifespan=_lifespan(service))
    app.state.service = service
    # Without auto_describe, registration collects nothing.
    app.state.registry = registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    registry.register(ExperimentMeasures(service.store, service.runs.result))
    registry.register(PoolMeasures(service.settings.home))
    answer_errors(app, app.methods_of)
    # The last one added is the outermost.
    app.add_middleware(RequestMeasures(registry).counting)
    app.add_middleware(Heads)
    app.add_middleware(Failures)
    settings = service.settings
    keeping, ended = settings.keeping, service.feed.wake
    tokens = Tokens(service.store, session_s=keeping.sessions_s, clock=settings.clock, ended=ended)
    # Outside of all middleware, that of unexpected errors included.
    app.middleware_stack = secure(app.build_middleware_stack(), settings, tokens)
    return app


def _lifespan(service: Service) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def living(app: FastAPI) -> AsyncIterator[None]:
        # Built now, so that the first request need not wait for it; in a thread, as planning processes start meanwhile.
        await run_in_threadpool(app.openapi)
        service.feed.open(service.store)
        await run_in_threadpool(service.store.free_keys)
        await service.plans.start()
        service.runs.start()
        try:
            yield
        finally:
            service.feed.close()
            service.runs.close()
            await service.plans.close()
            service.store.close()

    return living


# Errors as problem+json, to browsers as a page: those that routes raise, of the framework, and unexpected ones.

log = logging.getLogger("rubberband.api")

_KINDS = {400: MALFORMED, 413: TOO_LARGE, 415: MEDIA, 503: UNAVAILABLE}
_CLOSED_REQUEST = 499
"""Status in logs of a request whose sender left."""


def problem_answer(problem: HttpProblem) -> Response:
    """Return a problem as an answer."""
    return Response(to_bytes(plain(problem.to_json())), problem.kind.status, problem.headers, MEDIA_TYPE)


def answer_errors(app: FastAPI, methods_of: Callable[[str], Sequence[str]]) -> None:
    """Answer every error of `app` as a problem; `methods_of` returns the methods of a path."""

    async def answer(request: Request, error: Exception) -> Response:
        match error:
            case HttpProblem():
                return _problem_response(request, error)
            case RubberbandError():
                problem = problem_of(error)
                return _problem_response(request, unforeseen(error) if problem.kind is INTERNAL else problem)
            case RequestValidationError():
                return _problem_response(request, invalid(error.errors()))
            case HTTPException():
                return _problem_response(request, _of_framework(request, error, methods_of))
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


def _problem_response(request: Request, problem: HttpProblem) -> Response:
    """Return a problem as an answer, to browsers as a page."""
    return problem_page(request, problem) if wants_page(request) else problem_answer(problem)


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
                answer = _problem_response(Request(scope), problem)
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
