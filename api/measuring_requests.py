"""How many requests there were, and how long they took: counted by route, never by what a client chooses freely."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_METHODS = frozenset({"GET", "HEAD", "POST", "DELETE", "OPTIONS", "PUT", "PATCH"})
_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class RequestMeasures:
    """The counts of one app."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("method", "route", "status")
        self._requests = Counter("rubberband_requests", "Requests that were answered.", labels, registry=registry)
        self._latency = Histogram(
            "rubberband_request_seconds",
            "Seconds until a request was answered whole.",
            ("method", "route"),
            buckets=_BUCKETS_S,
            registry=registry,
        )
        self._streams = Gauge("rubberband_event_streams", "Streams of events that are open.", registry=registry)

    def counting(self, app: ASGIApp) -> ASGIApp:
        """`app`, with its requests counted here."""

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            status, begun_s = 0, time.perf_counter()
            stream = scope["path"] == "/v1/events"

            async def sending(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                await send(message)

            if stream:
                self._streams.inc()
            try:
                await app(scope, receive, sending)
            finally:
                if stream:
                    self._streams.dec()
                self._count(scope, status, None if stream else time.perf_counter() - begun_s)

        return counted

    def _count(self, scope: Scope, status: int, took_s: float | None) -> None:
        route = getattr(scope.get("route"), "path", "") or "(none)"
        method = scope["method"] if scope["method"] in _METHODS else "(other)"
        self._requests.labels(method, route, str(status or 499)).inc()
        if took_s is not None:
            self._latency.labels(method, route).observe(took_s)
