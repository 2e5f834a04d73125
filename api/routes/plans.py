"""`/v1/plans`: expected time and cost of experiments. Nothing is started or spent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Path, Request
from fastapi.responses import Response
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from rubberband.api.body import read_experiment
from rubberband.api.experiments.admission import Admission
from rubberband.api.plans.previews import PlanAnswer, Preview, PreviewOptions, fingerprint
from rubberband.api.problems import (
    INFEASIBLE,
    INVALID,
    MALFORMED,
    MEDIA,
    MEDIA_TYPE,
    NOT_FOUND,
    PROFILE_MISSING,
    PROVIDER,
    REFUSED,
    TOO_LARGE,
    TOO_LONG,
    UNAVAILABLE,
    HttpProblem,
)
from rubberband.api.routes import Reader, Service, Serving, caller_of
from rubberband.api.routes.answers import EXAMPLES, EXPERIMENT_BODY, invalid, refusals, require_documented
from rubberband.api.routes.queueing import place_if_submitted, previewing
from rubberband.client.models import OptionView, PlanView
from rubberband.spec.experiment import Experiment
from rubberband.units import shown

router = APIRouter(prefix="/v1/plans", tags=["plans"])
_Answered = TypeVar("_Answered", bound="PlanAnswer | None")


def _parameters() -> list[dict[str, Any]]:
    """Return the parameters of PreviewOptions for OpenAPI."""
    fields = PreviewOptions.model_json_schema()["properties"]
    described = (
        {"name": name, "description": field.pop("description"), "schema": field} for name, field in fields.items()
    )
    return [{"in": "query", "required": False, **each} for each in described]


_HEADERS = {
    "Content-Location": {"description": "URL of the same answer.", "schema": {"type": "string"}},
    "ETag": {"description": "The id, quoted.", "schema": {"type": "string"}},
}
_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"description": "The plan, what it takes and costs, and the alternatives.", "headers": _HEADERS}
}


def _refusals(*kinds: Any) -> dict[int | str, dict[str, Any]]:
    """Return `refusals` with a full example of INFEASIBLE."""
    found = refusals(*kinds, INFEASIBLE)
    found[422]["content"][MEDIA_TYPE]["examples"][INFEASIBLE.slug] = {"value": EXAMPLES["infeasible"]}
    return found


@router.post(
    "",
    summary="Preview a plan",
    operation_id="previewPlan",
    response_model=PlanView,
    responses=_RESPONSES
    | _refusals(MALFORMED, INVALID, MEDIA, PROFILE_MISSING, REFUSED, TOO_LONG, PROVIDER, UNAVAILABLE, TOO_LARGE),
    openapi_extra={"requestBody": EXPERIMENT_BODY, "parameters": _parameters()},
)
async def preview_plan(request: Request, service: Serving, reader: Reader) -> Response:
    """Plan an experiment that would start now, and say what it takes and costs: what `rubberband estimate` prints.

    The same question has the same answer and the same id. 422 where no plan keeps the limits, with `nearest` and the
    `remedies`: the least changes that make one possible, each as `set` takes it, with the time and cost of its plan.
    The deadline may be absolute; then the answer holds for this second. Where all slots are taken, `queue` has the
    place in the queue, the expected start, and whether the deadline can be met then.
    """
    body, media_type = await request.body(), request.headers.get("content-type", "")
    if service.admission is not None:
        return await _beside_promises(request, service, service.admission, reader.name, body, media_type)
    asked = fingerprint(body, media_type.encode("latin-1"), request.url.query.encode())
    answer = service.plans.recall(asked)
    if answer is None:
        preview = Preview(body=body, media_type=media_type, options=_options(request))
        answer = await _unless_left(request, service.plans.answer(preview, asked, caller_of(request)))
    if answer.status != 200 or service.runs.line.is_free:
        return _response(answer)
    experiment = Experiment.kept(answer.words)  # read already: to parse it again takes longer than to plan it
    plan = previewing(service, _options(request).policy, caller_of(request))
    queue = await place_if_submitted(service, experiment, plan, owner=reader.name, answer=answer)
    return _response(answer) if queue is None else _passing({**json.loads(answer.body), "queue": queue})


async def _beside_promises(
    request: Request, service: Service, admission: Admission, owner: str, body: bytes, media_type: str
) -> Response:
    """Plan an experiment beside what the pool has promised to others: `promise` says from when to when.

    The budgets of `owner` and of the pool count as they would for a submission.
    """
    options = _options(request)
    experiment = await run_in_threadpool(read_experiment, body, media_type, options.overrides)
    fitted = admission.within(experiment)
    caller = caller_of(request)
    answer = await _unless_left(request, service.plans.preview(fitted, options, caller=caller))
    if answer.status != 200:
        return _response(answer)
    plan = previewing(service, options.policy, caller)
    promise = await admission.admit(fitted, answer, service.settings.clock(), plan, owner=owner)
    queue = await place_if_submitted(service, fitted, plan, owner=owner, answer=answer)
    if promise is None and queue is None and not fitted.notes:
        return _response(answer)
    estimate = json.loads(answer.body)
    view = {**estimate, "notes": list(dict.fromkeys([*fitted.notes, *estimate["notes"]]))}
    if promise is not None:
        view["promise"] = {"start_at": promise.start_at, "end_at": promise.end_at}
    if queue is not None:
        view["queue"] = queue
    return _passing(view)


def _passing(view: dict[str, Any]) -> Response:
    """Return a plan with what holds at this moment only: others may submit at any time."""
    return Response(json.dumps(view).encode(), 200, {"Cache-Control": "no-store"}, media_type="application/json")


PlanId = Annotated[
    str, Path(description="The plan's id.", pattern="^[A-Za-z0-9_-]{1,64}$", examples=[EXAMPLES["plan"]["id"]])
]
SCHEDULER = Path(description="The scheduler of the option.", pattern="^[a-z]{1,32}$", examples=["asha"])


@router.get(
    "/{id}",
    summary="Get a previewed plan",
    operation_id="getPlan",
    response_model=PlanView,
    responses=_RESPONSES | {304: {"description": "The plan is unchanged (If-None-Match)."}} | _refusals(NOT_FOUND),
)
async def get_plan(request: Request, service: Serving, _reader: Reader, id: PlanId) -> Response:
    """The answer of a preview, as it was given; 422 again for what had no plan. Old ones are let go in time."""
    require_documented(request)
    answer = await service.plans.find(id)
    if answer is None:
        raise _unknown(id)
    if f'"{id}"' in request.headers.get("if-none-match", "") and answer.status == 200:
        return Response(status_code=304, headers=_headers(answer))
    return _response(answer)


@router.get(
    "/{id}/options/{scheduler}",
    summary="Get the option of another scheduler",
    operation_id="getPlanOption",
    response_model=OptionView,
    responses=refusals(NOT_FOUND, TOO_LONG, PROVIDER, UNAVAILABLE, REFUSED)
    | {200: {"description": "The row, simulated.", "headers": _HEADERS}},
)
async def get_plan_option(
    request: Request, service: Serving, _reader: Reader, id: PlanId, scheduler: Annotated[str, SCHEDULER]
) -> Response:
    """The row of `options` that a preview left `pending`: the best plan under another scheduler, which is simulated.

    The same plan has the same row.
    """
    require_documented(request)
    answer = await _unless_left(request, service.plans.option(id, scheduler, caller_of(request)))
    if answer is None:
        raise _unknown(id)
    return _response(answer)


def _unknown(id: str) -> HttpProblem:
    return HttpProblem(NOT_FOUND, f"plan {shown(id)} not found, or expired; POST /v1/plans makes one")


async def _unless_left(request: Request, answering: Coroutine[Any, Any, _Answered]) -> _Answered:
    """Return the answer, unless the client disconnects first: a moved slider abandons many requests."""
    answer, left = asyncio.create_task(answering), asyncio.create_task(_left(request))
    try:
        await asyncio.wait((answer, left), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ClientDisconnect
        return answer.result()
    finally:
        answer.cancel()
        left.cancel()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _options(request: Request) -> PreviewOptions:
    """Parse the query. FastAPI would do so for repeated questions, too."""
    require_documented(request)
    given = request.query_params
    words: dict[str, Any] = {name: given.getlist(name) if name == "set" else given[name] for name in given}
    try:
        return PreviewOptions.model_validate(words)
    except ValidationError as error:
        raise invalid(error.errors(), "query") from None


def _response(answer: PlanAnswer) -> Response:
    media_type = "application/json" if answer.status == 200 else MEDIA_TYPE
    return Response(answer.body, answer.status, _headers(answer), media_type)


def _headers(answer: PlanAnswer) -> dict[str, str]:
    return {
        "Content-Location": f"/v1/plans/{answer.id}",
        "ETag": f'"{answer.id}"',
        "Cache-Control": "private, no-cache",
    }
