"""The charts of adaptive batch sizes, in the form of Pollux's Figures 6 and 1b, as plain Plotly figures. Pure.

Colours and gestures are those of `rubberband.views.charts`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rubberband.executor.batch_history import BatchStretch
from rubberband.executor.result import Result, TrialResult
from rubberband.views.charts import (
    ALONE,
    CURVES,
    LEGEND,
    MANY_POINTS,
    STAGE_COLOURS,
    Figure,
    by_fate,
    fate_name,
    marks,
    time_unit,
)
from rubberband.views.words import counted, duration

_ROW_PX, _GAP_PX, _AROUND_PX = 120, 22, 150
_MOST_TICKS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One of the charts above each other: a value over time."""

    title: str
    value: Callable[[BatchStretch], float | None]
    hover: str
    """Of a point; `%{y}` is the value, `%{customdata[3]}` how the batch is made up."""
    axis: str = "linear"
    """`linear` from zero, `log`, or `powers`: log, with ticks at powers of two."""
    held: bool = True
    """Whether it holds for the whole stretch, or is that of its end."""


def _percent(stretch: BatchStretch) -> float:
    return 100.0 * stretch.efficiency


_ROWS = (
    _Row(title="GPUs", value=lambda stretch: stretch.gpus, hover="%{y} GPUs"),
    _Row(
        title="batch size",
        value=lambda stretch: stretch.batch_size,
        hover="batch %{y:,} (%{customdata[3]})",
        axis="powers",
    ),
    _Row(title="efficiency (%)", value=_percent, hover="%{y:.1f} % of its samples count"),
    _Row(
        title="noise scale",
        value=lambda stretch: stretch.noise_scale or None,
        hover="noise scale %{y:,.4~r}",
        axis="log",
        held=False,
    ),
    _Row(title="samples/s", value=lambda stretch: stretch.throughput, hover="%{y:,.4~r} samples/s"),
)


def batches_over_time(result: Result) -> Figure | None:
    """GPUs, batch size, efficiency, noise scale and throughput of every trial over time; None if batches are fixed."""
    fates = by_fate(result, [trial for trial in result.trials if trial.batches])
    if not fates:
        return None
    ends_s = [trial.batches[-1].end_s for trials in fates.values() for trial in trials]
    horizon_s = max(result.actual_jct_s, *ends_s)
    unit, unit_s = time_unit(horizon_s)
    drawn = _thinned([trial for trials in fates.values() for trial in trials])
    rows_px = len(_ROWS) * (_ROW_PX + _GAP_PX) - _GAP_PX
    layout: Figure = {
        "height": rows_px + _AROUND_PX,
        "xaxis": {
            "title": {"text": f"time since the start ({unit})"},
            "range": [0, horizon_s * 1.02 / unit_s],
            "anchor": _axis(len(_ROWS) - 1),
        },
        **marks(result, horizon_s, unit_s),
        **LEGEND,
    }
    for index, row in enumerate(_ROWS):
        top = 1 - index * (_ROW_PX + _GAP_PX) / rows_px
        values = [value for stretches in drawn.values() for s in stretches if (value := row.value(s)) is not None]
        layout[f"yaxis{index + 1}"] = _value_axis(row, values) | {"domain": [max(0.0, top - _ROW_PX / rows_px), top]}
    traces = [
        _trace(index, fate, trials, drawn, unit_s) for index in range(len(_ROWS)) for fate, trials in fates.items()
    ]
    return {"data": traces, "layout": layout}


def _axis(index: int) -> str:
    return f"y{index + 1}"


def _value_axis(row: _Row, values: Sequence[float]) -> Figure:
    axis: Figure = {"title": {"text": row.title, "standoff": 14}, "fixedrange": True}
    if row.axis == "linear" or not values:
        most = max(values, default=1.0) * 1.1
        return axis | {"range": [0, most], "nticks": 5} | ({"tickformat": "d"} if row.title == "GPUs" else {})
    return axis | (_powers(values) if row.axis == "powers" else _decades(values))


def _powers(values: Sequence[float]) -> Figure:
    """A log axis with ticks at powers of two."""
    first, last = math.floor(math.log2(min(values))), math.ceil(math.log2(max(values)))
    step = 1 + (last - first) // _MOST_TICKS
    ticks = [2**exponent for exponent in range(first, last + step, step)]
    return _log_range(values) | {
        "tickmode": "array",
        "tickvals": ticks,
        "ticktext": [f"{tick:,}" for tick in ticks],
    }


def _decades(values: Sequence[float]) -> Figure:
    """A log axis with ticks at powers of ten, or closer where these would be too few."""
    decades = math.log10(max(values) / min(values))
    return _log_range(values) | {"tickformat": ",~r", "dtick": "D1" if decades > 1.5 else "D2"}


def _log_range(values: Sequence[float]) -> Figure:
    low, high = math.log10(min(values)), math.log10(max(values))
    room = 0.08 * (high - low) + 0.08
    return {"type": "log", "range": [low - room, high + room]}


def _thinned(trials: Sequence[TrialResult]) -> dict[int, list[BatchStretch]]:
    """The stretches that are drawn, by trial: all, or, of many, those where the batch changes and some between."""
    step = math.ceil(sum(len(trial.batches) for trial in trials) / MANY_POINTS)
    return {trial.trial: [s for i, s in enumerate(trial.batches) if _drawn(trial, i, step)] for trial in trials}


def _drawn(trial: TrialResult, index: int, step: int) -> bool:
    last = len(trial.batches) - 1
    return (
        index in (0, last)
        or index % step == 0
        or any(_kind(trial.batches[index]) != _kind(trial.batches[beside]) for beside in (index - 1, index + 1))
    )


def _kind(stretch: BatchStretch) -> tuple[int, int, int]:
    return stretch.stage, stretch.gpus, stretch.batch_size


Point = tuple[float, BatchStretch] | None
"""(instant in seconds, what holds then); None is a gap."""


def _points(stretches: Iterable[BatchStretch], held: bool) -> list[Point]:
    """Of one trial, with a gap where it waited for the next stage, and after it."""
    points: list[Point] = []
    stage = None
    for stretch in stretches:
        if held and stage is not None and stretch.stage != stage:
            points.append(None)
        stage = stretch.stage
        points += [(stretch.start_s, stretch)] if held else []
        points.append((stretch.end_s, stretch))
    return [*points, None]


def _trace(
    index: int, fate: str, trials: Sequence[TrialResult], drawn: dict[int, list[BatchStretch]], unit_s: float
) -> Figure:
    row, (colour, width, opacity) = _ROWS[index], CURVES[fate]
    points = [(t.trial, point) for t in trials for point in _points(drawn[t.trial], row.held)]
    dots = not row.held and sum(map(len, drawn.values())) < MANY_POINTS
    return {
        "type": "scatter",
        "mode": "lines+markers" if dots else "lines",
        "name": fate_name(fate, trials),
        "legendgroup": fate,
        "showlegend": index == 0,
        "x": [None if point is None else point[0] / unit_s for _, point in points],
        "y": [None if point is None else row.value(point[1]) for _, point in points],
        "yaxis": _axis(index),
        "customdata": [None if point is None else _label(trial, point[1]) for trial, point in points],
        "hovertemplate": f"trial %{{customdata[0]}}: {row.hover}<br>stage %{{customdata[1]}}, %{{customdata[2]}}"
        f"<extra>{fate}</extra>",
        "line": {"color": colour, "width": width, "shape": "hv" if row.held else "linear"},
        "marker": {"color": colour, "size": 6 if fate in ALONE else 4},
        "opacity": opacity,
    }


def _label(trial: int, stretch: BatchStretch) -> list[Any]:
    span = f"{duration(stretch.start_s)} to {duration(stretch.end_s)}"
    passes = f" x {stretch.accumulation + 1} passes" if stretch.accumulation else ""
    return [trial, stretch.stage, span, f"{counted(stretch.gpus, 'GPU')} x {stretch.per_gpu:,}{passes}"]


def batches_by_gpus(result: Result) -> Figure | None:
    """The batch sizes that trials came to, against their GPUs: a series a stage; None if batches are fixed."""
    settled: dict[int, dict[int, list[int]]] = {}
    for trial in result.trials:
        for (stage, gpus), batch_size in _settled(trial).items():
            settled.setdefault(stage, {}).setdefault(gpus, []).append(batch_size)
    if not settled:
        return None
    sizes = [size for by_gpus in settled.values() for found in by_gpus.values() for size in found]
    counts = sorted({gpus for by_gpus in settled.values() for gpus in by_gpus})
    layout = {
        "height": 380,
        "showlegend": True,
        "xaxis": {
            "title": {"text": "GPUs of a trial"},
            "type": "log",
            "range": [math.log10(counts[0] / 1.5), math.log10(counts[-1] * 1.5)],
            "tickmode": "array",
            "tickvals": counts,
        },
        "yaxis": {"title": {"text": "batch size", "standoff": 14}, **_powers(sizes)},
        **LEGEND,
    }
    return {"data": [_series(stage, by_gpus) for stage, by_gpus in sorted(settled.items())], "layout": layout}


def _settled(trial: TrialResult) -> dict[tuple[int, int], int]:
    """(stage, GPUs) -> the batch size it had at last."""
    return {(stretch.stage, stretch.gpus): stretch.batch_size for stretch in trial.batches}


def _series(stage: int, by_gpus: dict[int, list[int]]) -> Figure:
    colour = STAGE_COLOURS[stage % len(STAGE_COLOURS)]
    points = [(gpus, median(sizes), min(sizes), max(sizes), len(sizes)) for gpus, sizes in sorted(by_gpus.items())]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": f"stage {stage}",
        "x": [gpus for gpus, *_ in points],
        "y": [middle for _, middle, *_ in points],
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [most - middle for _, middle, _, most, _ in points],
            "arrayminus": [middle - least for _, middle, least, _, _ in points],
            "color": colour,
            "thickness": 1.2,
        },
        "hovertext": [
            f"stage {stage}, {counted(gpus, 'GPU')}: batch {middle:,.6g}"
            f"<br>{least:,} to {most:,} over {counted(count, 'trial')}"
            for gpus, middle, least, most, count in points
        ],
        "hoverinfo": "text",
        "line": {"color": colour, "width": 2},
        "marker": {"color": colour, "size": 8},
    }
