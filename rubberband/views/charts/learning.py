"""Charts of the metrics: learning curves over iterations, time or dollars, and one metric against another. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from rubberband.executor.result.parts import TrialResult
from rubberband.executor.result.result import Objective, Result
from rubberband.units import counted, duration
from rubberband.views.charts.parts import (
    CURVES,
    LABELS_PX,
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
CURVES_PX = 460
"""Height of the chart."""
CURVES_NOTE = (
    "Each line is a trial, and its colour shows its outcome; click the legend to hide or show, drag to zoom. "
    "Dollars: the whole bill so far, idle and starting instances "
    "included, is shared out among the trials by the GPU time that each has held, at its instances' prices; the "
    "shares of all trials add up to the bill."
)


class _ReportPoint(NamedTuple):
    """Report of a trial."""

    trial: int
    iterations: int
    at_s: float
    share_usd: float
    value: float | None
    """None if it is not finite."""


Drawn = list[_ReportPoint | None]
"""Points of trials, with a gap after each trial."""


class _Group(NamedTuple):
    """Trials that are drawn alike: their name in the legend, and in the text at a point."""

    name: str
    short: str
    trials: Sequence[TrialResult]
    style: tuple[str, float, float]
    """Colour, width and opacity."""


def learning_curves(result: Result, *, top: int | None = None, trial: int | None = None) -> Figure | None:
    """Return the metric of each trial over iterations, time or its share of the bill, in the colour of its outcome.

    `top` draws that many of the best only. With `trial`, this one stands out among the others, and only the best and it
    have a colour. None before the first report.
    """
    if trial is not None and not result.trials[trial].curve:
        return None
    unit, unit_s = time_unit(result.actual_jct_s)
    every = [one for one in ranked(result) if one.curve]
    shown = every[: min(top or MOST_TRIALS, MOST_TRIALS)]
    if trial is not None and result.trials[trial] not in shown:
        shown.append(result.trials[trial])
    if not shown:
        return None
    groups = _by_outcome(result, shown) if trial is None else _around(result, shown, trial)
    count = sum(len(one.curve) for one in shown)
    costs, step = shares(result, shown), math.ceil(count / MOST_POINTS)
    drawn = [
        [p for t in group.trials for p in _points(result, t, costs[t.trial], 1 if t.trial == trial else step)]
        for group in groups
    ]
    by_iterations = [[point and point.iterations for point in points] for points in drawn]
    by_time = [[point and point.at_s / unit_s for point in points] for points in drawn]
    by_cost = [[point and point.share_usd for point in points] for points in drawn]
    whole = 1 if max(one.iterations for one in result.trials) <= 15 else None
    buttons = [
        button("over iterations", by_iterations, _axis("iterations", whole)),
        button("over time", by_time, _axis(f"time since the start ({unit})")),
        button("over dollars", by_cost, _axis("the trial's share of the bill (USD)")),
    ]
    traces = [
        _trace(group, points, xs, count < MANY_POINTS)
        for group, points, xs in zip(groups, drawn, by_iterations, strict=True)
    ]
    figure = curves_chart(traces, "iterations", whole, result.metric, buttons)
    if trial is None and top is None:
        figure["layout"]["meta"] = few_of_many(CURVES_NOTE.replace("GPU", result.place), len(every), MOST_TRIALS)
    return figure


def _by_outcome(result: Result, shown: Sequence[TrialResult]) -> list[_Group]:
    """Return the trials by outcome. The legend counts all, also those that are too many to be drawn."""
    every = shown if len(shown) < MOST_TRIALS else [one for one in result.trials if one.curve]
    counts, drawn = by_outcome(result, every), by_outcome(result, shown)
    return [_Group(outcome_name(name, counts[name]), name, trials, CURVES[name]) for name, trials in drawn.items()]


def _around(result: Result, shown: Sequence[TrialResult], trial: int) -> list[_Group]:
    """Return the other trials, the best one and this one, which is on top."""
    best = None if result.best is None or result.best.trial == trial else result.best.trial
    others = [one for one in shown if one.trial not in (trial, best)]
    leader = [one for one in shown if one.trial == best]
    ours = [one for one in shown if one.trial == trial]
    groups = [
        _Group(f"others ({counted(len(others), 'trial')})", "other", others, CURVES["stopped"]),
        _Group(f"best (trial {best})", "best", leader, CURVES["winner"]),
        _Group(f"trial {trial}", "this one", ours, ("#3b82c4", 3.5, 1.0)),
    ]
    return [group for group in groups if group.trials]


def curves_chart(
    traces: Sequence[Figure], title: str, step: int | None, metric: str, buttons: Sequence[Figure]
) -> Figure:
    """Return the chart of a metric, with buttons that change the x axis."""
    return chart(
        traces,
        CURVES_PX,
        axis(title, rangemode="tozero", dtick=step),
        {"title": {"text": chart_text(printable(metric)), "standoff": 8}, "exponentformat": "e"},
        showlegend=True,
        updatemenus=[SWITCH | {"buttons": buttons}],
        margin={"l": LABELS_PX, "r": 10, "t": 56, "b": 90},
    )


def _points(result: Result, trial: TrialResult, costs_usd: Sequence[float], step: int) -> Drawn:
    last, points = len(trial.curve) - 1, list[_ReportPoint | None]()
    forks_s = [one.at_s for one in result.forks if one.trial == trial.trial]
    for index, (at_s, iterations, metrics) in enumerate(trial.curve):
        if forks_s and at_s > forks_s[0]:  # from here on, another trial's weights
            points.append(None)
            forks_s = [fork_s for fork_s in forks_s if fork_s >= at_s]
        if index % step == 0 or index == last:
            value = finite(metrics.get(result.metric))
            points.append(_ReportPoint(trial.trial, iterations, at_s, costs_usd[index], value))
    return [*points, None]


def _trace(group: _Group, points: Drawn, xs: Sequence[Any], dots: bool) -> Figure:
    colour, width, opacity = group.style
    return {
        "type": "scatter",
        "mode": "lines+markers" if dots else "lines",
        "name": group.name,
        "x": xs,
        "y": [point and point.value for point in points],
        "customdata": [
            point and [point.trial, point.iterations, duration(point.at_s), usd(point.share_usd)] for point in points
        ],
        "hovertemplate": "trial %{customdata[0]}: %{y:.6g}<br>%{customdata[1]} iterations, at %{customdata[2]}, "
        f"%{{customdata[3]}} USD<extra>{group.short}</extra>",
        "line": {"color": colour, "width": width},
        "marker": {"color": colour, "size": 6 if width > 2 else 4},
        "opacity": opacity,
    }


def _axis(title: str, step: int | None = None) -> Figure:
    return {"xaxis.title.text": title, "xaxis.dtick": step}


PARETO_NOTE = (
    "Each point is a trial at its latest report, or the mean of a configuration's repeats. Orange: those that no other "
    "beats in all metrics at once; the star is the best by the metric that ranks."
)

_FRONT, _OTHERS = "#e08a1e", "#8d99a8"
_MOST_POINTS = 3000


def trade_off(result: Result) -> Figure | None:
    """Return the chart of the metric against the first of `also`; None without two trials that report both."""
    if not result.also:
        return None
    other = result.also[0]
    each = result.trials if result.repeats == 1 else result.of_configurations
    counted_with = {trial.trial: replace(trial, metrics=result.means(trial)) for trial in each}
    drawn = [
        trial
        for number in (one.trial for one in ranked(result))
        if (trial := counted_with.get(number)) is not None
        and finite(trial.metrics.get(result.metric)) is not None
        and finite(trial.metrics.get(other.metric)) is not None
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
    if result.best is not None and (stars := [one for one in drawn if one.trial == result.best.trial]):
        star = {"size": 16, "symbol": "star", "line": {"width": 1, "color": "#fff"}}
        data.append(_trade_points(result, other, stars, "best", _FRONT, "markers", star))
    across, up = (chart_text(printable(title)) for title in (other.title, f"{result.metric} ({result.mode})"))
    return chart([trace for trace in data if trace["x"]], 380, axis(across), axis(up), showlegend=True)


def _trade_points(
    result: Result, other: Objective, trials: list[TrialResult], name: str, colour: str, mode: str, marker: Figure
) -> Figure:
    def hover(trial: TrialResult) -> str:
        both = (f"{metric}={number(trial.metrics[metric])}" for metric in (result.metric, other.metric))
        return chart_text(printable(f"trial {trial.trial}: {', '.join(both)}"))

    points = ((one.metrics[other.metric], one.metrics[result.metric], hover(one)) for one in trials)
    numbers = [[one.trial] for one in trials]
    return scatter(name, points, mode=mode, marker={"color": colour, **marker}, customdata=numbers)
