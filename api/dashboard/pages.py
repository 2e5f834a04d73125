"""The pages for people: experiments, the preview of a plan, signing in. One experiment's page is in `experiment`."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from rubberband.api.dashboard import assets
from rubberband.api.dashboard.frame import render
from rubberband.api.security.access import Reader

router = APIRouter(include_in_schema=False)
router.include_router(assets.router)


@router.get("/")
def experiments(request: Request, _reader: Reader) -> Response:
    """All experiments."""
    return render(request, "experiments.html")


@router.get("/plan")
def plan(request: Request, _reader: Reader) -> Response:
    """The form that previews a plan."""
    return render(request, "plan.html")
