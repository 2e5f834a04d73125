"""`PATCH` and `DELETE /v1/experiments/NAME`: labels of an experiment, and its end."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool

from rubberband.api.problems import CONFLICT, INVALID, MEDIA, NOT_FOUND, NOTE_CHANGED, HttpProblem
from rubberband.api.routes import Known, Serving, Submitter, checked_name
from rubberband.api.routes.answers import (
    IdempotencyKey,
    asked,
    example,
    json_answer,
    once,
    only_documented,
    refusals,
)
from rubberband.api.routes.experiments import KEYED, REPLAYED_HEADER, Body, json_body, read_object, require_json
from rubberband.client import models
from rubberband.values.submission import LONGEST_NOTE, LONGEST_TAG, MOST_TAGS, LabelChange
from rubberband.views import experiment as views_json

router = APIRouter(tags=["experiments"], prefix="/v1/experiments", dependencies=[Depends(only_documented)])

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
