"""What the charts have in common: colours, axes, marks, and what became of trials. Pure; imports no plotly.

A chart is a plain Plotly figure (data and layout, ready for JSON). Colours read on light and on dark; the page sets
those of text and grid.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from rubberband.executor.result import InstanceResult, Result, StageResult, TrialResult
from rubberband.views.tables import status
from rubberband.views.words import counted

Figure = dict[str, Any]

STAGE_COLOURS = ("#3b82c4", "#e08a1e", "#2a9d6f", "#b565a7", "#c8553d", "#6c8ebf", "#8f9a2e", "#7a6fd0")
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
MANY_POINTS = 2000
"""From so many on, points are thinned out or have no dots."""


LEGEND: Figure = {
    "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0},
    "margin": {"l": 10, "r": 10, "t": 24, "b": 90},
    "hovermode": "closest",
}


def gpus_per_instance(result: Result) -> int:
    """GPUs of an instance: from the GPU-seconds paid for while instances ran, or from what trials used."""
    used = max((use.gpu + 1 for use in result.busy), default=1)
    held_s = math.fsum(
        end_s(result, instance) - instance.running_s for instance in result.instances if instance.running_s is not None
    )
    held_gpu_s = result.paid.total_gpu_s - result.paid.minimum_gpu_s
    return max(used, round(held_gpu_s / held_s)) if held_s > 0 else used


def end_s(result: Result, instance: InstanceResult) -> float:
    """When it was given back or lost; now, if it is held."""
    return result.actual_jct_s if instance.ended_s is None else instance.ended_s


def beyond_s(result: Result) -> float:
    """When the last thing ended that the bill counts: the last SYNC, or the last instance given back."""
    return max([result.actual_jct_s, *(end_s(result, instance) for instance in result.instances)])


def time_unit(horizon_s: float) -> tuple[str, float]:
    """What time axes count in, and how many seconds that is."""
    if horizon_s <= 180:
        return "seconds", 1.0
    return ("minutes", 60.0) if horizon_s <= 3 * 3600 else ("hours", 3600.0)


def stage_spans(result: Result) -> Iterator[tuple[StageResult, float, float]]:
    """The stages that have begun, from when until when (or until now), in seconds from the start.

    Between two of them lies what passed from a SYNC until a driver went on.
    """
    at_s = 0.0
    for stage in result.stages:
        if stage.actual_s is None:
            return
        start_s = at_s if stage.start_s is None else stage.start_s
        at_s = start_s + stage.actual_s
        yield stage, start_s, at_s


def marks(result: Result, horizon_s: float, unit_s: float) -> Figure:
    """Lines where stages end, where the deadline is and, while it runs, where now is; and the stages' names."""
    lines: list[tuple[float, str]] = []
    names: list[Figure] = []
    due_s = math.inf if result.deadline_s is None else result.deadline_s
    for stage, start_s, end_s in stage_spans(result):
        middle_s = (start_s + end_s) / 2
        beside_deadline = -0.05 < (due_s - middle_s) / horizon_s < 0.2
        if end_s - start_s > 0.07 * horizon_s and not beside_deadline:
            names.append(note(middle_s / unit_s, f"stage {stage.stage}"))
        if stage.promoted:
            lines.append((end_s, "dot"))
    if result.deadline_s is not None and result.deadline_s <= horizon_s * 1.02:
        lines.append((result.deadline_s, "solid"))
        names.append(note(result.deadline_s / unit_s, "deadline") | {"font": {"color": LOST}, "xanchor": "right"})
    if result.outcome == "unfinished":
        lines.append((result.actual_jct_s, "dash"))
        names.append(note(result.actual_jct_s / unit_s, "now") | {"yanchor": "top", "xanchor": "left"})
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


def note(x: float, text: str) -> Figure:
    """Words above the plot, at `x`."""
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
