"""Page of an estimate, which needs no network: headline figures, tables and charts.

The charts are plain Plotly figures: instances over time, the frontier, the throughput of
asynchronous workers, and how time and cost vary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rubberband.features import part
from rubberband.planner import Estimate, Lane, Point, method_of
from rubberband.planner.exact.table import Floats
from rubberband.units import counted, duration, format_duration, format_usd, gpus_each, in_unit
from rubberband.views.charts.parts import (
    LOST,
    PLANNED,
    STAGE_COLOURS,
    Figure,
    axis,
    chart,
    line_at,
    note,
    scatter,
    time_unit,
)
from rubberband.views.estimate.tables import fixed_cluster, percent
from rubberband.views.formatting import Card, TextTable, difference, printable
from rubberband.views.report.page import STRIP, STRIP_END, chart_section, page, page_header, table_section

THROUGHPUT_NOTE = (
    "Updates per second that plans count with, and the band of the queueing model: the workers wait for each other at "
    "the parameter servers and on their links."
)
_ALLOCATION = "Instances requested or held at every moment of the plan, at its expected times. Hover for a stage."
_FRONTIER = (
    "The lowest cost at which the job is done by each deadline: with instances that change from stage to stage, and "
    "with a cluster of a fixed size."
)
_ALLOCATION_WITHOUT_SYNC = (
    "The most instances that the plan holds, until its expected end. Those without a trial are released before."
)
_FRONTIER_WITHOUT_SYNC = "The lowest cost at which the job is done by each deadline."
_TIMES = "Time that the plan takes, over all samples."
_COSTS = "Cost of the plan, over all samples."


def render_estimate(answer: Estimate, lines: Sequence[str], tables: Sequence[TextTable]) -> str:
    """Return the page, from the headlines and tables that a terminal shows."""
    drawn = dict(figures(answer))
    stages = [table for table in tables if "Stages" in table.title]
    rest = [table for table in tables if "Stages" not in table.title]
    has_sync = answer.problem.has_sync
    instances, costs = (_ALLOCATION, _FRONTIER) if has_sync else (_ALLOCATION_WITHOUT_SYNC, _FRONTIER_WITHOUT_SYNC)
    body = "\n".join(
        [
            _header(answer, lines),
            chart_section("allocation", "Instances over time", instances, drawn),
            *(table_section(table) for table in stages),
            STRIP,
            chart_section("frontier", "Cost against deadline", costs, drawn),
            chart_section("throughput", "Throughput by workers", THROUGHPUT_NOTE, drawn),
            chart_section("times", "Distribution of the time", _TIMES, drawn),
            chart_section("costs", "Distribution of the cost", _COSTS, drawn),
            STRIP_END,
            _certain(answer),
            *(table_section(table) for table in rest),
        ]
    )
    return in_unit(page(f"{answer.experiment_name} - RubberBand estimate", body, drawn), answer.offer.unit)


def _certain(answer: Estimate) -> str:
    """Return a section in place of the distributions if nothing varies."""
    if answer.job is None or answer.job.odds is not None:
        return ""
    prediction = answer.job.prediction
    takes = f"{format_duration(prediction.jct_s)} and costs {format_usd(prediction.cost_usd)}"
    return (
        "<section><h2>How time and cost vary</h2>"
        f'<p class="note">The estimate assumes that nothing varies: every run takes {takes}. Give trial_cv, '
        "iteration_cv or startup_cv in the profile, or delays with a cv, to see distributions.</p></section>"
    )


def _header(answer: Estimate, lines: Sequence[str]) -> str:
    badge, kind = ("within the limits", "done") if answer.feasible else ("not within the limits", "failed")
    answers = [printable(line).removeprefix(f"{answer.experiment_name}: ") for line in lines]
    return page_header(answer.experiment_name, {kind: badge}, answers, _cards(answer))


def _cards(answer: Estimate) -> list[Card]:
    if answer.job is None:
        assert answer.nearest is not None, "an infeasible answer has a nearest plan"
        return [
            Card("shortest time", format_duration(answer.nearest.jct_s), ("of any plan",)),
            Card("lowest cost", format_usd(answer.nearest.cost_usd), ("of any plan",)),
        ]
    prediction, limits, odds = answer.job.prediction, answer.constraints, answer.job.odds
    time_note = "no deadline" if limits.deadline_s is None else f"deadline {format_duration(limits.deadline_s)}"
    cost_note = "no budget" if limits.max_cost_usd is None else f"budget {format_usd(limits.max_cost_usd)}"
    if prediction.jct is not None and prediction.cost is not None:
        time_note = f"p95 {format_duration(prediction.jct.p95)}; {time_note}"
        cost_note = f"p95 {format_usd(prediction.cost.p95)}; {cost_note}"
    cards = [
        Card("expected time", format_duration(prediction.jct_s), (time_note,)),
        Card("expected cost", format_usd(prediction.cost_usd), (cost_note,)),
    ]
    if odds is not None:
        cards.append(Card("P(both limits kept)", percent(odds.p_both), (f"{percent(limits.confidence)} asked",)))
    fixed = fixed_cluster(answer)
    if fixed is not None and fixed is not answer.job:
        against = difference(prediction.cost_usd, fixed.prediction.cost_usd)
        costs = f"it costs {format_usd(fixed.prediction.cost_usd)}"
        cards.append(Card("against the best fixed cluster", against, (costs,)))
    if answer.fixed_batch is not None:
        than = answer.fixed_batch.prediction
        took = f"it takes {format_duration(than.jct_s)} and {format_usd(than.cost_usd)}"
        cards.append(Card("against a fixed batch", difference(prediction.cost_usd, than.cost_usd) or "0 %", (took,)))
    return cards


_NEAR = 2.5
"""Multiple of the plan from which on a deadline is not drawn: the axis follows the plan."""
ELASTIC, FIXED = STAGE_COLOURS[0], STAGE_COLOURS[1]
_BINS = 60
_MOST_BINNED = 0.999
"""Share of the values in a histogram; the longest tail would squeeze the rest."""


def figures(answer: Estimate) -> dict[str, Figure]:
    """Return the charts for which the estimate has data, by name."""
    drawn: dict[str, Figure] = {}
    job, limits = answer.job, answer.constraints
    sure_s = 0.0 if job is None else job.prediction.jct_s
    if job is not None:
        drawn["allocation"] = allocation(answer)
    if job is not None and answer.profile.asynchronous is not None:
        used = {stage.gpus_per_trial for stage in job.plan.stages}
        drawn["throughput"] = part("throughput chart")(answer.profile, used)
    if job is not None and job.prediction.jct is not None:
        sample_lanes = method_of(job.lanes[0].stages).sample_lanes
        samples = sample_lanes(job.lanes, answer.profile, answer.offer, seed=answer.problem.seed)
        sure_s = float(np.quantile(samples.jct_s, limits.confidence))
        drawn["times"] = _histogram(samples.jct_s, "time", limits.deadline_s)
        drawn["costs"] = _histogram(samples.cost_usd, "cost", limits.max_cost_usd)
    if len(answer.frontier) > 1:
        drawn["frontier"] = frontier(answer, sure_s)
    return drawn


def allocation(answer: Estimate) -> Figure:
    """Return the chart of instances over the expected time, lanes on top of each other, with names of stages."""
    job, offer = answer.job, answer.offer
    assert job is not None, "the caller has a plan"
    deadline_s = answer.constraints.deadline_s
    jct_s = job.prediction.jct_s
    near_s = deadline_s if deadline_s is not None and deadline_s < _NEAR * jct_s else None
    end_s = max(jct_s, near_s or 0.0)
    unit, unit_s = time_unit(end_s)
    held = [_held(answer, lane) for lane in job.lanes]
    edges_s = sorted({edge_s for spans in held for start_s, stop_s, *_ in spans for edge_s in (start_s, stop_s)})
    totals = [sum(_at(spans, edge_s)[0] for spans in held) for edge_s in edges_s]
    most = max(totals)
    limits = _limits([(near_s, "deadline", "x", unit_s)])
    is_one_chain = len(job.lanes) == 1 and answer.problem.has_sync
    names = _names(job.lanes[0], unit_s, end_s) if is_one_chain else []
    each = f"instances ({counted(offer.gpus, offer.place)} each)"
    return chart(
        [_lane_trace(answer, at, spans, edges_s, unit_s) for at, spans in enumerate(held)],
        360,
        axis(f"time since the start ({unit})", range=[0, end_s * 1.03 / unit_s]),
        axis(each, range=[0, most * 1.15], tickformat="d", nticks=min(most + 1, 9)),
        showlegend=True,
        shapes=limits["shapes"],
        annotations=[*limits["annotations"], *names],
    )


Span = tuple[float, float, int, str]
"""Start_s, end_s, instances, and hover text."""


def _held(answer: Estimate, lane: Lane) -> list[Span]:
    """Return the instances that a lane holds, stage by stage."""
    several, spans, now_s = len(answer.brackets) > 1, list[Span](), 0.0
    rungs = [(bracket, rung) for bracket in lane.brackets for rung in range(len(answer.brackets[bracket]))]
    for (bracket, rung), stage, choice, predicted in zip(
        rungs, lane.stages, lane.planned.plan.stages, lane.planned.prediction.stages, strict=True
    ):
        name = f"bracket {bracket}, stage {rung}" if several else f"stage {rung}"
        market = f" on the {choice.market.replace('_', ' ')} market" if answer.offer.spot is not None else ""
        words = (
            f"{name}: {counted(choice.instances, 'instance')}{market}, "
            f"{counted(stage.trials, 'trial')} of {gpus_each(choice.gpus_per_trial, answer.offer.trials_per_gpu)} "
            f"GPU{'s' * (choice.gpus_per_trial > 1)}<br>"
            f"{duration(predicted.provisioning_s)} to start, {duration(predicted.duration_s)} to train, "
            f"{format_usd(predicted.cost_usd)}"
        )
        end_s = now_s + predicted.provisioning_s + predicted.duration_s
        spans.append((now_s, end_s, choice.instances, words))
        now_s = end_s
    return spans


def _at(spans: Sequence[Span], moment_s: float) -> tuple[int, str]:
    """Return the instances held at a moment, and the hover text."""
    return next(((count, words) for start_s, end_s, count, words in spans if start_s <= moment_s < end_s), (0, "done"))


def _lane_trace(answer: Estimate, at: int, spans: Sequence[Span], edges_s: Sequence[float], unit_s: float) -> Figure:
    assert answer.job is not None, "the caller has a plan"
    brackets = answer.job.lanes[at].brackets
    names = " and ".join(str(bracket) for bracket in brackets)
    label = f"lane {at}: {'brackets' if len(brackets) > 1 else 'bracket'} {names}"
    return scatter(
        label if len(answer.brackets) > 1 else "instances held or on their way",
        ((edge_s / unit_s, *_at(spans, edge_s)) for edge_s in edges_s),
        line={"shape": "hv", "color": STAGE_COLOURS[at % len(STAGE_COLOURS)], "width": 1.5},
        stackgroup="instances",
    )


def _names(lane: Lane, unit_s: float, end_s: float) -> list[Figure]:
    """Return the names of the stages above their steps, where there is room on an axis that ends at `end_s`."""
    found = list[Figure]()
    for index, (choice, stage) in enumerate(zip(lane.planned.plan.stages, lane.planned.prediction.stages, strict=True)):
        took_s = stage.provisioning_s + stage.duration_s
        if took_s > 0.05 * end_s:
            found.append(
                {
                    "x": (stage.start_s + took_s / 2) / unit_s,
                    "y": choice.instances,
                    "yanchor": "bottom",
                    "showarrow": False,
                    "text": f"stage {index}" if took_s > 0.12 * end_s else str(index),
                }
            )
    return found


def frontier(answer: Estimate, sure_s: float) -> Figure:
    """Return the chart of the lowest cost for each deadline, with the limits and the plan (safely done in `sure_s`)."""
    deadline_s, budget_usd = answer.constraints.deadline_s, answer.constraints.max_cost_usd
    far_s = max(answer.frontier[-1][0], *(point[0] for point in answer.static_frontier), deadline_s or 0.0)
    unit, unit_s = time_unit(far_s)
    cheapest = "elastic: the cheapest plan" if answer.problem.has_sync else "the cheapest plan"
    traces = [_steps(cheapest, answer.frontier, far_s * 1.05, unit_s, ELASTIC)]
    if answer.static_frontier:
        traces.append(_steps("fixed cluster: the best size", answer.static_frontier, far_s * 1.05, unit_s, FIXED))
    if answer.job is not None:
        cost_usd = answer.job.prediction.cost_usd
        point = (sure_s / unit_s, cost_usd, f"this plan: {format_duration(sure_s)}, {format_usd(cost_usd)}")
        marker = {"size": 12, "symbol": "star", "color": LOST}
        traces.append(scatter("this plan", [point], mode="markers", marker=marker))
    costs_usd = [usd for _, usd in (*answer.frontier, *answer.static_frontier)]
    top_usd = max(costs_usd) * 1.06
    shown_usd = budget_usd if budget_usd is not None and budget_usd <= top_usd else None
    return chart(
        traces,
        420,
        axis(f"deadline ({unit})", range=[0, far_s * 1.03 / unit_s]),
        axis("cost (USD)", range=[0, top_usd]),
        showlegend=True,
        **_limits([(deadline_s, "deadline", "x", unit_s), (shown_usd, "budget", "y", 1.0)]),
    )


def _steps(name: str, points: Sequence[Point], far_s: float, unit_s: float, colour: str) -> Figure:
    """Return a line of steps, as each cost is the lowest until the next plan is possible."""
    drawn = [(jct_s / unit_s, usd, f"{name}<br>{format_duration(jct_s)}, {format_usd(usd)}") for jct_s, usd in points]
    drawn.append((far_s / unit_s, points[-1][1], name))
    return scatter(name, drawn, line={"shape": "hv", "color": colour, "width": 2.5})


def _histogram(values: Floats, what: str, limit: float | None) -> Figure:
    """Return the histogram of samples, with p50, p95 and the limit."""
    unit_name, unit = time_unit(float(values.max())) if what == "time" else ("USD", 1.0)
    low, high = float(values.min()), float(np.quantile(values, _MOST_BINNED))
    counts, edges = np.histogram(values, bins=_BINS, range=(low, high if high > low else low + 1.0))
    shares = 100.0 * counts / len(values)
    shown = format_duration if what == "time" else format_usd
    p50, p95 = (float(value) for value in np.quantile(values, [0.5, 0.95]))
    near = limit if limit is not None and limit <= high + (high - low) else None
    marks = [(p50, "p50", PLANNED), (p95, "p95", PLANNED), *([(near, "limit", LOST)] if near is not None else [])]
    centres = (edges[:-1] + edges[1:]) / 2
    bars: Figure = {
        "type": "bar",
        "x": (centres / unit).tolist(),
        "y": shares.tolist(),
        "width": [float(edges[1] - edges[0]) / unit] * len(centres),
        "hovertext": [f"{shown(float(at))}: {share:.1f} %" for at, share in zip(centres, shares, strict=True)],
        "hoverinfo": "text",
        "marker": {"color": ELASTIC},
    }
    return chart(
        [bars],
        320,
        axis(f"{what} ({unit_name})"),
        axis("share of the samples (%)", rangemode="tozero"),
        showlegend=False,
        bargap=0.05,
        shapes=[rule(value / unit, "x", colour) for value, _, colour in marks],
        annotations=[
            label(value / unit, f"{name} {shown(value)}", "x", colour) | {"y": 1.0 + 0.07 * (at % 3)}
            for at, (value, name, colour) in enumerate(marks)
        ],
        margin={"l": 10, "r": 10, "t": 60, "b": 60},
    )


def _limits(limits: Sequence[tuple[float | None, str, str, float]]) -> Figure:
    """Return lines and labels of limits (value, text, axis, unit), without those that are not set."""
    known = [(value / unit, text, axis) for value, text, axis, unit in limits if value is not None]
    return {
        "shapes": [rule(at, axis, LOST) for at, _, axis in known],
        "annotations": [label(at, text, axis, LOST) for at, text, axis in known],
    }


def rule(at: float, axis: str, colour: str) -> Figure:
    """Return a dotted line at a value of an axis."""
    return line_at(at, axis, {"width": 1.5, "dash": "dot", "color": colour})


def label(at: float, text: str, axis: str, colour: str) -> Figure:
    """Return the text of such a line."""
    place = {} if axis == "x" else {"x": 1, "xref": "paper", "xanchor": "right", "y": at, "yref": "y"}
    return {**note(at, text), **place, "font": {"color": colour}}
