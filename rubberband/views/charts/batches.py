"""Charts of adaptive batch sizes: over time (Pollux, Figure 6) and by GPUs (Figure 1b). Plain Plotly figures; pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from rubberband.executor.result.batch_history import BatchStretch
from rubberband.executor.result.parts import TrialResult
from rubberband.executor.result.result import Result
from rubberband.planner.goodput import choose
from rubberband.units import counted, duration
from rubberband.values.adaptive import GoodputProfile
from rubberband.views.charts.parts import (
    ALONE,
    CURVES,
    LABELS_PX,
    LEGEND,
    MANY_POINTS,
    STAGE_COLOURS,
    SWITCH,
    Figure,
    axis,
    button,
    by_outcome,
    chart,
    decades,
    marks,
    outcome_name,
    scatter,
    slots_per_instance,
    time_axis,
    time_unit,
)
from rubberband.views.formatting import amount

_ROW_PX, _GAP_PX, _AROUND_PX = 120, 22, 150
_MOST_TICKS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One of the charts above each other: a value over time."""

    title: str
    value: Callable[[BatchStretch], float | None]
    hover: str
    """Hover text of a point; `%{y}` is the value, `%{customdata[3]}` the composition of the batch."""
    axis: str = "linear"
    """`linear` from zero, `log`, or `powers`: log, with ticks at powers of two."""
    whole: bool = False
    """Whether the value is a whole number."""
    held: bool = True
    """Whether the value is that of the whole stretch, or of its end."""


_ROWS = (
    _Row(title="GPUs", value=lambda stretch: stretch.gpus, hover="%{y} GPUs", whole=True),
    _Row(
        title="batch size",
        value=lambda stretch: stretch.batch_size,
        hover="batch %{y:,} (%{customdata[3]})",
        axis="powers",
    ),
    _Row(
        title="efficiency (%)",
        value=lambda stretch: 100.0 * stretch.efficiency,
        hover="%{y:.1f} % of its samples count",
    ),
    _Row(
        title="noise scale",
        value=lambda stretch: stretch.noise_scale or None,
        hover="noise scale %{y:,.4~r}",
        axis="log",
        held=False,
    ),
    _Row(title="samples/s", value=lambda stretch: stretch.throughput, hover="%{y:,.4~r} samples/s"),
)

_ROWS_PX = len(_ROWS) * (_ROW_PX + _GAP_PX) - _GAP_PX

Drawn = Mapping[int, Sequence[BatchStretch]]
"""Trial -> its stretches that are drawn."""


def batches_over_time(result: Result) -> Figure | None:
    """Return GPUs, batch size, efficiency, noise scale and throughput of each trial over time or its iterations.

    None if batches are fixed.
    """
    outcomes = by_outcome(result, [trial for trial in result.trials if trial.batches])
    if not outcomes:
        return None
    adaptive = [trial for trials in outcomes.values() for trial in trials]
    horizon_s = max(result.actual_jct_s, *(trial.batches[-1].end_s for trial in adaptive))
    unit, unit_s = time_unit(horizon_s)
    drawn = _thinned(adaptive)
    few = sum(map(len, drawn.values())) < MANY_POINTS
    traces, by_progress = [], []
    for index, row in enumerate(_ROWS):
        for outcome, trials in outcomes.items():
            points = [(t.trial, point) for t in trials for point in _points(drawn[t.trial], row.held)]
            traces.append(_trace(index, outcome, trials, points, unit_s, few))
            by_progress.append([point and point.progress for _, point in points])
    done = max(trial.batches[-1].progress for trial in adaptive)
    stages = marks(result, horizon_s, unit_s)
    time_title = f"time since the start ({unit})"
    buttons = [
        _button("over time", [trace["x"] for trace in traces], time_title, horizon_s / unit_s, stages),
        _button("over iterations", by_progress, "iterations", done, {"shapes": [], "annotations": []}),
    ]
    layout: Figure = {
        "height": _ROWS_PX + _AROUND_PX,
        "xaxis": time_axis(unit, horizon_s / unit_s) | {"anchor": f"y{len(_ROWS)}"},
        **{f"yaxis{index + 1}": _value_axis(index, drawn) for index in range(len(_ROWS))},
        **stages,
        "updatemenus": [SWITCH | {"y": 1 + 24 / _ROWS_PX, "buttons": buttons}],
        **LEGEND,
        "margin": {"l": LABELS_PX, "r": 10, "t": 70, "b": 90},
    }
    return {"data": traces, "layout": layout}


def _button(label: str, xs: list[list[Any]], title: str, most: float, stages: Figure) -> Figure:
    return button(label, xs, {"xaxis.title.text": title, "xaxis.range": [0, most * 1.02], **stages})


def _value_axis(index: int, drawn: Drawn) -> Figure:
    row, top = _ROWS[index], 1 - index * (_ROW_PX + _GAP_PX) / _ROWS_PX
    values = [value for stretches in drawn.values() for s in stretches if (value := row.value(s)) is not None]
    axis: Figure = {
        "title": {"text": row.title, "standoff": 14},
        "domain": [max(0.0, top - _ROW_PX / _ROWS_PX), top],
        "fixedrange": True,
    }
    if row.axis == "linear" or not values:
        most = max(values, default=1.0)
        ticks = {"dtick": 1} if row.whole and most <= 4 else {"nticks": 5}
        return axis | {"range": [0, most * 1.1], "tickformat": ",~r", **ticks}
    return axis | (powers(values) if row.axis == "powers" else _decades(values))


def powers(values: Sequence[float]) -> Figure:
    """Return a log axis for `values`, with ticks at powers of two."""
    first, last = math.floor(math.log2(min(values))), math.ceil(math.log2(max(values)))
    step = 1 + (last - first) // _MOST_TICKS
    ticks = [2**exponent for exponent in range(first, last + step, step)]
    return _log_axis(values) | {"tickvals": ticks, "ticktext": [f"{tick:,}" for tick in ticks]}


def _decades(values: Sequence[float]) -> Figure:
    """Return a log axis with ticks at powers of ten; also at 2 and 5 times these if there are few."""
    axis = _log_axis(values)
    low, high = axis["range"]
    every = decades(math.log10(min(values)), math.log10(max(values)), fine=2.5)
    ticks = [tick for tick in every if low <= math.log10(tick) <= high]
    return axis | {"tickvals": ticks, "ticktext": [amount(tick) for tick in ticks]}


def _log_axis(values: Sequence[float]) -> Figure:
    low, high = math.log10(min(values)), math.log10(max(values))
    room = 0.08 * (high - low) + 0.08
    return {"type": "log", "range": [low - room, high + room], "tickmode": "array"}


def _thinned(trials: Sequence[TrialResult]) -> Drawn:
    """Return trial -> stretches to draw: all, or some of very many, with those beside a change if there is room."""
    step = math.ceil(sum(len(trial.batches) for trial in trials) / MANY_POINTS)
    turns = {trial.trial: _turns(trial.batches) for trial in trials}
    shown = turns if sum(map(len, turns.values())) <= MANY_POINTS else {}
    return {
        trial.trial: [
            stretch
            for index, stretch in enumerate(trial.batches)
            if index % step == 0 or index == len(trial.batches) - 1 or index in shown.get(trial.trial, ())
        ]
        for trial in trials
    }


def _turns(stretches: Sequence[BatchStretch]) -> set[int]:
    """Return the indices of stretches before and after a change of stage, GPUs or batch size."""
    return {
        beside
        for index, (before, after) in enumerate(pairwise(stretches))
        if any(getattr(before, name) != getattr(after, name) for name in ("stage", "gpus", "batch_size"))
        for beside in (index, index + 1)
    }


class _Point(NamedTuple):
    """Instant of a trial's training."""

    at_s: float
    progress: float
    stretch: BatchStretch


def _points(stretches: Iterable[BatchStretch], held: bool) -> list[_Point | None]:
    """Return the points of one trial, with a gap for each wait for the next stage, and at the end."""
    points: list[_Point | None] = []
    before: BatchStretch | None = None
    for stretch in stretches:
        if held:
            if before is not None and stretch.stage != before.stage:
                points.append(None)
            done = 0.0 if before is None else before.progress
            points.append(_Point(stretch.start_s, done, stretch))
        points.append(_Point(stretch.end_s, stretch.progress, stretch))
        before = stretch
    return [*points, None]


def _trace(
    index: int,
    outcome: str,
    trials: Sequence[TrialResult],
    points: Sequence[tuple[int, _Point | None]],
    unit_s: float,
    few: bool,
) -> Figure:
    """Return the line of the trials with one outcome in a row; `points` have gaps between trials."""
    row, (colour, width, opacity) = _ROWS[index], CURVES[outcome]
    return {
        "type": "scatter",
        "mode": "lines+markers" if few and not row.held else "lines",
        "name": outcome_name(outcome, trials),
        "legendgroup": outcome,
        "showlegend": index == 0,
        "x": [point and point.at_s / unit_s for _, point in points],
        "y": [point and row.value(point.stretch) for _, point in points],
        "yaxis": f"y{index + 1}",
        "customdata": [point and _label(trial, point.stretch) for trial, point in points],
        "hovertemplate": f"trial %{{customdata[0]}}: {row.hover}<br>stage %{{customdata[1]}}, %{{customdata[2]}}"
        f"<extra>{outcome}</extra>",
        "line": {"color": colour, "width": width, "shape": "hv" if row.held else "linear"},
        "marker": {"color": colour, "size": 6 if outcome in ALONE else 4},
        "opacity": opacity,
    }


def _label(trial: int, stretch: BatchStretch) -> list[Any]:
    span = f"{duration(stretch.start_s)} to {duration(stretch.end_s)}"
    passes = f" x {stretch.accumulation + 1} passes" if stretch.accumulation else ""
    return [trial, stretch.stage, span, f"{counted(stretch.gpus, 'GPU')} x {stretch.per_gpu:,}{passes}"]


_APART = 1.03
"""Factor between points of several stages at the same number of GPUs, which are drawn side by side."""

Curve = Mapping[int, int]
"""GPUs -> batch size."""


def batches_by_gpus(result: Result) -> Figure | None:
    """Return the final batch sizes of trials against their GPUs, a series for each stage; None if batches are fixed."""
    settled = _settled(result)
    if not settled:
        return None
    used = {gpus for by_gpus in settled.values() for gpus in by_gpus}
    modelled = _modelled(result, used)
    sizes = [size for by_gpus in settled.values() for found in by_gpus.values() for size in found]
    sizes += [size for _, curve in modelled.values() for size in curve.values()]
    counts = sorted({*used, *(gpus for _, curve in modelled.values() for gpus in curve)})
    shown = [math.log10(counts[0] / 1.3), math.log10(counts[-1] * 1.3)]
    across = axis("GPUs of a trial", type="log", range=shown, tickmode="array", tickvals=counts)
    up = {"title": {"text": "batch size", "standoff": 14}, **powers(sizes)}
    curves = [_dashed(stage, noise, curve) for stage, (noise, curve) in sorted(modelled.items())]
    points = [_gpu_points(stage, by_gpus, _places(settled, stage)) for stage, by_gpus in sorted(settled.items())]
    return chart([*curves, *points], 400, across, up, showlegend=True)


def _settled(result: Result) -> dict[int, dict[int, list[int]]]:
    """Return stage -> GPUs -> the last batch size of each trial."""
    settled: dict[int, dict[int, list[int]]] = {}
    for trial in result.trials:
        for (stage, gpus), size in {(s.stage, s.gpus): s.batch_size for s in trial.batches}.items():
            settled.setdefault(stage, {}).setdefault(gpus, []).append(size)
    return settled


def _modelled(result: Result, used: Set[int]) -> dict[int, tuple[float, Curve]]:
    """Return stage -> its noise scale and the best batches by the model; none without a noise scale or a model.

    The noise scale of a stage is the median over its trials at its end. The GPUs are those `used`, those in the
    profile, and powers of two between.
    """
    profile = result.goodput
    if profile is None:
        return {}
    known = used | {point.gpus for point in profile.points}
    counts = sorted(known | {2**n for n in range(max(known).bit_length())})
    if len(counts) < 2:
        return {}
    noises: dict[int, list[float]] = {}
    for trial in result.trials:
        for stage, noise in {s.stage: s.noise_scale for s in trial.batches if s.noise_scale is not None}.items():
            noises.setdefault(stage, []).append(noise)
    per_instance = slots_per_instance(result)
    return {
        stage: (median(found), _curve(profile, median(found), per_instance, counts)) for stage, found in noises.items()
    }


def _curve(profile: GoodputProfile, noise_scale: float, per_instance: int, counts: Sequence[int]) -> Curve:
    return {
        gpus: choose(profile.throughput, noise_scale, profile.limits, -(-gpus // per_instance), gpus).batch_size
        for gpus in counts
        if gpus <= profile.limits.max
    }


def _dashed(stage: int, noise_scale: float, curve: Curve) -> Figure:
    by_model = f"by the model, at noise scale {amount(noise_scale)}"
    return scatter(
        f"stage {stage}, by the model",
        (
            (n, size, f"stage {stage}, {counted(n, 'GPU')}: best batch {size:,}<br>{by_model}")
            for n, size in curve.items()
        ),
        legendgroup=str(stage),
        showlegend=False,
        line={"color": STAGE_COLOURS[stage % len(STAGE_COLOURS)], "width": 1.5, "dash": "dash"},
    )


def _places(settled: Mapping[int, Mapping[int, object]], stage: int) -> list[float]:
    """Return the x values of the stage's points: their GPUs, or around these if several stages share them."""
    places = []
    for gpus in sorted(settled[stage]):
        sharing = sorted(other for other in settled if gpus in settled[other])
        places.append(gpus * _APART ** (sharing.index(stage) - (len(sharing) - 1) / 2))
    return places


def _gpu_points(stage: int, by_gpus: Mapping[int, Sequence[int]], places: Sequence[float]) -> Figure:
    colour = STAGE_COLOURS[stage % len(STAGE_COLOURS)]
    points, above, below = [], [], []
    for x, (gpus, sizes) in zip(places, sorted(by_gpus.items()), strict=True):
        middle, least, most = median(sizes), min(sizes), max(sizes)
        hover = f"stage {stage}, {counted(gpus, 'GPU')}: batch {middle:,.6g}"
        points.append((x, middle, f"{hover}<br>{least:,} to {most:,} over {counted(len(sizes), 'trial')}"))
        above.append(most - middle)
        below.append(middle - least)
    error = {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "color": colour, "thickness": 1.2}
    return scatter(
        f"stage {stage}",
        points,
        mode="lines+markers",
        legendgroup=str(stage),
        error_y=error,
        line={"color": colour, "width": 2},
        marker={"color": colour, "size": 8},
    )
