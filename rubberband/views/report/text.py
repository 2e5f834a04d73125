"""Report as text: one screen, or all of it."""

from __future__ import annotations

from dataclasses import replace

from rubberband.executor.result.result import Result
from rubberband.views.document import WIDTH, indented, more, print_document
from rubberband.views.formatting import TextTable, bill
from rubberband.views.report.headlines import failed_alike, headlines, schedule
from rubberband.views.report.tables import (
    batch_sizes,
    comparison,
    decisions,
    exchanges,
    failures,
    incidents,
    paid_time,
    pareto,
    purchases,
    stages,
    trials,
    updates,
    workers,
    worths,
)
from rubberband.views.report.waits import waits

MOST_TRIALS = 10
"""Limit of trials in the whole report; the rest is counted (`-o json` and `--html` have all)."""
_TRIALS_ON_A_SCREEN = 5


def tables(result: Result, most_trials: int | None = None) -> list[TextTable]:
    """Return the tables of the report in order, without empty ones. `most_trials` limits their trials."""
    result = result.shown
    every = [
        comparison(result),
        stages(result),
        decisions(result),
        worths(result),
        paid_time(result),
        waits(result),
        purchases(result),
        bill(result.bill),
        batch_sizes(result, most_trials),
        workers(result, most_trials),
        updates(result, most_trials),
        failures(result),
        incidents(result),
        pareto(result, most_trials),
        trials(result, most_trials),
        schedule(result),
        exchanges(result),
    ]
    return [table for table in every if table.rows]


def print_report(result: Result, *, verbose: bool = False) -> None:
    """Print the report: one screen, or all of it."""
    styles = ("bold", *("bold yellow" for _ in failed_alike(result)), "", "bold green", "", "dim")
    every = tables(result, MOST_TRIALS)
    if verbose:
        print_document(headlines(result), every, styles, unit=result.unit)
        return
    lines, shown = screen(result)
    print_document(lines, shown, styles, more(every, shown), result.unit)


def screen(result: Result, most_trials: int = _TRIALS_ON_A_SCREEN) -> tuple[list[str], list[TextTable]]:
    """Return the lines and tables of one screen."""
    result = result.shown
    shown = [stages(result), pareto(result, most_trials), trials(result, most_trials)]
    lines = [*headlines(result), *comparison(result).notes]
    return lines, [_narrowed(table) for table in shown if table.rows]


def _narrowed(table: TextTable) -> TextTable:
    """Return a table without notes, and with a shorter last column if it is too wide for a screen."""
    over = max(map(len, indented(table))) - WIDTH
    most = max(len(row[-1]) for row in table.rows) - max(0, over)
    cut = tuple((*row[:-1], row[-1] if len(row[-1]) <= most else row[-1][: most - 1] + "…") for row in table.rows)
    return replace(table, rows=cut, notes=())
