"""Headline figures as cards: a result's time, cost and best trial, against plan, forecast and limits. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rubberband.executor.result.result import Result
from rubberband.units import counted, duration
from rubberband.views.formatting import difference, number, printable, usd, usd_decimals


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge:
    """Shares of a limit (or of the larger of plan and forecast), from 0 to 1."""

    done: float
    planned: float | None = None
    forecast: float | None = None
    over: bool
    """Whether the limit is exceeded."""
    label: str


@dataclass(frozen=True, slots=True)
class Card:
    """Headline figure, with the figures to compare it to."""

    title: str
    value: str
    notes: tuple[str, ...] = ()
    gauge: Gauge | None = None


def time_card(result: Result, forecast_s: float | None = None) -> Card:
    """Return the time of a run, with its deadline, and the plan and the forecast of one that runs."""
    took_s, planned_s = result.actual_jct_s, result.planned_jct_s
    deadline = "no deadline" if result.deadline_s is None else f"deadline {duration(result.asked_deadline_s or 0.0)}"
    against = _against(result, planned_s, forecast_s, took_s, duration)
    gauge = _gauge(took_s, result.deadline_s, planned_s, forecast_s, "deadline")
    return Card("time", duration(took_s), (deadline, against), gauge)


def cost_card(result: Result, forecast_usd: float | None = None) -> Card:
    """Return the cost of a run and its profile, with its max_cost, and the plan and the forecast of one that runs."""
    spent_usd, cap_usd, planned_usd = result.whole_cost_usd, result.asked_max_cost_usd, result.whole_planned_usd
    decimals = usd_decimals(max(spent_usd, planned_usd))
    cap = "no max_cost" if cap_usd is None else f"max_cost {usd(cap_usd)}"
    against = _against(result, planned_usd, forecast_usd, spent_usd, lambda money: usd(money, decimals))
    charged = () if result.is_charged else ("nothing is charged",)
    gauge = _gauge(spent_usd, cap_usd, planned_usd, forecast_usd, "max_cost")
    return Card("spent (USD)", usd(spent_usd, decimals), (cap, against, *charged), gauge)


def best_card(result: Result) -> Card:
    """Return the metric of the best trial."""
    best = result.best
    value = None if best is None else best.metrics.get(result.metric)
    note = "no report yet" if best is None else f"trial {best.trial}, {counted(best.iterations, 'iteration')}"
    return Card(f"best {printable(result.metric)}", "-" if value is None else number(value), (note,))


def _against(
    result: Result, planned: float, forecast: float | None, actual: float, text: Callable[[float], str]
) -> str:
    """Return the plan and the forecast; only a forecast, or a run that is done, compares to its plan."""
    compared = actual if result.outcome == "done" and forecast is None else forecast
    off = "" if compared is None else difference(compared, planned).replace(" %", "\N{NO-BREAK SPACE}%")
    detail = f" ({off})" if off else ""
    return f"planned {text(planned)}{'' if forecast is None else f'; forecast {text(forecast)}'}{detail}"


def _gauge(done: float, limit: float | None, planned: float, forecast: float | None, name: str) -> Gauge | None:
    whole = limit or max(planned, forecast or 0.0, done)
    if whole <= 0:
        return None
    of = f"of the {name}" if limit else "of the plan"
    return Gauge(
        done=min(done / whole, 1.0),
        planned=planned / whole if planned <= whole else None,
        forecast=forecast / whole if forecast is not None and forecast <= whole else None,
        over=done > whole * (1 + 1e-9),
        label=f"{100 * done / whole:.0f} % {of}",
    )
