"""`/v1/experiments`: submit, list and show experiments and their parts, act on them, label and delete them."""

from __future__ import annotations

import json
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool

from rubberband.api.body import read_experiment, require_allowed
from rubberband.api.experiments.admission import OvertakenError, planned_of
from rubberband.api.experiments.extending import Wanted
from rubberband.api.plans.previews import PlanAnswer, PreviewOptions
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
    UNAVAILABLE,
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
from rubberband.api.store.schema import Principal
from rubberband.client import models
from rubberband.executor.journal.inbox import NewTrials
from rubberband.executor.result.result import Result
from rubberband.spec.experiment import Experiment
from rubberband.spec.fields import Usd
from rubberband.states import ExperimentState
from rubberband.units import shown
from rubberband.values.plan import Policy
from rubberband.values.submission import LONGEST_NOTE, LONGEST_TAG, MOST_TAGS, LabelChange, Submission
from rubberband.views import experiment as views_json

_SUBMISSION_TRIES = 5
"""Others may take the room of a plan while it is made."""


class ExtendBody(BaseModel):
    """Other limits for an experiment, of which only raising is granted, another target, or more trials."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)

    deadline: str | float | None = Field(
        default=None, description="A duration such as `40m` (from the submission), seconds, or an absolute time."
    )
    max_cost: Annotated[Usd, Field(gt=0)] | None = Field(
        default=None, description="In US dollars, such as `5` or `$5`."
    )
    target: float | None = Field(default=None, description="The value of the metric that ends the search.")
    num_samples: str | int | None = Field(
        default=None, description="More trials, such as `+16`, or how many the search is to have in all."
    )
    dry_run: bool = Field(default=True, description="Only show what would change; false changes it.")


class AddBody(BaseModel):
    """A configuration to add to a search."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)

    configuration: dict[str, Any] = Field(
        default_factory=dict, description="Values of parameters; others are drawn, or as in `clone_of`."
    )
    clone_of: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="The trial whose configuration this changes."
    )
    from_checkpoint: bool = Field(
        default=False, description="Continue from the latest checkpoint of `clone_of`, not from the beginning."
    )
    dry_run: bool = Field(default=True, description="Only show what would change; false changes it.")


class LimitBody(BaseModel):
    """How many instances a running experiment may hold from now on."""

    model_config = ConfigDict(extra="forbid", strict=True)

    max_instances: Annotated[int, Field(ge=0, le=100_000)] | None = Field(
        description="0 pauses it; null lifts the limit: as many as its file allows."
    )


def read_limits(body: bytes, media_type: str) -> ExtendBody:
    """Parse the limits in a request's body. Raises Problem: MEDIA, MALFORMED, or INVALID."""
    require_json(media_type)
    limits = read_object(
        ExtendBody, body, "an extension; send an object: deadline, max_cost, target or num_samples, and dry_run"
    )
    if all(value is None for value in (limits.deadline, limits.max_cost, limits.target, limits.num_samples)):
        raise HttpProblem(INVALID, "neither deadline, max_cost, target nor num_samples is given; give one of them")
    return limits


_Route = TypeVar("_Route", bound=Callable[..., Response | Awaitable[Response]])


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
    items = [views_json.experiment_view(submission) for submission in page.items]
    return json_answer({"items": items, "next": page.next})


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
            return _accepted(known)
        require_allowed(experiment, service.settings)
        if plan is not None and await service.plans.find(plan) is None:
            raise HttpProblem(INVALID, f"plan: {shown(plan)} not found; preview it again, or leave plan out")
        accept = partial(service.runs.submit, policy=policy, owner=principal.name, request=given.request)
        preview = partial(service.plans.preview, options=PreviewOptions(policy=policy), caller=caller_of(request))
        if service.admission is None:
            return await _planned(experiment, plan, preview, accept)
        for left in reversed(range(_SUBMISSION_TRIES)):
            try:
                return await _promised(service, principal.name, experiment, plan, preview, accept)
            except OvertakenError:
                if not left:
                    raise
        raise AssertionError("the last try returns or raises")

    return await once(service.store, service.settings.clock, given, act)


_Preview = Callable[..., Awaitable[PlanAnswer]]
_Accept = Callable[..., Submission]


async def _planned(experiment: Experiment, seen: str | None, preview: _Preview, accept: _Accept) -> Response:
    """Accept an experiment that has a feasible plan, or whose profile is measured first."""
    if experiment.profile is not None:
        found = await preview(experiment)
        if found.status != 200:
            return Response(found.body, found.status, media_type=MEDIA_TYPE)
        seen = seen or found.id
    return _accepted(await run_in_threadpool(accept, experiment, plan=seen), experiment.notes)


async def _promised(
    service: Service, owner: str, experiment: Experiment, seen: str | None, preview: _Preview, accept: _Accept
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
        return await _planned(experiment, seen, preview, accept)
    found = await preview(experiment)
    if found.status != 200:
        return Response(found.body, found.status, media_type=MEDIA_TYPE)
    promise = await admission.admit(experiment, found, service.settings.clock(), preview, owner=owner)
    planned = planned_of(json.loads(found.body))
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
    return _accepted(made, experiment.notes)


def _accepted(submission: Submission, notes: Sequence[str] = ()) -> Response:
    location = {"Location": f"/v1/experiments/{submission.name}"}
    return json_answer({**views_json.experiment_view(submission), "notes": list(notes)}, 201, location)


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
    return json_answer(views_json.experiment_detail(experiment, result))


def action(
    router: APIRouter, path: str, summary: str, operation_id: str, accepted: str, *refused: Kind, **more: Any
) -> Callable[[_Route], _Route]:
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
        return json_answer(views_json.experiment_view(submission), 202)

    return await once(service.store, service.settings.clock, given, act)


@router.post(
    "/{name}/extend",
    summary="Extend an experiment's deadline, budget or trials, or change its target",
    operation_id="extendExperiment",
    response_model=models.ExtensionView,
    openapi_extra=json_body(
        ExtendBody,
        {
            "look": {"summary": "Effect of half an hour more", "value": {"deadline": "50m"}},
            "do": {"summary": "Do it", "value": {"deadline": "50m", "max_cost": 12.5, "dry_run": False}},
            "trials": {"summary": "Sixteen more trials", "value": {"num_samples": "+16", "dry_run": False}},
        },
    ),
    responses={
        200: example("Expected time and cost, before and after.", "extension") | {"headers": REPLAYED_HEADER},
        **refusals(NOT_FOUND, CONFLICT, MEDIA, INVALID, TOO_LONG, UNAVAILABLE, *KEYED),
    },
)
async def extend(
    request: Request, service: Serving, principal: Submitter, experiment: Known, body: Body, key: IdempotencyKey = None
) -> Response:
    """Shows what other limits or more trials would change; with `dry_run: false` they are in force from then on.

    The trials of a search that has ended are trained once it is resumed.
    """
    limits = read_limits(body, request.headers.get("content-type", ""))
    wanted = Wanted(
        deadline=limits.deadline, max_cost_usd=limits.max_cost, target=limits.target, num_samples=limits.num_samples
    )
    return await _changed(request, service, principal, experiment.name, body, key, wanted, dry_run=limits.dry_run)


@router.post(
    "/{name}/trials",
    summary="Add a trial to a search",
    operation_id="addTrial",
    response_model=models.ExtensionView,
    openapi_extra=json_body(
        AddBody,
        {
            "look": {"summary": "Effect of a configuration", "value": {"configuration": {"lr": 0.01}}},
            "do": {"summary": "Add it", "value": {"configuration": {"lr": 0.01}, "dry_run": False}},
            "clone": {
                "summary": "Another trial with a change",
                "value": {"clone_of": 3, "configuration": {"lr": 1e-4}, "from_checkpoint": True, "dry_run": False},
            },
        },
    ),
    responses={
        200: example("Expected time and cost, before and after.", "extension") | {"headers": REPLAYED_HEADER},
        **refusals(NOT_FOUND, CONFLICT, MEDIA, INVALID, TOO_LONG, UNAVAILABLE, *KEYED),
    },
)
async def add_trial(
    request: Request, service: Serving, principal: Submitter, experiment: Known, body: Body, key: IdempotencyKey = None
) -> Response:
    """Shows what a trial of this configuration would change; with `dry_run: false` it joins the search.

    The trial of a search that has ended is trained once it is resumed.
    """
    require_json(request.headers.get("content-type", ""))
    asked_for = read_object(AddBody, body, "a trial; send an object with configuration, clone_of or both, and dry_run")
    trials = NewTrials(
        configuration=asked_for.configuration,
        clone_of=asked_for.clone_of,
        from_checkpoint=asked_for.from_checkpoint,
    )
    wanted, dry_run = Wanted(trials=trials), asked_for.dry_run
    return await _changed(request, service, principal, experiment.name, body, key, wanted, dry_run=dry_run)


async def _changed(
    request: Request,
    service: Service,
    principal: Principal,
    name: str,
    body: bytes,
    key: str | None,
    wanted: Wanted,
    *,
    dry_run: bool,
) -> Response:
    """Answer what other limits or trials change, and ask for them unless it is a dry run."""
    given = asked(request, principal, key, body)
    asked_for, extensions = (service.plans, name, wanted, caller_of(request)), service.runs.extensions
    if dry_run:
        return json_answer(views_json.extension_view(await extensions.outlook(*asked_for)))

    async def act() -> Response:
        id = given.request or secrets.token_hex(16)
        found = await extensions.planned_and_granted(*asked_for, request=id)
        return json_answer(views_json.extension_view(found))

    return await once(service.store, service.settings.clock, given, act)


@action(
    router,
    "limit",
    "Limit a running experiment's instances",
    "limitExperiment",
    "Asked of its driver; `summary.max_instances` shows it in force.",
    MEDIA,
    INVALID,
    openapi_extra=json_body(
        LimitBody, {"two": {"summary": "At most two instances from now on", "value": {"max_instances": 2}}}
    ),
)
async def limit(
    request: Request, service: Serving, principal: Submitter, experiment: Known, body: Body, key: IdempotencyKey = None
) -> Response:
    """Fewer: trials stop at their next checkpoints and instances are given back. More: it grows within the stage.

    The rest is planned again at once, where plans are not held fixed. The resources of its file stay the upper limit.
    """
    require_json(request.headers.get("content-type", ""))
    asked_for = read_object(LimitBody, body, "a limit; send an object with max_instances")
    effect = partial(service.runs.limit, max_instances=asked_for.max_instances)
    return await acted(request, service, principal, key, effect, experiment.name)


# Details of one experiment: allocations, costs, decisions, logs, and the report.


MAX_TRIAL = (1 << 31) - 1


def part(
    router: APIRouter, path: str, summary: str, id: str, model: type, description: str, sample: str, *refused: Kind
) -> Callable[[_Route], _Route]:
    """Declare a route below an experiment; `sample` is an example of its answer."""
    responses = {200: example(description, sample), **refusals(NOT_FOUND, *refused)}
    return router.get(f"/{{name}}{path}", summary=summary, operation_id=id, response_model=model, responses=responses)


@part(
    router,
    "/allocations",
    "Get an experiment's instances and their use",
    "getAllocations",
    models.Allocations,
    "Instances, busy GPUs, and the plan.",
    "allocations",
)
def get_allocations(service: Serving, _reader: Reader, experiment: Known) -> Response:
    """All instants are seconds from the start. Empty until it began."""
    return json_answer(views_json.allocations(service.runs.result(experiment.name)))


@part(
    router,
    "/costs",
    "Get an experiment's bill",
    "getCosts",
    models.Costs,
    "The bill so far, against plan and cap.",
    "costs",
)
def get_costs(service: Serving, _reader: Reader, experiment: Known) -> Response:
    """In US dollars, by stage and by instance, and where the paid time of GPUs went."""
    return json_answer(views_json.costs(experiment, service.runs.result(experiment.name)))


@part(
    router,
    "/decisions",
    "Get an experiment's decisions",
    "listDecisions",
    models.Decisions,
    "Decisions and extensions, in order.",
    "decisions",
)
def list_decisions(service: Serving, _reader: Reader, experiment: Known) -> Response:
    """At the end of each stage the rest is planned again; also how limits were extended."""
    return json_answer(views_json.decisions(service.runs.result(experiment.name)))


@part(router, "/logs", "Read an experiment's logs", "readLogs", models.LogPage, "Lines, oldest first.", "logs", INVALID)
def read_logs(
    service: Serving,
    _reader: Reader,
    experiment: Known,
    source: Annotated[
        Literal["trials", "process"], Query(description="Output of the trials, or of the experiment's process.")
    ] = "trials",
    trial: Annotated[int | None, Query(ge=0, le=MAX_TRIAL, description="Only lines of this trial.")] = None,
    cursor: Annotated[str | None, Query(max_length=4000, description="`next` of the previous answer.")] = None,
    limit: Annotated[int, Query(ge=1, le=10_000, description="The largest number of lines to return.")] = 1000,
    search: Annotated[
        str, Query(max_length=200, description="Only lines with this text, in upper or lower case.", examples=["epoch"])
    ] = "",
) -> Response:
    """Ask again with `next` for what was printed since; a search has more to read until `next` stays the same."""
    lines, following = service.runs.lines(
        experiment.name, source=source, trial=trial, cursor=cursor, limit=limit, search=search
    )
    return json_answer({"lines": [{"trial": line.trial, "text": line.text} for line in lines], "next": following})


@part(
    router,
    "/report",
    "Get an experiment's report",
    "getReport",
    models.Report,
    "As `rubberband report -o json` prints it.",
    "report",
    CONFLICT,
)
def get_report(service: Serving, _reader: Reader, experiment: Known) -> Response:
    """The best configuration, stages, time and cost planned against actual, and all trials; also while it runs."""
    return json_answer(views_json.plain(begun(service, experiment).to_json()))


def begun(service: Service, experiment: Submission) -> Result:
    """Return the result so far. Raises Problem CONFLICT before the start."""
    result = service.runs.result(experiment.name)
    if result is None:
        state = experiment.state.value
        raise HttpProblem(CONFLICT, f"experiment {experiment.name!r} is {state}: there is nothing to report yet; wait")
    return result


# Labels of an experiment, and its end.

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
    return json_answer(views_json.experiment_view(found))


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
