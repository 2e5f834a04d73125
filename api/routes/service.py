"""Routes about the service: its health, kinds of problems, prices, the pool, and tokens."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Path, Query, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from rubberband.api.problems import INVALID, KINDS, NAME_TAKEN, NOT_FOUND, HttpProblem
from rubberband.api.routes import Admin, Reader, Service, Serving, authenticator_of
from rubberband.api.routes.answers import example, json_answer, only_documented, refusals
from rubberband.api.settings import Settings
from rubberband.api.store.schema import Scope
from rubberband.client.models import (
    Health,
    KindView,
    MadeToken,
    MemberView,
    PoolView,
    PriceList,
    PromiseView,
    TokenList,
)
from rubberband.cloud.aws.prices import overlaid, prices_of, read_book
from rubberband.cloud.catalogue import LiveTable, catalogue
from rubberband.errors import RubberbandError
from rubberband.states import ACTIVE
from rubberband.units import nearest, parse_duration, shown
from rubberband.views.estimate.prices import chosen, price_notes, prices_json
from rubberband.views.experiment import wire

router = APIRouter()
_DOCUMENTED = [Depends(only_documented)]

# `/healthz` and `/readyz`. They need no token and show nothing of experiments.

_OK = {"status": "ok", "checks": {}}
_READY = {"status": "ok", "checks": {"store": "ok", "watcher": "ok", "planner": "ok"}}
_NOT_READY = {"status": "unavailable", "checks": {"store": "does not answer", "watcher": "ok", "planner": "ok"}}


@router.get(
    "/healthz",
    tags=["service"],
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
    tags=["service"],
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
    ready = all(check == "ok" for check in checks.values())
    return json_answer({"status": "ok" if ready else "unavailable", "checks": checks}, 200 if ready else 503)


def _store(service: Service) -> str:
    try:
        service.store.check()
    except RubberbandError:
        # The reason may hold the address of the store, and this route is public.
        return "does not answer"
    return "another server uses it" if service.store.is_taken else "ok"


# `/problems/{slug}`: the explanation of each kind of problem, to which its `type` leads.


_KIND_EXAMPLE = NAME_TAKEN.to_json() | {"explanation": NAME_TAKEN.explanation}


@router.get(
    "/problems/{slug}",
    tags=["service"],
    dependencies=_DOCUMENTED,
    summary="Explain a kind of problem",
    operation_id="getProblem",
    response_model=KindView,
    responses={
        200: {
            "description": "The cause, and what to do.",
            "content": {"application/json": {"example": _KIND_EXAMPLE}, "text/plain": {"schema": {"type": "string"}}},
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
        return PlainTextResponse(f"{kind.title} ({kind.status})\n\n{kind.explanation}\n")
    return json_answer(kind.to_json() | {"explanation": kind.explanation})


# `/v1/prices`: hardware and prices of instance types, current or last known.


REGION_PATTERN = "^[a-z]{2,4}(-[a-z]{2,12}){1,3}-[0-9]{1,2}$"
_TYPE = re.compile(r"[a-z0-9-]{1,24}\.[a-z0-9-]{1,24}")
_MAX_TYPES = 50


@router.get(
    "/v1/prices",
    tags=["prices"],
    dependencies=_DOCUMENTED,
    summary="List prices of instance types",
    operation_id="listPrices",
    response_model=PriceList,
    responses={200: example("As `rubberband cloud prices -o json` prints them.", "prices"), **refusals(INVALID)},
)
def list_prices(
    service: Serving,
    _reader: Reader,
    type: Annotated[
        list[str] | None,
        Query(
            description="Only these types, with or without GPUs; default: all with GPUs. Repeats.",
            max_length=_MAX_TYPES,
            examples=[["g4dn.xlarge"]],
        ),
    ] = None,
    region: Annotated[
        str, Query(pattern=REGION_PATTERN, max_length=40, description="The region of AWS.", examples=["us-east-1"])
    ] = "us-east-1",
) -> Response:
    """AWS is asked where the service may rent there; otherwise, and where it cannot be, `notes` say what is shown."""
    types = type or []
    for name in types:
        if _TYPE.fullmatch(name) is None:
            raise HttpProblem(INVALID, f"type: {shown(name)} is not an instance type; write one such as g4dn.xlarge")
    table = _table(service.settings, types, region)
    rows = chosen(table, types, region, option="region")
    return json_answer(prices_json(rows, region, price_notes(table)))


def _table(settings: Settings, types: list[str], region: str) -> LiveTable:
    if settings.rents:
        return prices_of(types or None, region, settings.home)
    return LiveTable(overlaid(catalogue(), read_book(settings.home, region)), ("the service does not rent from AWS",))


# `/v1/pool`: the pool that experiments share: who may hold how much of it, and what is promised.


@router.get(
    "/v1/pool",
    tags=["pool"],
    dependencies=_DOCUMENTED,
    summary="Get the pool",
    operation_id="getPool",
    response_model=PoolView,
    responses={200: example("The pool, and the experiments that share it.", "pool"), **refusals(NOT_FOUND)},
)
def get_pool(service: Serving, _reader: Reader) -> Response:
    """The experiments that run or wait, with what each may hold and what it is promised. 404 without a pool."""
    return json_answer(pool_view(service, service.settings.clock()))


def pool_view(service: Service, now: float) -> PoolView:
    """Return the pool at `now` (Unix time) as JSON values. Raises Problem NOT_FOUND without a pool."""
    pool, admission = service.settings.pool, service.admission
    if pool is None or admission is None:
        raise HttpProblem(NOT_FOUND, "this service shares no pool; start it with --pool FILE")
    promises = {promise.experiment: promise for promise in service.store.promises()}
    calendar, rows = admission.calendar(), service.store.submissions(states=list(ACTIVE), limit=500).items
    members = [
        wire(
            MemberView,
            row,
            weight=pool.weights.get(row.owner, 1.0),
            instances=row.summary.instances,
            max_instances=row.summary.max_instances,
            promised_gpus=calendar.promised(row.name, now),
            promise=wire(PromiseView, promises[row.name]) if row.name in promises else None,
        )
        for row in rows
        if row.words.get("resources", {}).get("provider") == pool.provider
    ]
    return wire(PoolView, pool, experiments=members)


# `/v1/tokens`: make, list and revoke tokens. For admins.


class NewToken(BaseModel):
    """A token to be made."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"name": "ci", "scope": "submit", "expires": "90d"}]}
    )

    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[\w.@+-]([\w .@+-]*[\w.@+-])?$")]
    """The token's owner or purpose."""
    scope: Scope
    expires: Annotated[str | None, Field(max_length=64, description="After this duration, such as 90d.")] = None


@router.get(
    "/v1/tokens", tags=["tokens"], operation_id="listTokens", summary="List the tokens", response_model=TokenList
)
def list_tokens(request: Request, _admin: Admin) -> Response:
    """All tokens, those that are revoked or expired included; never their secrets."""
    return JSONResponse({"items": [asdict(record) for record in authenticator_of(request).tokens.records()]})


@router.post(
    "/v1/tokens",
    tags=["tokens"],
    operation_id="createToken",
    summary="Make a token",
    status_code=201,
    response_model=MadeToken,
)
def create_token(request: Request, body: NewToken, _admin: Admin) -> Response:
    """Make a token. Its secret is in this answer, and nowhere else."""
    lasts_s = None if body.expires is None else parse_duration(body.expires)
    record, token = authenticator_of(request).tokens.create(body.name, body.scope, lasts_s=lasts_s)
    return JSONResponse(asdict(record) | {"token": token}, 201, {"Location": f"/v1/tokens/{record.id}"})


@router.delete(
    "/v1/tokens/{id}",
    tags=["tokens"],
    operation_id="revokeToken",
    summary="Revoke a token",
    status_code=204,
    responses=refusals(NOT_FOUND),
)
def revoke_token(
    request: Request,
    _admin: Admin,
    id: Annotated[str, Path(description="The token's id.", max_length=64, examples=["0123456789ab"])],
) -> Response:
    """End a token, and the sessions of the browsers that signed in with it, at once."""
    if not authenticator_of(request).tokens.revoke(id):
        raise HttpProblem(NOT_FOUND, f"there is no token {shown(id)}")
    return Response(status_code=204)
