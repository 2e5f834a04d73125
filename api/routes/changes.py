"""`/v1/experiments/NAME/extend`, `trials` and `limit`: more time, money or trials for it, and a limit of instances."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from rubberband.api.experiments.extending import Wanted
from rubberband.api.problems import CONFLICT, INVALID, MEDIA, NOT_FOUND, TOO_LONG, UNAVAILABLE, HttpProblem
from rubberband.api.routes import Known, Service, Serving, Submitter, caller_of
from rubberband.api.routes.answers import (
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
from rubberband.api.routes.experiments import KEYED, REPLAYED_HEADER, Route, acted, action
from rubberband.api.store.schema import Principal
from rubberband.client import models
from rubberband.executor.journal.inbox import NewTrials
from rubberband.spec.fields import Usd
from rubberband.views import experiment as views_json


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


router = APIRouter(tags=["experiments"], prefix="/v1/experiments", dependencies=[Depends(only_documented)])


def _change(
    path: str, summary: str, operation_id: str, body: type[BaseModel], examples: dict[str, Any]
) -> Callable[[Route], Route]:
    """Return the decorator of a route whose answer is the effect of a change, which it makes unless it is a dry run."""
    return router.post(
        f"/{{name}}/{path}",
        summary=summary,
        operation_id=operation_id,
        response_model=models.ExtensionView,
        openapi_extra=json_body(body, examples),
        responses={
            200: example("Expected time and cost, before and after.", "extension") | {"headers": REPLAYED_HEADER},
            **refusals(NOT_FOUND, CONFLICT, MEDIA, INVALID, TOO_LONG, UNAVAILABLE, *KEYED),
        },
    )


@_change(
    "extend",
    "Extend an experiment's deadline, budget or trials, or change its target",
    "extendExperiment",
    ExtendBody,
    {
        "look": {"summary": "Effect of half an hour more", "value": {"deadline": "50m"}},
        "do": {"summary": "Do it", "value": {"deadline": "50m", "max_cost": 12.5, "dry_run": False}},
        "trials": {"summary": "Sixteen more trials", "value": {"num_samples": "+16", "dry_run": False}},
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


@_change(
    "trials",
    "Add a trial to a search",
    "addTrial",
    AddBody,
    {
        "look": {"summary": "Effect of a configuration", "value": {"configuration": {"lr": 0.01}}},
        "do": {"summary": "Add it", "value": {"configuration": {"lr": 0.01}, "dry_run": False}},
        "clone": {
            "summary": "Another trial with a change",
            "value": {"clone_of": 3, "configuration": {"lr": 1e-4}, "from_checkpoint": True, "dry_run": False},
        },
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
        configuration=asked_for.configuration, clone_of=asked_for.clone_of, from_checkpoint=asked_for.from_checkpoint
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
