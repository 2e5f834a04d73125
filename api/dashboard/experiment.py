"""One experiment's page, the parts of it that are fetched again, its figures, and its report."""

from __future__ import annotations

import gzip
import hashlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse, Response
from markupsafe import Markup

from rubberband.api.dashboard import experiment_words as words
from rubberband.api.dashboard.experiment_trials import Asked, trial_page
from rubberband.api.dashboard.frame import render
from rubberband.api.names import Known
from rubberband.api.problems import NOT_FOUND, Problem
from rubberband.api.security.authentication import Reader
from rubberband.api.service import Service, Serving
from rubberband.errors import InputError, RubberbandError
from rubberband.executor.core.forecast import Forecast
from rubberband.executor.result import Result
from rubberband.states import ACTIVE, Action, ExperimentState
from rubberband.units import parse_deadline
from rubberband.values.submission import Submission
from rubberband.views.allocation_chart import ALLOCATION_NOTE, allocation
from rubberband.views.batch_charts import BATCHES_NOTE, batches_over_time
from rubberband.views.charts import Figure
from rubberband.views.learning_chart import CURVES_NOTE, learning_curves
from rubberband.views.parallel_coordinates import PARALLEL_NOTE, parallel_coordinates
from rubberband.views.report_html import CONTENT_POLICY, render_html, script_json
from rubberband.views.spending import SPEND_NOTE, spend
from rubberband.views.tables import TextTable, failures, incidents
from rubberband.views.words import duration, printable, setting, usd

# What was submitted, as the page of an experiment tells it that has not begun (or never did). Pure.


Fact = tuple[str, str]
"""What, and what is asked for."""
_SAME_DAY_S = 12 * 3600.0
"""So near, the time of day is enough."""


def facts(submission: Submission, now: float) -> list[Fact]:
    """Code, place, search and limits, as far as the file says; at `now` (Unix time)."""
    words = submission.words
    found = [
        ("runs", str(words.get("entrypoint") or "")),
        ("on", " ".join(_place(_part(words, "resources")))),
        ("searches", ", ".join(_search(_part(words, "search")))),
        *_limits(_part(words, "constraints"), now),
        ("policy", "" if submission.policy == "optimal" else submission.policy),
        ("profile", "" if words.get("profile") or not words else "measured first"),
    ]
    return [(what, printable(told)) for what, told in found if told]


def _part(words: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = words.get(name)
    return found if isinstance(found, Mapping) else {}


def _place(resources: Mapping[str, Any]) -> Iterator[str]:
    types = resources.get("instance_types") or resources.get("instance_type")
    if most := resources.get("max_instances"):
        yield f"up to {most} x" if types else f"up to {most} instances"
    if types:
        yield " or ".join(map(str, types)) if isinstance(types, list | tuple) else str(types)
    if resources.get("market") == "spot":
        yield "on spot"
    if provider := resources.get("provider"):
        yield f"({provider}, {resources['region']})" if provider == "aws" else f"({provider})"


def _search(search: Mapping[str, Any]) -> Iterator[str]:
    scheduler = _part(search, "scheduler")
    kind = f" ({scheduler['type']})" if scheduler.get("type") else ""
    if number := scheduler.get("num_samples"):
        yield f"{setting(number)} configurations{kind}"
    if metric := search.get("metric"):
        yield f"for the {'highest' if search.get('mode') == 'max' else 'lowest'} {metric}"


def _limits(constraints: Mapping[str, Any], now: float) -> Iterator[Fact]:
    yield "deadline", _deadline(constraints.get("deadline"), now)
    cap_usd = constraints.get("max_cost")
    yield "max_cost", f"{usd(cap_usd)} USD" if isinstance(cap_usd, int | float) else "none"


def _deadline(asked: Any, now: float) -> str:
    if asked is None:
        return "none"
    try:
        found = parse_deadline(asked)
    except InputError:
        return str(asked)
    if not isinstance(found, datetime):
        return f"{duration(found)} from the start"
    left_s = found.timestamp() - now
    when = f"{found:%H:%M} UTC" if abs(left_s) < _SAME_DAY_S else f"{found:%Y-%m-%d %H:%M} UTC"
    return f"in {duration(left_s)}, at {when}" if left_s >= 0 else f"passed {duration(-left_s)} ago, at {when}"


router = APIRouter(include_in_schema=False)

CHARTS = {
    "curves": ("Learning curves", CURVES_NOTE),
    "spend": ("Spend", SPEND_NOTE),
    "allocation": ("Instances and GPUs", ALLOCATION_NOTE),
    "batches": ("Batch sizes", BATCHES_NOTE),
    "parallel": ("Configurations", PARALLEL_NOTE),
}
"""Charts of the page: their titles, and what is to be known to read them."""

_MANY_BYTES = 8192
_MOST_ROWS = 25


def asked_trials(
    sort: Annotated[str, Query(max_length=200)] = "",
    down: Annotated[str, Query(max_length=10)] = "",
    status: Annotated[str, Query(max_length=40)] = "",
    page: Annotated[str, Query(max_length=10)] = "",
) -> Asked:
    """A dependency: which trials are to be seen."""
    number = int(page) if page.isascii() and page.isdigit() else 1
    return Asked(sort=sort, down=down == "1", status=status, page=number)


Trials = Annotated[Asked, Depends(asked_trials)]


@router.get("/experiments/{name}")
def experiment_page(request: Request, service: Serving, _reader: Reader, experiment: Known, asked: Trials) -> Response:
    """The page of an experiment."""
    after = service.store.last_feed_id()
    result = _result(service, experiment)
    data = Markup(script_json(figures(experiment, result)))
    values = _shown(service, experiment, result, asked)
    return render(request, "experiment.html", **values, after=after, figures=data)


@router.get("/fragments/experiments/{name}")
def experiment_live(request: Request, service: Serving, _reader: Reader, experiment: Known, asked: Trials) -> Response:
    """What changes of the page of an experiment."""
    shown = _shown(service, experiment, _result(service, experiment), asked)
    return render(request, "experiment_live.html", **shown)


@router.get("/experiments/{name}/figures")
def experiment_figures(request: Request, service: Serving, _reader: Reader, experiment: Known) -> Response:
    """The page's charts as JSON: chart -> Plotly figure. A chart that has nothing to show yet is missing."""
    body = script_json(figures(experiment, _result(service, experiment))).encode()
    version = f'"{hashlib.sha256(body).hexdigest()[:20]}"'
    headers = {"ETag": version, "Cache-Control": "private, no-cache", "Vary": "Accept-Encoding"}
    if request.headers.get("if-none-match") == version:
        return Response(status_code=304, headers=headers)
    if len(body) > _MANY_BYTES and "gzip" in request.headers.get("accept-encoding", ""):
        body, headers["Content-Encoding"] = gzip.compress(body, compresslevel=1, mtime=0), "gzip"
    return Response(body, headers=headers, media_type="application/json")


@router.get("/experiments/{name}/report")
def experiment_report(service: Serving, _reader: Reader, experiment: Known) -> Response:
    """The report as one page, which may be kept as a file. Raises Problem if nothing is journalled yet."""
    result = _result(service, experiment)
    if result is None:
        raise Problem(NOT_FOUND, f"{experiment.name!r} has no report yet: it has not started")
    policy = f"{CONTENT_POLICY}; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
    headers = {"Content-Security-Policy": policy, "Cache-Control": "no-store"}
    return HTMLResponse(render_html(result), headers=headers)


def _result(service: Service, experiment: Submission) -> Result | None:
    """What came of it so far. Of a journal that cannot be read nothing is known: the page says so."""
    try:
        return service.runs.result(experiment.name)
    except (Problem, RubberbandError):
        if experiment.state is ExperimentState.UNREADABLE:
            return None
        raise


def _possible(service: Service, experiment: Submission) -> frozenset[Action]:
    try:
        return service.runs.possible(experiment)
    except Problem:  # its journal cannot be read just now
        return frozenset()


def figures(experiment: Submission, result: Result | None) -> dict[str, Figure]:
    """The charts that there are."""
    if result is None:
        return {}
    search = experiment.words.get("search")
    space = search.get("space") if isinstance(search, dict) else None
    drawn = {
        "curves": learning_curves(result),
        "spend": spend(result, _forecast(experiment)),
        "allocation": allocation(result),
        "batches": batches_over_time(result),
        "parallel": parallel_coordinates(result, space if isinstance(space, dict) else None),
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}


def _forecast(experiment: Submission) -> Forecast | None:
    summary = experiment.summary
    runs = experiment.state is ExperimentState.RUNNING
    if not runs or summary.forecast_jct_s is None or summary.forecast_cost_usd is None:
        return None
    return Forecast(jct_s=summary.forecast_jct_s, cost_usd=summary.forecast_cost_usd)


def _shown(service: Service, experiment: Submission, result: Result | None, asked: Asked) -> dict[str, Any]:
    is_queued = experiment.state is ExperimentState.QUEUED
    turn = words.turn(service.store.count_states()) if is_queued else ""
    kind, state = words.badge(experiment, result)
    begun = result is not None and experiment.summary.started_at is not None
    return {
        "experiment": experiment,
        "result": result if begun else None,
        "kind": kind,
        "state": state,
        "is_active": experiment.state in ACTIVE,
        "sentence": words.sentence(experiment, result),
        "actions": _possible(service, experiment),
        "charts": CHARTS,
        "address": f"/fragments/experiments/{experiment.name}",
        "facts": [] if begun else facts(experiment, time.time()),
        "turn": turn,
        **(_told(experiment, result, asked) if begun and result is not None else {}),
    }


def _told(experiment: Submission, result: Result, asked: Asked) -> dict[str, Any]:
    return {
        "cards": words.cards(experiment, result),
        "stages": words.stage_rows(result),
        "happenings": words.happenings(result),
        "trials": trial_page(result, asked),
        "tables": [_shortened(table) for table in (failures(result), incidents(result)) if table.rows],
    }


def _shortened(table: TextTable) -> TextTable:
    """Its first rows; the report has them all."""
    left = len(table.rows) - _MOST_ROWS
    if left <= 0:
        return table
    return replace(table, rows=table.rows[:_MOST_ROWS], notes=(f"{left:,} more are in the report.", *table.notes))
