"""What is known of one experiment in detail: trials, allocations, costs, decisions, logs, and the whole report."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query
from fastapi.responses import Response

from rubberband.api.answers import json_answer
from rubberband.api.models import (
    ALLOCATIONS,
    COSTS,
    DECISIONS,
    LOGS,
    TRIALS,
    Allocations,
    Costs,
    Decisions,
    LogPage,
    Report,
    TrialPage,
    example,
)
from rubberband.api.names import Known
from rubberband.api.openapi import only_documented, refusals
from rubberband.api.problems import CONFLICT, INVALID, NOT_FOUND, Problem
from rubberband.api.security.authentication import Reader
from rubberband.api.service import Serving
from rubberband.executor.core.state import TrialStatus
from rubberband.units import shown
from rubberband.views import experiment as views_json

router = APIRouter(tags=["experiments"], prefix="/v1/experiments/{name}", dependencies=[Depends(only_documented)])

MAX_TRIAL = (1 << 31) - 1


@router.get(
    "/trials",
    summary="List an experiment's trials",
    operation_id="listTrials",
    response_model=TrialPage,
    responses={200: example("A page of trials, by number.", TRIALS), **refusals(NOT_FOUND, INVALID)},
)
def list_trials(
    service: Serving,
    _reader: Reader,
    experiment: Known,
    status: Annotated[list[TrialStatus] | None, Query(description="Only trials with this status; repeats.")] = None,
    limit: Annotated[int, Query(ge=1, le=10_000, description="The largest number to return.")] = 1000,
    cursor: Annotated[str | None, Query(max_length=20, description="`next` of the previous page.")] = None,
    curves: Annotated[bool, Query(description="With learning curves and batch sizes.")] = False,
) -> Response:
    """Empty until it began."""
    result = service.runs.result(experiment.name)
    begin = 0 if cursor is None else _place(cursor)
    trials = () if result is None else result.trials[begin:]
    found = [trial for trial in trials if not status or trial.status in status]
    items = [views_json.trial_view(trial, curves=curves) for trial in found[:limit]]
    return json_answer({"items": items, "next": str(found[limit].trial) if len(found) > limit else None})


def _place(cursor: str) -> int:
    """The number of the trial that a page begins with."""
    if not (cursor.isascii() and cursor.isdigit()):
        raise Problem(
            INVALID, f"cursor {shown(cursor)} was not issued by this service; leave it out for the first page"
        )
    return int(cursor)


@router.get(
    "/allocations",
    summary="Get an experiment's instances and their use",
    operation_id="getAllocations",
    response_model=Allocations,
    responses={200: example("Instances, busy GPUs, and the plan.", ALLOCATIONS), **refusals(NOT_FOUND)},
)
def get_allocations(service: Serving, _reader: Reader, experiment: Known) -> Response:
    """All instants are seconds from the start. Empty until it began."""
    return json_answer(views_json.allocations(service.runs.result(experiment.name)))


@router.get(
    "/costs",
    summary="Get an experiment's bill",
    operation_id="getCosts",
    response_model=Costs,
    responses={200: example("The bill so far, against plan and cap.", COSTS), **refusals(NOT_FOUND)},
)
def get_costs(service: Serving, _reader: Reader, experiment: Known) -> Response:
    """In US dollars, by stage and by instance, and where the paid time of GPUs went."""
    return json_answer(views_json.costs(experiment, service.runs.result(experiment.name)))


@router.get(
    "/decisions",
    summary="Get an experiment's decisions",
    operation_id="listDecisions",
    response_model=Decisions,
    responses={200: example("Decisions and extensions, in order.", DECISIONS), **refusals(NOT_FOUND)},
)
def list_decisions(service: Serving, _reader: Reader, experiment: Known) -> Response:
    """At the end of each stage the rest is planned again; also how limits were extended."""
    return json_answer(views_json.decisions(service.runs.result(experiment.name)))


@router.get(
    "/logs",
    summary="Read an experiment's logs",
    operation_id="readLogs",
    response_model=LogPage,
    responses={200: example("Lines, oldest first.", LOGS), **refusals(NOT_FOUND, INVALID)},
)
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
) -> Response:
    """Ask again with `next` for what was printed since."""
    lines, following = service.runs.lines(experiment.name, source=source, trial=trial, cursor=cursor, limit=limit)
    return json_answer({"lines": [{"trial": line.trial, "text": line.text} for line in lines], "next": following})


@router.get(
    "/report",
    summary="Get an experiment's report",
    operation_id="getReport",
    response_model=Report,
    responses={
        200: example(
            "As `rubberband report -o json` prints it.",
            {"schema": "rubberband.report/1", "name": "digits-sha", "outcome": "done"},
        ),
        **refusals(NOT_FOUND, CONFLICT),
    },
)
def get_report(service: Serving, _reader: Reader, experiment: Known) -> Response:
    """The best configuration, stages, time and cost planned against actual, and all trials; also while it runs."""
    result = service.runs.result(experiment.name)
    if result is None:
        state: Any = experiment.state.value
        raise Problem(CONFLICT, f"experiment {experiment.name!r} is {state}: there is nothing to report yet; wait")
    return json_answer(views_json.plain(result.to_json()))
