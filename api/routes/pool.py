"""`/v1/pool`: the pool that experiments share: who may hold how much of it, and what is promised."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Depends
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict

from rubberband.api.security.authentication import Reader
from rubberband.api.service import Service, Serving
from rubberband.api.web.answers import json_answer
from rubberband.api.web.models import example
from rubberband.api.web.openapi import only_documented, refusals
from rubberband.api.web.problems import NOT_FOUND, HttpProblem
from rubberband.states import ACTIVE

router = APIRouter(tags=["pool"], prefix="/v1", dependencies=[Depends(only_documented)])

_EXAMPLE: dict[str, Any] = {
    "name": "team",
    "provider": "local",
    "instances": 4,
    "gpus_per_instance": 2,
    "policy": "default",
    "experiments": [
        {
            "name": "digits-sha",
            "owner": "ann",
            "weight": 2.0,
            "state": "running",
            "instances": 2,
            "max_instances": 2,
            "promised_gpus": 4,
            "promise": {"start_at": 1795291200.0, "end_at": 1795292400.0},
        }
    ],
}


class PromiseView(BaseModel):
    """From when to when a pool's GPUs are promised (Unix time)."""

    start_at: float
    end_at: float


class MemberView(BaseModel):
    """An experiment that runs on the pool, or waits."""

    name: str
    owner: str
    weight: float
    """Its share relative to others."""
    state: str
    instances: int
    """Held now."""
    max_instances: int | None
    """The most that the pool allots it now; null before its first allotment."""
    promised_gpus: int
    """GPUs that it is promised now."""
    promise: PromiseView | None
    """Null without a promise."""


class PoolView(BaseModel):
    """A pool, and the experiments that share it."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})

    name: str
    provider: str
    instances: int
    gpus_per_instance: int
    policy: str
    experiments: list[MemberView]


@router.get(
    "/pool",
    summary="Get the pool",
    operation_id="getPool",
    response_model=PoolView,
    responses={200: example("The pool, and the experiments that share it.", _EXAMPLE), **refusals(NOT_FOUND)},
)
def get_pool(service: Serving, _reader: Reader) -> Response:
    """The experiments that run or wait, with what each may hold and what it is promised. 404 without a pool."""
    return json_answer(pool_view(service, time.time()))


def pool_view(service: Service, now: float) -> dict[str, Any]:
    """Return the pool at `now` (Unix time) as JSON values. Raises Problem NOT_FOUND without a pool."""
    pool, admission = service.settings.pool, service.admission
    if pool is None or admission is None:
        raise HttpProblem(NOT_FOUND, "this service shares no pool; start it with --pool FILE")
    promises = {promise.experiment: promise for promise in service.store.promises()}
    calendar, members = admission.calendar(), list[dict[str, Any]]()
    for row in service.store.submissions(states=list(ACTIVE), limit=500).items:
        if row.words.get("resources", {}).get("provider") != pool.provider:
            continue
        promise = promises.get(row.name)
        members.append(
            {
                "name": row.name,
                "owner": row.owner,
                "weight": pool.weights.get(row.owner, 1.0),
                "state": row.state.value,
                "instances": row.summary.instances,
                "max_instances": row.summary.max_instances,
                "promised_gpus": calendar.promised(row.name, now),
                "promise": None if promise is None else {"start_at": promise.start_at, "end_at": promise.end_at},
            }
        )
    shape = ("name", "provider", "instances", "gpus_per_instance", "policy")
    return {name: getattr(pool, name) for name in shape} | {"experiments": members}
