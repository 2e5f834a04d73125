"""The use of machines by trials: a sentence on where the time of training went, and a chart of a trial's. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from rubberband.executor.result.batch_history import UseStretch
from rubberband.executor.result.parts import TrialResult
from rubberband.executor.result.result import Result
from rubberband.units import duration, format_bytes
from rubberband.views.charts.parts import (
    LABELS_PX,
    Figure,
    beyond_s,
    chart,
    first_start_s,
    marks,
    scatter,
    time_axis,
    time_unit,
)

_WAITS = {"data_s": "data", "peers_s": "other workers", "checkpoint_s": "checkpoints"}
"""Field -> what training waited for."""
_LEAST = 0.01
"""Waits of a smaller part of the time are not worth a word or a line."""
_GAP_S = 15.0
"""A longer time without training is a gap of a line."""
_FIRST_PX, _ROW_PX, _GAP_PX, _AROUND_PX = 150, 76, 22, 120


def use_of_trials(trials: Sequence[TrialResult]) -> str:
    """Return a sentence on the use of GPUs, or of CPUs without any, and on waits; empty where none was measured."""
    every = [stretch for trial in trials for stretch in trial.use]
    if not every:
        return ""
    busy, cpu = mean_of(every, lambda use: use.gpu), mean_of(every, lambda use: use.cpu)
    if busy is None:
        return f"While trials trained, each worker used {_cpus(cpu or 0.0)}{_and_waited(every)}."
    waited = _and_waited(every).replace("waited", "workers waited")
    return f"While trials trained, GPUs were busy {_percent(busy)} of the time{waited}."


def _of_trial(stretches: Sequence[UseStretch]) -> str:
    """Return the same of one trial, with its memory and power."""
    busy, watts = mean_of(stretches, lambda use: use.gpu), mean_of(stretches, lambda use: use.watts)
    taken = [] if stretches[0].gpu_memory_bytes is None else [f"{_memory(stretches, 'gpu_memory_bytes')} taken"]
    taken += [] if watts is None else [f"{watts:.0f} W"]
    parts = [] if busy is None else [f"busy {_percent(busy)} of the time", *taken]
    gpu = f"GPU: {', '.join(parts or taken)}. " if parts or taken else ""
    cpu = f"{_cpus(mean_of(stretches, lambda use: use.cpu) or 0.0)} and {_memory(stretches, 'memory_bytes')}"
    trained = duration(math.fsum(use.seconds for use in stretches))
    return f"{gpu}In {trained} of training the worker used {cpu}{_and_waited(stretches)}."


def mean_of(stretches: Sequence[UseStretch], value: Callable[[UseStretch], float | None]) -> float | None:
    """Return the mean over the time in which the value was measured; None if it never was."""
    found = [(seen, use.seconds) for use in stretches if (seen := value(use)) is not None]
    total_s = math.fsum(seconds for _, seconds in found)
    return math.fsum(seen * seconds for seen, seconds in found) / total_s if total_s > 0.0 else None


def _share(field: str, use: UseStretch) -> float | None:
    waited_s: float | None = getattr(use, field)
    return None if waited_s is None else min(1.0, waited_s / use.seconds)


def _and_waited(stretches: Sequence[UseStretch]) -> str:
    """Return a clause on the waits; empty where only those for checkpoints are measured, and are short."""
    means = {cause: mean_of(stretches, partial(_share, field)) for field, cause in _WAITS.items()}
    said = [f"{_percent(mean)} for {cause}" for cause, mean in means.items() if mean is not None and mean >= _LEAST]
    if said:
        return f", and waited {', '.join(said)}"
    return "" if means["data"] is None else ", and waited less than 1 %"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _cpus(count: float) -> str:
    return f"{_percent(count)} of a CPU" if count < 1.995 else f"{count:.1f} CPUs"


def _memory(stretches: Sequence[UseStretch], field: str) -> str:
    return f"{format_bytes(max(getattr(use, field) or 0 for use in stretches))} of memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """A line of the chart: its panel, and its value at a stretch."""

    panel: str
    name: str
    colour: str
    value: Callable[[UseStretch], float | None]
    text: Callable[[float], str]
    width: float = 1.6


_TIME, _CPUS, _MEMORY, _POWER = "% of the time", "CPUs", "GB", "watts"
_BUSY, _CPU = "#3b82c4", "#2a9d6f"


def _waiting(field: str, colour: str) -> _Line:
    cause = _WAITS[field]

    def percent(use: UseStretch) -> float | None:
        share = _share(field, use)
        return None if share is None else 100.0 * share

    return _Line(
        panel=_TIME,
        name=f"waits for {cause}",
        colour=colour,
        value=percent,
        text=lambda value: f"waited {value:.0f} % for {cause}",
    )


def _gb(field: str) -> Callable[[UseStretch], float | None]:
    def gigabytes(use: UseStretch) -> float | None:
        size_bytes: int | None = getattr(use, field)
        return None if size_bytes is None else size_bytes / 1e9

    return gigabytes


_LINES = (
    _Line(
        panel=_TIME,
        name="GPU busy",
        colour=_BUSY,
        value=lambda use: None if use.gpu is None else 100.0 * use.gpu,
        text=lambda value: f"GPU busy {value:.0f} %",
        width=2.6,
    ),
    _waiting("data_s", "#b565a7"),
    _waiting("peers_s", "#7a6fd0"),
    _waiting("checkpoint_s", "#8f9a2e"),
    _Line(
        panel=_CPUS,
        name="CPUs in use",
        colour=_CPU,
        value=lambda use: use.cpu,
        text=lambda value: f"{value:.2f} CPUs",
        width=2.0,
    ),
    _Line(
        panel=_MEMORY,
        name="GPU memory",
        colour=_BUSY,
        value=_gb("gpu_memory_bytes"),
        text=lambda value: f"GPU memory {value:.3g} GB",
    ),
    _Line(
        panel=_MEMORY,
        name="memory",
        colour=_CPU,
        value=_gb("memory_bytes"),
        text=lambda value: f"memory {value:.3g} GB",
    ),
    _Line(
        panel=_POWER,
        name="GPU power",
        colour="#c8553d",
        value=lambda use: use.watts,
        text=lambda value: f"{value:.0f} W",
    ),
)


def _drawn(stretches: Sequence[UseStretch]) -> list[_Line]:
    """Return the lines that have something to show: waits only from a hundredth of the time on."""
    shown = []
    for line in _LINES:
        values = [value for use in stretches if (value := line.value(use)) is not None]
        if values and (not line.name.startswith("waits") or max(values) >= 100.0 * _LEAST):
            shown.append(line)
    return shown


def use_px(stretches: Sequence[UseStretch]) -> int:
    """Return the height of the chart in pixels; 0 without anything to show."""
    panels = len({line.panel for line in _drawn(stretches)})
    return _FIRST_PX + (panels - 1) * (_ROW_PX + _GAP_PX) + _AROUND_PX if panels else 0


def use_over_time(result: Result, trial: int) -> Figure | None:
    """Return the chart of a trial's GPU, CPUs, memory, power and waits over time; None where none was measured."""
    stretches = result.trials[trial].use
    if not stretches:
        return None
    lines = _drawn(stretches)
    panels = list(dict.fromkeys(line.panel for line in lines))
    begin_s = first_start_s(result, trial)
    horizon_s = max(beyond_s(result), stretches[-1].end_s)
    unit, unit_s = time_unit(horizon_s)
    axes = _panel_axes(panels, use_px(stretches) - _AROUND_PX)
    traces = [_trace(line, stretches, unit_s, panels.index(line.panel)) for line in lines]
    return chart(
        traces,
        use_px(stretches),
        time_axis(unit, horizon_s / unit_s, begin=begin_s / unit_s)
        | {"anchor": "y" if len(panels) == 1 else f"y{len(panels)}"},
        axes.pop("yaxis"),
        **axes,
        **marks(result, horizon_s, unit_s, begin_s),
        showlegend=True,
        margin={"l": LABELS_PX, "r": 10, "t": 24, "b": 96},
        meta={"note": f"{_of_trial(stretches)} Means over its gang, measured about every 5 s."},
    )


def _panel_axes(panels: Sequence[str], height_px: int) -> Figure:
    """Return the y axes by name, the first panel on top."""
    axes, top = Figure(), 1.0
    for index, panel in enumerate(panels):
        bottom = max(0.0, top - (_FIRST_PX if index == 0 else _ROW_PX) / height_px)
        title = {"text": panel, "standoff": 8}
        whole = {"range": [0, 102]} if panel == _TIME else {"rangemode": "tozero", "nticks": 4}
        axes[f"yaxis{index + 1}" if index else "yaxis"] = {"title": title, "domain": [bottom, top], **whole}
        top = bottom - _GAP_PX / height_px
    return axes


def _trace(line: _Line, stretches: Sequence[UseStretch], unit_s: float, panel: int) -> Figure:
    """Return the line, level over each stretch, with gaps where the trial did not train."""
    points, before_s = list[tuple[float | None, float | None, str]](), None
    for use in stretches:
        value = line.value(use)
        if value is None:
            continue
        start_s = max(use.end_s - use.seconds, before_s or 0.0)  # a report that had to wait is late by that
        end_s = max(use.end_s, start_s)
        if before_s is not None and start_s - before_s > _GAP_S:
            points.append((None, None, ""))
        text = f"{line.text(value)}<br>at {duration(end_s)}, over {duration(use.seconds)}"
        points += [(start_s / unit_s, value, text), (end_s / unit_s, value, text)]
        before_s = end_s
    style = {"color": line.colour, "width": line.width}
    is_named = line.panel in (_TIME, _MEMORY)  # the others have one line, and its name beside them
    return scatter(line.name, points, line=style, yaxis=f"y{panel + 1}" if panel else "y", showlegend=is_named)
