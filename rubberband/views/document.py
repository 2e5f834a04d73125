"""Documents as text: lines and tables, drawn by rich on a terminal, plain elsewhere."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rubberband.units import in_unit
from rubberband.views.formatting import TextTable, aligned, hanging, local_times

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 100
"""Columns of a line, if its names are short enough."""


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
    """Print lines (on a terminal, each in its style), tables, and closing lines.

    Amounts count in `unit`, and instants are shown in this process's time zone.
    """
    now = time.time()

    def shown(text: str) -> str:
        return local_times(in_unit(text, unit), now)

    lines, found, closing = [*map(shown, lines)], [table.mapped(shown) for table in found], [*map(shown, closing)]
    if sys.stdout.isatty():
        _print_rich(lines, found, styles, closing)
    else:
        print(render_document(lines, found, closing), end="")


def render_document(lines: Sequence[str], found: Sequence[TextTable], closing: Sequence[str] = ()) -> str:
    """Return lines, tables and closing lines as plain aligned text."""
    parts = list(lines)
    for table in found:
        parts += ["", table.title, *indented(table), *table.notes]
    parts += ["", *closing] if closing else []
    return "\n".join(parts) + "\n"


def indented(table: TextTable) -> list[str]:
    """Return the lines of a table: header, rows and total."""
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
        rows = indented(table)
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
            box=box.SIMPLE_HEAD, show_footer=table.total is not None, padding=(0, padding), pad_edge=False
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
