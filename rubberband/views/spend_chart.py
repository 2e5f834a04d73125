"""The bill over time against the plan, the forecast and max_cost, as a plain Plotly figure. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from rubberband.executor.core.forecast import Forecast
from rubberband.executor.result import Result
from rubberband.views.charts import LEGEND, LOST, MANY_POINTS, PLANNED, STAGE_COLOURS, Figure, marks, time_unit
from rubberband.views.spending import spending
from rubberband.views.words import duration, usd

_HEIGHT_PX = 340
SPEND_NOTE = "The bill as it grew, against what the run was planned to cost. Dotted lines are the ends of stages."


def spend(result: Result, forecast: Forecast | None = None) -> Figure | None:
    """What was paid by when; None before the first instance was asked for. `forecast` is drawn while it runs."""
    if not result.instances:
        return None
    bill = spending(result)
    paid = _thinned(list(zip(bill.at_s, bill.amount, strict=True)))
    planned = _planned(result)
    expected = _expected(paid[-1], forecast) if forecast is not None and result.outcome == "unfinished" else []
    horizon_s = max(at_s for at_s, _ in [*paid, *planned, *expected])
    unit, unit_s = time_unit(horizon_s)
    traces = [
        _line("planned", planned, unit_s, {"color": PLANNED, "width": 2, "dash": "dash"}),
        _line("forecast", expected, unit_s, {"color": STAGE_COLOURS[0], "width": 2, "dash": "dot"}),
        _line("spent", paid, unit_s, {"color": STAGE_COLOURS[0], "width": 2.5})
        | {"fill": "tozeroy", "fillcolor": "rgba(59,130,196,0.12)"},
    ]
    drawn = marks(result, horizon_s, unit_s)
    highest = max(amount for _, amount in [*paid, *planned, *expected])
    layout = {
        "height": _HEIGHT_PX,
        "xaxis": {"title": {"text": f"time since the start ({unit})"}, "range": [0, horizon_s * 1.02 / unit_s]},
        "yaxis": {"title": {"text": "USD"}, "range": [0, max(highest, _near(result, highest)) * 1.08 or 1.0]},
        **_capped(result, highest, drawn),
        **LEGEND,
    }
    return {"data": [trace for trace in traces if trace["x"]], "layout": layout}


Points = Sequence[tuple[float, float]]
"""(seconds from the start, US dollars)"""


def _planned(result: Result) -> Points:
    """At the end of every stage, as the run began."""
    ends_s = accumulate(stage.planned_s for stage in result.stages)
    paid = accumulate(stage.planned_cost_usd for stage in result.stages)
    return [(0.0, 0.0), *zip(ends_s, paid, strict=True)]


def _expected(last: tuple[float, float], forecast: Forecast) -> Points:
    return [last, (max(forecast.jct_s, last[0]), max(forecast.cost_usd, last[1]))]


def _thinned(points: list[tuple[float, float]]) -> Points:
    step = 1 + len(points) // MANY_POINTS
    return [*points[:-1:step], points[-1]]


def _near(result: Result, highest_usd: float) -> float:
    """max_cost, if it is so near that the chart shows it."""
    cap_usd = result.max_cost_usd
    return cap_usd if cap_usd is not None and cap_usd <= 3 * highest_usd else 0.0


def _capped(result: Result, highest_usd: float, drawn: Figure) -> Figure:
    """The marks, and the line of max_cost or, where that is far above, its amount in words."""
    cap_usd = result.max_cost_usd
    if cap_usd is None:
        return drawn
    text = f"max_cost {usd(cap_usd)} USD"
    label = {"xref": "paper", "x": 0.01, "xanchor": "left", "showarrow": False, "font": {"color": LOST}}
    if not _near(result, highest_usd):
        height = 0.88 if result.outcome == "unfinished" else 0.98  # below the word now
        above = label | {"text": f"{text} is above", "yref": "paper", "y": height, "yanchor": "top"}
        return {**drawn, "annotations": [*drawn["annotations"], above]}
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": cap_usd, "y1": cap_usd}
    return {
        "shapes": [*drawn["shapes"], line | {"line": {"width": 1.5, "color": LOST}}],
        "annotations": [*drawn["annotations"], label | {"text": text, "yref": "y", "y": cap_usd, "yanchor": "bottom"}],
    }


def _line(name: str, points: Points, unit_s: float, line: Figure) -> Figure:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": [at_s / unit_s for at_s, _ in points],
        "y": [amount for _, amount in points],
        "hovertext": [f"{name}: {usd(amount)} USD at {duration(at_s)}" for at_s, amount in points],
        "hoverinfo": "text",
        "line": line,
    }
