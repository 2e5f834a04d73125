"""`/healthz` and `/readyz`. They need no token and show nothing of experiments."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import Response

from rubberband.api.service import Service, Serving
from rubberband.api.web.answers import json_answer
from rubberband.api.web.models import Health
from rubberband.errors import RubberbandError

router = APIRouter(tags=["service"])

_OK = {"status": "ok", "checks": {}}
_READY = {"status": "ok", "checks": {"store": "ok", "watcher": "ok", "planner": "ok"}}
_NOT_READY = {"status": "unavailable", "checks": {"store": "does not answer", "watcher": "ok", "planner": "ok"}}


@router.get(
    "/healthz",
    summary="Check that the service is alive",
    operation_id="getHealth",
    response_model=Health,
    responses={200: {"description": "It lives.", "content": {"application/json": {"example": _OK}}}},
)
async def healthz() -> Response:
    """It answers as long as its event loop turns. A supervisor restarts what does not answer."""
    return json_answer(_OK)


@router.get(
    "/readyz",
    summary="Check that the service is ready",
    operation_id="getReadiness",
    response_model=Health,
    responses={
        200: {"description": "All its parts work.", "content": {"application/json": {"example": _READY}}},
        503: {
            "description": "A part does not work; `checks` says which.",
            "model": Health,
            "content": {"application/json": {"example": _NOT_READY}},
        },
    },
)
def readyz(service: Serving) -> Response:
    """Its store answers, experiments are watched, and plans are made. A load balancer asks this."""
    checks = {
        "store": _store(service),
        "watcher": "ok" if service.runs.alive else "does not watch",
        "planner": "ok" if service.plans.alive else "does not plan",
    }
    ready = all(told == "ok" for told in checks.values())
    return json_answer({"status": "ok" if ready else "unavailable", "checks": checks}, 200 if ready else 503)


def _store(service: Service) -> str:
    try:
        service.store.check()
    except RubberbandError:
        # The reason may hold the address of the store, and this route is public.
        return "does not answer"
    return "another server uses it" if service.store.is_taken else "ok"
