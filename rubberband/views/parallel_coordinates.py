"""Every trial's configuration and metric as a line across parallel axes, as a plain Plotly figure. Pure.

One trace for each shade of the metric; a trial is as many points as there are axes, and a gap. Positions are from 0 to
1 on every axis, whose ticks are notes, so that axes may be linear, logarithmic or of categories side by side.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rubberband.executor.result import Result, TrialResult
from rubberband.views.charts import Figure
from rubberband.views.tables import ranked
from rubberband.views.words import number, printable, setting

MOST_AXES, MOST_TRIALS = 12, 3000
_SHADES = ("#8d99a8", "#7b97b4", "#6391bd", "#3b82c4", "#4b8f9f", "#8a8f5e", "#b98f3c", "#e08a1e")
"""From the worst to the best."""
_NO_METRIC = "#b0888a"
_HEIGHT_PX, _WIDE_PX = 400, 100
_MOST_CATEGORIES = 12
PARALLEL_NOTE = (
    "Each line is a trial, from its configuration to its latest metric; the best are orange, on top. Parameters that "
    f"are the same for all are left out. Only the best {MOST_TRIALS:,} trials are drawn."
)

_SHORT_NAME = 8
"""Letters of a name that fit above the first and the last axis, in the middle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axis:
    name: str
    place: Callable[[Any], float | None]
    """Value -> 0 to 1; None: it has no place here."""
    ticks: Sequence[tuple[float, str]]


def parallel_coordinates(result: Result, space: Mapping[str, Any] | None = None) -> Figure | None:
    """Configurations and metrics of the trials, the best on top; None before there are two to compare,
    and a metric.

    `space` is the search space in the file's words, if it is known: then axes are drawn as their domains are.
    """
    shown = [trial for trial in ranked(result) if trial.metrics][:MOST_TRIALS]
    names = _varied(shown)
    if len(shown) < 2 or not names:
        return None
    values = [value for trial in shown if (value := _metric(result, trial)) is not None]
    if not values:
        return None
    axes = [_axis(name, [t.configuration.get(name) for t in shown], (space or {}).get(name)) for name in names]
    axes.append(_numbers(result.metric, values, log=False))
    groups: dict[int | None, list[TrialResult]] = {}
    for trial in reversed(shown):
        groups.setdefault(_shade(result, trial, values), []).append(trial)
    order = sorted(groups, key=lambda shade: -1 if shade is None else shade)
    traces = [_trace(result, axes, shade, groups[shade]) for shade in order]
    layout = {
        "height": _HEIGHT_PX,
        "meta": {"axes": [_label(axis.name) for axis in axes], "least_width_px": _WIDE_PX * len(axes)},
        "showlegend": False,
        "hovermode": "closest",
        "margin": {"l": 60, "r": 40, "t": 40, "b": 20, "autoexpand": False},
        "xaxis": _plain([0, len(axes) - 1]),
        "yaxis": _plain([-0.03, 1.03]),
        "shapes": [_post(index) for index in range(len(axes))],
        "annotations": [mark for index, axis in enumerate(axes) for mark in _marks(index, axis, len(axes))],
    }
    return {"data": traces, "layout": layout}


def _varied(trials: Sequence[TrialResult]) -> list[str]:
    """Parameters that are not the same for all, in the order of the file."""
    seen: dict[str, set[str]] = {}
    for trial in trials:
        for name, value in trial.configuration.items():
            if len(values := seen.setdefault(name, set())) < 2:
                values.add(setting(value))
    return [name for name, values in seen.items() if len(values) > 1][: MOST_AXES - 1]


def _metric(result: Result, trial: TrialResult) -> float | None:
    value = trial.metrics.get(result.metric)
    return value if value is not None and math.isfinite(value) else None


def _axis(name: str, values: Sequence[Any], domain: Any) -> _Axis:
    kind = domain.get("type", "") if isinstance(domain, Mapping) else ""
    if kind in ("choice", "grid") or not all(_is_number(value) for value in values):
        return _categories(name, [*(domain.get("values", ()) if kind in ("choice", "grid") else ()), *values])
    bounds = [domain[end] for end in ("lower", "upper") if kind and _is_number(domain.get(end))]
    every = [*values, *bounds]
    log = "log" in kind if kind else min(every) > 0 and max(every) >= 100 * min(every)
    return _numbers(name, every, log=log and min(every) > 0)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _numbers(name: str, values: Sequence[float], *, log: bool) -> _Axis:
    scale: Callable[[float], float] = math.log10 if log else float
    low, high = scale(min(values)), scale(max(values))

    def place(value: Any) -> float | None:
        if not _is_number(value) or (log and value <= 0):
            return None
        return 0.5 if high == low else (scale(value) - low) / (high - low)

    ticks = _decades(low, high) if log else _round(low, high)
    return _Axis(name=name, place=place, ticks=[(place(tick) or 0.0, number(tick)) for tick in ticks])


def _decades(low: float, high: float) -> list[float]:
    """Powers of ten between two logarithms; with 2 and 5 where these would be too few."""
    digits = (1,) if high - low > 2 else (1, 2, 5)
    every = [digit * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for digit in digits]
    inside = [tick for tick in every if low - 1e-9 <= math.log10(tick) <= high + 1e-9]
    return inside[:: 1 + len(inside) // 9] or [10.0**low, 10.0**high]


def _round(low: float, high: float) -> list[float]:
    """Round numbers from `low` to `high`, about five of them."""
    if high <= low:
        return [low]
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(digit * power for digit in (1, 2, 5, 10) if digit * power >= rough)
    first = math.ceil(low / step - 1e-9)
    return [round(count * step, 12) for count in range(first, math.floor(high / step + 1e-9) + 1)]


def _categories(name: str, values: Sequence[Any]) -> _Axis:
    known = list(dict.fromkeys(setting(value) for value in values))
    places = {text: (index + 0.5) / len(known) for index, text in enumerate(known)}
    ticks = [(places[text], text) for text in known[:: math.ceil(len(known) / _MOST_CATEGORIES)]]
    return _Axis(name=name, place=lambda value: places.get(setting(value)), ticks=ticks)


def _shade(result: Result, trial: TrialResult, values: Sequence[float]) -> int | None:
    """From 0 (the worst tenth and below) to the best; None without a metric."""
    value = _metric(result, trial)
    if value is None:
        return None
    good = sorted(values, reverse=result.mode == "min")
    low, high = good[len(good) // 10], good[-1]
    share = 1.0 if high == low else (value - low) / (high - low)
    return max(0, min(len(_SHADES) - 1, math.floor(share * len(_SHADES))))


def _trace(result: Result, axes: Sequence[_Axis], shade: int | None, trials: Sequence[TrialResult]) -> Figure:
    best = shade == len(_SHADES) - 1
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [item for _ in trials for item in [*range(len(axes)), None]],
        "y": [item for trial in trials for item in [*_places(result, axes, trial), None]],
        "customdata": [item for trial in trials for item in [*[trial.trial] * len(axes), None]],
        "hovertemplate": "trial %{customdata}<extra></extra>",
        "line": {"color": _NO_METRIC if shade is None else _SHADES[shade], "width": 1.6 if best else 1.0},
        "opacity": 0.95 if best else 0.55,
    }


def _places(result: Result, axes: Sequence[_Axis], trial: TrialResult) -> list[float | None]:
    values = [trial.configuration.get(axis.name) for axis in axes[:-1]]
    return [axis.place(value) for axis, value in zip(axes, [*values, _metric(result, trial)], strict=True)]


def _plain(shown: Sequence[float]) -> Figure:
    return {
        "range": list(shown),
        "visible": False,
        "fixedrange": True,
        "automargin": False,
    }


def _post(index: int) -> Figure:
    return {
        "type": "line",
        "x0": index,
        "x1": index,
        "y0": 0,
        "y1": 1,
        "layer": "below",
        "line": {"width": 1.5, "color": "#8a8f98"},
    }


def _label(text: str, most: int = 18) -> str:
    whole = printable(text)
    return html.escape(whole if len(whole) <= most else whole[: most - 1] + "…")


def _marks(index: int, axis: _Axis, count: int) -> list[Figure]:
    """The axis's name above it, its ticks beside it."""
    plain: Figure = {"x": index, "showarrow": False}
    name = plain | {"y": 1, "yanchor": "bottom", "yshift": 10, "text": f"<b>{_label(axis.name)}</b>"}
    if len(axis.name) > _SHORT_NAME and index in (0, count - 1):
        name |= {"xanchor": "right", "xshift": 38} if index else {"xanchor": "left", "xshift": -58}
    ticks = [
        plain | {"y": place, "xanchor": "right", "xshift": -3, "text": _label(text, 12), "font": {"size": 10}}
        for place, text in axis.ticks
    ]
    return [name, *ticks]
