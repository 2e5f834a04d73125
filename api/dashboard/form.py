"""The form that previews and submits a plan: the file it starts with, and what a submission would do."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any

import yaml
from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response

from rubberband.api.body import read_experiment, require_allowed
from rubberband.api.dashboard.frame import render
from rubberband.api.problems import HttpProblem
from rubberband.api.routes import NAME_PATTERN, Reader, Service, Serving, caller_of
from rubberband.api.routes.queueing import place_if_submitted, previewing
from rubberband.api.store.schema import Principal
from rubberband.errors import InputError
from rubberband.spec.experiment import Experiment
from rubberband.spec.loading import Dumper
from rubberband.spec.resources import Aws
from rubberband.units import format_duration, parse_deadline
from rubberband.values.plan import Policy
from rubberband.values.submission import Submission

router = APIRouter(include_in_schema=False)


_PLAIN_AWS = ("aws", Aws().model_dump(mode="json", by_alias=True, exclude_none=True))


def file_of(submission: Submission) -> str:
    """Return the experiment file, its deadline as a duration from the start; empty if none is stored."""
    words = file_words(submission)
    if not words:
        return ""
    resources = words.get("resources")
    if isinstance(resources, Mapping):
        words["resources"] = {key: value for key, value in _given(resources).items() if (key, value) != _PLAIN_AWS}
    return yaml.dump(_given(words), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)


def file_words(submission: Submission) -> dict[str, Any]:
    """Return the words of its file, its deadline as a duration from the start."""
    words, constraints = dict(submission.words), submission.words.get("constraints")
    if isinstance(constraints, Mapping):
        words["constraints"] = _given(constraints) | _deadline(constraints.get("deadline"), submission.created_at)
    return words


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


_LONGEST_NAME = 63
_MOST_TRIED = 100


def preflight(service: Service, principal: Principal, experiment: Experiment) -> dict[str, Any]:
    """Return the expected effect of a submission, which is not made, for the form.

    `free_name` is the name, or a similar one if it is taken. `deadline_s` counts from now. `measures` says whether a
    profile is measured first, and `reason` why it cannot be submitted.
    """
    deadline_s, reason = None, ""
    try:
        deadline_s = experiment.constraints.deadline_from(service.settings.clock())
    except InputError as passed:
        reason = str(passed)
    try:
        require_allowed(experiment, service.settings)
        if service.admission is not None:
            service.admission.require_room(experiment)
    except HttpProblem as problem:
        reason = problem.detail
    if not principal.may("submit"):
        reason = f"the token {principal.name!r} may only read; sign in with one that has the scope submit"
    return {
        "name": experiment.name,
        "free_name": _free(service, experiment.name),
        "entrypoint": str(experiment.entrypoint or ""),
        "provider": experiment.resources.provider,
        "region": experiment.resources.region,
        "deadline_s": deadline_s,
        "max_cost_usd": experiment.constraints.max_cost_usd,
        "measures": experiment.profile is None,
        "reason": reason,
    }


def _free(service: Service, name: str) -> str:
    """Return `digits`, or `digits-2` if that is taken, and so on."""
    tried = (name if at == 1 else f"{name[: _LONGEST_NAME - 4].rstrip('-')}-{at}" for at in itertools.count(1))
    free = (one for one in itertools.islice(tried, _MOST_TRIED) if service.store.submission(one) is None)
    return next(free, name)


Like = Annotated[str, Query(pattern=NAME_PATTERN)]
Overrides = Annotated[Sequence[str], Query()]


@router.get("/plan")
def plan(request: Request, service: Serving, _reader: Reader, like: Like = "") -> Response:
    """Form that previews a plan; `like` names an experiment whose file it starts with."""
    known = service.store.submission(like) if like else None
    return render(request, "plan.html", text="" if known is None else file_of(known))


@router.post("/plan/check")
async def check(
    request: Request, service: Serving, reader: Reader, set: Overrides = (), policy: Policy = "optimal"
) -> Response:
    """Expected effect of submitting the body, as JSON for the form; `queue` is its place where no slot is free."""
    body, media_type = await request.body(), request.headers.get("content-type", "")
    experiment = await run_in_threadpool(read_experiment, body, media_type, set)
    told = await run_in_threadpool(preflight, service, reader, experiment)
    if told["reason"]:
        return JSONResponse({**told, "queue": None})
    plan = previewing(service, policy, caller_of(request))
    return JSONResponse({**told, "queue": await place_if_submitted(service, experiment, plan, owner=reader.name)})
