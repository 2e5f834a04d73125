"""`/v1/experiments`: submit, list and show experiments and their parts, act on them, label and delete them."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool

from rubberband.api.body import read_experiment, require_allowed
from rubberband.api.experiments.admission import OvertakenError, PlanOf, planned_of
from rubberband.api.plans.previews import PlanAnswer
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
    NOTE_CHANGED,
    PROFILE_MISSING,
    PROVIDER,
    REFUSED,
    TOO_LONG,
    HttpProblem,
    Kind,
)
from rubberband.api.routes import Known, Reader, Service, Serving, Submitter, caller_of, checked_name
from rubberband.api.routes.answers import (
    EXPERIMENT_BODY,
    Body,
    IdempotencyKey,
    asked,
    example,
    json_answer,
    json_body,
    once,
    only_documented,
    read_object,
    refusals,
    require_json,
)
from rubberband.api.routes.queueing import experiment_views, place_of, previewing, queue_views, shortest_s
from rubberband.api.store.schema import Principal
from rubberband.client import models
from rubberband.spec.experiment import Experiment
from rubberband.states import ExperimentState
from rubberband.units import shown
from rubberband.values.plan import Policy
from rubberband.values.submission import LONGEST_NOTE, LONGEST_TAG, MOST_TAGS, LabelChange, Submission, Summary
from rubberband.views import experiment as views_json

_SUBMISSION_TRIES = 5
"""Others may take the room of a plan while it is made."""


Route = TypeVar("Route", bound=Callable[..., Response | Awaitable[Response]])


router = APIRouter(tags=["experiments"], prefix="/v1/experiments", dependencies=[Depends(only_documented)])

KEYED = (KEY_BUSY, KEY_REUSED)
_LOCATION = {"Location": {"description": "The experiment's address.", "schema": {"type": "string"}}}
REPLAYED_HEADER = {
    "Idempotency-Replayed": {
        "description": "`true` if an earlier answer is repeated.",
        "schema": {"type": "string", "enum": ["true"]},
    }
}


SeenPlan = Annotated[
    str | None, Query(max_length=200, description="Id of the preview that the caller saw; it is recorded.")
]
Overrides = Annotated[
    list[str] | None,
    Query(
        alias="set",
        description="KEY=VALUE replaces a value of the body, as `-s` of the command line; repeats.",
        examples=[["constraints.deadline=30m"]],
    ),
]


@router.get(
    "",
    summary="List experiments",
    operation_id="listExperiments",
    response_model=models.ExperimentPage,
    responses={200: example("A page of experiments.", "experiments")},
)
def list_experiments(
    service: Serving,
    _reader: Reader,
    state: Annotated[list[ExperimentState] | None, Query(description="Only those in this state; repeats.")] = None,
    search: Annotated[
        str,
        Query(
            max_length=200,
            description="Words that are part of the name, owner, state, note or a tag.",
            examples=["resnet ann"],
        ),
    ] = "",
    tag: Annotated[list[str] | None, Query(max_length=20, description="Only those with this tag; repeats.")] = None,
    archived: Annotated[bool, Query(description="Those that were archived, in place of the others.")] = False,
    limit: Annotated[int, Query(ge=1, le=500, description="The largest number to return.")] = 50,
    cursor: Annotated[str | None, Query(max_length=400, description="`next` of the previous page.")] = None,
) -> Response:
    """Newest first."""
    page = service.store.submissions(
        states=state or None, search=search, tags=tag or (), archived=archived, limit=limit, after=cursor
    )
    return json_answer({"items": experiment_views(service, page.items), "next": page.next})


@router.post(
    "",
    status_code=201,
    summary="Submit an experiment",
    operation_id="submitExperiment",
    response_model=models.SubmittedView,
    openapi_extra={"requestBody": EXPERIMENT_BODY},
    responses={
        201: example("Accepted; it starts as soon as a slot is free.", "submitted")
        | {"headers": _LOCATION | REPLAYED_HEADER},
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
    plan: SeenPlan = None,
    set_: Overrides = None,
) -> Response:
    """The experiment is planned, and refused (422) where no plan keeps its deadline and budget.

    One without a profile is accepted, measured, and then planned. A deadline that is a duration counts from now.
    """
    given = asked(request, principal, key, body)

    async def act() -> Response:
        media_type = request.headers.get("content-type", "")
        experiment = await run_in_threadpool(read_experiment, body, media_type, set_ or ())
        known = await run_in_threadpool(service.runs.submitted, experiment.name, given.request)
        if known is not None:  # its answer was lost; by now there may be no feasible plan
            return _accepted(known, queue_views(service, [known]).get(known.name))
        require_allowed(experiment, service.settings)
        if plan is not None and await service.plans.find(plan) is None:
            raise HttpProblem(INVALID, f"plan: {shown(plan)} not found; preview it again, or leave plan out")
        accept = partial(service.runs.submit, policy=policy, owner=principal.name, request=given.request)
        preview = previewing(service, policy, caller_of(request))
        if service.admission is None:
            return await _planned(service, experiment, plan, preview, accept)
        for left in reversed(range(_SUBMISSION_TRIES)):
            try:
                return await _promised(service, principal.name, experiment, plan, preview, accept)
            except OvertakenError:
                if not left:
                    raise
        raise AssertionError("the last try returns or raises")

    return await once(service.store, service.settings.clock, given, act)


_Accept = Callable[..., Submission]


async def _planned(
    service: Service, experiment: Experiment, seen: str | None, preview: PlanOf, accept: _Accept
) -> Response:
    """Accept an experiment that has a feasible plan, or whose profile is measured first."""
    if experiment.profile is not None:
        found = await preview(experiment)
        if found.status != 200:
            return Response(found.body, found.status, media_type=MEDIA_TYPE)
        seen = seen or found.id
        accept = partial(accept, summary=await _summary(service, experiment, found, preview))
    made = await run_in_threadpool(accept, experiment, plan=seen)
    return _accepted(made, place_of(service, made), experiment.notes)


async def _summary(service: Service, experiment: Experiment, found: PlanAnswer, preview: PlanOf) -> Summary:
    """Return the time and cost that are planned, and for one that will wait, the time of its shortest plan."""
    shortest_jct_s = None if service.runs.line.is_free else await shortest_s(experiment, preview)
    return replace(planned_of(json.loads(found.body)), shortest_jct_s=shortest_jct_s)


async def _promised(
    service: Service, owner: str, experiment: Experiment, seen: str | None, preview: PlanOf, accept: _Accept
) -> Response:
    """Accept an experiment whose plan fits into its owner's budget, and beside what the pool has promised to others.

    Others may submit while it is planned: `accept` checks the promise again. Raises OvertakenError where they took its
    room.
    """
    admission = service.admission
    assert admission is not None, "the service has a pool"
    experiment = admission.within(experiment)
    if experiment.profile is None:
        admission.require_plan(experiment)
        accept = partial(accept, admitted_usd=admission.budgets.most_usd(experiment, owner, None))
        return await _planned(service, experiment, seen, preview, accept)
    found = await preview(experiment)
    if found.status != 200:
        return Response(found.body, found.status, media_type=MEDIA_TYPE)
    promise = await admission.admit(experiment, found, service.settings.clock(), preview, owner=owner)
    planned = await _summary(service, experiment, found, preview)
    if promise is not None:
        planned = replace(planned, planned_cost_usd=promise.cost_usd)
    accept = partial(
        accept,
        promise=promise,
        summary=planned,
        admitted_usd=admission.budgets.most_usd(experiment, owner, planned.planned_cost_usd),
    )
    await service.plans.keep()  # the next submission counts it
    made = await run_in_threadpool(accept, experiment, plan=seen or found.id)
    place = None if promise is not None else place_of(service, made)
    return _accepted(made, place, experiment.notes)


def _accepted(submission: Submission, queue: models.QueueView | None, notes: Sequence[str] = ()) -> Response:
    location = {"Location": f"/v1/experiments/{submission.name}"}
    return json_answer({**views_json.experiment_view(submission, queue), "notes": list(notes)}, 201, location)


@router.get(
    "/{name}",
    summary="Get an experiment",
    operation_id="getExperiment",
    response_model=models.ExperimentDetail,
    responses={200: example("The experiment, with its settings and stages.", "detail"), **refusals(NOT_FOUND)},
)
def get_experiment(service: Serving, _reader: Reader, experiment: Known) -> Response:
    """How it stands, stage by stage."""
    result = service.runs.result(experiment.name)
    place = queue_views(service, [experiment]).get(experiment.name)
    return json_answer(views_json.experiment_detail(experiment, result, place))


def action(
    router: APIRouter, path: str, summary: str, operation_id: str, accepted: str, *refused: Kind, **more: Any
) -> Callable[[Route], Route]:
    """Return the decorator of an action that is asked of an experiment's process; `accepted` is the meaning of 202."""
    return router.post(
        f"/{{name}}/{path}",
        status_code=202,
        summary=summary,
        operation_id=operation_id,
        response_model=models.ExperimentView,
        responses={
            202: example(accepted, "experiment") | {"headers": REPLAYED_HEADER},
            **refusals(NOT_FOUND, CONFLICT, *refused, *KEYED),
        },
        **more,
    )


@action(
    router,
    "cancel",
    "Cancel an experiment",
    "cancelExperiment",
    "Cancellation is requested; its state shows when it has ended.",
)
async def cancel(
    request: Request, service: Serving, principal: Submitter, experiment: Known, key: IdempotencyKey = None
) -> Response:
    """Its instances are given back and the best trial so far is kept. Asking twice asks once."""
    return await acted(request, service, principal, key, service.runs.cancel, experiment.name)


@action(
    router,
    "resume",
    "Resume an experiment",
    "resumeExperiment",
    "Accepted; it resumes as soon as a slot is free.",
    REFUSED,
)
async def resume(
    request: Request, service: Serving, principal: Submitter, experiment: Known, key: IdempotencyKey = None
) -> Response:
    """Go on with one that was interrupted or cancelled, or that its budget ended and that was extended since."""
    return await acted(request, service, principal, key, service.runs.resume, experiment.name)


async def acted(
    request: Request,
    service: Service,
    principal: Principal,
    key: str | None,
    effect: Callable[..., Submission],
    name: str,
) -> Response:
    """Have the effect once for each key, and return the experiment as it is then."""
    given = asked(request, principal, key, await request.body())

    async def act() -> Response:
        submission = await run_in_threadpool(effect, name, request=given.request)
        return json_answer(experiment_views(service, [submission])[0], 202)

    return await once(service.store, service.settings.clock, given, act)


_Tags = Annotated[
    tuple[str, ...],
    Field(max_length=100, strict=False, description=f"Each of up to {LONGEST_TAG} letters, digits and - _ . : / @."),
]


class LabelBody(BaseModel):
    """Change of an experiment's labels. Values that are left out stay."""

    model_config = ConfigDict(extra="forbid", strict=True)

    add_tags: _Tags = Field(default=(), description=f"An experiment has up to {MOST_TAGS}.")
    remove_tags: _Tags = ()
    note: str | None = Field(default=None, description=f"Up to {LONGEST_NOTE} characters; empty removes it.")
    note_before: str | None = Field(default=None, description="The note is replaced only if it is this one.")
    archived: bool | None = Field(default=None, description="Lists leave it out once it does not run.")


@router.patch(
    "/{name}",
    summary="Label an experiment",
    operation_id="labelExperiment",
    response_model=models.ExperimentView,
    openapi_extra=json_body(
        LabelBody,
        {
            "tags": {"summary": "Other tags", "value": {"add_tags": ["vision"], "remove_tags": ["old"]}},
            "note": {"summary": "A note", "value": {"note": "The baseline of the paper.", "note_before": ""}},
            "archive": {"summary": "Archive it", "value": {"archived": True}},
        },
    ),
    responses={200: example("The experiment.", "experiment"), **refusals(NOT_FOUND, MEDIA, INVALID, NOTE_CHANGED)},
)
async def label(request: Request, service: Serving, _: Submitter, experiment: Known, body: Body) -> Response:
    """Tags, note and archive help people to find it; nothing else reads them. Repeating a request changes nothing."""
    require_json(request.headers.get("content-type", ""))
    words = read_object(LabelBody, body, "labels; send an object: add_tags, remove_tags, note, note_before, archived")
    if not words.model_fields_set:
        raise HttpProblem(INVALID, "nothing to change; give add_tags, remove_tags, note or archived")
    change = LabelChange(**words.model_dump())
    found = await run_in_threadpool(service.runs.care.label, experiment.name, change)
    return json_answer(experiment_views(service, [found])[0])


@router.delete(
    "/{name}",
    summary="Delete an experiment",
    operation_id="deleteExperiment",
    response_model=models.RemovalView,
    responses={
        200: example("It is deleted; with `dry_run`, what would be.", "removal") | {"headers": REPLAYED_HEADER},
        **refusals(NOT_FOUND, CONFLICT, *KEYED),
    },
)
async def delete(
    request: Request,
    service: Serving,
    principal: Submitter,
    name: Annotated[str, Depends(checked_name)],
    key: IdempotencyKey = None,
    dry_run: Annotated[bool, Query(description="Only show what would be deleted.")] = False,
) -> Response:
    """Deletes the journal, the logs and the checkpoints in the service's home, of one that has ended.

    Checkpoints in a bucket stay, and its cost counts on in the month's caps.
    """
    care = service.runs.care
    if dry_run:
        going = await run_in_threadpool(care.removal, name)
        return json_answer(views_json.removal_view(going, is_deleted=False))

    async def act() -> Response:
        gone = await run_in_threadpool(care.delete, name)
        return json_answer(views_json.removal_view(gone, is_deleted=True))

    return await once(service.store, service.settings.clock, asked(request, principal, key), act)
