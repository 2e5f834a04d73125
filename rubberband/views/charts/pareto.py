"""Trade-off between the metric that ranks trials and the others of `search.also`: table and chart. Pure."""

from __future__ import annotations

import html

from rubberband.executor.result.result import Objective, Result, TrialResult
from rubberband.units import counted
from rubberband.views.charts.parts import Figure, axis, chart, scatter
from rubberband.views.formatting import number, printable
from rubberband.views.report.tables import TextTable, finite, ranked, trial_rows

PARETO_NOTE = (
    "Each point is a trial at its latest report. Orange: the trials that no other beats in all metrics at once; "
    "the star is the best by the metric that ranks."
)
_FRONT, _OTHERS = "#e08a1e", "#8d99a8"
_MOST_POINTS = 3000


def pareto(result: Result, most: int | None) -> TextTable:
    """Return the trials that no other beats in all metrics; those beyond `most` are counted. Empty without `also`."""
    found = result.pareto
    shown, objectives = found[:most], _objectives(result)
    left = len(found) - len(shown)
    return TextTable(
        title=f"Best in {' and '.join(printable(one.title) for one in objectives)}: "
        f"{len(found)} of {counted(len(result.trials), 'trial')}",
        header=("trial", *(printable(one.metric) for one in objectives), "iterations", "status", "configuration"),
        rows=trial_rows(result, shown, [one.metric for one in objectives]),
        words=frozenset({len(objectives) + 2, len(objectives) + 3}),
        notes=(
            f"No other trial is better in one of them and as good in the rest (Pareto), at their latest reports. "
            f"{printable(result.metric)} alone ranks trials.",
            *([f"{counted(left, 'more trial')} not shown."] if left else []),
        ),
    )


def _objectives(result: Result) -> tuple[Objective, ...]:
    return Objective(metric=result.metric, mode=result.mode), *result.also


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
    data = [_points(result, other, others, "other trials", _OTHERS, "markers", {"size": 6, "opacity": 0.75})]
    line = {"line": {"color": _FRONT, "width": 1, "dash": "dot"}}
    mode = "lines+markers" if two_dimensional else "markers"
    data.append(_points(result, other, on_front, "beaten by none", _FRONT, mode, {"size": 9}) | line)
    if result.best is not None and result.best in drawn:
        star = {"size": 16, "symbol": "star", "line": {"width": 1, "color": "#fff"}}
        data.append(_points(result, other, [result.best], "best", _FRONT, "markers", star))
    across, up = (html.escape(printable(title)) for title in (other.title, f"{result.metric} ({result.mode})"))
    return chart([trace for trace in data if trace["x"]], 380, axis(across), axis(up), showlegend=True)


def _points(
    result: Result, other: Objective, trials: list[TrialResult], name: str, colour: str, mode: str, marker: Figure
) -> Figure:
    def hover(trial: TrialResult) -> str:
        both = (f"{metric}={number(trial.metrics[metric])}" for metric in (result.metric, other.metric))
        return html.escape(printable(f"trial {trial.trial}: {', '.join(both)}"))

    points = ((one.metrics[other.metric], one.metrics[result.metric], hover(one)) for one in trials)
    return scatter(name, points, mode=mode, marker={"color": colour, **marker})
