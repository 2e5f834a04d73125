"""The ASGI app: routes, pages, errors and middleware around the parts of the service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from fastapi import FastAPI
from prometheus_client import CollectorRegistry, ProcessCollector
from starlette.concurrency import run_in_threadpool

import rubberband
from rubberband.api.dashboard import pages
from rubberband.api.experiments.service import ExperimentRuns
from rubberband.api.plans.previews import Plans
from rubberband.api.routes import events, experiment_parts, experiments, health, plans, pool, prices, problems, tokens
from rubberband.api.security import authentication
from rubberband.api.security.middleware import secure
from rubberband.api.service import Service
from rubberband.api.settings import Settings
from rubberband.api.store.sql import Store
from rubberband.api.web import metrics
from rubberband.api.web.answers import Failures, Heads, answer_errors
from rubberband.api.web.feed import EventFeed
from rubberband.api.web.metrics import ExperimentMeasures, PoolMeasures, RequestMeasures
from rubberband.api.web.openapi import DocumentedApp

_ROUTERS = (
    plans.router,
    experiments.router,
    experiment_parts.router,
    events.router,
    prices.router,
    pool.router,
    tokens.router,
    health.router,
    metrics.router,
    problems.router,
    pages.router,
    authentication.router,
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


def app_of(service: Service) -> FastAPI:
    """Return the app around given parts."""
    app = DocumentedApp(
        title="RubberBand",
        version=rubberband.__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=_lifespan(service),
    )
    app.state.service = service
    # Without auto_describe, registration collects nothing.
    app.state.registry = registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    registry.register(ExperimentMeasures(service.store, service.runs.result))
    registry.register(PoolMeasures(service.settings.home))
    for router in _ROUTERS:
        app.include_router(router)
    answer_errors(app, app.methods_of)
    # The last one added is the outermost.
    app.add_middleware(RequestMeasures(registry).counting)
    app.add_middleware(Heads)
    app.add_middleware(Failures)
    # Outside of all middleware, that of unexpected errors included.
    app.middleware_stack = secure(app.build_middleware_stack(), service)
    return app


def _lifespan(service: Service) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def living(app: FastAPI) -> AsyncIterator[None]:
        # Built now, so that the first request need not wait for it.
        app.openapi()
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
