"""What each kind of problem means: where the `type` of a problem leads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Path
from fastapi.responses import PlainTextResponse, Response

from rubberband.api.answers import json_answer
from rubberband.api.models import KindView
from rubberband.api.openapi import only_documented, refusals
from rubberband.api.problems import KINDS, NOT_FOUND, Kind, Problem
from rubberband.api.security.authentication import Reader
from rubberband.units import nearest, shown

router = APIRouter(tags=["service"], dependencies=[Depends(only_documented)])

EXPLANATIONS: Mapping[str, str] = {
    "malformed": "The body is no JSON or YAML, holds a key twice, NaN or an infinity, or is nested too deep; or a "
    "header is not what it must be. The detail says where. Correct it and ask again.",
    "unauthenticated": "No token came along, or one that is unknown, expired or revoked. Send `Authorization: Bearer "
    "TOKEN`; `rubberband token create NAME` on the service's machine makes one.",
    "forbidden": "The token's scope is too small for this. Scopes are read, submit and admin; each includes those "
    "before it. Ask whoever runs the service for another token.",
    "foreign-host": "The Host header names a host that the service does not answer for. Whoever runs it adds one by "
    "`rubberband serve --host-name NAME`.",
    "foreign-origin": "A browser sent this from a page of another site, which is refused. Use the service's own page.",
    "not-found": "There is no experiment, plan, token or page of this name. Plans are forgotten in time: ask for the "
    "preview again.",
    "method-not-allowed": "The path is right and the method is not; the Allow header lists those that are.",
    "too-slow": "The request's body was not there in time. Send it faster, or less of it.",
    "events-gone": "Events of experiments that ended long ago are kept no longer (`rubberband serve --keep-events`), "
    "and some that come after the given id are among them. Ask without `after` and Last-Event-ID for all that is kept, "
    "or with after=latest; what happened before is told by the experiments themselves.",
    "too-large": "The body is larger than the service reads. Shorten it, or ask whoever runs the service.",
    "unsupported-media-type": "The Content-Type is not one that is read here. Send application/json, or "
    "application/yaml for an experiment file.",
    "invalid": "The request can be read, and something in it does not fit. The detail names the key (and in YAML the "
    "line), the value, the limit and the remedy; `errors` lists faults of the query and headers.",
    "not-allowed-here": "The operator does not allow this on this service: an entry point that is not installed, a "
    "provider, a file of the server, or a budget beyond the limit. `key` names the key of the experiment.",
    "profile-missing": "A plan needs to know how long an iteration takes. Write `profile` into the experiment, or "
    "submit it without one: it is then measured first.",
    "infeasible": "No plan keeps the deadline and the budget. `nearest` tells the shortest time and the lowest cost "
    "that there are. `remedies` are the least changes that make a plan possible, the best first: those that concede no "
    "time and no money, then the cheapest. Each has its `changes`, the same as `set` takes them, and the time and cost "
    "of its plan; where there are none, nothing was found in the time that there is.",
    "name-taken": "Another experiment has this name. Choose another, for instance by `?set=name=NAME-2`.",
    "conflict": "The experiment is in a state in which this cannot be done: the detail says which, and what can.",
    "idempotency-key-reused": "An Idempotency-Key belongs to one request. Make a new one for each new request.",
    "idempotency-key-busy": "The request with this key is being served. Ask again after Retry-After seconds.",
    "too-many-requests": "More was asked than one caller may ask. Wait for Retry-After seconds.",
    "provider": "The cloud refused, or did not answer. Nothing was started. Try again later.",
    "unavailable": "A part of the service (its store, its planner) does not answer now. Nothing was changed. Try again "
    "after Retry-After seconds.",
    "planning-too-long": "Planning was given up. Allow fewer instance types, instances or GPUs per trial, or leave "
    "`frontier` out.",
    "internal": "Something failed that nobody foresaw. The service's log has the details under `reference`.",
}
_EXAMPLE: dict[str, Any] = {
    "type": "/problems/name-taken",
    "title": "The name is taken",
    "status": 409,
    "explanation": EXPLANATIONS["name-taken"],
}


@router.get(
    "/problems/{slug}",
    summary="What a kind of problem means",
    operation_id="getProblem",
    response_model=KindView,
    responses={
        200: {
            "description": "When it happens, and what to do.",
            "content": {
                "application/json": {"example": _EXAMPLE},
                "text/plain": {"schema": {"type": "string"}},
            },
        },
        **refusals(NOT_FOUND),
    },
)
async def get_problem(
    _reader: Reader,
    slug: Annotated[str, Path(description="The last part of the problem's type.", examples=["name-taken"])],
    accept: Annotated[str, Header(include_in_schema=False)] = "",
) -> Response:
    """JSON for programs; text for browsers."""
    kind = next((kind for kind in KINDS if kind.slug == slug), None)
    if kind is None:
        near = nearest(slug, [kind.slug for kind in KINDS])
        raise Problem(NOT_FOUND, f"there is no kind of problem {shown(slug)}; {near}")
    if "text/html" in accept:
        return PlainTextResponse(f"{kind.title} ({kind.status})\n\n{EXPLANATIONS[slug]}\n")
    return json_answer(_view(kind))


def _view(kind: Kind) -> dict[str, Any]:
    return {
        "type": f"/problems/{kind.slug}",
        "title": kind.title,
        "status": kind.status,
        "explanation": EXPLANATIONS[kind.slug],
    }
