"""The pages for people: experiments and the preview of a plan. One experiment's page is in `experiment`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, RedirectResponse, Response

from rubberband.api.dashboard import assets, experiment
from rubberband.api.dashboard.again import file_of
from rubberband.api.dashboard.frame import render
from rubberband.api.dashboard.listing import CHOICES, counted_choices, row
from rubberband.api.dashboard.preflight import preflight
from rubberband.api.names import NAME_PATTERN
from rubberband.api.security.access import STRANGER, Reader, principal_of
from rubberband.api.security.hosts import safe_next
from rubberband.api.service import Service, Serving

router = APIRouter(include_in_schema=False)
router.include_router(assets.router)
router.include_router(experiment.router)

Show = Annotated[str, Query(max_length=20)]
Cursor = Annotated[str | None, Query(max_length=200)]
Like = Annotated[str, Query(pattern=NAME_PATTERN)]
Overrides = Annotated[Sequence[str], Query()]
_PAGE_SIZE = 25


@router.get("/")
def experiments(
    request: Request, service: Serving, _reader: Reader, show: Show = "all", cursor: Cursor = None
) -> Response:
    """The experiments, newest first."""
    after = service.store.last_feed_id()
    listed, counts = _listed(service, request, show, cursor), counted_choices(service.store.count_states())
    return render(request, "experiments.html", **listed, choices=CHOICES, counts=counts, after=after)


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
def plan(request: Request, service: Serving, _reader: Reader, like: Like = "") -> Response:
    """The form that previews a plan; with the file of another experiment, if one is named."""
    known = service.store.submission(like) if like else None
    return render(request, "plan.html", text="" if known is None else file_of(known))


@router.get("/docs")
def docs(request: Request, _reader: Reader) -> Response:
    """The REST API, as /openapi.json describes it."""
    return render(request, "docs.html")


@router.get("/login")
def login(request: Request, next: Annotated[str, Query(max_length=2000)] = "/", problem: Show = "") -> Response:
    """The form that signs in; whoever is signed in already goes on."""
    wanted = safe_next(next)
    if principal_of(request) is not STRANGER and not problem:
        return RedirectResponse(wanted, 303)
    told = "The token is not known here, has expired or was revoked; check it, or ask for another." if problem else ""
    return render(request, "login.html", next=wanted, problem=told)


@router.post("/plan/check")
async def check(request: Request, service: Serving, reader: Reader, set: Overrides = ()) -> Response:
    """What submitting the body would do, and whether it may be, as JSON for that form."""
    body, media_type = await request.body(), request.headers.get("content-type", "")
    found = await run_in_threadpool(preflight, service, reader, body, media_type, set)
    return JSONResponse(asdict(found))
