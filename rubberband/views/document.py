"""Documents as text: lines and tables, drawn by rich on a terminal, plain elsewhere."""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

from rubberband.units import in_unit
from rubberband.views.formatting import TextTable, aligned, hanging, local_times

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

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
    """Print lines (on a terminal, each in its style), tables, and closing lines, as `localised` shows them."""
    lines, found = localised(lines, found, unit)
    closing, _ = localised(closing, (), unit)
    if sys.stdout.isatty():
        from rich.console import Console

        console = Console(highlight=False)
        print_drawn(console, drawn(lines, found, styles, closing, width=console.width))
    else:
        print(render_document(lines, found, closing), end="")


def localised(lines: Sequence[str], found: Sequence[TextTable], unit: str = "USD") -> tuple[list[str], list[TextTable]]:
    """Return lines and tables whose amounts count in `unit`, with instants in this process's time zone."""
    now = time.time()

    def shown(text: str) -> str:
        return local_times(in_unit(text, unit), now)

    return [*map(shown, lines)], [table.mapped(shown) for table in found]


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


def drawn(
    lines: Sequence[str], found: Sequence[TextTable], styles: Sequence[str], closing: Sequence[str] = (), *, width: int
) -> Iterator[Text | RichTable]:
    """Yield a document for a terminal of `width` columns: lines with hanging indents, and tables folded if need be.

    No word of a line is broken: a path that is wider than the terminal is a line of its own, which the terminal wraps.
    """
    from rich.text import Text

    for at, line in enumerate(lines):
        yield Text(hanging(line, width), style=styles[at] if at < len(styles) else "")
    for table in found:
        yield Text(f"\n{table.title}", style="bold")
        yield from drawn_table(table, width)
        for note in table.notes:
            yield Text(hanging(note, width), style="dim")
    for at, line in enumerate(closing):
        yield Text(hanging(line, width) if at else f"\n{hanging(line, width)}")


def print_drawn(console: Console, parts: Iterable[Text | RichTable]) -> None:
    """Print what `drawn` yields. Lines are folded already."""
    from rich.text import Text

    for part in parts:
        console.print(part, soft_wrap=isinstance(part, Text))


def drawn_table(table: TextTable, width: int) -> Iterator[Text | RichTable]:
    """Yield the rows of a table, or tables that are folded if it is wider than the terminal.

    Headers and words are folded, figures are not. Columns that have no room even so follow in a table below, which
    begins with the first column again.
    """
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    rows = indented(table)
    if max(map(len, rows)) <= width:
        for at, line in enumerate(rows):
            total = table.total is not None and at == len(rows) - 1
            yield Text(line, style="dim" if not at else "bold" if total or at - 1 in table.marked else "")
        return
    padding = 1 if width >= WIDTH else 0
    for columns in _columns_that_fit(table, width, padding):
        folded = RichTable(
            box=box.SIMPLE_HEAD, show_footer=table.total is not None, padding=(0, padding), pad_edge=False
        )
        for column in columns:
            name, words = table.header[column], column in table.words
            folded.add_column(
                Text(name if words else "\n".join(name.split())),
                footer=Text(table.total[column] if table.total else ""),
                justify="left" if words else "right",
                overflow="fold",
                no_wrap=not words,
                min_width=min(_least_width(table, column), width - (2 + 2 * padding) * (len(columns) - 1)),
            )
        for at, row in enumerate(table.rows):
            style = "bold" if at in table.marked else ""
            folded.add_row(*(Text(row[column]) for column in columns), style=style)
        yield folded


_FOLDED = 16
"""Width of a column of words below which its cells are not folded."""


def _least_width(table: TextTable, column: int) -> int:
    """Return the width in which no word of a column is broken; columns of words are not narrower than `_FOLDED`."""
    cells = [row[column] for row in [*table.rows, *([table.total] if table.total else [])]]
    widest = max(map(len, cells), default=0)
    if column in table.words:
        longest = max((len(word) for cell in cells for word in cell.split()), default=0)
        widest = max(longest, min(widest, _FOLDED))
    return max(*map(len, table.header[column].split()), widest, 1)


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


def print_remark(line: str, stream: TextIO) -> None:
    """Print a line that is no data; on a terminal it is folded between words, with a hanging indent."""
    if stream.isatty():
        line = hanging(line, shutil.get_terminal_size().columns)
    print(line, file=stream, flush=True)
