"""The report as text: the answer in the first lines, then tables; drawn by rich on a terminal, plain elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rubberband.executor.result import Result
from rubberband.views.tables import (
    Row,
    TextTable,
    batch_sizes,
    bill,
    comparison,
    decisions,
    failures,
    headlines,
    incidents,
    paid_time,
    purchases,
    stages,
    trials,
)

MOST_TRIALS = 10
"""Trials that the report names; the rest is counted (`-o json` and `--html` have them all)."""


def tables(result: Result, most_trials: int | None = None) -> list[TextTable]:
    """All tables of the report, in order; those with nothing in them are left out. `most_trials`: None is all."""
    every = [
        comparison(result),
        stages(result),
        decisions(result),
        paid_time(result),
        purchases(result),
        bill(result.bill),
        batch_sizes(result, most_trials),
        failures(result),
        incidents(result),
        trials(result, most_trials),
    ]
    return [table for table in every if table.rows]


def print_report(result: Result) -> None:
    """The report on stdout."""
    print_document(headlines(result), tables(result, MOST_TRIALS), ("bold", "bold green", "", "dim", "dim"))


def print_document(lines: Sequence[str], found: Sequence[TextTable], styles: Sequence[str]) -> None:
    """Lines (on a terminal, each in its style) and tables on stdout."""
    if sys.stdout.isatty():
        _print_rich(lines, found, styles)
    else:
        print(render_document(lines, found), end="")


def render(result: Result) -> str:
    """The report as plain aligned text."""
    return render_document(headlines(result), tables(result, MOST_TRIALS))


def render_document(lines: Sequence[str], found: Sequence[TextTable]) -> str:
    """Lines and tables as plain aligned text."""
    parts = list(lines)
    for table in found:
        parts += ["", table.title, *_aligned(table), *table.notes]
    return "\n".join(parts) + "\n"


def _aligned(table: TextTable) -> list[str]:
    rows = [table.header, *table.rows, *([table.total] if table.total else [])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(table.header))]

    def line(row: Row) -> str:
        cells = zip(row, widths, strict=True)
        padded = (c.ljust(w) if i in table.words else c.rjust(w) for i, (c, w) in enumerate(cells))
        return "  ".join(padded).rstrip()

    return [f"  {line(row)}" for row in rows]


def _print_rich(lines: Sequence[str], found: Sequence[TextTable], styles: Sequence[str]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console()
    for line, style in zip(lines, styles, strict=False):
        console.print(Text(line, style=style))
    for table in found:
        console.print(Text(f"\n{table.title}", style="bold"))
        drawn = RichTable(
            box=box.SIMPLE_HEAD,
            show_footer=table.total is not None,
            padding=(0, 1 if console.width >= 100 else 0),
            pad_edge=False,
        )
        tight = max(map(len, _aligned(table))) > console.width
        for column, name in enumerate(table.header):
            words = column in table.words
            cells = [row[column] for row in table.rows] + ([table.total[column]] if table.total else [])
            drawn.add_column(
                Text("\n".join(name.split()) if tight and not words else name),
                footer=Text(table.total[column] if table.total else ""),
                justify="left" if words else "right",
                overflow="fold",
                no_wrap=not words,
                min_width=_least_width(name, [] if words else cells),
            )
        for row in table.rows:
            drawn.add_row(*(Text(cell) for cell in row))
        console.print(drawn)
        for note in table.notes:
            console.print(Text(note, style="dim"))


def _least_width(header: str, figures: list[str]) -> int:
    """A header may be broken between words, a figure nowhere."""
    return max(len(text) for text in [*header.split(), *figures, ""])
