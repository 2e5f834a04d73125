"""The page of one experiment, its parts that reload, its table of trials, its figures, and its report."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.responses import HTMLResponse, Response

from rubberband.api.dashboard import badge, render, zipped
from rubberband.api.dashboard import sentences as words
from rubberband.api.problems import NOT_FOUND, HttpProblem
from rubberband.api.routes import Known, Reader, Service, Serving
from rubberband.errors import InputError, RubberbandError
from rubberband.executor.core.forecast import Forecast
from rubberband.executor.result.result import Result, TrialResult
from rubberband.states import ACTIVE, Action, ExperimentState
from rubberband.units import counted, duration, format_instant, in_unit, parse_deadline
from rubberband.values.command import entrypoint_text
from rubberband.values.kinds import KINDS
from rubberband.values.submission import Submission
from rubberband.views.charts.parallel_coordinates import is_number, parameters
from rubberband.views.charts.parts import CURVES, Figure
from rubberband.views.charts.search import (
    Space,
    contour,
    importance_chart,
    question_of,
    to_json,
)
from rubberband.views.charts.spending import trial_costs_usd
from rubberband.views.formatting import (
    TextTable,
    change,
    mean_efficiency,
    printable,
    ranked,
    setting,
    status,
    usd,
    usd_decimals,
)
from rubberband.views.report.page import (
    CHARTS,
    CONTENT_POLICY,
    charts_to_expect,
    render_html,
    result_drawings,
    script_json,
)
from rubberband.views.report.tables import failures, incidents, measured, pareto, updates, workers
from rubberband.views.story import story

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
        *_limits(_part(words, "constraints"), now),
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
    left_s, when = found.timestamp() - now, format_instant(found.replace(microsecond=0))
    return f"{when} (in {duration(left_s)})" if left_s >= 0 else f"{when} (passed {duration(-left_s)} ago)"


PAGE_SIZE = 25
_MOST_COLUMNS = 10
_PARAMETER = "."
"""Prefix of parameters in sort keys; the other columns have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Requested view of the trials; values that do not fit are ignored."""

    sort: str = ""
    """Key of a column; empty: best first."""
    down: bool = False
    status: str = ""
    """Empty: all."""
    page: int = 1

    def address(self, **changes: str | int | bool) -> str:
        """Return the query and fragment of the address of this view, with changes."""
        wanted = replace(self, **changes)  # type: ignore[arg-type]
        query: dict[str, str | int] = {"sort": wanted.sort, "down": int(wanted.down), "status": wanted.status}
        query |= {"page": wanted.page if wanted.page > 1 else 0}
        return f"?{urlencode({key: value for key, value in query.items() if value})}#trials"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Column, and the address that sorts by it."""

    title: str
    words: bool
    address: str
    sorted: str
    """`ascending`, `descending` or empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRow:
    """Row of a trial, with a cell for each column after the first."""

    trial: int
    status: str
    winner: bool
    cells: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusChoice:
    """Filter by status: its number of trials, and its address."""

    title: str
    count: int
    address: str
    chosen: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialTable:
    """Page of the table."""

    columns: tuple[Column, ...]
    rows: tuple[TrialRow, ...]
    choices: tuple[StatusChoice, ...]
    shown: str
    """Such as `26 to 50 of 3,000 trials`."""
    before: str
    """Address of the previous page; empty on the first."""
    after: str


@dataclass(frozen=True, slots=True)
class _Kind:
    """Kind of column: its values for sorting, and its texts."""

    key: str
    title: str
    value: Callable[[TrialResult], Any]
    text: Callable[[TrialResult], str]
    words: bool = False


def trial_page(result: Result, asked: Asked) -> TrialTable:
    """Return a page of trials."""
    kinds = _kinds(result)
    every = Counter(status(result, trial) for trial in result.trials)
    wanted = asked.status if asked.status in every else ""
    found = [trial for trial in ranked(result) if not wanted or status(result, trial) == wanted]
    chosen = next((kind for kind in kinds if kind.key == asked.sort), None)
    if chosen is not None:
        found = _sorted(found, chosen.value, asked.down)
    pages = max(1, math.ceil(len(found) / PAGE_SIZE))
    page = max(1, min(asked.page, pages))
    first = (page - 1) * PAGE_SIZE
    rows = found[first : first + PAGE_SIZE]
    of = f"{len(found):,} {'trial' if len(found) == 1 else 'trials'}"
    return TrialTable(
        columns=tuple(_column(kind, asked) for kind in kinds),
        rows=tuple(_row(result, trial, kinds) for trial in rows),
        choices=_choices(result, every, wanted, asked),
        shown=of if pages == 1 else f"{first + 1:,} to {first + len(rows):,} of {of}",
        before=asked.address(page=page - 1) if page > 1 else "",
        after=asked.address(page=page + 1) if page < pages else "",
    )


def _kinds(result: Result) -> list[_Kind]:
    costs_usd = trial_costs_usd(result)
    decimals = usd_decimals(result.actual_cost_usd / max(1, len(result.trials)))

    def cost_usd(trial: TrialResult) -> float:
        return costs_usd[trial.trial]

    def metric(trial: TrialResult) -> float | None:
        return trial.metrics.get(result.metric)

    def status_text(trial: TrialResult) -> str:
        return trial.with_end(status(result, trial))

    return [
        _Kind("trial", "trial", lambda t: t.trial, lambda t: str(t.trial)),
        _Kind("metric", printable(result.metric), metric, lambda t: measured(t, result.metric)),
        *(_also(one.metric) for one in result.also),
        _Kind("iterations", "iterations", lambda t: t.iterations, lambda t: str(t.iterations)),
        _Kind("status", "status", status_text, status_text, words=True),
        *(_BATCH_KINDS if any(trial.batches for trial in result.trials) else ()),
        *(_parameter(name) for name in _names(result.trials)),
        _Kind("cost", "share (USD)", cost_usd, lambda t: usd(cost_usd(t), decimals)),
    ]


_BATCH_KINDS = (
    _Kind(
        "batch",
        "batch size",
        lambda t: t.batches[-1].batch_size if t.batches else None,
        lambda t: change(t.batches[0].batch_size, t.batches[-1].batch_size) if t.batches else "-",
    ),
    _Kind(
        "efficiency",
        "efficiency",
        lambda t: mean_efficiency(t.batches) if t.batches else None,
        lambda t: f"{100 * mean_efficiency(t.batches):.0f} %" if t.batches else "-",
    ),
)
"""Columns of adaptive batches: the last batch size, and the share of samples that counted."""


def _names(trials: Sequence[TrialResult]) -> list[str]:
    """Return parameters in the order of the file, first those that differ between trials."""
    varies = parameters(trials)
    return sorted(varies, key=lambda name: not varies[name])[:_MOST_COLUMNS]


def _also(metric: str) -> _Kind:
    """Return the column of another metric."""
    return _Kind(f"also:{metric}", printable(metric), lambda t: t.metrics.get(metric), lambda t: measured(t, metric))


def _parameter(name: str) -> _Kind:
    return _Kind(
        f"{_PARAMETER}{name}",
        printable(name),
        lambda t: t.configuration.get(name),
        lambda t: setting(t.configuration[name]) if name in t.configuration else "-",
    )


def _sorted(trials: Sequence[TrialResult], value: Callable[[TrialResult], Any], down: bool) -> list[TrialResult]:
    """Sort numbers before words, and missing values last in both directions."""
    known = [trial for trial in trials if is_number(value(trial))]
    other = [trial for trial in trials if not is_number(value(trial)) and not _is_missing(value(trial))]
    missing = [trial for trial in trials if _is_missing(value(trial))]
    known.sort(key=value, reverse=down)
    other.sort(key=lambda trial: setting(value(trial)), reverse=down)
    return [*known, *other, *missing]


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and not math.isfinite(value))


def _column(kind: _Kind, asked: Asked) -> Column:
    here = kind.key == asked.sort
    return Column(
        title=kind.title,
        words=kind.words,
        address=asked.address(sort=kind.key, down=here and not asked.down, page=1),
        sorted=("descending" if asked.down else "ascending") if here else "",
    )


def _row(result: Result, trial: TrialResult, kinds: Sequence[_Kind]) -> TrialRow:
    return TrialRow(
        trial=trial.trial,
        status=status(result, trial),
        winner=result.best is not None and trial.trial == result.best.trial,
        cells=tuple(kind.text(trial) for kind in kinds[1:]),
    )


def _choices(result: Result, every: Mapping[str, int], wanted: str, asked: Asked) -> tuple[StatusChoice, ...]:
    def choice(name: str, title: str, count: int) -> StatusChoice:
        return StatusChoice(title=title, count=count, address=asked.address(status=name, page=1), chosen=name == wanted)

    order = sorted(every, key=lambda name: (list(CURVES).index(name) if name in CURVES else len(CURVES), name))
    return (choice("", "All", len(result.trials)), *(choice(name, name, every[name]) for name in order))


router = APIRouter(include_in_schema=False)

_MOST_ROWS = 25


def asked_trials(
    sort: Annotated[str, Query(max_length=200)] = "",
    down: Annotated[str, Query(max_length=10)] = "",
    status: Annotated[str, Query(max_length=40)] = "",
    page: Annotated[str, Query(max_length=10)] = "",
) -> Asked:
    """Dependency: the requested view of the trials."""
    number = int(page) if page.isascii() and page.isdigit() else 1
    return Asked(sort=sort, down=down == "1", status=status, page=number)


Trials = Annotated[Asked, Depends(asked_trials)]
Parameter = Annotated[str, Query(max_length=200)]


@router.get("/experiments/{name}")
def experiment_page(request: Request, service: Serving, _reader: Reader, experiment: Known, asked: Trials) -> Response:
    """Page of an experiment."""
    after = service.store.last_feed_id()
    values = _shown(service, experiment, result_of(service, experiment), asked)
    return render(request, "experiment.html", **values, after=after, unit=experiment.summary.unit)


@router.get("/fragments/experiments/{name}")
def experiment_live(request: Request, service: Serving, _reader: Reader, experiment: Known, asked: Trials) -> Response:
    """Part of the page that reloads."""
    shown = _shown(service, experiment, result_of(service, experiment), asked)
    return render(request, "experiment_live.html", **shown, unit=experiment.summary.unit)


@router.get("/experiments/{name}/figures/{chart}")
def experiment_figure(
    request: Request, service: Serving, _reader: Reader, experiment: Known, chart: Annotated[str, Path(max_length=40)]
) -> Response:
    """Chart of the page as JSON: its name -> Plotly figure; empty without anything to show."""
    if chart not in CHARTS:
        raise HttpProblem(NOT_FOUND, f"the page of {experiment.name!r} has no such chart")
    result = result_of(service, experiment)
    drawings = {} if result is None else result_drawings(result, _space(experiment), _forecast(experiment))
    figure = drawings[chart]() if chart in drawings else None
    return _json(request, {} if figure is None else {chart: figure}, experiment.summary.unit)


@router.get("/experiments/{name}/contour")
def experiment_contour(
    request: Request, service: Serving, _reader: Reader, experiment: Known, x: Parameter = "", y: Parameter = ""
) -> Response:
    """Contour of two parameters, the first two unless others are named; empty without one."""
    result = result_of(service, experiment)
    figure = None if result is None else contour(result, _space(experiment), x=x, y=y)
    return _json(request, {} if figure is None else {"contour": figure})


@router.get("/experiments/{name}/importance")
def experiment_importance(request: Request, service: Serving, _reader: Reader, experiment: Known) -> Response:
    """Importance of the parameters as a Plotly figure, or a note that says why there is none."""
    result = result_of(service, experiment)
    if result is None:
        return _json(request, {})
    found = cached_importance(result, _space(experiment))
    return _json(request, {"note": found} if isinstance(found, str) else {"importance": found})


def _json(request: Request, value: Mapping[str, Any], unit: str = "USD") -> Response:
    """Return JSON whose amounts count in `unit`, with its version."""
    text = in_unit(script_json(value), unit).encode()
    version = f'"{hashlib.sha256(text).hexdigest()[:20]}"'
    cached = {"ETag": version, "Cache-Control": "private, no-cache"}
    if request.headers.get("if-none-match") == version:
        return Response(status_code=304, headers=cached | {"Vary": "Accept-Encoding"})
    body, headers = zipped(request, text)
    return Response(body, headers=headers | cached, media_type="application/json")


@router.get("/experiments/{name}/report")
def experiment_report(service: Serving, _reader: Reader, experiment: Known) -> Response:
    """Report as one file of HTML. Raises Problem NOT_FOUND without a journal."""
    result = result_of(service, experiment)
    if result is None:
        raise HttpProblem(NOT_FOUND, f"{experiment.name!r} has no report yet: it has not started")
    policy = f"{CONTENT_POLICY}; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
    headers = {"Content-Security-Policy": policy, "Cache-Control": "no-store"}
    importance = cached_importance(result, _space(experiment))
    return HTMLResponse(render_html(result, importance), headers=headers)


def result_of(service: Service, experiment: Submission) -> Result | None:
    """Return the result so far; None for an unreadable journal, which the page reports."""
    try:
        return service.runs.result(experiment.name)
    except (HttpProblem, RubberbandError):
        if experiment.state is ExperimentState.UNREADABLE:
            return None
        raise


def _possible(service: Service, experiment: Submission) -> frozenset[Action]:
    try:
        return service.runs.possible(experiment)
    except HttpProblem:  # its journal cannot be read now
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
    is_queued = experiment.state is ExperimentState.QUEUED
    kind, state = badge(experiment)
    begun = result is not None and experiment.summary.started_at is not None
    shown = {
        "experiment": experiment,
        "result": result if begun else None,
        "kind": kind,
        "state": state,
        "is_active": experiment.state in ACTIVE,
        "sentence": words.sentence(experiment, result),
        "actions": _possible(service, experiment),
        "charts": CHARTS,
        "expected": charts_to_expect(result) if begun and result is not None else {},
        "address": f"/fragments/experiments/{experiment.name}",
        "facts": [] if begun else facts(experiment, service.settings.clock()),
        "turn": words.turn(service.store.count_states()) if is_queued else "",
    }
    if not begun or result is None:
        return shown
    return shown | {
        "troubles": words.troubles(result),
        "cards": words.cards(experiment, result),
        "stages": words.stage_rows(result, experiment.summary.target_iterations),
        "rungs": words.rungs_reached(result),
        "story": story(result),
        "trials": trial_page(result, asked),
        "pareto": _shortened(pareto(result, None)),
        "tables": [_shortened(table) for table in _tables(result) if table.rows],
    }


def _tables(result: Result) -> tuple[TextTable, ...]:
    return workers(result, None), updates(result, None), failures(result), incidents(result)


def _shortened(table: TextTable) -> TextTable:
    """Return the first rows; the report has them all."""
    left = len(table.rows) - _MOST_ROWS
    if left <= 0:
        return table
    return replace(table, rows=table.rows[:_MOST_ROWS], notes=(f"{left:,} more are in the report.", *table.notes))
