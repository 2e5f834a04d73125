"""`/problems/{slug}`: the explanation of each kind of problem, to which its `type` leads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Path
from fastapi.responses import PlainTextResponse, Response

from rubberband.api.security.authentication import Reader
from rubberband.api.web.answers import json_answer
from rubberband.api.web.models import KindView
from rubberband.api.web.openapi import only_documented, refusals
from rubberband.api.web.problems import KINDS, NAME_TAKEN, NOT_FOUND, HttpProblem
from rubberband.units import nearest, shown

router = APIRouter(tags=["service"], dependencies=[Depends(only_documented)])

EXPLANATIONS: Mapping[str, str] = {
    "malformed": "The body is not JSON or YAML, has a key twice, NaN or an infinity, or is nested too deep; or a "
    "header is wrong. The detail says where. Correct it and try again.",
    "unauthenticated": "The request has no token, or one that is unknown, expired or revoked. Send `Authorization: "
    "Bearer TOKEN`; `rubberband token create NAME` on the service's machine makes one.",
    "forbidden": "The token's scope is too small for this. Scopes are read, submit and admin; each includes those "
    "before it. Ask the operator of the service for another token.",
    "foreign-host": "The Host header names a host that the service does not answer for. The operator adds a name "
    "with `rubberband serve --host-name NAME`.",
    "foreign-origin": "A browser sent this from a page of another site, which is refused. Use the service's own page.",
    "not-found": "No experiment, plan, token or page has this name. Plans expire: preview again.",
    "method-not-allowed": "The path exists, but not for this method; the Allow header lists the methods.",
    "too-slow": "The request's body did not arrive in time. Send it faster, or send less.",
    "events-gone": "The service deletes events of experiments that ended long ago (`rubberband serve "
    "--keep-events`). Some events after the given id are among them. Leave out `after` and Last-Event-ID for all "
    "kept events, or give after=latest; read earlier events from the experiments.",
    "too-large": "The body is larger than the service reads. Shorten it, or ask the operator to raise the limit.",
    "unsupported-media-type": "The service does not accept this Content-Type. Send application/json, or "
    "application/yaml for an experiment file.",
    "invalid": "The request can be read, but a value in it is not valid. The detail names the key (and in YAML the "
    "line), the value, the limit and the remedy; `errors` lists faults of the query and headers.",
    "not-allowed-here": "The operator does not allow this on this service: an entry point that is not installed, a "
    "provider, a file of the server, or a budget beyond the limit. `key` names the key of the experiment.",
    "profile-missing": "A plan needs to know how long an iteration takes. Write `profile` into the experiment, or "
    "submit it without one: it is then measured first.",
    "infeasible": "No plan keeps the deadline and the budget. `nearest` gives the shortest possible time and the "
    "lowest possible cost. `remedies` are the smallest changes that make a plan possible: first those that need no "
    "more time or money, then the cheapest. Each has its `changes`, in the form that `set` takes, and the time and "
    "cost of its plan. The list is empty if none was found in time.",
    "name-taken": "Another experiment has this name. Choose another, for instance by `?set=name=NAME-2`.",
    "conflict": "The experiment's state does not allow this: the detail names the state and the allowed actions.",
    "idempotency-key-reused": "An Idempotency-Key belongs to one request. Make a new key for each new request.",
    "idempotency-key-busy": "The request with this key is being served. Ask again after Retry-After seconds.",
    "too-many-requests": "The caller sent more requests than are allowed. Wait for Retry-After seconds.",
    "provider": "The cloud refused, or did not answer. Nothing was started. Try again later.",
    "unavailable": "A part of the service (its store, its planner) does not answer now. Nothing was changed. Try again "
    "after Retry-After seconds.",
    "planning-too-long": "Planning took longer than the limit. Allow fewer instance types, instances or GPUs per "
    "trial, or leave `frontier` out.",
    "internal": "An unexpected error occurred. The service's log has the details under `reference`.",
}
_EXAMPLE = NAME_TAKEN.to_json() | {"explanation": EXPLANATIONS["name-taken"]}


@router.get(
    "/problems/{slug}",
    summary="Explain a kind of problem",
    operation_id="getProblem",
    response_model=KindView,
    responses={
        200: {
            "description": "The cause, and what to do.",
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
        raise HttpProblem(NOT_FOUND, f"kind of problem {shown(slug)} not found; {near}")
    if "text/html" in accept:
        return PlainTextResponse(f"{kind.title} ({kind.status})\n\n{EXPLANATIONS[slug]}\n")
    return json_answer(kind.to_json() | {"explanation": EXPLANATIONS[slug]})
