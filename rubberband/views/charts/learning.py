"""Charts of the metrics: learning curves over iterations, time or dollars, and one metric against another. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rubberband.executor.result.result import Objective, Result, TrialResult
from rubberband.units import duration
from rubberband.views.charts.parts import (
    ALONE,
    CURVES,
    MANY_POINTS,
    SWITCH,
    Figure,
    axis,
    button,
    by_outcome,
    chart,
    chart_text,
    few_of_many,
    outcome_name,
    scatter,
    time_unit,
)
from rubberband.views.charts.spending import shares
from rubberband.views.formatting import finite, number, printable, ranked, usd

MOST_TRIALS = 3000
"""Limit of trials; the best are drawn."""
MOST_POINTS = 4 * MANY_POINTS
"""Limit of points; if there are more, every curve is thinned out evenly."""
CURVES_NOTE = (
    "Each line is a trial, and its colour shows its outcome; click the legend to hide or show, drag to zoom. "
    "Dollars: the whole bill so far, idle and starting instances "
    "included, is shared out among the trials by the GPU time that each has held, at its instances' prices; the "
    "shares of all trials add up to the bill."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReportPoint:
    """Report of a trial."""

    trial: int
    iterations: int
    at_s: float
    share_usd: float
    value: float | None
    """None if it is not finite."""


Drawn = list[_ReportPoint | None]
"""Points of trials, with a gap after each trial."""


def learning_curves(result: Result) -> Figure | None:
    """Return the metric of each trial over iterations, time or its share of the bill, in the colour of its outcome.

    None before the first report.
    """
    outcomes = by_outcome(result, [trial for trial in result.trials if trial.curve])
    if not outcomes:
        return None
    unit, unit_s = time_unit(result.actual_jct_s)
    every = [trial for trial in ranked(result) if trial.curve]
    shown = every[:MOST_TRIALS]
    count = sum(len(trial.curve) for trial in shown)
    costs, step = shares(result, shown), math.ceil(count / MOST_POINTS)
    drawn = {
        outcome: [p for t in trials if t.trial in costs for p in _points(result, t, costs[t.trial], step)]
        for outcome, trials in outcomes.items()
    }
    by_iterations = [[point and point.iterations for point in points] for points in drawn.values()]
    by_time = [[point and point.at_s / unit_s for point in points] for points in drawn.values()]
    by_cost = [[point and point.share_usd for point in points] for points in drawn.values()]
    whole = 1 if max(trial.iterations for trial in result.trials) <= 15 else None
    buttons = [
        button("over iterations", by_iterations, _axis("iterations", whole)),
        button("over time", by_time, _axis(f"time since the start ({unit})")),
        button("over dollars", by_cost, _axis("the trial's share of the bill (USD)")),
    ]
    traces = [
        _trace(outcome, outcomes[outcome], points, xs, count < MANY_POINTS)
        for (outcome, points), xs in zip(drawn.items(), by_iterations, strict=True)
    ]
    figure = curves_chart(traces, "iterations", whole, result.metric, buttons)
    figure["layout"]["meta"] = few_of_many(CURVES_NOTE, len(every), MOST_TRIALS)
    return figure


def curves_chart(
    traces: Sequence[Figure], title: str, step: int | None, metric: str, buttons: Sequence[Figure]
) -> Figure:
    """Return the chart of a metric, with buttons that change the x axis."""
    return chart(
        traces,
        460,
        axis(title, rangemode="tozero", dtick=step),
        {"title": {"text": chart_text(printable(metric)), "standoff": 8}, "exponentformat": "e"},
        showlegend=True,
        updatemenus=[SWITCH | {"buttons": buttons}],
        margin={"l": 10, "r": 10, "t": 50, "b": 90},
    )


def _points(result: Result, trial: TrialResult, costs_usd: Sequence[float], step: int) -> Drawn:
    last = len(trial.curve) - 1
    return [
        *(
            _ReportPoint(
                trial=trial.trial,
                iterations=iterations,
                at_s=at_s,
                share_usd=costs_usd[index],
                value=finite(metrics.get(result.metric)),
            )
            for index, (at_s, iterations, metrics) in enumerate(trial.curve)
            if index % step == 0 or index == last
        ),
        None,
    ]


def _trace(outcome: str, trials: Sequence[TrialResult], points: Drawn, xs: Sequence[Any], dots: bool) -> Figure:
    colour, width, opacity = CURVES[outcome]
    return {
        "type": "scatter",
        "mode": "lines+markers" if dots else "lines",
        "name": outcome_name(outcome, trials),
        "x": xs,
        "y": [point and point.value for point in points],
        "customdata": [point and _label(point) for point in points],
        "hovertemplate": "trial %{customdata[0]}: %{y:.6g}<br>%{customdata[1]} iterations, at %{customdata[2]}, "
        f"%{{customdata[3]}} USD<extra>{outcome}</extra>",
        "line": {"color": colour, "width": width},
        "marker": {"color": colour, "size": 6 if outcome in ALONE else 4},
        "opacity": opacity,
    }


def _label(point: _ReportPoint) -> list[Any]:
    return [point.trial, point.iterations, duration(point.at_s), usd(point.share_usd)]


def _axis(title: str, step: int | None = None) -> Figure:
    return {"xaxis.title.text": title, "xaxis.dtick": step}


PARETO_NOTE = (
    "Each point is a trial at its latest report. Orange: the trials that no other beats in all metrics at once; "
    "the star is the best by the metric that ranks."
)


_FRONT, _OTHERS = "#e08a1e", "#8d99a8"


_MOST_POINTS = 3000


def trade_off(result: Result) -> Figure | None:
    """Return the chart of the metric against the first of `also`; None without two trials that report both."""
    if not result.also:
        return None
    other = result.also[0]
    drawn = [
        trial
        for trial in ranked(result)
        if finite(trial.metrics.get(result.metric)) is not None and finite(trial.metrics.get(other.metric)) is not None
    ][:_MOST_POINTS]
    if len(drawn) < 2:
        return None
    best = {trial.trial for trial in result.pareto}
    on_front = sorted((one for one in drawn if one.trial in best), key=lambda one: one.metrics[other.metric])
    others = [one for one in drawn if one.trial not in best]
    two_dimensional = len(result.also) == 1
    data = [_trade_points(result, other, others, "other trials", _OTHERS, "markers", {"size": 6, "opacity": 0.75})]
    line = {"line": {"color": _FRONT, "width": 1, "dash": "dot"}}
    mode = "lines+markers" if two_dimensional else "markers"
    data.append(_trade_points(result, other, on_front, "beaten by none", _FRONT, mode, {"size": 9}) | line)
    if result.best is not None and result.best in drawn:
        star = {"size": 16, "symbol": "star", "line": {"width": 1, "color": "#fff"}}
        data.append(_trade_points(result, other, [result.best], "best", _FRONT, "markers", star))
    across, up = (chart_text(printable(title)) for title in (other.title, f"{result.metric} ({result.mode})"))
    return chart([trace for trace in data if trace["x"]], 380, axis(across), axis(up), showlegend=True)


def _trade_points(
    result: Result, other: Objective, trials: list[TrialResult], name: str, colour: str, mode: str, marker: Figure
) -> Figure:
    def hover(trial: TrialResult) -> str:
        both = (f"{metric}={number(trial.metrics[metric])}" for metric in (result.metric, other.metric))
        return chart_text(printable(f"trial {trial.trial}: {', '.join(both)}"))

    points = ((one.metrics[other.metric], one.metrics[result.metric], hover(one)) for one in trials)
    return scatter(name, points, mode=mode, marker={"color": colour, **marker})
