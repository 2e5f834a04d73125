"""Chart of the throughput of asynchronous workers, of the page of an estimate."""

from __future__ import annotations

from collections.abc import Collection

from rubberband.planner.exact.table import Floats
from rubberband.planner.queueing import Curve, curve, knee, planned_updates_per_s
from rubberband.units import counted
from rubberband.values.profile import Profile
from rubberband.views.charts.parts import PLANNED, Figure, axis, chart, scatter
from rubberband.views.estimate.page import label, rule

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
    return chart(
        [*_band(counts, found), _planned(counts, found, planned_updates_per_s(profile, most), used)],
        340,
        axis("workers of a trial", range=[0.5, most + 0.5]),
        axis("updates per second", rangemode="tozero"),
        shapes=[rule(bend, "x", PLANNED)] if bend <= most else [],
        annotations=[label(bend, f"knee: {counted(bend, 'worker')}", "x", PLANNED)] if bend <= most else [],
    )


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
