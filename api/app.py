"""The app: routes, pages, errors and middleware, around the parts of the service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

import rubberband
from rubberband.api.dashboard import pages
from rubberband.api.feed import Feed
from rubberband.api.plans import Plans
from rubberband.api.problems import MEDIA_TYPE, Problem, problem_of
from rubberband.api.runs import Runs
from rubberband.api.security.secured import secure
from rubberband.api.service import Service
from rubberband.api.settings import Settings
from rubberband.api.store.protocol import Store
from rubberband.errors import RubberbandError


def create_app(settings: Settings, *, store: Store) -> FastAPI:
    """The service as an ASGI app. Its parts start with the app's lifespan, and end with it; experiments go on."""
    feed = Feed()
    service = Service(
        settings=settings,
        store=store,
        plans=Plans(settings, store),
        runs=Runs(settings, store, feed.wake),
        feed=feed,
    )
    app = FastAPI(
        title="RubberBand", version=rubberband.__version__, docs_url=None, redoc_url=None, lifespan=_lifespan(service)
    )
    app.state.service = service
    app.include_router(pages.router)
    app.add_exception_handler(Problem, _answer_problem)
    app.add_exception_handler(RubberbandError, _answer_error)
    # Last: it is outside of all that was added before, the handler of errors that nobody foresaw included.
    app.middleware_stack = secure(app.build_middleware_stack(), service)
    return app


def _lifespan(service: Service):  # type: ignore[no-untyped-def]
    @asynccontextmanager
    async def living(app: FastAPI) -> AsyncIterator[None]:
        service.feed.open()
        await service.plans.start()
        service.runs.start()
        try:
            yield
        finally:
            service.runs.close()
            await service.plans.close()
            service.store.close()

    return living


async def _answer_problem(_request: Request, error: Exception) -> Response:
    assert isinstance(error, Problem), "registered for problems"
    return JSONResponse(error.to_json(), error.kind.status, error.headers, MEDIA_TYPE)


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RubberbandError), "registered for these"
    return await _answer_problem(request, problem_of(error))
