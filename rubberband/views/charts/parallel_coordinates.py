"""Axes of parameters (linear, logarithmic, or categories, from 0 to 1), and the chart of lines across them. Pure.

There is one trace for each shade of the metric. A trial has a point on each axis, then a gap. Positions are from 0 to 1
on every axis and ticks are annotations, so that linear, logarithmic and category axes can be side by side.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rubberband.executor.result.parts import TrialResult
from rubberband.executor.result.result import Result
from rubberband.spec.space import canonical
from rubberband.views.charts.parts import SHADES, Figure, chart_text, decades, few_of_many
from rubberband.views.formatting import finite, number, printable, ranked, setting

Space = Mapping[str, Any] | None
"""The search space in the words of the file; if it is given, axes have the scale of their domains."""

_MOST_CATEGORIES = 12
_FEW_NUMBERS = 5
"""Different numbers that count as categories if there are many trials, and no domain is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Scale of a parameter or a metric."""

    name: str
    place: Callable[[Any], float | None]
    """Value -> 0 to 1; None for a value that the axis cannot show."""
    ticks: Sequence[tuple[float, str]]
    kind: Literal["linear", "log", "category"] = "linear"
    num_categories: int = 0
    has_absent: bool = False
    """Whether the place 0 is that of trials without the parameter, and its values begin at `ABSENT_SHARE`."""


def parameters(trials: Sequence[TrialResult]) -> dict[str, bool]:
    """Return parameter -> whether it differs between trials, in the order of the file."""
    seen: dict[str, set[str]] = {}
    for trial in trials:
        for name, value in trial.configuration.items():
            if len(values := seen.setdefault(name, set())) < 2:
                values.add(canonical(value))
    return {name: len(values) > 1 for name, values in seen.items()}


ABSENT = object()
"""Stands for a parameter that a trial does not have, as it belongs to another option of a choice."""


def domains_of(space: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameter -> domain in the words of the file; of those of the options of a choice, the first one."""
    found: dict[str, Any] = {}
    for name, domain in space.items():
        found.setdefault(name, domain)
        options = domain.get("values", ()) if isinstance(domain, Mapping) else ()
        for option in options:
            if isinstance(option, Mapping) and isinstance(option.get("space"), Mapping):
                found = {**domains_of(option["space"]), **found}
    return found


def axes_of(names: Iterable[str], trials: Sequence[TrialResult], space: Space) -> list[Axis]:
    """Return the axes of parameters; where some trials do not have one, "-" is below its values."""
    domains = domains_of(space or {})
    return [axis_of(name, [t.configuration.get(name, ABSENT) for t in trials], domains.get(name)) for name in names]


def axis_of(name: str, values: Sequence[Any], domain: Any) -> Axis:
    """Return the axis of a parameter with these values, among which `ABSENT` may be."""
    known = [value for value in values if value is not ABSENT]
    axis = _known_axis(name, known, domain)
    if len(known) == len(values):
        return axis

    def place(value: Any) -> float | None:
        if value is ABSENT:
            return 0.0
        at = axis.place(value)
        return None if at is None else ABSENT_SHARE + (1.0 - ABSENT_SHARE) * at

    ticks = [(ABSENT_SHARE + (1.0 - ABSENT_SHARE) * at, text) for at, text in axis.ticks]
    return replace(axis, place=place, ticks=[(0.0, "-"), *ticks], has_absent=True)


ABSENT_SHARE = 0.12
"""Share of an axis below its values, for trials that do not have the parameter."""


def _known_axis(name: str, values: Sequence[Any], domain: Any) -> Axis:
    kind = domain.get("type", "") if isinstance(domain, Mapping) else ""
    if kind in ("choice", "grid") or not all(is_number(value) for value in values):
        options = domain.get("values", ()) if kind in ("choice", "grid") else ()
        named = [each["name"] if isinstance(each, Mapping) and "space" in each else each for each in options]
        return _categories(name, [*named, *values])
    if not kind and len(set(values)) <= _FEW_NUMBERS <= len(values) / 4:  # as a choice of numbers has
        return _categories(name, sorted(values))
    bounds = [domain[end] for end in ("lower", "upper") if kind and is_number(domain.get(end))]
    every = [*values, *bounds]
    log = "log" in kind if kind else min(every) > 0 and max(every) >= 100 * min(every)
    return number_axis(name, every, log=log and min(every) > 0)


def is_number(value: Any) -> bool:
    """Whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def number_axis(name: str, values: Sequence[float], *, log: bool) -> Axis:
    """Return an axis from the least to the greatest of `values`."""
    scale: Callable[[float], float] = math.log10 if log else float
    low, high = scale(min(values)), scale(max(values))

    def place(value: Any) -> float | None:
        if not is_number(value) or (log and value <= 0):
            return None
        return 0.5 if high == low else (scale(value) - low) / (high - low)

    ticks = _powers(low, high) if log else _round(low, high)
    kind: Literal["linear", "log"] = "log" if log else "linear"
    return Axis(name=name, place=place, ticks=[(place(tick) or 0.0, number(tick)) for tick in ticks], kind=kind)


def _powers(low: float, high: float) -> list[float]:
    """Return powers of ten between two logarithms, also 2 and 5 times these if there are few."""
    inside = [tick for tick in decades(low, high, fine=2) if low - 1e-9 <= math.log10(tick) <= high + 1e-9]
    return inside[:: 1 + len(inside) // 9] or [10.0**low, 10.0**high]


def _round(low: float, high: float) -> list[float]:
    """Return about five round numbers from `low` to `high`."""
    if high <= low:
        return [low]
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(digit * power for digit in (1, 2, 5, 10) if digit * power >= rough)
    first = math.ceil(low / step - 1e-9)
    return [round(count * step, 12) for count in range(first, math.floor(high / step + 1e-9) + 1)]


def _categories(name: str, values: Sequence[Any]) -> Axis:
    known = {canonical(value): setting(value) for value in values}
    shown = Counter(known.values())
    labels = {text: label if shown[label] == 1 else text for text, label in known.items()}
    places = {text: (index + 0.5) / len(known) for index, text in enumerate(known)}
    ticks = [(places[text], labels[text]) for text in list(known)[:: math.ceil(len(known) / _MOST_CATEGORIES)]]
    return Axis(
        name=name,
        place=lambda value: places.get(canonical(value)),
        ticks=ticks,
        kind="category",
        num_categories=len(known),
    )


def short_label(text: str, most: int = 18) -> str:
    """Return text for a chart, cut to `most` letters and free of markup."""
    whole = printable(text)
    return chart_text(whole if len(whole) <= most else whole[: most - 1] + "…")


MOST_AXES, MOST_TRIALS = 12, 3000
_NO_METRIC = "#b0888a"
_HEIGHT_PX, _WIDE_PX = 400, 100
PARALLEL_NOTE = (
    "Each line is a trial, from its configuration to its latest metric; the best are orange, on top. Parameters that "
    "are the same for all are left out."
)

_SHORT_NAME = 8
"""Letters of a name that fit centred above the first and the last axis."""


def parallel_coordinates(result: Result, space: Space = None) -> Figure | None:
    """Return configurations and metrics of the trials, the best on top; None without two trials and a metric."""
    drawn = _drawn(result, space)
    if drawn is None:
        return None
    shown, axes, values = drawn
    groups: dict[int | None, list[TrialResult]] = {}
    good = sorted(values, reverse=result.mode == "min")
    low, high = good[len(good) // 10], good[-1]
    for trial in reversed(shown):
        groups.setdefault(_shade(finite(trial.metrics.get(result.metric)), low, high), []).append(trial)
    order = sorted(groups, key=lambda shade: -1 if shade is None else shade)
    traces = [_trace(result, axes, shade, groups[shade]) for shade in order]
    post = {"width": 1.5, "color": "#8a8f98"}
    layout = {
        "height": _HEIGHT_PX,
        "meta": {
            "axes": [short_label(axis.name) for axis in axes],
            "names": [axis.name for axis in axes],
            "least_width_px": _WIDE_PX * len(axes),
            **few_of_many(PARALLEL_NOTE, sum(bool(one.metrics) for one in result.trials), MOST_TRIALS),
        },
        "showlegend": False,
        "hovermode": "closest",
        "margin": {"l": 60, "r": 40, "t": 40, "b": 20, "autoexpand": False},
        "xaxis": _plain([0, len(axes) - 1]),
        "yaxis": _plain([-0.03, 1.03]),
        "shapes": [
            {"type": "line", "x0": index, "x1": index, "y0": 0, "y1": 1, "layer": "below", "line": post}
            for index in range(len(axes))
        ],
        "annotations": [mark for index, axis in enumerate(axes) for mark in _marks(index, axis, len(axes))],
    }
    return {"data": traces, "layout": layout}


def _drawn(result: Result, space: Space) -> tuple[list[TrialResult], list[Axis], list[float]] | None:
    """Return the trials of the chart, best first, its axes and the metrics; None without two trials and a metric."""
    shown = [trial for trial in ranked(result) if trial.metrics][:MOST_TRIALS]
    names = [name for name, varies in parameters(shown).items() if varies][: MOST_AXES - 1]
    if len(shown) < 2 or not names:
        return None
    values = [value for trial in shown if (value := finite(trial.metrics.get(result.metric))) is not None]
    if not values:
        return None
    return shown, [*axes_of(names, shown, space), number_axis(result.metric, values, log=False)], values


Range = tuple[str, float, float]
"""Name of an axis, and the part of it that is chosen, from 0 to 1."""


def within(result: Result, ranges: Sequence[Range], space: Space = None) -> frozenset[int]:
    """Return the trials of the chart that pass through all of the ranges; those of unknown axes have no effect."""
    drawn = _drawn(result, space)
    if drawn is None:
        return frozenset()
    shown, axes, _ = drawn
    chosen = [(at, low, high) for name, low, high in ranges for at, axis in enumerate(axes) if axis.name == name]

    def passes(trial: TrialResult) -> bool:
        places = _places(result, axes, trial)
        return all((place := places[at]) is not None and low - 1e-9 <= place <= high + 1e-9 for at, low, high in chosen)

    return frozenset(trial.trial for trial in shown if passes(trial))


def _shade(value: float | None, low: float, high: float) -> int | None:
    """Return the index of a shade from 0 (`low`, the worst tenth, and below) to the best, `high`; None without one."""
    if value is None:
        return None
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
