"""Details of an experiment below `/v1/experiments/NAME`: allocations, costs, decisions, logs and the report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query
from fastapi.responses import Response

from rubberband.api.problems import CONFLICT, INVALID, NOT_FOUND, HttpProblem, Kind
from rubberband.api.routes import Known, Reader, Service, Serving
from rubberband.api.routes.answers import example, json_answer, only_documented, refusals
from rubberband.api.routes.experiments import Route
from rubberband.client import models
from rubberband.executor.logs.pages import Wanted
from rubberband.executor.result.result import Result
from rubberband.values.submission import Submission
from rubberband.views import experiment as views_json

router = APIRouter(tags=["experiments"], prefix="/v1/experiments", dependencies=[Depends(only_documented)])
MAX_TRIAL = (1 << 31) - 1
MAX_RANK = 999_999


def part(
    router: APIRouter, path: str, summary: str, id: str, model: type, description: str, sample: str, *refused: Kind
) -> Callable[[Route], Route]:
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
    rank: Annotated[
        int | None, Query(ge=0, le=MAX_RANK, description="Only lines of the worker of a gang that has this rank.")
    ] = None,
    cursor: Annotated[str | None, Query(max_length=4000, description="`next` of the previous answer.")] = None,
    limit: Annotated[int, Query(ge=1, le=10_000, description="The largest number of lines to return.")] = 1000,
    search: Annotated[
        str, Query(max_length=200, description="Only lines with this text, in upper or lower case.", examples=["epoch"])
    ] = "",
) -> Response:
    """Ask again with `next` for what was printed since; with `search` or `rank`, until `next` stays the same.

    `rank` of a line is null if its trial trained on one worker then, or no worker printed it.
    """
    wanted = Wanted(text=search, rank=rank)
    lines, following = service.runs.lines(
        experiment.name, source=source, trial=trial, cursor=cursor, limit=limit, wanted=wanted
    )
    return json_answer({"lines": [asdict(line) for line in lines], "next": following})


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
