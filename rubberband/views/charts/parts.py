"""Parts that the charts share: colours, traces, axes, marks, and trials by outcome. Pure; imports no plotly.

A chart is a plain Plotly figure (data and layout, ready for JSON). Its colours are readable on light and dark pages;
the page sets the colours of text and grid.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import Any

from rubberband.executor.result.parts import InstanceResult, TrialResult
from rubberband.executor.result.result import Result
from rubberband.units import counted
from rubberband.views.formatting import status
from rubberband.views.story import stage_spans

Figure = dict[str, Any]

STAGE_COLOURS = ("#3b82c4", "#8f9a2e", "#2a9d6f", "#b565a7", "#c8553d", "#6c8ebf", "#d6568c", "#7a6fd0")
"""Not orange: that is the best trial, and nothing else."""
SHADES = ("#8d99a8", "#7b97b4", "#6391bd", "#3b82c4", "#4b8f9f", "#8a8f5e", "#b98f3c", "#e08a1e")
"""Colours from the worst metric to the best."""
PLANNED, LOST, FAR = "#9aa0a8", "#d62728", "#7a828c"
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
"""Outcomes of a single trial."""
MANY_POINTS = 2000
"""Number of points from which on they are thinned out or have no dots."""

LABELS_PX = 56
"""Room for the labels and the title of a y axis. One that needs more is drawn twice, which takes as long again."""
LEGEND: Figure = {
    "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0},
    "margin": {"l": LABELS_PX, "r": 10, "t": 24, "b": 90},
    "hovermode": "closest",
}


def chart(traces: Sequence[Figure], height: int, x: Figure, y: Figure, **layout: Any) -> Figure:
    """Return the figure of traces over two axes, with its legend below; `height` is in pixels."""
    return {"data": list(traces), "layout": {"height": height, "xaxis": x, "yaxis": y, **LEGEND, **layout}}


def axis(title: str, **more: Any) -> Figure:
    """Return an axis with a title."""
    return {"title": {"text": title}, **more}


def time_axis(unit: str, horizon: float, since: str = "time since the start", begin: float = 0.0) -> Figure:
    """Return an axis of time from `begin` to a little beyond the horizon, in `unit`."""
    return axis(f"{since} ({unit})", range=[begin, begin + (horizon - begin) * 1.02])


def line_at(value: float, across: str, line: Figure) -> Figure:
    """Return a line across the whole chart, at a value of the x or the y axis."""
    ends = {"xref": "x", "yref": "paper", "x0": value, "x1": value, "y0": 0, "y1": 1}
    if across == "y":
        ends = {"xref": "paper", "yref": "y", "x0": 0, "x1": 1, "y0": value, "y1": value}
    return {"type": "line", **ends, "line": line}


def slots_per_instance(result: Result) -> int:
    """Return the slots of an instance, from the paid GPU-seconds of running instances, or from the use by trials."""
    used = max((use.gpu + 1 for use in result.busy), default=1)
    held_s = math.fsum(
        end_s(result, instance) - instance.running_s for instance in result.instances if instance.running_s is not None
    )
    held_gpu_s = result.paid.total_gpu_s - result.paid.minimum_gpu_s
    return max(used, round(held_gpu_s / held_s) * result.trials_per_gpu) if held_s > 0 else used


def end_s(result: Result, instance: InstanceResult) -> float:
    """Return the time at which an instance was released or lost; now, if it is held."""
    return result.actual_jct_s if instance.ended_s is None else instance.ended_s


def first_start_s(result: Result, trial: int) -> float:
    """Return the first instant at which a trial had a GPU, where its own charts begin; 0 if it had none."""
    return min((use.start_s for use in result.busy if use.trial == trial), default=0.0)


def beyond_s(result: Result) -> float:
    """Return the end of all that is billed: the last SYNC, or the release of the last instance."""
    return max([result.actual_jct_s, *(end_s(result, instance) for instance in result.instances)])


def time_unit(horizon_s: float) -> tuple[str, float]:
    """Return the unit of a time axis, and its length in seconds."""
    if horizon_s <= 180:
        return "seconds", 1.0
    return ("minutes", 60.0) if horizon_s <= 3 * 3600 else ("hours", 3600.0)


def marks(result: Result, horizon_s: float, unit_s: float, begin_s: float = 0.0) -> Figure:
    """Return lines at the ends of stages, the deadline and (while it runs) now, and the names of the stages.

    The chart shows the time from `begin_s` to `horizon_s`.
    Stages of several brackets run at once, and are not named; nor is the only stage of trials that climb rungs.
    """
    lines: list[tuple[float, str]] = []
    names: list[Figure] = []
    is_one_chain = all(stage.bracket is None for stage in result.stages) and not result.rungs
    due_s = math.inf if result.deadline_s is None else result.deadline_s
    shown_s = horizon_s - begin_s
    for stage, start_s, end_s in stage_spans(result):
        if end_s < begin_s:
            continue
        middle_s = (max(start_s, begin_s) + end_s) / 2
        beside_deadline = -0.05 < (due_s - middle_s) / shown_s < 0.2
        if end_s - max(start_s, begin_s) > 0.07 * shown_s and not beside_deadline and is_one_chain:
            names.append(note(middle_s / unit_s, f"stage {stage.stage}"))
        if stage.promoted:
            lines.append((end_s, "dot"))
    if result.deadline_s is not None and begin_s <= result.deadline_s <= begin_s + shown_s * 1.02:
        lines.append((result.deadline_s, "solid"))
        names.append(note(result.deadline_s / unit_s, "deadline") | {"font": {"color": LOST}, "xanchor": "right"})
    if result.outcome == "unfinished":
        lines.append((result.actual_jct_s, "dash"))
        side = "right" if result.actual_jct_s - begin_s > 0.9 * shown_s else "left"
        names.append(note(result.actual_jct_s / unit_s, "now") | {"yanchor": "top", "xanchor": side})
    shapes = [
        line_at(x / unit_s, "x", {"width": 1, "dash": dash, "color": LOST if dash == "solid" else PLANNED})
        for x, dash in lines
    ]
    return {"shapes": shapes, "annotations": names}


def chart_text(text: str) -> str:
    """Return text for a chart, free of markup. Plotly knows no entity for quotes, which need none there."""
    return html.escape(text, quote=False)


def few_of_many(note: str, count: int, most: int) -> Figure:
    """Return the `meta` of a chart that draws the best `most` of `count` trials: a longer note if some are left out."""
    return {"note": f"{note} Only the best {most:,} of {count:,} trials are drawn."} if count > most else {}


def note(x: float, text: str) -> Figure:
    """Return a text above the plot, at `x`."""
    return {"x": x, "xref": "x", "y": 1, "yref": "paper", "yanchor": "bottom", "showarrow": False, "text": text}


def scatter(name: str, points: Iterable[tuple[Any, Any, str]], mode: str = "lines", **more: Any) -> Figure:
    """Return a trace of points (x, y, hover text)."""
    every = list(points)
    return {
        "type": "scatter",
        "mode": mode,
        "name": name,
        "x": [x for x, _, _ in every],
        "y": [y for _, y, _ in every],
        "hovertext": [text for _, _, text in every],
        "hoverinfo": "text",
        **more,
    }


def decades(low: float, high: float, fine: float) -> list[float]:
    """Return powers of ten around two logarithms; also 2 and 5 times these if the two are at most `fine` apart."""
    digits = (1, 2, 5) if high - low <= fine else (1,)
    return [digit * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for digit in digits]


SWITCH: Figure = {
    "type": "buttons",
    "direction": "right",
    "x": 0,
    "xanchor": "left",
    "y": 1.02,
    "yanchor": "bottom",
    "pad": {"b": 4},
}
"""Buttons above a chart."""


def button(label: str, xs: list[list[Any]], layout: Figure) -> Figure:
    """Return a button that changes the x values of the traces, and the layout."""
    return {"label": label, "method": "update", "args": [{"x": xs}, layout]}


def by_outcome(result: Result, trials: Sequence[TrialResult]) -> dict[str, list[TrialResult]]:
    """Return the trials by outcome, a key of `CURVES`. Those drawn on top come last."""
    outcomes: dict[str, list[TrialResult]] = {}
    for trial in trials:
        outcomes.setdefault(_outcome_of(result, trial), []).append(trial)
    return {outcome: outcomes[outcome] for outcome in reversed(CURVES) if outcome in outcomes}


def outcome_name(outcome: str, trials: Sequence[TrialResult]) -> str:
    """Return an outcome for the legend, with its only trial or the number of trials."""
    return f"{outcome} ({f'trial {trials[0].trial}' if outcome in ALONE else counted(len(trials), 'trial')})"


def _outcome_of(result: Result, trial: TrialResult) -> str:
    if result.outcome != "done" and result.best is not None and trial.trial == result.best.trial:
        return "best so far"
    outcome = status(result, trial)
    return "waiting" if outcome in ("queued", "paused") else outcome
