"""Chart of instances over time, planned and held, above the use of every GPU. A plain Plotly figure; pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from rubberband.executor.result.parts import Busy, InstanceResult
from rubberband.executor.result.result import Result
from rubberband.units import duration, format_duration
from rubberband.views.charts.parts import (
    LEGEND,
    LOST,
    PLANNED,
    STAGE_COLOURS,
    Figure,
    beyond_s,
    chart,
    chart_text,
    end_s,
    first_start_s,
    marks,
    scatter,
    slots_per_instance,
    time_axis,
    time_unit,
)
from rubberband.views.formatting import printable
from rubberband.views.story import planned_spans

STARTING, IDLE, STARTUP = "#b9a44c", "rgba(128,128,128,0.25)", "#8a8f98"
GHOST = "rgba(128,128,128,0.10)"
SEVERAL = -1
"""Number in place of a trial for a bar of several trials."""
_ROW_PX, _SMALL_ROW_PX, _TINY_ROW_PX, _STEPS_PX, _AROUND_PX = 22, 14, 6, 130, 150
_MOST_ROWS, _MOST_BARS, _MOST_LABELS = 160, 600, 60
_LETTER_PX, _BESIDE_LABELS_PX = 6.5, 38
_TEXT_SHARE = 0.008
"""Part of the chart's width that a letter in a bar takes; measuring texts that have no room takes most of a drawing."""
_GAP = 0.15
"""Part of a row that is no bar."""
ALLOCATION_NOTE = (
    "Above: instances planned and held. Below: what each GPU did; the number in a bar is the trial, its colour the "
    "stage (or bracket, or rung); the dashed areas behind are the plan. Dotted lines are the ends of stages."
)


def allocation(result: Result) -> Figure | None:
    """Return the chart, with the plan in the background; None if no instance was held.

    If there are many instances, each has one line for all its GPUs.
    """
    rented = _longest_first(result)
    if not rented:
        return None
    horizon_s = max([beyond_s(result), result.planned_jct_s, *(use.end_s for use in result.busy)])
    unit, unit_s = time_unit(horizon_s)
    gpus = slots_per_instance(result)
    if len(rented) * gpus > _MOST_ROWS:
        gpus, result = 1, replace(result, busy=tuple(replace(use, gpu=0) for use in result.busy))
    rows = [_row(instance.instance, gpu) for instance in rented for gpu in range(gpus)]
    busy = _busy_bars(result, _joined(result.busy, horizon_s), unit_s)
    for bar in busy:
        _keep_texts(bar, horizon_s / unit_s, len(rows))
    bars = _held_bars(result, rented, gpus, unit_s) + busy
    gantt_px = _gantt_px(len(rows))
    drawn = marks(result, horizon_s, unit_s)
    share = gantt_px / (gantt_px + _STEPS_PX + 30)
    counts = _steps(result, rented, unit_s)
    most = max(max(line["y"]) for line in counts)
    steps = {
        "domain": [share + (1 - share) * 0.2, 1],
        "title": {"text": "instances", "standoff": 14},
        "rangemode": "tozero",
        "tickformat": "d",
        **({"nticks": 5} if most > 4 else {"dtick": 1}),
        "fixedrange": True,
    }
    slots = _slot_axis(rows, gpus, result.slot_name)
    return chart(
        [*bars, *_lost(rented, gpus, unit_s), *counts],
        gantt_px + _STEPS_PX + 30 + _AROUND_PX,
        time_axis(unit, horizon_s / unit_s),
        slots | {"domain": [0, share], "automargin": False},
        yaxis2=steps,
        barmode="overlay",
        bargap=_GAP,
        **({"uniformtext": {"minsize": 8, "mode": "hide"}} if any("text" in bar for bar in bars) else {}),
        annotations=drawn["annotations"],
        shapes=[*_ghosts(result, len(rows), gpus, unit_s), *drawn["shapes"]],
        margin=LEGEND["margin"] | {"l": _LETTER_PX * max(map(len, rows)) + _BESIDE_LABELS_PX, "b": 112},
    )


def gangs(result: Result, trial: int) -> Figure | None:
    """Return the chart of the GPUs that a trial had over time, from its first start on; None if it had none."""
    ours = replace(result, busy=tuple(use for use in result.busy if use.trial == trial))
    rows = sorted({(use.instance, use.gpu) for use in ours.busy})
    if not rows:
        return None
    begin_s = first_start_s(result, trial)
    horizon_s = max(beyond_s(result), *(use.end_s for use in ours.busy))
    unit, unit_s = time_unit(horizon_s)
    bars = _busy_bars(ours, ours.busy, unit_s)
    for bar in bars:
        bar.pop("text", None)
        bar["textposition"] = "none"
    return chart(
        bars,
        _gantt_px(len(rows)) + _AROUND_PX,
        time_axis(unit, horizon_s / unit_s, begin=begin_s / unit_s),
        _slot_axis([_row(instance, gpu) for instance, gpu in rows], 1, result.slot_name) | {"title": {"text": ""}},
        barmode="overlay",
        bargap=_GAP,
        showlegend=True,
        **marks(result, horizon_s, unit_s, begin_s),
    )


def gangs_px(result: Result, trial: int) -> int:
    """Return the height of the chart of `gangs`, without drawing it; 0 if the trial had no GPU."""
    rows = len({(use.instance, use.gpu) for use in result.busy if use.trial == trial})
    return _gantt_px(rows) + _AROUND_PX if rows else 0


def _longest_first(result: Result) -> list[InstanceResult]:
    """Return the instances that were held: those still held first, then the latest end first, which makes stairs."""
    rented = [i for i in result.instances if i.running_s is not None or not i.reason]
    return sorted(rented, key=lambda i: (i.ended_s is not None, -(i.ended_s or 0.0), i.requested_s, i.instance))


def allocation_px(result: Result) -> int:
    """Return the height of the chart, without drawing it; 0 if no instance was held."""
    instances = len(_longest_first(result))
    rows = instances * slots_per_instance(result)
    return _gantt_px(instances if rows > _MOST_ROWS else rows) + _STEPS_PX + 30 + _AROUND_PX if instances else 0


def _gantt_px(rows: int) -> int:
    return _row_px(rows) * rows + 10


def _row_px(rows: int) -> int:
    return _TINY_ROW_PX if rows > 120 else _SMALL_ROW_PX if rows > 40 else _ROW_PX


def _keep_texts(bar: Figure, horizon: float, rows: int) -> None:
    """Keep the texts that have room in their bars."""
    is_high = _row_px(rows) > _TINY_ROW_PX
    sized = zip(bar.pop("text", []), bar["x"], strict=False)
    texts = [text if is_high and long > _TEXT_SHARE * (1 + len(text)) * horizon else "" for text, long in sized]
    bar |= {"text": texts, "textposition": "inside"} if any(texts) else {"textposition": "none"}


def _ghosts(result: Result, rows: int, gpus: int, unit_s: float) -> list[Figure]:
    """Return the plan as areas behind the bars: one for each stage, with a row for each of its GPUs."""
    return [
        {
            "type": "rect",
            "layer": "below",
            "x0": start_s / unit_s,
            "x1": until_s / unit_s,
            "y0": -0.5,
            "y1": min(instances * gpus, rows) - 0.5,
            "fillcolor": GHOST,
            "line": {"width": 1.5, "dash": "dash", "color": PLANNED},
        }
        for start_s, until_s, instances in _planned_areas(result)
    ]


def _planned_areas(result: Result) -> list[tuple[float, float, int]]:
    """Return (start, end, planned instances): of each stage or, with several brackets, of all that run at once."""
    spans = planned_spans(result.stages)
    if all(stage.bracket is None for stage in result.stages):
        return [(start_s, until_s, stage.planned_instances) for stage, start_s, until_s in spans]
    changes = sorted({0.0, *(start_s for _, start_s, _ in spans), *(until_s for _, _, until_s in spans)})
    return [
        (at_s, until_s, sum(stage.planned_instances for stage, start_s, ends_s in spans if start_s <= at_s < ends_s))
        for at_s, until_s in pairwise(changes)
    ]


def _joined(busy: Sequence[Busy], horizon_s: float) -> Sequence[Busy]:
    """Return the stretches; if there are very many, close ones of the same GPU and stage are joined.

    How close they are joined doubles until they are few enough, up to a tenth of the chart.
    """
    joined, gap_s = busy, horizon_s / 200
    while len(joined) > _MOST_BARS and gap_s <= horizon_s / 10:
        joined, gap_s = _joined_within(joined, gap_s), 2 * gap_s
    return joined


def _joined_within(busy: Sequence[Busy], gap_s: float) -> Sequence[Busy]:
    joined: list[Busy] = []
    for use in sorted(busy, key=lambda use: (use.instance, use.gpu, use.start_s)):
        last = joined[-1] if joined else use
        same = (last.instance, last.gpu, last.stage) == (use.instance, use.gpu, use.stage)
        if joined and same and use.start_s - last.end_s < gap_s:
            joined[-1] = replace(last, trial=SEVERAL, end_s=max(last.end_s, use.end_s))
        else:
            joined.append(use)
    return joined


def _slot_axis(rows: list[str], slots: int, name: str) -> Figure:
    """Return an axis with a line for each slot (or instance), from the top; `name` is that of a slot."""
    return {
        "type": "category",
        "categoryorder": "array",
        "categoryarray": rows,
        "range": [len(rows) - 0.5, -0.5],
        "fixedrange": True,
        "title": {"text": f"instance : {name}" if slots > 1 else "instance", "standoff": 14},
        "ticklabelstandoff": 5,
        "tickmode": "array",
        "tickvals": rows[:: 1 + len(rows) // _MOST_LABELS],
    }


def _row(instance: str, gpu: int) -> str:
    return f"{chart_text(instance)} : {gpu}"


Stretch = tuple[str, float, float, str, str]
"""Row, start_s, end_s, hover text, and text in the bar."""


def _bar(name: str, colour: str, stretches: Iterable[Stretch], unit_s: float, pattern: str = "") -> Figure:
    every = [stretch for stretch in stretches if stretch[2] > stretch[1]]
    texts = [text for *_, text in every]
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": [row for row, *_ in every],
        "base": [start_s / unit_s for _, start_s, *_ in every],
        "x": [(end_s - start_s) / unit_s for _, start_s, end_s, *_ in every],
        "hovertext": [
            f"{hover}<br>{duration(start_s)} to {duration(end_s)} ({format_duration(round(end_s - start_s, 1))})"
            for _, start_s, end_s, hover, _ in every
        ],
        "hoverinfo": "text",
        **({"text": texts, "customdata": texts, "textposition": "inside"} if any(texts) else {"textposition": "none"}),
        "insidetextanchor": "middle",
        "textangle": 0,
        "cliponaxis": True,
        "marker": {"color": colour, "pattern": {"shape": pattern, "size": 5, "solidity": 0.3}, "line": {"width": 0}},
    }


def _held_bars(result: Result, rented: Sequence[InstanceResult], gpus: int, unit_s: float) -> list[Figure]:
    """Return the bars behind the others: an instance has one, across the rows of its GPUs."""
    waiting, starting, held = (list[Stretch]() for _ in range(3))
    for instance in rented:
        until_s = end_s(result, instance)
        running_s = until_s if instance.running_s is None else min(instance.running_s, until_s)
        ready_s = until_s if instance.ready_s is None else min(instance.ready_s, until_s)
        name = chart_text(instance.instance)
        row = _row(instance.instance, 0)
        waiting.append((row, instance.requested_s, running_s, f"{name} asked for, not billed yet", ""))
        starting.append((row, running_s, max(running_s, ready_s), f"{name} runs, its workers start", ""))
        held.append((row, max(running_s, ready_s), until_s, f"{name} held", ""))
    bars = [
        _bar("asked for, not billed", STARTING, waiting, unit_s, pattern="/"),
        _bar("instance starts up", STARTING, starting, unit_s),
        _bar("held, idle", IDLE, held, unit_s),
    ]
    across = {"offset": (_GAP - 1) / 2, "width": gpus - _GAP}
    return [bar | across for bar in bars if bar["y"]]


def _busy_bars(result: Result, busy: Sequence[Busy], unit_s: float) -> list[Figure]:
    startup: list[Stretch] = []
    training: dict[int, list[Stretch]] = {}
    for use in busy:
        row, step = _row(use.instance, use.gpu), _step_of(result, use)
        first_s = use.end_s if use.training_s is None else use.training_s
        number = "" if use.trial == SEVERAL else str(use.trial)
        trial = f"trial {number}" if number else "several trials"
        title = f"rung {step}" if result.rungs else result.stages[use.stage].title
        what = f"{trial}, {title}, on {row}"
        if first_s > use.start_s:
            startup.append((row, use.start_s, first_s, f"start-up of {what}", ""))
        if use.end_s > first_s:
            training.setdefault(step, []).append((row, first_s, use.end_s, what, number))
    bars = [_bar("start-up of a trial", STARTUP, startup, unit_s)] if startup else []
    named = set[str]()
    for stage, stretches in sorted(training.items()):
        bracket = None if result.rungs else result.stages[stage].bracket
        name = f"{'rung' if result.rungs else 'stage'} {stage}" if bracket is None else f"bracket {bracket}"
        colour = STAGE_COLOURS[(stage if bracket is None else bracket) % len(STAGE_COLOURS)]
        bar = _bar(name, colour, stretches, unit_s) | {"legendgroup": name, "showlegend": name not in named}
        named.add(name)
        bar["marker"]["line"] = {"width": 1, "color": "rgba(255,255,255,0.7)"}
        bar["textfont"] = {"color": "#fff"}
        bars.append(bar)
    return bars


def _step_of(result: Result, use: Busy) -> int:
    """Return the stage of a stretch, or its rung if trials climb rungs: by the iterations done before it."""
    if not result.rungs or use.trial == SEVERAL:
        return 0 if result.rungs else use.stage
    curve = result.trials[use.trial].curve
    before = bisect_right(curve, use.start_s, key=lambda report: report[0])
    done = curve[before - 1][1] if before else 0
    return min(sum(rung.iterations <= done for rung in result.rungs), len(result.rungs) - 1)


def _lost(rented: Sequence[InstanceResult], gpus: int, unit_s: float) -> list[Figure]:
    points = []
    for instance in rented:
        if instance.reason and instance.ended_s is not None:
            how = "PREEMPTED" if instance.preempted else "lost"
            hover = f"{instance.instance} {how} at {duration(instance.ended_s)}: {printable(instance.reason)}"
            rows = [_row(instance.instance, gpu) for gpu in range(gpus)]
            points += [(instance.ended_s / unit_s, row, chart_text(hover)) for row in rows]
    marker = {"symbol": "x", "size": 9, "color": LOST}
    return [scatter("instance lost", points, mode="markers", marker=marker)] if points else []


def _steps(result: Result, rented: Sequence[InstanceResult], unit_s: float) -> list[Figure]:
    """Return lines of the number of instances: planned, and held or starting."""
    areas = _planned_areas(result)
    planned = [(0.0, 0), *((start_s, count) for start_s, _, count in areas), (areas[-1][1] if areas else 0.0, 0)]
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
    drawn = [(at_s / unit_s, count, f"{name}: {count} from {duration(at_s)}") for at_s, count in points]
    return scatter(name, drawn, line={"shape": "hv", **line}, yaxis="y2")
