"""The pages for people: experiments and the preview of a plan. One experiment's page is in `experiment`."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Annotated, Any
from urllib.parse import urlencode

import yaml
from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, RedirectResponse, Response

from rubberband.api.dashboard import experiment
from rubberband.api.dashboard.frame import render
from rubberband.api.dashboard.frame import router as assets_router
from rubberband.api.dashboard.listing import CHOICES, counted_choices, row
from rubberband.api.experiments.body import read_experiment, require_allowed
from rubberband.api.names import NAME_PATTERN
from rubberband.api.problems import Problem
from rubberband.api.security.authentication import STRANGER, Reader, principal_of
from rubberband.api.security.checks import safe_next
from rubberband.api.service import Service, Serving
from rubberband.api.store.protocol import Principal
from rubberband.errors import InputError
from rubberband.spec.experiment import Experiment
from rubberband.spec.loading import Dumper
from rubberband.units import format_duration, parse_deadline
from rubberband.values.submission import Submission

# An experiment's file as it may be planned and submitted anew, of what the service keeps of it. Pure.


def file_of(submission: Submission) -> str:
    """The experiment file, its deadline as long after a start as it was after the first one; empty if none is kept."""
    words = dict(submission.words)
    if not words:
        return ""
    constraints, resources = words.get("constraints"), words.get("resources")
    if isinstance(constraints, Mapping):
        words["constraints"] = _given(constraints) | _deadline(constraints.get("deadline"), submission.created_at)
    if isinstance(resources, Mapping):
        elsewhere = {"aws"} if resources.get("provider") != "aws" else set()
        words["resources"] = {key: value for key, value in _given(resources).items() if key not in elsewhere}
    return yaml.dump(_given(words), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)


def _given(words: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in words.items() if value is not None}


def _deadline(asked: Any, created_at: float) -> dict[str, Any]:
    try:
        found = parse_deadline(asked)
    except InputError:
        return {}
    if not isinstance(found, datetime):
        return {}
    return {"deadline": format_duration(max(1, round(found.timestamp() - created_at)))}


# What a submission would do, and whether it may: told before it is asked for. It starts nothing and keeps nothing.


_LONGEST_NAME = 63
_MOST_TRIED = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """A submission before it is made."""

    name: str
    free_name: str
    """The name itself; another one like it if there is an experiment of that name."""
    entrypoint: str
    provider: str
    region: str
    deadline_s: float | None
    """From now; None if there is none, or it has passed."""
    max_cost_usd: float | None
    measures: bool
    """Whether a profile is measured first."""
    reason: str
    """Why it cannot be submitted, as a clause; empty if it can be."""


def preflight(
    service: Service, principal: Principal, body: bytes, media_type: str, overrides: Sequence[str]
) -> Preflight:
    """What would come of submitting it. Raises Problem for what is no experiment."""
    experiment = read_experiment(body, media_type, overrides)
    resources = experiment.resources
    return Preflight(
        name=experiment.name,
        free_name=_free(service, experiment.name),
        entrypoint=str(experiment.entrypoint or ""),
        provider=resources.provider,
        region=resources.region,
        deadline_s=_left_s(experiment),
        max_cost_usd=experiment.constraints.max_cost_usd,
        measures=experiment.profile is None,
        reason=_reason(service, principal, experiment),
    )


def _reason(service: Service, principal: Principal, experiment: Experiment) -> str:
    if not principal.may("submit"):
        return f"the token {principal.name!r} may only read; sign in with one that has the scope submit"
    try:
        require_allowed(experiment, service.settings, to_run=True)
        experiment.constraints.deadline_from(time.time())
    except Problem as problem:
        return problem.detail
    except InputError as passed:
        return str(passed)
    return ""


def _left_s(experiment: Experiment) -> float | None:
    try:
        return experiment.constraints.deadline_from(time.time())
    except InputError:
        return None


def _free(service: Service, name: str) -> str:
    """`digits`, or `digits-2` where that is taken, and so on."""
    tried = (name if at == 1 else f"{name[: _LONGEST_NAME - 4].rstrip('-')}-{at}" for at in itertools.count(1))
    free = (one for one in itertools.islice(tried, _MOST_TRIED) if service.store.submission(one) is None)
    return next(free, name)


router = APIRouter(include_in_schema=False)
router.include_router(assets_router)
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
    told = "The token is unknown, expired or revoked; check it, or ask for another." if problem else ""
    return render(request, "login.html", next=wanted, problem=told)


@router.post("/plan/check")
async def check(request: Request, service: Serving, reader: Reader, set: Overrides = ()) -> Response:
    """What submitting the body would do, and whether it may be, as JSON for that form."""
    body, media_type = await request.body(), request.headers.get("content-type", "")
    found = await run_in_threadpool(preflight, service, reader, body, media_type, set)
    return JSONResponse(asdict(found))
