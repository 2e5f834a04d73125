"""Chart of configurations and metrics as lines across parallel axes. A plain Plotly figure; pure.

There is one trace for each shade of the metric. A trial has a point on each axis, then a gap. Positions are from 0 to 1
on every axis and ticks are annotations, so that linear, logarithmic and category axes can be side by side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rubberband.executor.result import Result, TrialResult
from rubberband.views.charts import SHADES, Figure
from rubberband.views.parameter_axes import ABSENT, Axis, axis_of, domains_of, number_axis, parameters, short_label
from rubberband.views.tables import finite, ranked

MOST_AXES, MOST_TRIALS = 12, 3000
_NO_METRIC = "#b0888a"
_HEIGHT_PX, _WIDE_PX = 400, 100
PARALLEL_NOTE = (
    "Each line is a trial, from its configuration to its latest metric; the best are orange, on top. Parameters that "
    f"are the same for all are left out. Only the best {MOST_TRIALS:,} trials are drawn."
)

_SHORT_NAME = 8
"""Letters of a name that fit centred above the first and the last axis."""


def parallel_coordinates(result: Result, space: Mapping[str, Any] | None = None) -> Figure | None:
    """Return configurations and metrics of the trials, the best on top; None without two trials and a metric.

    `space` is the search space in the words of the file. If it is given, axes have the scale of their domains.
    """
    shown = [trial for trial in ranked(result) if trial.metrics][:MOST_TRIALS]
    names = [name for name, varies in parameters(shown).items() if varies][: MOST_AXES - 1]
    if len(shown) < 2 or not names:
        return None
    values = [value for trial in shown if (value := finite(trial.metrics.get(result.metric))) is not None]
    if not values:
        return None
    domains = domains_of(space or {})
    axes = [axis_of(name, [t.configuration.get(name, ABSENT) for t in shown], domains.get(name)) for name in names]
    axes.append(number_axis(result.metric, values, log=False))
    groups: dict[int | None, list[TrialResult]] = {}
    for trial in reversed(shown):
        groups.setdefault(_shade(result, trial, values), []).append(trial)
    order = sorted(groups, key=lambda shade: -1 if shade is None else shade)
    traces = [_trace(result, axes, shade, groups[shade]) for shade in order]
    layout = {
        "height": _HEIGHT_PX,
        "meta": {"axes": [short_label(axis.name) for axis in axes], "least_width_px": _WIDE_PX * len(axes)},
        "showlegend": False,
        "hovermode": "closest",
        "margin": {"l": 60, "r": 40, "t": 40, "b": 20, "autoexpand": False},
        "xaxis": _plain([0, len(axes) - 1]),
        "yaxis": _plain([-0.03, 1.03]),
        "shapes": [_post(index) for index in range(len(axes))],
        "annotations": [mark for index, axis in enumerate(axes) for mark in _marks(index, axis, len(axes))],
    }
    return {"data": traces, "layout": layout}


def _shade(result: Result, trial: TrialResult, values: Sequence[float]) -> int | None:
    """Return the index of a shade from 0 (the worst tenth and below) to the best; None without a metric."""
    value = finite(trial.metrics.get(result.metric))
    if value is None:
        return None
    good = sorted(values, reverse=result.mode == "min")
    low, high = good[len(good) // 10], good[-1]
    share = 1.0 if high == low else (value - low) / (high - low)
    return max(0, min(len(SHADES) - 1, math.floor(share * len(SHADES))))


def _trace(result: Result, axes: Sequence[Axis], shade: int | None, trials: Sequence[TrialResult]) -> Figure:
    best = shade == len(SHADES) - 1
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [item for _ in trials for item in [*range(len(axes)), None]],
        "y": [item for trial in trials for item in [*_places(result, axes, trial), None]],
        "customdata": [item for trial in trials for item in [*[trial.trial] * len(axes), None]],
        "hovertemplate": "trial %{customdata}<extra></extra>",
        "line": {"color": _NO_METRIC if shade is None else SHADES[shade], "width": 1.6 if best else 1.0},
        "opacity": 0.95 if best else 0.55,
    }


def _places(result: Result, axes: Sequence[Axis], trial: TrialResult) -> list[float | None]:
    values = [trial.configuration.get(axis.name, ABSENT) for axis in axes[:-1]]
    metric = finite(trial.metrics.get(result.metric))
    return [axis.place(value) for axis, value in zip(axes, [*values, metric], strict=True)]


def _plain(shown: Sequence[float]) -> Figure:
    return {"range": list(shown), "visible": False, "fixedrange": True, "automargin": False}


def _post(index: int) -> Figure:
    line = {"width": 1.5, "color": "#8a8f98"}
    return {"type": "line", "x0": index, "x1": index, "y0": 0, "y1": 1, "layer": "below", "line": line}


def _marks(index: int, axis: Axis, count: int) -> list[Figure]:
    """Return the axis's name above it, and its ticks beside it."""
    plain: Figure = {"x": index, "showarrow": False}
    name = plain | {"y": 1, "yanchor": "bottom", "yshift": 10, "text": f"<b>{short_label(axis.name)}</b>"}
    if len(axis.name) > _SHORT_NAME and index in (0, count - 1):
        name |= {"xanchor": "right", "xshift": 38} if index else {"xanchor": "left", "xshift": -58}
    ticks = [
        plain | {"y": place, "xanchor": "right", "xshift": -3, "text": short_label(text, 12), "font": {"size": 10}}
        for place, text in axis.ticks
    ]
    return [name, *ticks]
