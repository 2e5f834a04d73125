"""`/v1/experiments`: submit, list and see experiments, and act on them."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.responses import Response
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool

from rubberband.api.answers import invalid, json_answer
from rubberband.api.experiments.body import JSON_TYPE, json_object, read_experiment, require_allowed
from rubberband.api.models import (
    DETAIL,
    EXTENSION,
    PAGE,
    VIEW,
    ExperimentDetail,
    ExperimentPage,
    ExperimentView,
    ExtendBody,
    ExtensionView,
    example,
)
from rubberband.api.names import Known
from rubberband.api.openapi import EXPERIMENT_BODY, only_documented, refusals
from rubberband.api.problems import (
    CONFLICT,
    INFEASIBLE,
    INVALID,
    KEY_BUSY,
    KEY_REUSED,
    MEDIA,
    MEDIA_TYPE,
    NAME_TAKEN,
    NOT_FOUND,
    PROFILE_MISSING,
    PROVIDER,
    REFUSED,
    TOO_LONG,
    UNAVAILABLE,
    Problem,
)
from rubberband.api.security.authentication import Reader, Submitter, caller_of
from rubberband.api.service import Service, Serving
from rubberband.api.store.protocol import KeptAnswer, Principal, Store
from rubberband.executor.core.extending import Extension
from rubberband.spec.experiment import Experiment
from rubberband.states import ExperimentState
from rubberband.units import shown
from rubberband.values.plan import Policy
from rubberband.values.submission import Submission
from rubberband.views import experiment as views_json

# Requests that spend money, sent again: the same Idempotency-Key has the same answer, and one effect.


IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        pattern="^[!-~]{1,255}$",
        description=(
            "A value that the client chooses, a new one for each new request. If a request is sent again with it "
            "(after a lost answer, say), nothing is done again: the service repeats its first answer, with "
            "`Idempotency-Replayed: true`."
        ),
        examples=["8e03978e-40d5-43dd-bc93-6894a57f9324"],
    ),
]
REPLAYED = "Idempotency-Replayed"
_KEPT_HEADERS = ("content-type", "location", "content-location", "cache-control")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedRequest:
    """A request, as far as another one with its key must be the same."""

    key: str | None
    owner: str
    """Id of the token; keys of different tokens have nothing to do with each other."""
    digest: str

    @property
    def request(self) -> str:
        """An id of what is asked for, the same each time it is asked with its key; empty without a key."""
        if self.key is None:
            return ""
        return hashlib.sha256(f"{self.owner}\n{self.digest}\n{self.key}".encode()).hexdigest()[:32]


def asked(request: Request, principal: Principal, key: str | None, body: bytes = b"") -> KeyedRequest:
    """What a request asks for."""
    digest = hashlib.sha256()
    for part in (request.method, request.url.path, request.url.query, request.headers.get("content-type", "")):
        digest.update(part.encode() + b"\n")
    digest.update(body)
    return KeyedRequest(key=key, owner=principal.token, digest=digest.hexdigest())


async def once(store: Store, request: KeyedRequest, act: Callable[[], Awaitable[Response]]) -> Response:
    """The answer of `act`, or the one that it gave when the same was asked before.

    What came to nothing (an error) is not kept: it may be asked again. Raises Problem KEY_REUSED and KEY_BUSY.
    """
    key, owner = request.key, request.owner
    if key is None:
        return await act()
    found = await run_in_threadpool(store.claim_key, key, owner=owner, request_hash=request.digest, at=time.time())
    if isinstance(found, KeptAnswer):
        return Response(found.body, found.status, {**found.headers, REPLAYED: "true"})
    if found is not None:
        raise _refusal(found)
    try:
        answer = await act()
    except Exception:
        await run_in_threadpool(store.free_key, key, owner=owner)
        raise
    if answer.status_code >= 400:
        await run_in_threadpool(store.free_key, key, owner=owner)
    else:
        await run_in_threadpool(store.keep_answer, key, owner=owner, answer=_kept(answer), at=time.time())
    return answer


def _kept(answer: Response) -> KeptAnswer:
    headers = {name: value for name, value in answer.headers.items() if name in _KEPT_HEADERS}
    return KeptAnswer(status=answer.status_code, headers=headers, body=bytes(answer.body))


def _refusal(found: str) -> Problem:
    if found == "reused":
        return Problem(KEY_REUSED, "another request had this Idempotency-Key; make a new one for each new request")
    return Problem(
        KEY_BUSY, "the request with this Idempotency-Key is being served; ask again soon", headers={"Retry-After": "1"}
    )


# Other limits as requests ask for them: planned in a process of its own, and granted if nothing changed meanwhile.


_TRIES = 5
_PAUSE_S = 0.2
"""The watcher reads a journal somewhat later than the process that plans."""


async def looked_at(service: Service, name: str, limits: ExtendBody, caller: str) -> Extension:
    """What the limits would change. Raises Problem."""
    asked = await run_in_threadpool(
        partial(service.runs.extensions.question, name, deadline=limits.deadline, max_cost_usd=limits.max_cost)
    )
    return asked if isinstance(asked, Extension) else (await service.plans.rest(asked, caller)).extension


async def granted(service: Service, name: str, limits: ExtendBody, caller: str, *, request: str) -> Extension:
    """What they change, and that they are in force; `request` is an id that makes it happen once. Raises Problem.

    What is granted is what was planned: if the experiment has other limits by then, it is planned again.
    """
    extensions = service.runs.extensions
    question = partial(
        extensions.question, name, deadline=limits.deadline, max_cost_usd=limits.max_cost, request=request
    )
    for _ in range(_TRIES):
        asked = await run_in_threadpool(question)
        if isinstance(asked, Extension):
            return asked
        answer = await service.plans.rest(asked, caller)
        found = await run_in_threadpool(extensions.grant, asked, answer, request)
        if found is not None:
            return found
        await asyncio.sleep(_PAUSE_S)
    raise Problem(UNAVAILABLE, f"the limits of {name!r} are being changed; try again", headers={"Retry-After": "2"})


# Other limits for an experiment, as a request carries them: read as strictly as an experiment.


def read_limits(body: bytes, media_type: str) -> ExtendBody:
    """The limits of a request's body. Raises Problem: MEDIA, MALFORMED, or INVALID."""
    if media_type.partition(";")[0].strip().lower() != JSON_TYPE:
        raise Problem(MEDIA, f"Content-Type {shown(media_type)} is not supported; send {JSON_TYPE}")
    words = json_object(body, "what extends an experiment; send an object: deadline, max_cost or both, and dry_run")
    try:
        limits = ExtendBody.model_validate(words)
    except ValidationError as error:
        faults = [{"loc": ["body", *map(str, fault["loc"])], "message": fault["msg"]} for fault in error.errors()]
        raise invalid(faults) from None
    if limits.deadline is None and limits.max_cost is None:
        raise Problem(INVALID, "neither deadline nor max_cost is given; give one or both")
    return limits


router = APIRouter(tags=["experiments"], prefix="/v1/experiments", dependencies=[Depends(only_documented)])

_KEYED = (KEY_BUSY, KEY_REUSED)
_LOCATION = {"Location": {"description": "The experiment's address.", "schema": {"type": "string"}}}
_REPLAYED = {
    "Idempotency-Replayed": {
        "description": "`true` if an earlier answer is repeated.",
        "schema": {"type": "string", "enum": ["true"]},
    }
}


async def body_of(request: Request) -> bytes:
    """A dependency: the body as it was sent."""
    return await request.body()


Body = Annotated[bytes, Depends(body_of)]


@router.get(
    "",
    summary="List experiments",
    operation_id="listExperiments",
    response_model=ExperimentPage,
    responses={200: example("A page of experiments.", PAGE)},
)
def list_experiments(
    service: Serving,
    _reader: Reader,
    state: Annotated[list[ExperimentState] | None, Query(description="Only those in this state; repeats.")] = None,
    limit: Annotated[int, Query(ge=1, le=500, description="The largest number to return.")] = 50,
    cursor: Annotated[str | None, Query(max_length=400, description="`next` of the previous page.")] = None,
) -> Response:
    """Newest first."""
    page = service.store.submissions(states=state or None, limit=limit, after=cursor)
    items = [views_json.experiment_view(submission) for submission in page.items]
    return json_answer({"items": items, "next": page.next})


@router.post(
    "",
    status_code=201,
    summary="Submit an experiment",
    operation_id="submitExperiment",
    response_model=ExperimentView,
    openapi_extra={"requestBody": EXPERIMENT_BODY},
    responses={
        201: example("Accepted; it starts as soon as a slot is free.", VIEW) | {"headers": _LOCATION | _REPLAYED},
        **refusals(
            NAME_TAKEN, KEY_BUSY, MEDIA, INVALID, REFUSED, PROFILE_MISSING, INFEASIBLE, TOO_LONG, KEY_REUSED, PROVIDER
        ),
    },
)
async def submit(
    request: Request,
    service: Serving,
    principal: Submitter,
    body: Body,
    key: IdempotencyKey = None,
    policy: Annotated[Policy, Query(description="How to search for a plan.")] = "optimal",
    plan: Annotated[
        str | None, Query(max_length=200, description="Id of the preview that the caller saw; it is recorded.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        Query(
            alias="set",
            description="KEY=VALUE replaces a value of the body, as `-s` of the command line; repeats.",
            examples=[["constraints.deadline=30m"]],
        ),
    ] = None,
) -> Response:
    """The experiment is planned, and refused (422) where no plan keeps its deadline and budget.

    One without a profile is accepted, measured, and then planned. A deadline that is a duration counts from now.
    """
    given = asked(request, principal, key, body)

    async def act() -> Response:
        media_type = request.headers.get("content-type", "")
        experiment = await run_in_threadpool(read_experiment, body, media_type, set_ or ())
        known = await run_in_threadpool(service.runs.submitted, experiment.name, given.request)
        if known is not None:  # its answer was lost; by now there may be no plan any more
            return _accepted(known)
        require_allowed(experiment, service.settings, to_run=True)
        return await _submitted(service, principal, experiment, policy, plan, given.request, caller_of(request))

    return await once(service.store, given, act)


async def _submitted(
    service: Service,
    principal: Principal,
    experiment: Experiment,
    policy: Policy,
    plan: str | None,
    request: str,
    caller: str,
) -> Response:
    if plan is not None and await service.plans.find(plan) is None:
        raise Problem(INVALID, f"plan: {shown(plan)} not found; preview it again, or leave plan out")
    if experiment.profile is not None:
        preview = await service.plans.preview(experiment, policy=policy, caller=caller)
        if preview.status != 200:
            return Response(preview.body, preview.status, media_type=MEDIA_TYPE)
        plan = plan or preview.id
    accept = partial(service.runs.submit, experiment, policy=policy, owner=principal.name, plan=plan, request=request)
    return _accepted(await run_in_threadpool(accept))


def _accepted(submission: Submission) -> Response:
    location = {"Location": f"/v1/experiments/{submission.name}"}
    return json_answer(views_json.experiment_view(submission), 201, location)


@router.get(
    "/{name}",
    summary="Get an experiment",
    operation_id="getExperiment",
    response_model=ExperimentDetail,
    responses={200: example("The experiment, with its settings and stages.", DETAIL), **refusals(NOT_FOUND)},
)
def get_experiment(service: Serving, _reader: Reader, experiment: Known) -> Response:
    """How it stands, stage by stage."""
    result = service.runs.result(experiment.name)
    return json_answer(views_json.experiment_detail(experiment, result))


@router.post(
    "/{name}/cancel",
    status_code=202,
    summary="Cancel an experiment",
    operation_id="cancelExperiment",
    response_model=ExperimentView,
    responses={
        202: example("Cancellation is requested; its state shows when it has ended.", VIEW) | {"headers": _REPLAYED},
        **refusals(NOT_FOUND, CONFLICT, *_KEYED),
    },
)
async def cancel(
    request: Request, service: Serving, principal: Submitter, experiment: Known, key: IdempotencyKey = None
) -> Response:
    """Its instances are given back and the best trial so far is kept. Asking twice asks once."""
    return await _acted(request, service, principal, key, partial(service.runs.cancel, experiment.name))


@router.post(
    "/{name}/resume",
    status_code=202,
    summary="Resume an experiment",
    operation_id="resumeExperiment",
    response_model=ExperimentView,
    responses={
        202: example("Accepted; it resumes as soon as a slot is free.", VIEW) | {"headers": _REPLAYED},
        **refusals(NOT_FOUND, CONFLICT, *_KEYED),
    },
)
async def resume(
    request: Request, service: Serving, principal: Submitter, experiment: Known, key: IdempotencyKey = None
) -> Response:
    """Go on with one that was interrupted or cancelled, or that its budget ended and that was extended since."""
    return await _acted(request, service, principal, key, partial(service.runs.resume, experiment.name))


async def _acted(
    request: Request, service: Service, principal: Principal, key: str | None, effect: Callable[..., Submission]
) -> Response:
    given = asked(request, principal, key, await request.body())

    async def act() -> Response:
        submission = await run_in_threadpool(partial(effect, request=given.request))
        return json_answer(views_json.experiment_view(submission), 202)

    return await once(service.store, given, act)


@router.post(
    "/{name}/extend",
    summary="Extend an experiment's deadline or budget",
    operation_id="extendExperiment",
    response_model=ExtensionView,
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": ExtendBody.model_json_schema(),
                    "examples": {
                        "look": {"summary": "Effect of half an hour more", "value": {"deadline": "50m"}},
                        "do": {"summary": "Do it", "value": {"deadline": "50m", "max_cost": 12.5, "dry_run": False}},
                    },
                }
            },
        }
    },
    responses={
        200: example("Expected time and cost, before and after.", EXTENSION) | {"headers": _REPLAYED},
        **refusals(NOT_FOUND, CONFLICT, MEDIA, INVALID, TOO_LONG, UNAVAILABLE, *_KEYED),
    },
)
async def extend(
    request: Request, service: Serving, principal: Submitter, experiment: Known, body: Body, key: IdempotencyKey = None
) -> Response:
    """Shows what later or dearer limits would change; with `dry_run: false` they are in force from then on."""
    limits = read_limits(body, request.headers.get("content-type", ""))
    given = asked(request, principal, key, body)
    name, caller = experiment.name, caller_of(request)
    if limits.dry_run:
        return json_answer(views_json.extension_view(await looked_at(service, name, limits, caller)))

    async def act() -> Response:
        id = given.request or secrets.token_hex(16)
        return json_answer(views_json.extension_view(await granted(service, name, limits, caller, request=id)))

    return await once(service.store, given, act)
