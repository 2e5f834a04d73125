"""The size of a search that was sized to its limits: headline, table and chart. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rubberband.planner.sizing import Size, SizeAt
from rubberband.units import counted, format_duration, format_usd
from rubberband.views.charts import STAGE_COLOURS, Figure, axis, chart, scatter, time_unit
from rubberband.views.estimate_tables import TICK
from rubberband.views.tables import Row, TextTable

CHART_NOTE = "The largest search by each deadline and within each budget. The ring is the search that is planned here."


def size_line(name: str, size: Size) -> str:
    """Return the answer in a line: `digits: 283 configurations fit 10m and 1.00 USD (num_samples: 283); …`."""
    limits = " and ".join(_limits(size.at))
    if size.number is None:
        return f"{name}: no search fits {limits}"
    if size.key == "num_samples":
        return f"{name}: {counted(size.number, 'configuration')} fit {limits} (num_samples: {size.number}); no more do"
    trials = counted(size.num_trials, "configuration")
    return f"{name}: max_t: {size.number} fits {limits}, with {trials}; no more does"


def _limits(at: SizeAt) -> list[str]:
    time = [] if at.deadline_s is None else [format_duration(at.deadline_s)]
    return time + ([] if at.max_cost_usd is None else [format_usd(at.max_cost_usd)])


def size_table(size: Size) -> TextTable:
    """Return the sizes: a row for each deadline, a column for each budget."""
    deadlines = list(dict.fromkeys(cell.deadline_s for cell in size.frontier))
    budgets = list(dict.fromkeys(cell.max_cost_usd for cell in size.frontier))
    found = {(cell.deadline_s, cell.max_cost_usd): cell for cell in size.frontier}
    what = "Configurations" if size.key == "num_samples" else "max_t"
    by = " and ".join(_named(deadlines, "deadline") + _named(budgets, "budget"))
    rows: list[Row] = [
        (
            "no deadline" if deadline_s is None else format_duration(deadline_s),
            *(_cell(found[deadline_s, budget], size.at) for budget in budgets),
        )
        for deadline_s in deadlines
    ]
    return TextTable(
        title=f"{what} by {by}",
        header=("deadline", *("no budget" if budget is None else format_usd(budget) for budget in budgets)),
        rows=tuple(rows),
        notes=tuple(_notes(size)),
    )


def _named(limits: Sequence[float | None], name: str) -> list[str]:
    return [] if limits in ([], [None]) else [name]


def _cell(cell: SizeAt, asked: SizeAt) -> str:
    number = "none" if cell.number is None else f"{cell.number:,}"
    return f"{TICK} {number}" if cell == asked else number


def _notes(size: Size) -> list[str]:
    notes = [f"{TICK} is for the limits of the experiment; none: not even the smallest search fits."]
    if size.on_average:
        notes.append("Times vary: the other numbers are by mean times, with the margin that this plan keeps.")
    return notes


def size_figure(size: Size) -> Figure | None:
    """Return the chart of the sizes over the deadlines (or the budgets), a line for each budget; None without any."""
    if len(size.frontier) < 2:
        return None
    by_time = size.at.deadline_s is not None
    lines: dict[float | None, list[SizeAt]] = {}
    for cell in size.frontier:
        lines.setdefault(cell.max_cost_usd if by_time else None, []).append(cell)
    longest = max(_at(cell, by_time) for cell in size.frontier)
    unit, unit_s = time_unit(longest) if by_time else ("USD", 1.0)
    data = []
    for at, (budget, cells) in enumerate(lines.items()):
        name = "no budget" if budget is None else f"within {format_usd(budget)}"
        shown = [cell for cell in cells if cell.number is not None]
        points = [(_at(cell, by_time) / unit_s, float(cell.number or 0), _told(cell, size)) for cell in shown]
        data.append(scatter(name if by_time else "sizes", points, line={"color": STAGE_COLOURS[at], "width": 2.5}))
    if size.number is not None:
        here = [(_at(size.at, by_time) / unit_s, float(size.number), _told(size.at, size))]
        ring = {"size": 16, "symbol": "circle-open", "color": "#d9480f", "line": {"width": 3}}
        data.append(scatter("this search", here, mode="markers", marker=ring))
    what = "configurations" if size.key == "num_samples" else "max_t"
    across = axis(f"{'deadline' if by_time else 'budget'} ({unit})", type="log")
    return chart(data, 340, across, axis(what, type="log"), showlegend=True)


def _at(cell: SizeAt, by_time: bool) -> float:
    return (cell.deadline_s if by_time else cell.max_cost_usd) or 0.0


def _told(cell: SizeAt, size: Size) -> str:
    what = counted(cell.number or 0, "configuration") if size.key == "num_samples" else f"max_t: {cell.number}"
    return f"{what}<br>{' and '.join(_limits(cell))}"
