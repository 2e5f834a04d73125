"""The pages of one experiment and of its trials, their parts that reload, their figures, and the report."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import HTMLResponse, Response

from rubberband.api.dashboard import experiment_texts as texts
from rubberband.api.dashboard.frame import frame_of, render, zipped
from rubberband.api.dashboard.listing import badge, tag_links
from rubberband.api.dashboard.trials_table import Asked, Trials, selected, table_page, whole
from rubberband.api.problems import NOT_FOUND, HttpProblem
from rubberband.api.routes import Known, Reader, Service, Serving
from rubberband.api.routes.queueing import queue_views
from rubberband.api.routes.trials import trial_of
from rubberband.errors import RubberbandError
from rubberband.executor.core.forecast import Forecast
from rubberband.executor.result.parts import TrialResult
from rubberband.executor.result.result import Result
from rubberband.features import made_by
from rubberband.states import ACTIVE, Action, ExperimentState
from rubberband.units import counted, duration, in_unit
from rubberband.values.command import entrypoint_text
from rubberband.values.kinds import KINDS
from rubberband.values.submission import Submission
from rubberband.views import equal_iterations
from rubberband.views.charts.allocation import gangs as gangs_chart
from rubberband.views.charts.allocation import gangs_px
from rubberband.views.charts.learning import CURVES_PX, learning_curves
from rubberband.views.charts.parallel_coordinates import Space
from rubberband.views.charts.parts import Figure
from rubberband.views.charts.search import contour, few_for_contour, importance_chart, question_of, to_json
from rubberband.views.formatting import TextTable, printable, setting, status, usd
from rubberband.views.report.page import (
    CHARTS,
    CONTENT_POLICY,
    OF_CONFIGURATIONS,
    charts_of,
    charts_to_expect,
    render_html,
    result_drawings,
    script_json,
    short,
)
from rubberband.views.report.tables import failures, incidents, paid_parts, paid_time, pareto, updates, workers
from rubberband.views.story import story
from rubberband.views.trial import configuration_texts, gangs, lead, most_workers, trial_cards

_TIMEOUT_S = 60.0
_KEPT = 32
_answers: OrderedDict[str, dict[str, float]] = OrderedDict()
_answering = threading.Lock()


def cached_importance(result: Result, space: Space = None) -> Figure | str:
    """Return the chart, or in a sentence why there is none."""
    question = question_of(result, space)
    if isinstance(question, str):
        return question
    text = to_json(question)
    key = hashlib.sha256(text.encode()).hexdigest()
    found = _answers.get(key)
    if found is None:
        if not _answering.acquire(timeout=_TIMEOUT_S):
            return "The importance of parameters is being computed for other experiments; reload the page."
        try:
            found = _answers[key] = _answers.get(key) or _computed(text)
            while len(_answers) > _KEPT:
                _answers.popitem(last=False)
        except (subprocess.SubprocessError, OSError, ValueError) as error:
            return f"The importance of parameters cannot be computed: {_cause(error)}."
        finally:
            _answering.release()
    return importance_chart(found, question.note)


def _computed(text: str) -> dict[str, float]:
    command = [sys.executable, "-m", "rubberband.views.charts.search"]
    ran = subprocess.run(command, input=text, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    shares: dict[str, float] = json.loads(ran.stdout)
    return shares


def _cause(error: Exception) -> str:
    if isinstance(error, subprocess.TimeoutExpired):
        return f"it took longer than {_TIMEOUT_S:g} s"
    if isinstance(error, subprocess.CalledProcessError):
        return str(error.stderr).strip().rpartition("\n")[2] or "its process ended"
    return str(error)


# The submission, as the page of an experiment shows it that has not started. Pure.

Fact = tuple[str, str]
"""Label and value."""


def facts(submission: Submission, now: float) -> list[Fact]:
    """Return entry point, resources, search and limits, as far as the file says; at `now` (Unix time)."""
    words = submission.words
    found = [
        ("runs", entrypoint_text(words.get("entrypoint")) or ""),
        ("on", " ".join(_place(_part(words, "resources")))),
        ("searches", ", ".join(_search(_part(words, "search")))),
        *_limits(submission, now),
        ("policy", "" if submission.policy == "optimal" else submission.policy),
        ("profile", "" if words.get("profile") or not words else "measured first"),
    ]
    return [(what, printable(text)) for what, text in found if text]


def _part(words: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = words.get(name)
    return found if isinstance(found, Mapping) else {}


def _place(resources: Mapping[str, Any]) -> Iterator[str]:
    types = resources.get("instance_types") or resources.get("instance_type")
    if most := resources.get("max_instances"):
        yield f"up to {most} x" if types else f"up to {counted(most, 'instance')}"
    if types:
        yield " or ".join(map(str, types)) if isinstance(types, list | tuple) else str(types)
    if resources.get("market") == "spot":
        yield "on spot"
    if provider := resources.get("provider"):
        has_regions = provider in KINDS and KINDS[provider].is_rented and KINDS[provider].region is not None
        yield f"({provider}, {resources['region']})" if has_regions else f"({provider})"


def _search(search: Mapping[str, Any]) -> Iterator[str]:
    scheduler = _part(search, "scheduler")
    kind = f" ({scheduler['type']})" if scheduler.get("type") else ""
    if number := scheduler.get("num_samples"):
        yield ("as many configurations as fit" if number == "auto" else f"{setting(number)} configurations") + kind
    if metric := search.get("metric"):
        yield f"for the {'highest' if search.get('mode') == 'max' else 'lowest'} {metric}"


def _limits(submission: Submission, now: float) -> Iterator[Fact]:
    yield "deadline", _deadline(submission, now)
    cap_usd = _part(submission.words, "constraints").get("max_cost")
    yield "max_cost", f"{usd(cap_usd)} USD" if isinstance(cap_usd, int | float) else "none"


def _deadline(submission: Submission, now: float) -> str:
    at = submission.deadline_at
    if at is None:
        return "none"
    left = f"in {duration(at - now)}" if at >= now else f"passed {duration(now - at)} ago"
    return f"{submission.deadline}, {left}"


router = APIRouter(include_in_schema=False)

_MOST_ROWS = 25
_JUMPS = {
    "curves": "Curves",
    "allocation": "Instances",
    "batches": "Batches",
    "importance": "Importance",
    "trade-off": "Trade-off",
    "slices": "By parameter",
    "contour": "By two",
}
"""Short words of charts for the line of jumps; the others have their titles."""

Parameter = Annotated[str, Query(max_length=200)]
Top = Annotated[str, Query(max_length=5)]


@router.get("/experiments/{name}")
def experiment_page(request: Request, service: Serving, _reader: Reader, experiment: Known, asked: Trials) -> Response:
    """Page of an experiment."""
    after = service.store.last_feed_id()
    result = result_of(service, experiment)
    values = {**_shown(service, experiment, result, asked), "workers": most_workers(result), "known": CHARTS}
    return render(request, "experiment.html", **values, after=after, unit=experiment.summary.unit)


@router.get("/fragments/experiments/{name}")
def experiment_live(request: Request, service: Serving, _reader: Reader, experiment: Known, asked: Trials) -> Response:
    """Part of the page that reloads."""
    shown = _shown(service, experiment, result_of(service, experiment), asked)
    return render(request, "experiment_live.html", **shown, unit=experiment.summary.unit)


@router.get("/experiments/{name}/figures/{chart}")
def experiment_figure(
    request: Request,
    service: Serving,
    _reader: Reader,
    experiment: Known,
    chart: Annotated[str, Path(max_length=40)],
    asked: Trials,
    top: Top = "",
) -> Response:
    """Chart of the page as JSON: its name -> Plotly figure; empty without anything to show.

    `top`: curves of that many of the best trials only. Charts of trials have those that the table has.
    """
    if chart not in CHARTS:
        raise HttpProblem(NOT_FOUND, f"the page of {experiment.name!r} has no such chart")
    result = result_of(service, experiment)
    if chart == "curves" and result is not None:
        result = selected(result, asked, _space(experiment))
    elif chart in OF_CONFIGURATIONS:
        ranges = () if chart == "parallel" else asked.brush  # the page greys what is out of them
        result = _compared(result, replace(asked, brush=ranges), _space(experiment))
    drawings = {} if result is None else result_drawings(result, _space(experiment), _forecast(experiment))
    if chart == "curves" and result is not None:
        figure = learning_curves(result, top=whole(top) or None)
    else:
        figure = drawings[chart]() if chart in drawings else None
        if figure is not None and chart in OF_CONFIGURATIONS and asked.after:
            figure = _noted(figure, CHARTS[chart][1], asked.after)
    return json_of(request, {} if figure is None else {chart: figure}, experiment.summary.unit)


@router.get("/experiments/{name}/contour")
def experiment_contour(
    request: Request,
    service: Serving,
    _reader: Reader,
    experiment: Known,
    asked: Trials,
    x: Parameter = "",
    y: Parameter = "",
) -> Response:
    """Contour of two parameters, the first two unless others are named; or a note that there are too few trials."""
    result = _compared(result_of(service, experiment), asked, _space(experiment))
    figure = None if result is None else contour(result, _space(experiment), x=x, y=y)
    if result is None or figure is None:
        return json_of(request, {} if result is None or not (few := few_for_contour(result)) else {"note": few})
    return json_of(request, {"contour": figure})


@router.get("/experiments/{name}/importance")
def experiment_importance(
    request: Request, service: Serving, _reader: Reader, experiment: Known, asked: Trials
) -> Response:
    """Importance of the parameters as a Plotly figure, or a note that says why there is none."""
    result = _compared(result_of(service, experiment), asked, _space(experiment))
    if result is None:
        return json_of(request, {})
    found = cached_importance(result, _space(experiment))
    return json_of(request, {"note": found} if isinstance(found, str) else {"importance": found})


def json_of(request: Request, value: Mapping[str, Any], unit: str = "USD") -> Response:
    """Return charts as JSON whose amounts count in `unit`, with its version."""
    text = in_unit(script_json(short(value)), unit).encode()
    version = f'"{hashlib.sha256(text).hexdigest()[:20]}"'
    cached = {"ETag": version, "Cache-Control": "private, no-cache"}
    if request.headers.get("if-none-match") == version:
        return Response(status_code=304, headers=cached | {"Vary": "Accept-Encoding"})
    body, headers = zipped(request, text)
    return Response(body, headers=headers | cached, media_type="application/json")


@router.get("/experiments/{name}/report")
def experiment_report(request: Request, service: Serving, _reader: Reader, experiment: Known) -> Response:
    """Report as one file of HTML, in the site's frame. Raises Problem NOT_FOUND without a journal."""
    result = result_of(service, experiment)
    if result is None:
        raise HttpProblem(NOT_FOUND, f"{experiment.name!r} has no report yet: it has not started")
    policy = f"{CONTENT_POLICY}; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    headers = {"Content-Security-Policy": policy, "Cache-Control": "no-store"}
    space = _space(experiment)
    trials_at, frame = f"/experiments/{experiment.name}/trials", frame_of(request, experiment.name)
    page = render_html(result, cached_importance(result, space), trials_at, space, frame)
    return HTMLResponse(page, headers=headers)


def _noted(figure: Figure, note: str, iterations: int) -> Figure:
    """Return a chart with a note on the iterations after which it compares."""
    meta = figure["layout"].get("meta", {})
    after = f"after {counted(iterations, 'iteration')}"
    compared = re.sub(r"latest (metric|report)", rf"\1 {after}", meta.get("note", note))
    return {**figure, "layout": figure["layout"] | {"meta": meta | {"note": compared}}}


def _compared(result: Result | None, asked: Asked, space: Space) -> Result | None:
    """Return the chosen trials as they stood after the iterations that are asked for."""
    return None if result is None else equal_iterations.after(selected(result, asked, space), asked.after)


def result_of(service: Service, experiment: Submission) -> Result | None:
    """Return the result so far; None for an unreadable journal, which the page reports."""
    try:
        result = service.runs.result(experiment.name)
    except (HttpProblem, RubberbandError):
        if experiment.state is ExperimentState.UNREADABLE:
            return None
        raise
    return None if result is None else result.shown


def possible(service: Service, experiment: Submission) -> frozenset[Action]:
    """Return the actions that an experiment's state allows; none if its journal cannot be read now."""
    try:
        return service.runs.possible(experiment)
    except HttpProblem:
        return frozenset()


def _space(experiment: Submission) -> dict[str, Any] | None:
    search = experiment.words.get("search")
    space = search.get("space") if isinstance(search, dict) else None
    return space if isinstance(space, dict) else None


def _forecast(experiment: Submission) -> Forecast | None:
    summary = experiment.summary
    runs = experiment.state is ExperimentState.RUNNING
    if not runs or summary.forecast_jct_s is None or summary.forecast_cost_usd is None:
        return None
    run_usd = summary.forecast_cost_usd - summary.profiling_cost_usd
    return Forecast(jct_s=summary.forecast_jct_s, cost_usd=run_usd)


def _shown(service: Service, experiment: Submission, result: Result | None, asked: Asked) -> dict[str, Any]:
    kind, state = badge(experiment)
    begun = result is not None and experiment.summary.started_at is not None
    shown = {
        "experiment": experiment,
        "result": result if begun else None,
        "kind": kind,
        "state": state,
        "is_active": experiment.state in ACTIVE,
        "sentence": texts.sentence(experiment, result),
        "actions": possible(service, experiment),
        "charts": CHARTS if result is None else charts_of(result),
        "jumps": _JUMPS,
        "expected": charts_to_expect(result) if begun and result is not None else {},
        "address": f"/fragments/experiments/{experiment.name}",
        "facts": [] if begun else facts(experiment, service.settings.clock()),
        "tags": tag_links(experiment),
        "queue": queue_views(service, [experiment]).get(experiment.name),
    }
    if not begun or result is None:
        return shown
    paid = paid_time(result)
    return shown | {
        "paid": paid,
        "paid_parts": paid_parts(paid),
        "use": made_by("use of trials", result.trials),
        "troubles": texts.troubles(result),
        "cards": texts.cards(experiment, result),
        "best": best_of(experiment, result),
        "stages": texts.stage_rows(result, experiment.summary.target_iterations),
        "rungs": texts.rungs_reached(result),
        "story": story(result),
        "trials": table_page(result, asked, _space(experiment)),
        "asked": asked,
        "pareto": _shortened(pareto(result, None)),
        "tables": [_shortened(table) for table in _tables(result) if table.rows],
    }


def best_of(experiment: Submission, result: Result) -> dict[str, Any] | None:
    """Return the best trial for the page, with its lead over the next one; None before the first report."""
    best = result.best
    if best is None:
        return None
    return {
        "trial": best,
        "lead": lead(result, best),
        "infeasible": result.infeasible,
        "texts": configuration_texts(best.configuration, experiment.words.get("entrypoint")),
        "download": download_address(experiment.name, best),
    }


def download_address(name: str, trial: TrialResult) -> str:
    """Return the address of its checkpoint; empty if it has none, or only a virtual one."""
    has_one = trial.checkpoint is not None and not trial.checkpoint.url.startswith("virtual:")
    return f"/v1/experiments/{name}/trials/{trial.trial}/checkpoint" if has_one else ""


def _tables(result: Result) -> tuple[TextTable, ...]:
    return workers(result, None), updates(result, None), failures(result), incidents(result)


def _shortened(table: TextTable) -> TextTable:
    """Return the first rows; the report has them all."""
    left = len(table.rows) - _MOST_ROWS
    if left <= 0:
        return table
    return replace(table, rows=table.rows[:_MOST_ROWS], notes=(f"{left:,} more are in the report.", *table.notes))


# The page of one trial: its configuration, its curve among the others, its gangs, checkpoint, failures and log.

_TRIAL_CHARTS = {
    "curves": (
        "Its curve among the others",
        "Blue is this trial, orange the best one; click a curve for the page of its trial, drag to zoom. Dollars: the "
        "trial's share of the bill, by the GPU time that it has held.",
    ),
    "use": ("GPU use", "Parts of the time in which it trained, over stretches of a minute at most."),
    "gangs": (
        "Its gangs over time",
        "Each bar is a GPU that it had, its colour the stage (or bracket, or rung). Dotted: ends of stages.",
    ),
}
"""Charts of a trial, in their order: name -> title and note."""
_Number = Annotated[str, Path(max_length=20)]


@router.get("/experiments/{name}/trials/{trial}")
def trial_page(request: Request, service: Serving, _reader: Reader, experiment: Known, trial: _Number) -> Response:
    """Page of a trial."""
    after = service.store.last_feed_id()
    shown = _trial_shown(service, experiment, trial)
    return render(request, "trial.html", **shown, after=after, unit=experiment.summary.unit)


@router.get("/fragments/experiments/{name}/trials/{trial}")
def trial_live(request: Request, service: Serving, _reader: Reader, experiment: Known, trial: _Number) -> Response:
    """Part of the page that reloads."""
    return render(request, "trial_live.html", **_trial_shown(service, experiment, trial), unit=experiment.summary.unit)


@router.get("/experiments/{name}/trials/{trial}/figures/{chart}")
def trial_figure(
    request: Request,
    service: Serving,
    _reader: Reader,
    experiment: Known,
    trial: _Number,
    chart: Annotated[str, Path(max_length=40)],
    top: Top = "",
) -> Response:
    """Chart of the page as JSON: its name -> Plotly figure; empty without anything to show."""
    if chart not in _TRIAL_CHARTS:
        raise HttpProblem(NOT_FOUND, f"the page of a trial of {experiment.name!r} has no such chart")
    result, found = trial_of(experiment, result_of(service, experiment), trial)
    most = whole(top) or None
    draw: dict[str, Callable[[], Figure | None]] = {
        "curves": lambda: learning_curves(result, trial=found.trial, top=most),
        "use": lambda: made_by("use over time", result, found.trial),
        "gangs": lambda: gangs_chart(result, found.trial),
    }
    figure = draw[chart]()
    return json_of(request, {} if figure is None else {chart: figure}, experiment.summary.unit)


def _trial_shown(service: Service, experiment: Submission, number: str) -> dict[str, Any]:
    result, trial = trial_of(experiment, result_of(service, experiment), number)
    here = f"/experiments/{experiment.name}/trials"
    use = made_by("use over time", result, trial.trial)
    heights_px = {
        "curves": CURVES_PX if trial.curve else 0,
        "use": use["layout"]["height"] if use else 0,
        "gangs": gangs_px(result, trial.trial),
    }
    charts = charts_of(result, _TRIAL_CHARTS)
    if all(stretch.gpu_memory_bytes is None for stretch in trial.use):
        charts["use"] = "CPU use", charts["use"][1]
    return {
        "experiment": experiment,
        "result": result,
        "trial": trial,
        "state": status(result, trial),
        "is_active": experiment.state in ACTIVE,
        "lead": lead(result, trial),
        "cards": trial_cards(result, trial),
        "texts": configuration_texts(trial.configuration, experiment.words.get("entrypoint")),
        "charts": charts,
        "expected": {name: height_px for name, height_px in heights_px.items() if height_px},
        "gangs": gangs(result, trial),
        "workers": most_workers(result, trial.trial),
        "download": download_address(experiment.name, trial),
        "is_stoppable": not trial.is_over and "stop" in possible(service, experiment),
        "before": f"{here}/{trial.trial - 1}" if trial.trial else "",
        "after_it": f"{here}/{trial.trial + 1}" if trial.trial + 1 < len(result.trials) else "",
        "address": f"/fragments{here}/{trial.trial}",
        "base": f"{here}/{trial.trial}",
    }
