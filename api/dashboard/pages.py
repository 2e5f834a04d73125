"""The pages for people: experiments and the preview of a plan. One experiment's page is in `experiment`."""

from __future__ import annotations

import time
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from rubberband.api.dashboard import assets
from rubberband.api.dashboard.frame import render
from rubberband.api.dashboard.listing import CHOICES, row
from rubberband.api.security.access import Reader
from rubberband.api.service import Service, Serving

router = APIRouter(include_in_schema=False)
router.include_router(assets.router)

Show = Annotated[str, Query(max_length=20)]
Cursor = Annotated[str | None, Query(max_length=200)]
_PAGE_SIZE = 25


@router.get("/")
def experiments(
    request: Request, service: Serving, _reader: Reader, show: Show = "all", cursor: Cursor = None
) -> Response:
    """The experiments, newest first."""
    after = service.store.last_feed_id()
    return render(request, "experiments.html", **_listed(service, request, show, cursor), choices=CHOICES, after=after)


@router.get("/fragments/experiments")
def experiment_rows(
    request: Request, service: Serving, _reader: Reader, show: Show = "all", cursor: Cursor = None
) -> Response:
    """What changes of the page of experiments."""
    return render(request, "experiments_rows.html", **_listed(service, request, show, cursor))


def _listed(service: Service, request: Request, show: str, cursor: str | None) -> dict[str, Any]:
    chosen = show if show in CHOICES else "all"
    page = service.store.submissions(states=CHOICES[chosen][1], limit=_PAGE_SIZE, after=cursor)
    now = time.time()
    return {
        "rows": [row(submission, now) for submission in page.items],
        "next": page.next,
        "later": cursor is not None,
        "show": chosen,
        "here": _address("/", show=chosen),
        "older": _address("/", show=chosen, cursor=page.next),
        "address": _address("/fragments/experiments", show=chosen, cursor=cursor),
        "origin": f"{request.url.scheme}://{request.url.netloc}",
    }


def _address(path: str, *, show: str, cursor: str | None = None) -> str:
    asked = {"show": show} if show != "all" else {}
    return f"{path}?{urlencode(asked | ({'cursor': cursor} if cursor else {}))}".rstrip("?")


@router.get("/plan")
def plan(request: Request, _reader: Reader) -> Response:
    """The form that previews a plan."""
    return render(request, "plan.html")
