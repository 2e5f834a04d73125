"""Details of one experiment: trials, allocations, costs, decisions, logs, and the report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Depends, Query
from fastapi.responses import Response

from rubberband.api.security.authentication import Reader
from rubberband.api.service import Known, Serving
from rubberband.api.web.answers import json_answer
from rubberband.api.web.models import (
    ALLOCATIONS,
    COSTS,
    DECISIONS,
    LOGS,
    TRIALS,
    Allocations,
    Answer,
    Costs,
    Decisions,
    LogPage,
    Report,
    TrialPage,
    example,
)
from rubberband.api.web.openapi import only_documented, refusals
from rubberband.api.web.problems import CONFLICT, INVALID, NOT_FOUND, HttpProblem, Kind
from rubberband.executor.core.state import TrialStatus
from rubberband.executor.result import rows
from rubberband.executor.result.result import Result
from rubberband.units import shown
from rubberband.views import experiment as views_json

router = APIRouter(tags=["experiments"], prefix="/v1/experiments/{name}", dependencies=[Depends(only_documented)])

_CSV = "text/csv"
MAX_TRIAL = (1 << 31) - 1
_REPORT = {"schema": "rubberband.report/1", "name": "digits-sha", "outcome": "done"}

_Route = TypeVar("_Route", bound=Callable[..., Response])


def _part(
    path: str, summary: str, id: str, model: type[Answer], description: str, sample: Any, *refused: Kind
) -> Callable[[_Route], _Route]:
    """Declare a route below an experiment; `sample` is an example of its answer."""
    responses = {200: example(description, sample), **refusals(NOT_FOUND, *refused)}
    return router.get(path, summary=summary, operation_id=id, response_model=model, responses=responses)


@_part(
    "/trials", "List an experiment's trials", "listTrials", TrialPage, "A page of trials, by number.", TRIALS, INVALID
)
def list_trials(
    service: Serving,
    _reader: Reader,
    experiment: Known,
    status: Annotated[list[TrialStatus] | None, Query(description="Only trials with this status; repeats.")] = None,
    limit: Annotated[int, Query(ge=1, le=10_000, description="The largest number to return.")] = 1000,
    cursor: Annotated[str | None, Query(max_length=20, description="`next` of the previous page.")] = None,
    curves: Annotated[
        bool, Query(description="With learning curves, batch sizes and shares of unequal workers.")
    ] = False,
) -> Response:
    """Empty until it began."""
    result = service.runs.result(experiment.name)
    begin = 0 if cursor is None else _place(cursor)
    trials = () if result is None else result.trials[begin:]
    found = [trial for trial in trials if not status or trial.status in status]
    items = [views_json.trial_view(trial, curves=curves) for trial in found[:limit]]
    return json_answer({"items": items, "next": str(found[limit].trial) if len(found) > limit else None})


def _place(cursor: str) -> int:
    """Return the first trial of a page."""
    if not (cursor.isascii() and cursor.isdigit()):
        raise HttpProblem(
            INVALID, f"cursor {shown(cursor)} was not issued by this service; leave it out for the first page"
        )
    return int(cursor)


@_part(
    "/allocations",
    "Get an experiment's instances and their use",
    "getAllocations",
    Allocations,
    "Instances, busy GPUs, and the plan.",
    ALLOCATIONS,
)
def get_allocations(service: Serving, _reader: Reader, experiment: Known) -> Response:
    """All instants are seconds from the start. Empty until it began."""
    return json_answer(views_json.allocations(service.runs.result(experiment.name)))


@_part("/costs", "Get an experiment's bill", "getCosts", Costs, "The bill so far, against plan and cap.", COSTS)
def get_costs(service: Serving, _reader: Reader, experiment: Known) -> Response:
    """In US dollars, by stage and by instance, and where the paid time of GPUs went."""
    return json_answer(views_json.costs(experiment, service.runs.result(experiment.name)))


@_part(
    "/decisions",
    "Get an experiment's decisions",
    "listDecisions",
    Decisions,
    "Decisions and extensions, in order.",
    DECISIONS,
)
def list_decisions(service: Serving, _reader: Reader, experiment: Known) -> Response:
    """At the end of each stage the rest is planned again; also how limits were extended."""
    return json_answer(views_json.decisions(service.runs.result(experiment.name)))


@_part("/logs", "Read an experiment's logs", "readLogs", LogPage, "Lines, oldest first.", LOGS, INVALID)
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


@_part(
    "/report",
    "Get an experiment's report",
    "getReport",
    Report,
    "As `rubberband report -o json` prints it.",
    _REPORT,
    CONFLICT,
)
def get_report(service: Serving, _reader: Reader, experiment: Known) -> Response:
    """The best configuration, stages, time and cost planned against actual, and all trials; also while it runs."""
    return json_answer(views_json.plain(_begun(service, experiment).to_json()))


@router.get(
    "/export",
    summary="Export an experiment's trials",
    operation_id="exportTrials",
    response_class=Response,
    response_model=None,
    responses={
        200: {
            "description": "As `rubberband export` writes it: CSV with a header.",
            "content": {
                _CSV: {
                    "schema": {"type": "string"},
                    "example": "trial,status,accuracy\n0,completed,0.97\n",
                }
            },
        },
        **refusals(NOT_FOUND, CONFLICT),
    },
)
def export_trials(
    service: Serving,
    _reader: Reader,
    experiment: Known,
    reports: Annotated[bool, Query(description="A row for each report, instead of one for each trial.")] = False,
) -> Response:
    """A row for each trial: configuration, metrics, iterations, status, GPU time, and its share of the bill."""
    result = _begun(service, experiment)
    found = rows.report_rows(result) if reports else rows.trial_rows(result)
    name = f"{experiment.name}{'-reports' if reports else ''}.csv"
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return Response(rows.to_csv(found), media_type=_CSV, headers=headers)


def _begun(service: Serving, experiment: Known) -> Result:
    result = service.runs.result(experiment.name)
    if result is None:
        state = experiment.state.value
        raise HttpProblem(CONFLICT, f"experiment {experiment.name!r} is {state}: there is nothing to report yet; wait")
    return result
