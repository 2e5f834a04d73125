"""Report as text: one screen, or all of it; drawn by rich on a terminal, plain elsewhere."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rubberband.executor.result.result import Result
from rubberband.units import in_unit
from rubberband.views.formatting import TextTable, aligned, hanging
from rubberband.views.report.tables import (
    batch_sizes,
    bill,
    comparison,
    decisions,
    failed_alike,
    failures,
    headlines,
    incidents,
    paid_time,
    pareto,
    purchases,
    stages,
    trials,
    updates,
    workers,
)

if TYPE_CHECKING:
    from rich.console import Console

MOST_TRIALS = 10
"""Limit of trials in the whole report; the rest is counted (`-o json` and `--html` have all)."""
_TRIALS_ON_A_SCREEN = 5
WIDTH = 100
"""Columns of a line, if its names are short enough."""


def tables(result: Result, most_trials: int | None = None) -> list[TextTable]:
    """Return the tables of the report in order, without empty ones. `most_trials` limits their trials."""
    every = [
        comparison(result),
        stages(result),
        decisions(result),
        paid_time(result),
        purchases(result),
        bill(result.bill),
        batch_sizes(result, most_trials),
        workers(result, most_trials),
        updates(result, most_trials),
        failures(result),
        incidents(result),
        pareto(result, most_trials),
        trials(result, most_trials),
    ]
    return [table for table in every if table.rows]


def print_report(result: Result, *, verbose: bool = False) -> None:
    """Print the report: one screen, or all of it."""
    styles = ("bold", *("bold yellow" for _ in failed_alike(result)), "", "bold green", "", "dim")
    lines, every = headlines(result), tables(result, MOST_TRIALS)
    if verbose:
        print_document(lines, every, styles, unit=result.unit)
        return
    shown = [stages(result), pareto(result, _TRIALS_ON_A_SCREEN), trials(result, _TRIALS_ON_A_SCREEN)]
    lines += comparison(result).notes
    print_document(lines, [_narrowed(table) for table in shown if table.rows], styles, more(every, shown), result.unit)


def _narrowed(table: TextTable) -> TextTable:
    """Return a table without notes, and with a shorter last column if it is too wide for a screen."""
    over = max(map(len, _aligned(table))) - WIDTH
    most = max(len(row[-1]) for row in table.rows) - max(0, over)
    cut = tuple((*row[:-1], row[-1] if len(row[-1]) <= most else row[-1][: most - 1] + "…") for row in table.rows)
    return replace(table, rows=cut, notes=())


def more(every: Sequence[TextTable], shown: Sequence[TextTable]) -> list[str]:
    """Return a line with the tables that are not shown, and the options that show them."""
    kinds = {table.title.partition(":")[0] for table in shown}
    titles = [table.title for table in every if table.title.partition(":")[0] not in kinds]
    named = [f"{title[0].lower()}{title[1:]}" for title in titles]
    return textwrap.wrap(f"--verbose shows more: {'; '.join(named)}. --html FILE draws charts.", WIDTH) if named else []


def print_document(
    lines: Sequence[str],
    found: Sequence[TextTable],
    styles: Sequence[str],
    closing: Sequence[str] = (),
    unit: str = "USD",
) -> None:
    """Print lines (on a terminal, each in its style), tables, and closing lines. Amounts count in `unit`."""
    lines, found, closing = (
        [in_unit(line, unit) for line in lines],
        [table.in_unit(unit) for table in found],
        [in_unit(line, unit) for line in closing],
    )
    if sys.stdout.isatty():
        _print_rich(lines, found, styles, closing)
    else:
        print(render_document(lines, found, closing), end="")


def render_document(lines: Sequence[str], found: Sequence[TextTable], closing: Sequence[str] = ()) -> str:
    """Return lines, tables and closing lines as plain aligned text."""
    parts = list(lines)
    for table in found:
        parts += ["", table.title, *_aligned(table), *table.notes]
    parts += ["", *closing] if closing else []
    return "\n".join(parts) + "\n"


def _aligned(table: TextTable) -> list[str]:
    rows = [table.header, *table.rows, *([table.total] if table.total else [])]
    return [f"  {line}" for line in aligned(rows, table.words)]


def _print_rich(
    lines: Sequence[str], found: Sequence[TextTable], styles: Sequence[str], closing: Sequence[str]
) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    for at, line in enumerate(lines):
        console.print(Text(hanging(line, console.width), style=styles[at] if at < len(styles) else ""))
    for table in found:
        console.print(Text(f"\n{table.title}", style="bold"))
        rows = _aligned(table)
        if max(map(len, rows)) <= console.width:
            for at, line in enumerate(rows):
                total = table.total is not None and at == len(rows) - 1
                console.print(Text(line, style="dim" if not at else "bold" if total else ""))
        else:
            _print_folded(console, table)
        for note in table.notes:
            console.print(Text(hanging(note, console.width), style="dim"))
    for at, line in enumerate(closing):
        console.print(Text(hanging(line, console.width) if at else f"\n{hanging(line, console.width)}"))


def _print_folded(console: Console, table: TextTable) -> None:
    """Print a table that is wider than the terminal: headers and words are folded, figures are not.

    Columns that have no room even so follow in a table below, which begins with the first column again.
    """
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    padding = 1 if console.width >= WIDTH else 0
    for columns in _columns_that_fit(table, console.width, padding):
        drawn = RichTable(
            box=box.SIMPLE_HEAD,
            show_footer=table.total is not None,
            padding=(0, padding),
            pad_edge=False,
        )
        for column in columns:
            name, words = table.header[column], column in table.words
            drawn.add_column(
                Text(name if words else "\n".join(name.split())),
                footer=Text(table.total[column] if table.total else ""),
                justify="left" if words else "right",
                overflow="fold",
                no_wrap=not words,
                min_width=_least_width(table, column),
            )
        for row in table.rows:
            drawn.add_row(*(Text(row[column]) for column in columns))
        console.print(drawn)


_FOLDED = 16
"""Width of a column of words below which its cells are not folded."""


def _least_width(table: TextTable, column: int) -> int:
    cells = [row[column] for row in [*table.rows, *([table.total] if table.total else [])]]
    widest = max(map(len, cells), default=0)
    return max(*map(len, table.header[column].split()), min(widest, _FOLDED) if column in table.words else widest, 1)


def _columns_that_fit(table: TextTable, width: int, padding: int) -> list[list[int]]:
    """Return the columns of one table, or of several that each begin with the first column."""
    parts = [[0]]
    around = 1 + 2 * padding
    first = left = width - _least_width(table, 0) - around
    for column in range(1, len(table.header)):
        need = _least_width(table, column) + around
        if need > left and len(parts[-1]) > 1:
            parts.append([0])
            left = first
        parts[-1].append(column)
        left -= need
    return parts
