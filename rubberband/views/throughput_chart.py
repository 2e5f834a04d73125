"""Chart of an estimate: the updates per second of asynchronous workers, with the band and the knee."""

from __future__ import annotations

from collections.abc import Collection

from rubberband.planner.queueing.planning import Curve, curve, knee, planned_updates_per_s
from rubberband.planner.table import Floats
from rubberband.values.profile import Profile
from rubberband.views.charts import LEGEND, PLANNED, Figure, scatter
from rubberband.views.words import counted

THROUGHPUT_NOTE = (
    "Updates per second that plans count with, and the band of the queueing model: the workers wait for each other at "
    "the parameter servers and on their links."
)
_FEWEST, _MOST = 4, 64
_COLOUR, _BAND = "#3b82c4", "rgba(59, 130, 196, 0.18)"


def throughput_chart(profile: Profile, used: Collection[int]) -> Figure:
    """Return the chart of 1 worker to twice the knee, or to the most of a plan's trials, if `used` has more.

    The profile is a case's, with a model of the workers.
    """
    model = profile.asynchronous
    assert model is not None, "only asynchronous training has updates"
    bend = knee(model)
    most = max(_FEWEST, min(2 * bend, _MOST), *used)
    found, counts = curve(model, most), list(range(1, most + 1))
    return {
        "data": [*_band(counts, found), _planned(counts, found, planned_updates_per_s(profile, most), used)],
        "layout": {
            "height": 340,
            "xaxis": {"title": {"text": "workers of a trial"}, "range": [0.5, most + 0.5]},
            "yaxis": {"title": {"text": "updates per second"}, "rangemode": "tozero"},
            "shapes": [_upright(bend)] if bend <= most else [],
            "annotations": [_at_top(bend, f"knee: {counted(bend, 'worker')}")] if bend <= most else [],
            **LEGEND,
        },
    }


def _band(counts: list[int], found: Curve) -> list[Figure]:
    edges = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "type": "scatter", "x": counts}
    low: Figure = {**edges, "y": found.low.tolist(), "showlegend": False}
    return [low, {**edges, "y": found.high.tolist(), "name": "band", "fill": "tonexty", "fillcolor": _BAND}]


def _planned(counts: list[int], found: Curve, planned: Floats, used: Collection[int]) -> Figure:
    points = [
        (count, float(point), f"{counted(count, 'worker')}: {point:.4g} updates/s ({low:.4g} to {high:.4g})")
        for count, low, point, high in zip(counts, found.low, planned, found.high, strict=True)
    ]
    sizes = [11 if count in used else 5 for count in counts]
    return scatter("planned with", points, line={"color": _COLOUR, "width": 2.5}) | {
        "mode": "lines+markers",
        "marker": {"color": _COLOUR, "size": sizes},
    }


def _upright(at: int) -> Figure:
    line = {"width": 1.5, "dash": "dot", "color": PLANNED}
    return {"type": "line", "xref": "x", "yref": "paper", "x0": at, "x1": at, "y0": 0, "y1": 1, "line": line}


def _at_top(at: int, text: str) -> Figure:
    place = {"x": at, "xref": "x", "y": 1, "yref": "paper", "yanchor": "bottom", "showarrow": False}
    return {**place, "text": text, "font": {"color": PLANNED}}
