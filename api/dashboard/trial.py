"""The page of one trial: its configuration, its curve among the others, its gangs, checkpoint, failures and log."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from fastapi.responses import Response

from rubberband.api.dashboard import render
from rubberband.api.dashboard.experiment import Top, download_address, json_of, possible, result_of, top_of
from rubberband.api.problems import NOT_FOUND, HttpProblem
from rubberband.api.routes import Known, Reader, Service, Serving
from rubberband.api.routes.trials import trial_of
from rubberband.states import ACTIVE
from rubberband.values.submission import Submission
from rubberband.views.charts.allocation import gangs as gangs_chart
from rubberband.views.charts.allocation import gangs_px
from rubberband.views.charts.learning import CURVES_PX, learning_curves
from rubberband.views.formatting import status
from rubberband.views.report.page import charts_of
from rubberband.views.trial import configuration_texts, gangs, lead, trial_cards

CHARTS = {
    "curves": (
        "Its curve among the others",
        "Blue is this trial, orange the best one; click a curve for the page of its trial, drag to zoom. Dollars: the "
        "trial's share of the bill, by the GPU time that it has held.",
    ),
    "gangs": (
        "Its gangs over time",
        "Each bar is a GPU that it had, its colour the stage (or bracket, or rung). Dotted: ends of stages.",
    ),
}
"""Charts of a trial, in their order: name -> title and note."""
router = APIRouter(include_in_schema=False)
Number = Annotated[str, Path(max_length=20)]


@router.get("/experiments/{name}/trials/{trial}")
def trial_page(request: Request, service: Serving, _reader: Reader, experiment: Known, trial: Number) -> Response:
    """Page of a trial."""
    after = service.store.last_feed_id()
    shown = _shown(service, experiment, trial)
    return render(request, "trial.html", **shown, after=after, unit=experiment.summary.unit)


@router.get("/fragments/experiments/{name}/trials/{trial}")
def trial_live(request: Request, service: Serving, _reader: Reader, experiment: Known, trial: Number) -> Response:
    """Part of the page that reloads."""
    return render(request, "trial_live.html", **_shown(service, experiment, trial), unit=experiment.summary.unit)


@router.get("/experiments/{name}/trials/{trial}/figures/{chart}")
def trial_figure(
    request: Request,
    service: Serving,
    _reader: Reader,
    experiment: Known,
    trial: Number,
    chart: Annotated[str, Path(max_length=40)],
    top: Top = "",
) -> Response:
    """Chart of the page as JSON: its name -> Plotly figure; empty without anything to show."""
    if chart not in CHARTS:
        raise HttpProblem(NOT_FOUND, f"the page of a trial of {experiment.name!r} has no such chart")
    result, found = trial_of(experiment, result_of(service, experiment), trial)
    is_curves = chart == "curves"
    figure = (
        learning_curves(result, trial=found.trial, top=top_of(top)) if is_curves else gangs_chart(result, found.trial)
    )
    return json_of(request, {} if figure is None else {chart: figure}, experiment.summary.unit)


def _shown(service: Service, experiment: Submission, number: str) -> dict[str, Any]:
    result, trial = trial_of(experiment, result_of(service, experiment), number)
    here = f"/experiments/{experiment.name}/trials"
    heights_px = {"curves": CURVES_PX if trial.curve else 0, "gangs": gangs_px(result, trial.trial)}
    return {
        "experiment": experiment,
        "result": result,
        "trial": trial,
        "state": status(result, trial),
        "is_active": experiment.state in ACTIVE,
        "lead": lead(result, trial),
        "cards": trial_cards(result, trial),
        "texts": configuration_texts(trial.configuration, experiment.words.get("entrypoint")),
        "charts": charts_of(result, CHARTS),
        "expected": {name: height_px for name, height_px in heights_px.items() if height_px},
        "gangs": gangs(result, trial),
        "download": download_address(experiment.name, trial),
        "is_stoppable": not trial.is_over and "stop" in possible(service, experiment),
        "before": f"{here}/{trial.trial - 1}" if trial.trial else "",
        "after_it": f"{here}/{trial.trial + 1}" if trial.trial + 1 < len(result.trials) else "",
        "address": f"/fragments{here}/{trial.trial}",
        "base": f"{here}/{trial.trial}",
    }
