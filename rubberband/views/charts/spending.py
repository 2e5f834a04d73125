"""The bill over time, its chart, and each trial's share of it, from a result alone. Pure.

The bill grows as it is paid. An instance is paid from when it runs; its costs beyond time (data, a billing minimum) at
once. Functions are paid with the GPU time that trials hold, the head evenly. It ends at the amount of the result.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from rubberband.executor.core.forecast import Forecast
from rubberband.executor.result.parts import InstanceResult, TrialResult
from rubberband.executor.result.result import Result
from rubberband.executor.result.rows import paid_uses
from rubberband.units import duration
from rubberband.values.offer import SECONDS_PER_HOUR
from rubberband.views.charts.parts import (
    FAR,
    LOST,
    MANY_POINTS,
    PLANNED,
    STAGE_COLOURS,
    Figure,
    axis,
    beyond_s,
    chart,
    end_s,
    line_at,
    marks,
    scatter,
    time_axis,
    time_unit,
)
from rubberband.views.formatting import usd
from rubberband.views.story import planned_spans

_NOTHING_USD = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Amount over time. It begins at zero, may jump, and grows evenly between its knots."""

    at_s: tuple[float, ...]
    """Ascending; an instant of a jump appears twice."""
    amount: tuple[float, ...]

    def at(self, instant_s: float) -> float:
        """Return the amount at an instant, after a jump at that instant."""
        after = bisect_right(self.at_s, instant_s)
        if after == 0:
            return 0.0
        if after == len(self.at_s):
            return self.amount[-1]
        from_s, until_s = self.at_s[after - 1], self.at_s[after]
        share = (instant_s - from_s) / (until_s - from_s)
        return self.amount[after - 1] + share * (self.amount[after] - self.amount[after - 1])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Cost of `usd_per_s` from `start_s` until `end_s`, and `once_usd` at its start."""

    start_s: float
    end_s: float
    usd_per_s: float
    once_usd: float = 0.0


def spending(result: Result) -> Growth:
    """Return the bill over time, in US dollars, until now or until the last instance was released."""
    instances_usd = sum(i.cost_usd for i in result.instances if i.running_s is not None)
    functions_usd = result.actual_cost_usd - instances_usd - result.head_cost_usd
    parts = [*_rented(result), *_spread(result.head_cost_usd, [(0.0, beyond_s(result))])]
    if functions_usd > _NOTHING_USD:
        parts += _spread(functions_usd, [(use.start_s, use.end_s) for use in result.busy])
    return _grown(parts)


def _rented(result: Result) -> list[_Part]:
    """Return the costs of instances: data and a billing minimum at once, and the time beyond that as it passes."""
    ran = []
    for i in result.instances:
        if i.running_s is not None:
            held_s = max(0.0, end_s(result, i) - i.running_s)
            usd_per_s = (i.price_usd_per_hour + result.side_usd_per_hour) / SECONDS_PER_HOUR
            ran.append((i, held_s, usd_per_s, i.cost_usd - usd_per_s * held_s))
    data_usd = min((extra for *_, extra in ran if extra > -_NOTHING_USD), default=0.0)
    minima_s = [
        held_s + (extra - data_usd) / usd_per_s
        for _, held_s, usd_per_s, extra in ran
        if extra > data_usd + _NOTHING_USD
    ]
    minimum_s = max(minima_s, default=0.0)
    return [
        part
        for i, held_s, usd_per_s, _ in ran
        for part in _instance(i, held_s, data_usd + usd_per_s * minimum_s, minimum_s)
    ]


def _instance(instance: InstanceResult, held_s: float, once_usd: float, minimum_s: float) -> list[_Part]:
    start_s = instance.running_s or 0.0
    if held_s <= minimum_s or once_usd >= instance.cost_usd:
        return [_Part(start_s=start_s, end_s=start_s, usd_per_s=0.0, once_usd=instance.cost_usd)]
    usd_per_s = (instance.cost_usd - once_usd) / (held_s - minimum_s)
    return [
        _Part(start_s=start_s, end_s=start_s, usd_per_s=0.0, once_usd=max(0.0, once_usd)),
        _Part(start_s=start_s + minimum_s, end_s=start_s + held_s, usd_per_s=usd_per_s),
    ]


def _spread(amount: float, stretches: Sequence[tuple[float, float]]) -> list[_Part]:
    """Spread an amount evenly over all of the stretches."""
    total_s = sum(until_s - from_s for from_s, until_s in stretches)
    if amount <= 0 or total_s <= 0:
        return []
    return [_Part(start_s=from_s, end_s=until_s, usd_per_s=amount / total_s) for from_s, until_s in stretches]


def _grown(parts: Iterable[_Part]) -> Growth:
    turns: list[tuple[float, float, float]] = [(0.0, 0.0, 0.0)]
    for part in parts:
        turns += [(part.start_s, part.usd_per_s, part.once_usd), (part.end_s, -part.usd_per_s, 0.0)]
    at_s, amounts, slope, amount, before_s = [], [], 0.0, 0.0, 0.0
    for instant_s, here in groupby(sorted(turns), key=lambda turn: turn[0]):
        changes = list(here)
        amount += slope * (instant_s - before_s)
        at_s.append(instant_s)
        amounts.append(amount)
        once = sum(once for *_, once in changes)
        if once:
            amount += once
            at_s.append(instant_s)
            amounts.append(amount)
        slope += sum(change for _, change, _ in changes)
        before_s = instant_s
    return Growth(at_s=tuple(at_s), amount=tuple(amounts))


def trial_growth(result: Result, trials: Sequence[TrialResult]) -> Mapping[int, Growth]:
    """Return trial -> its cost over time, in US dollars.

    The last amounts of all trials add up to the bill, if any has trained (see `paid_uses`).
    """
    parts: dict[int, list[_Part]] = {trial.trial: [] for trial in trials}
    for use, usd_per_s in paid_uses(result):
        if use.trial in parts:
            parts[use.trial].append(_Part(start_s=use.start_s, end_s=use.end_s, usd_per_s=usd_per_s))
    return {trial: _grown(held) for trial, held in parts.items()}


def trial_costs_usd(result: Result) -> Mapping[int, float]:
    """Return trial -> its share of the bill so far, the last amount of `trial_growth`."""
    costs_usd = {trial.trial: 0.0 for trial in result.trials}
    for use, usd_per_s in paid_uses(result):
        costs_usd[use.trial] += usd_per_s * (use.end_s - use.start_s)
    return costs_usd


def shares(result: Result, trials: Sequence[TrialResult]) -> Mapping[int, tuple[float, ...]]:
    """Return trial -> its cost at each point of its learning curve, in US dollars."""
    grown = trial_growth(result, trials)
    return {trial.trial: tuple(grown[trial.trial].at(at_s) for at_s, *_ in trial.curve) for trial in trials}


_HEIGHT_PX = 340
SPEND_NOTE = "The bill as it grew, against what the run was planned to cost. Dotted lines are the ends of stages."


def spend(result: Result, forecast: Forecast | None = None) -> Figure | None:
    """Return the chart of the bill over time against plan, forecast and max_cost; None before the first instance.

    `forecast` is drawn while the run lasts.
    """
    if not result.instances:
        return None
    bill = spending(result)
    every = list(zip(bill.at_s, bill.amount, strict=True))
    paid = [*every[: -1 : 1 + len(every) // MANY_POINTS], every[-1]]
    planned = _planned(result)
    expected: Points = []
    if forecast is not None and result.outcome == "unfinished":
        now_s, now_usd = paid[-1]
        expected = [(now_s, now_usd), (max(forecast.jct_s, now_s), max(forecast.cost_usd, now_usd))]
    horizon_s = max(at_s for at_s, _ in [*paid, *planned, *expected])
    unit, unit_s = time_unit(horizon_s)
    traces = [
        _line("planned", planned, unit_s, {"color": PLANNED, "width": 2, "dash": "dash"}),
        _line("forecast", expected, unit_s, {"color": STAGE_COLOURS[0], "width": 2, "dash": "dot"}),
        _line("spent", paid, unit_s, {"color": STAGE_COLOURS[0], "width": 2.5})
        | {"fill": "tozeroy", "fillcolor": "rgba(59,130,196,0.12)"},
    ]
    drawn = marks(result, horizon_s, unit_s)
    highest = max(amount for _, amount in [*paid, *planned, *expected])
    return chart(
        [trace for trace in traces if trace["x"]],
        _HEIGHT_PX,
        time_axis(unit, horizon_s / unit_s),
        axis("USD", range=[0, max(highest, _near(result, highest)) * 1.08 or 1.0]),
        **_capped(result, highest, drawn),
    )


Points = Sequence[tuple[float, float]]
"""Pairs of seconds from the start and US dollars."""


def _planned(result: Result) -> Points:
    """Return the planned cost at the end of every stage, by the first plan."""
    spans = planned_spans(result.stages)
    if all(stage.bracket is None for stage in result.stages):
        paid = accumulate(stage.planned_cost_usd for stage, _, _ in spans)
        return [(0.0, 0.0), *((end_s, usd) for (_, _, end_s), usd in zip(spans, paid, strict=True))]

    def planned_usd(at_s: float) -> float:
        """Stages that run side by side, and the head node that they share, are paid for all the time."""
        shares = (
            (stage.planned_cost_usd, (at_s - start_s) / (end_s - start_s or 1.0)) for stage, start_s, end_s in spans
        )
        stages_usd = sum(cost_usd * min(1.0, max(0.0, share)) for cost_usd, share in shares)
        return stages_usd + head_usd * at_s / (result.planned_jct_s or 1.0)

    head_usd = result.planned_head_usd
    ends_s = sorted({0.0, *(at_s for _, *span in spans for at_s in span)})
    return [(at_s, planned_usd(at_s)) for at_s in ends_s]


def _near(result: Result, highest_usd: float) -> float:
    """Return max_cost if it fits in the chart, else 0."""
    cap_usd = result.max_cost_usd
    return cap_usd if cap_usd is not None and cap_usd <= 3 * highest_usd else 0.0


def _capped(result: Result, highest_usd: float, drawn: Figure) -> Figure:
    """Return the marks with the line of max_cost, or with its amount as a text if it is far above."""
    cap_usd = result.max_cost_usd
    if cap_usd is None:
        return drawn
    text = f"max_cost {usd(cap_usd)} USD"
    label = {"xref": "paper", "x": 0.01, "xanchor": "left", "showarrow": False, "font": {"color": LOST}}
    if not _near(result, highest_usd):
        height = 0.88 if result.outcome == "unfinished" else 0.98  # below the word now
        above = label | {"text": f"{text} is above", "yref": "paper", "y": height, "yanchor": "top"}
        above["font"] = {"color": FAR}
        return {**drawn, "annotations": [*drawn["annotations"], above]}
    return {
        "shapes": [*drawn["shapes"], line_at(cap_usd, "y", {"width": 1.5, "color": LOST})],
        "annotations": [*drawn["annotations"], label | {"text": text, "yref": "y", "y": cap_usd, "yanchor": "bottom"}],
    }


def _line(name: str, points: Points, unit_s: float, line: Figure) -> Figure:
    drawn = ((at_s / unit_s, amount, f"{name}: {usd(amount)} USD at {duration(at_s)}") for at_s, amount in points)
    return scatter(name, drawn, line=line)
