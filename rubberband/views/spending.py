"""The bill over time, its chart, and every trial's share of it, from a result alone. Pure.

The bill grows as it is paid: an instance from when it runs, what it costs beyond its time (data, a billing minimum) at
once; functions with the GPU time that trials hold; the head evenly. It ends at the result's own amount.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from rubberband.executor.core.forecast import Forecast
from rubberband.executor.result import Busy, InstanceResult, Result, TrialResult
from rubberband.values.offer import SECONDS_PER_HOUR
from rubberband.views.charts import (
    LEGEND,
    LOST,
    MANY_POINTS,
    PLANNED,
    STAGE_COLOURS,
    Figure,
    beyond_s,
    end_s,
    marks,
    time_unit,
)
from rubberband.views.words import duration, usd

_NOTHING_USD = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """An amount that begins at zero, may jump, and grows evenly between its knots."""

    at_s: tuple[float, ...]
    """Ascending; an instant at which it jumps is there twice."""
    amount: tuple[float, ...]

    def at(self, instant_s: float) -> float:
        """The amount then; after the jump, if it jumps."""
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
    """What costs `usd_per_s` from `start_s` until `end_s`, and `once_usd` at its start."""

    start_s: float
    end_s: float
    usd_per_s: float
    once_usd: float = 0.0


def spending(result: Result) -> Growth:
    """The bill over time, in US dollars, until now or until the last instance was given back."""
    rented = _rented(result)
    until_s = beyond_s(result)
    functions_usd = (
        result.actual_cost_usd - sum(i.cost_usd for i in result.instances if i.running_s is not None)
    ) - result.head_cost_usd
    parts = [*rented, *_spread(result.head_cost_usd, [(0.0, until_s)])]
    if functions_usd > _NOTHING_USD:
        parts += _spread(functions_usd, [(use.start_s, use.end_s) for use in result.busy])
    return _grown(parts)


def _rented(result: Result) -> list[_Part]:
    """What instances cost: data and a billing minimum at once, and the time beyond that as it passes."""
    ran = [instance for instance in result.instances if instance.running_s is not None]
    beyond = [
        (held_s, instance.cost_usd - _usd_per_s(result, instance) * held_s, instance)
        for held_s, instance in _held(result, ran)
    ]
    data_usd = min((extra for _, extra, _ in beyond if extra > -_NOTHING_USD), default=0.0)
    minimum_s = max(
        (
            held_s + (extra - data_usd) / _usd_per_s(result, i)
            for held_s, extra, i in beyond
            if extra > data_usd + _NOTHING_USD
        ),
        default=0.0,
    )
    return [
        part
        for held_s, _, i in beyond
        for part in _instance(i, held_s, data_usd + _usd_per_s(result, i) * minimum_s, minimum_s)
    ]


def _held(result: Result, ran: Sequence[InstanceResult]) -> list[tuple[float, InstanceResult]]:
    return [(max(0.0, end_s(result, i) - (i.running_s or 0.0)), i) for i in ran]


def _usd_per_s(result: Result, instance: InstanceResult) -> float:
    return (instance.price_usd_per_hour + result.side_usd_per_hour) / SECONDS_PER_HOUR


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
    """An amount that is paid evenly over all of the stretches."""
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
    """Trial -> what it has cost over time, in US dollars.

    The whole bill so far (idle and starting instances included) is shared out among all trials by the GPU time that
    each has held, at its instances' prices; so the last amounts of all trials add up to the bill, if any has trained.
    """
    parts: dict[int, list[_Part]] = {trial.trial: [] for trial in trials}
    for use, usd_per_s in _uses(result):
        if use.trial in parts:
            parts[use.trial].append(_Part(start_s=use.start_s, end_s=use.end_s, usd_per_s=usd_per_s))
    return {trial: _grown(held) for trial, held in parts.items()}


def trial_costs_usd(result: Result) -> Mapping[int, float]:
    """Trial -> its share of the bill so far, as `trial_growth` ends."""
    costs_usd = {trial.trial: 0.0 for trial in result.trials}
    for use, usd_per_s in _uses(result):
        costs_usd[use.trial] += usd_per_s * (use.end_s - use.start_s)
    return costs_usd


def _uses(result: Result) -> Iterator[tuple[Busy, float]]:
    """What trials held, and what of the bill that is a second."""
    prices = {instance.instance: instance.price_usd_per_hour for instance in result.instances}
    total = sum(prices[use.instance] * (use.end_s - use.start_s) for use in result.busy)
    usd_each = result.actual_cost_usd / total if total > 0 else 0.0
    for use in result.busy:
        yield use, prices[use.instance] * usd_each


def shares(result: Result, trials: Sequence[TrialResult]) -> Mapping[int, tuple[float, ...]]:
    """Trial -> what it had cost by each point of its curve, in US dollars."""
    grown = trial_growth(result, trials)
    return {trial.trial: tuple(grown[trial.trial].at(at_s) for at_s, *_ in trial.curve) for trial in trials}


# The bill over time against the plan, the forecast and max_cost, as a plain Plotly figure. Pure.


_HEIGHT_PX = 340
SPEND_NOTE = "The bill as it grew, against what the run was planned to cost. Dotted lines are the ends of stages."


def spend(result: Result, forecast: Forecast | None = None) -> Figure | None:
    """What was paid by when; None before the first instance was asked for. `forecast` is drawn while it runs."""
    if not result.instances:
        return None
    bill = spending(result)
    paid = _thinned(list(zip(bill.at_s, bill.amount, strict=True)))
    planned = _planned(result)
    expected = _expected(paid[-1], forecast) if forecast is not None and result.outcome == "unfinished" else []
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
    layout = {
        "height": _HEIGHT_PX,
        "xaxis": {"title": {"text": f"time since the start ({unit})"}, "range": [0, horizon_s * 1.02 / unit_s]},
        "yaxis": {"title": {"text": "USD"}, "range": [0, max(highest, _near(result, highest)) * 1.08 or 1.0]},
        **_capped(result, highest, drawn),
        **LEGEND,
    }
    return {"data": [trace for trace in traces if trace["x"]], "layout": layout}


Points = Sequence[tuple[float, float]]
"""(seconds from the start, US dollars)"""


def _planned(result: Result) -> Points:
    """At the end of every stage, as the run began."""
    ends_s = accumulate(stage.planned_s for stage in result.stages)
    paid = accumulate(stage.planned_cost_usd for stage in result.stages)
    return [(0.0, 0.0), *zip(ends_s, paid, strict=True)]


def _expected(last: tuple[float, float], forecast: Forecast) -> Points:
    return [last, (max(forecast.jct_s, last[0]), max(forecast.cost_usd, last[1]))]


def _thinned(points: list[tuple[float, float]]) -> Points:
    step = 1 + len(points) // MANY_POINTS
    return [*points[:-1:step], points[-1]]


def _near(result: Result, highest_usd: float) -> float:
    """max_cost, if it is so near that the chart shows it."""
    cap_usd = result.max_cost_usd
    return cap_usd if cap_usd is not None and cap_usd <= 3 * highest_usd else 0.0


def _capped(result: Result, highest_usd: float, drawn: Figure) -> Figure:
    """The marks, and the line of max_cost or, where that is far above, its amount in words."""
    cap_usd = result.max_cost_usd
    if cap_usd is None:
        return drawn
    text = f"max_cost {usd(cap_usd)} USD"
    label = {"xref": "paper", "x": 0.01, "xanchor": "left", "showarrow": False, "font": {"color": LOST}}
    if not _near(result, highest_usd):
        height = 0.88 if result.outcome == "unfinished" else 0.98  # below the word now
        above = label | {"text": f"{text} is above", "yref": "paper", "y": height, "yanchor": "top"}
        return {**drawn, "annotations": [*drawn["annotations"], above]}
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": cap_usd, "y1": cap_usd}
    return {
        "shapes": [*drawn["shapes"], line | {"line": {"width": 1.5, "color": LOST}}],
        "annotations": [*drawn["annotations"], label | {"text": text, "yref": "y", "y": cap_usd, "yanchor": "bottom"}],
    }


def _line(name: str, points: Points, unit_s: float, line: Figure) -> Figure:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": [at_s / unit_s for at_s, _ in points],
        "y": [amount for _, amount in points],
        "hovertext": [f"{name}: {usd(amount)} USD at {duration(at_s)}" for at_s, amount in points],
        "hoverinfo": "text",
        "line": line,
    }
