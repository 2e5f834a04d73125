"""The report's charts as plain Plotly figures (data and layout, ready for JSON). Pure; imports no plotly.

Colours read on light and on dark; the page sets those of text and grid.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rubberband.executor.result import Busy, InstanceResult, Result, TrialResult
from rubberband.units import format_duration
from rubberband.views.tables import status
from rubberband.views.words import counted, duration, printable

Figure = dict[str, Any]

STAGE_COLOURS = ("#3b82c4", "#e08a1e", "#2a9d6f", "#b565a7", "#c8553d", "#6c8ebf", "#8f9a2e", "#7a6fd0")
WAITING, STARTING, IDLE, STARTUP = "rgba(128,128,128,0.10)", "#b9a44c", "rgba(128,128,128,0.25)", "#8a8f98"
PLANNED, LOST = "#9aa0a8", "#d62728"
CURVES = {
    "winner": ("#e08a1e", 3.5, 1.0),
    "best so far": ("#e08a1e", 3.5, 1.0),
    "completed": ("#2a9d6f", 1.8, 0.9),
    "running": ("#3b82c4", 1.4, 0.8),
    "waiting": ("#7a6fd0", 1.2, 0.7),
    "cut short": ("#3b82c4", 1.2, 0.6),
    "stopped": ("#8a8f98", 1.0, 0.45),
    "failed": ("#d62728", 1.2, 0.7),
}
ALONE = ("winner", "best so far")
"""Fates of a single trial."""
_ROW_PX, _SMALL_ROW_PX, _STEPS_PX, _AROUND_PX = 22, 14, 130, 150
MANY_POINTS = 2000
"""From so many on, points are thinned out or have no dots."""


def allocation(result: Result) -> Figure | None:
    """Instances over time, planned and actual, above what every GPU did; None if nothing was ever held."""
    rented = [instance for instance in result.instances if not _refused(instance)]
    if not rented:
        return None
    end_s = max([result.actual_jct_s, *(use.end_s for use in result.busy), *(_end_s(result, i) for i in rented)])
    horizon_s = max(end_s, result.planned_jct_s)
    unit, unit_s = time_unit(horizon_s)
    gpus = gpus_per_instance(result)
    rows = [_row(instance.instance, gpu) for instance in rented for gpu in range(gpus)]
    bars = _held_bars(result, rented, gpus, unit_s) + _busy_bars(result.busy, unit_s)
    gantt_px = (_ROW_PX if len(rows) <= 40 else _SMALL_ROW_PX) * len(rows) + 10
    share = gantt_px / (gantt_px + _STEPS_PX + 30)
    most = max([len(rented), *(stage.planned_instances for stage in result.stages)])
    layout = {
        "height": gantt_px + _STEPS_PX + 30 + _AROUND_PX,
        "barmode": "overlay",
        "bargap": 0.15,
        "uniformtext": {"minsize": 8, "mode": "hide"},
        "xaxis": {"title": {"text": f"time since the start ({unit})"}, "range": [0, horizon_s * 1.02 / unit_s]},
        "yaxis": _gpu_axis(rows) | {"domain": [0, share]},
        "yaxis2": {
            "domain": [share + (1 - share) * 0.2, 1],
            "title": {"text": "instances", "standoff": 14},
            "rangemode": "tozero",
            "tickformat": "d",
            "nticks": 5 if most > 4 else most + 1,
            "fixedrange": True,
        },
        **marks(result, horizon_s, unit_s),
        **LEGEND,
    }
    return {"data": [*bars, *_lost(result, rented, gpus, unit_s), *_steps(result, rented, unit_s)], "layout": layout}


def _gpu_axis(rows: list[str]) -> Figure:
    """A line for each GPU, from above."""
    return {
        "type": "category",
        "categoryorder": "array",
        "categoryarray": rows,
        "range": [len(rows) - 0.5, -0.5],
        "fixedrange": True,
        "title": {"text": "instance : GPU", "standoff": 14},
        "tickmode": "array",
        "tickvals": rows,
    }


LEGEND: Figure = {
    "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0},
    "margin": {"l": 10, "r": 10, "t": 24, "b": 90},
    "hovermode": "closest",
}


def gpus_per_instance(result: Result) -> int:
    """GPUs of an instance: from the GPU-seconds paid for while instances ran, or from what trials used."""
    used = max((use.gpu + 1 for use in result.busy), default=1)
    held_s = math.fsum(
        _end_s(result, instance) - instance.running_s for instance in result.instances if instance.running_s is not None
    )
    held_gpu_s = result.paid.total_gpu_s - result.paid.minimum_gpu_s
    return max(used, round(held_gpu_s / held_s)) if held_s > 0 else used


def _refused(instance: InstanceResult) -> bool:
    return instance.running_s is None and bool(instance.reason)


def _end_s(result: Result, instance: InstanceResult) -> float:
    return result.actual_jct_s if instance.ended_s is None else instance.ended_s


def _fate(instance: InstanceResult) -> str:
    return "PREEMPTED" if instance.preempted else "lost"


def _row(instance: str, gpu: int) -> str:
    return f"{html.escape(instance)} : {gpu}"


def time_unit(horizon_s: float) -> tuple[str, float]:
    """What time axes count in, and how many seconds that is."""
    if horizon_s <= 180:
        return "seconds", 1.0
    return ("minutes", 60.0) if horizon_s <= 3 * 3600 else ("hours", 3600.0)


Stretch = tuple[str, float, float, str, str]
"""(row, start_s, end_s, hover text, text in the bar)"""


def _bar(name: str, colour: str, stretches: Iterable[Stretch], unit_s: float, pattern: str = "") -> Figure:
    every = list(stretches)
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": [row for row, *_ in every],
        "base": [start_s / unit_s for _, start_s, *_ in every],
        "x": [(end_s - start_s) / unit_s for _, start_s, end_s, *_ in every],
        "hovertext": [f"{hover}<br>{_span(start_s, end_s)}" for _, start_s, end_s, hover, _ in every],
        "hoverinfo": "text",
        "text": [text for *_, text in every],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "cliponaxis": True,
        "marker": {"color": colour, "pattern": {"shape": pattern, "size": 5, "solidity": 0.3}, "line": {"width": 0}},
    }


def _span(start_s: float, end_s: float) -> str:
    return f"{duration(start_s)} to {duration(end_s)} ({format_duration(round(end_s - start_s, 1))})"


def _held_bars(result: Result, rented: Sequence[InstanceResult], gpus: int, unit_s: float) -> list[Figure]:
    waiting: list[Stretch] = []
    starting: list[Stretch] = []
    held: list[Stretch] = []
    for instance in rented:
        end_s = _end_s(result, instance)
        running_s = end_s if instance.running_s is None else min(instance.running_s, end_s)
        ready_s = end_s if instance.ready_s is None else min(instance.ready_s, end_s)
        name = html.escape(instance.instance)
        for row in (_row(instance.instance, gpu) for gpu in range(gpus)):
            waiting.append((row, instance.requested_s, running_s, f"{name} asked for, not billed yet", ""))
            starting.append((row, running_s, max(running_s, ready_s), f"{name} runs, its workers start", ""))
            held.append((row, max(running_s, ready_s), end_s, f"{name} held", ""))
    kinds = [
        ("asked for, not billed", STARTING, waiting, "/"),
        ("instance starts up", STARTING, starting, ""),
        ("held, idle", IDLE, held, ""),
    ]
    bars = [
        _bar(name, colour, [s for s in stretches if s[2] > s[1]], unit_s, pattern)
        for name, colour, stretches, pattern in kinds
    ]
    return [bar for bar in bars if bar["y"]]


def _busy_bars(busy: Sequence[Busy], unit_s: float) -> list[Figure]:
    startup: list[Stretch] = []
    training: dict[int, list[Stretch]] = {}
    for use in busy:
        row = _row(use.instance, use.gpu)
        first_s = use.end_s if use.training_s is None else use.training_s
        what = f"trial {use.trial}, stage {use.stage}, on {row}"
        if first_s > use.start_s:
            startup.append((row, use.start_s, first_s, f"start-up of {what}", ""))
        if use.end_s > first_s:
            training.setdefault(use.stage, []).append((row, first_s, use.end_s, what, str(use.trial)))
    bars = [_bar("start-up of a trial", STARTUP, startup, unit_s)] if startup else []
    for stage, stretches in sorted(training.items()):
        bar = _bar(f"stage {stage}", STAGE_COLOURS[stage % len(STAGE_COLOURS)], stretches, unit_s)
        bar["marker"]["line"] = {"width": 1, "color": "rgba(255,255,255,0.7)"}
        bar["textfont"] = {"color": "#fff"}
        bars.append(bar)
    return bars


def _lost(result: Result, rented: Sequence[InstanceResult], gpus: int, unit_s: float) -> list[Figure]:
    lost = [(i, gpu) for i in rented if i.reason and i.ended_s is not None for gpu in range(gpus)]
    if not lost:
        return []
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": "instance lost",
            "x": [_end_s(result, instance) / unit_s for instance, _ in lost],
            "y": [_row(instance.instance, gpu) for instance, gpu in lost],
            "hovertext": [
                f"{html.escape(i.instance)} {_fate(i)} at {duration(_end_s(result, i))}: "
                f"{html.escape(printable(i.reason))}"
                for i, _ in lost
            ],
            "hoverinfo": "text",
            "marker": {"symbol": "x", "size": 9, "color": LOST},
        }
    ]


def _steps(result: Result, rented: Sequence[InstanceResult], unit_s: float) -> list[Figure]:
    """Instances over time: as planned, and those held or on their way."""
    planned = [(0.0, 0)]
    at_s = 0.0
    for stage in result.stages:
        planned.append((at_s, stage.planned_instances))
        at_s += stage.planned_s
    planned.append((at_s, 0))
    changes = sorted([(i.requested_s, 1) for i in rented] + [(i.ended_s, -1) for i in rented if i.ended_s is not None])
    held, actual = 0, [(0.0, 0)]
    for at_s, change in changes:
        held += change
        actual.append((at_s, held))
    actual.append((max(actual[-1][0], result.actual_jct_s), held))
    return [
        _step("instances planned", planned, unit_s, {"color": PLANNED, "width": 2, "dash": "dash"}),
        _step("instances held or asked for", actual, unit_s, {"color": STAGE_COLOURS[0], "width": 2}),
    ]


def _step(name: str, points: Sequence[tuple[float, int]], unit_s: float, line: Figure) -> Figure:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": [at_s / unit_s for at_s, _ in points],
        "y": [count for _, count in points],
        "hovertext": [f"{name}: {count} from {duration(at_s)}" for at_s, count in points],
        "hoverinfo": "text",
        "line": {"shape": "hv", **line},
        "yaxis": "y2",
    }


def marks(result: Result, horizon_s: float, unit_s: float) -> Figure:
    """Lines where stages end and where the deadline is, and the stages' names."""
    lines: list[tuple[float, str]] = []
    names: list[Figure] = []
    at_s = 0.0
    for stage in result.stages:
        if stage.actual_s is None:
            break
        if stage.actual_s > 0.07 * horizon_s:
            names.append(_note((at_s + stage.actual_s / 2) / unit_s, f"stage {stage.stage}"))
        at_s += stage.actual_s
        if stage.promoted:
            lines.append((at_s, "dot"))
    if result.deadline_s is not None and result.deadline_s <= horizon_s * 1.02:
        lines.append((result.deadline_s, "solid"))
        names.append(_note(result.deadline_s / unit_s, "deadline") | {"font": {"color": LOST}, "xanchor": "right"})
    shapes = [
        {
            "type": "line",
            "xref": "x",
            "yref": "paper",
            "x0": x / unit_s,
            "x1": x / unit_s,
            "y0": 0,
            "y1": 1,
            "line": {"width": 1, "dash": dash, "color": LOST if dash == "solid" else PLANNED},
        }
        for x, dash in lines
    ]
    return {"shapes": shapes, "annotations": names}


def _note(x: float, text: str) -> Figure:
    return {"x": x, "xref": "x", "y": 1, "yref": "paper", "yanchor": "bottom", "showarrow": False, "text": text}


SWITCH: Figure = {
    "type": "buttons",
    "direction": "right",
    "x": 0,
    "xanchor": "left",
    "y": 1.02,
    "yanchor": "bottom",
    "pad": {"b": 4},
}


def learning_curves(result: Result) -> Figure | None:
    """Every trial's metric over iterations (or time), a colour for each fate; None before the first report."""
    fates = by_fate(result, [trial for trial in result.trials if trial.curve])
    if not fates:
        return None
    unit, unit_s = time_unit(result.actual_jct_s)
    points = sum(len(trial.curve) for trial in result.trials)
    traces = [_trace(result, fate, trials, points < MANY_POINTS) for fate, trials in fates.items()]
    by_time = [_joined(trials, lambda point: point[0] / unit_s) for trials in fates.values()]
    by_iterations = [trace["x"] for trace in traces]
    most = max(trial.iterations for trial in result.trials)
    step = 1 if most <= 15 else None
    buttons = [
        _button("over iterations", by_iterations, "iterations", step),
        _button("over time", by_time, f"time since the start ({unit})", None),
    ]
    layout = {
        "height": 460,
        "showlegend": True,
        "xaxis": {"title": {"text": "iterations"}, "rangemode": "tozero", "dtick": step},
        "yaxis": {"title": {"text": html.escape(printable(result.metric))}},
        "updatemenus": [SWITCH | {"buttons": buttons}],
        **LEGEND,
        "margin": {"l": 10, "r": 10, "t": 50, "b": 90},
    }
    return {"data": traces, "layout": layout}


Point = tuple[float, int, Any]


def _joined(trials: Iterable[TrialResult], value: Callable[[Point], Any]) -> list[Any]:
    """The values of all the trials' points, with a gap after each trial."""
    return [item for trial in trials for item in [*(value(point) for point in trial.curve), None]]


def by_fate(result: Result, trials: Sequence[TrialResult]) -> dict[str, list[TrialResult]]:
    """Trials by what became of them, a key of `CURVES`; what is to be drawn on top comes last."""
    fates: dict[str, list[TrialResult]] = {}
    for trial in trials:
        fates.setdefault(_fate_of(result, trial), []).append(trial)
    return {fate: fates[fate] for fate in reversed(CURVES) if fate in fates}


def fate_name(fate: str, trials: Sequence[TrialResult]) -> str:
    """A fate as the legend has it, with its only trial or how many there are."""
    return f"{fate} ({f'trial {trials[0].trial}' if fate in ALONE else counted(len(trials), 'trial')})"


def _fate_of(result: Result, trial: TrialResult) -> str:
    if result.outcome != "done" and result.best is not None and trial.trial == result.best.trial:
        return "best so far"
    fate = status(result, trial)
    return "waiting" if fate in ("queued", "paused") else fate


def _trace(result: Result, fate: str, trials: Sequence[TrialResult], dots: bool) -> Figure:
    colour, width, opacity = CURVES[fate]

    def metric(point: Point) -> float | None:
        value = point[2].get(result.metric)
        return value if value is not None and math.isfinite(value) else None

    names = [[trial.trial] for trial in trials for _ in [*trial.curve, None]]
    times = _joined(trials, lambda point: duration(point[0]))
    iterations = _joined(trials, lambda point: point[1])
    labels = [[*name, done, at] for name, done, at in zip(names, iterations, times, strict=True)]
    return {
        "type": "scatter",
        "mode": "lines+markers" if dots else "lines",
        "name": fate_name(fate, trials),
        "x": iterations,
        "y": _joined(trials, metric),
        "customdata": labels,
        "hovertemplate": "trial %{customdata[0]}: %{y:.6g}<br>%{customdata[1]} iterations, at %{customdata[2]}"
        f"<extra>{fate}</extra>",
        "line": {"color": colour, "width": width},
        "marker": {"color": colour, "size": 6 if fate in ALONE else 4},
        "opacity": opacity,
    }


def _button(label: str, xs: list[list[Any]], title: str, step: int | None) -> Figure:
    axis = {"xaxis.title.text": title, "xaxis.dtick": step}
    return {"label": label, "method": "update", "args": [{"x": xs}, axis]}
