"""What commands print: tables as plain aligned text, or drawn by rich on a terminal; figures that add up."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rubberband.errors import InputError

if TYPE_CHECKING:
    from rubberband.client.client import Client


def print_json(value: Any) -> None:
    """One JSON value on stdout."""
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def write_page(path: Path, text: str) -> None:
    """Write a page, and say on stderr where it is. Raises InputError if it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}); give another path") from None
    print(f"Wrote {path.absolute()} ({len(text.encode()) / 1e6:.1f} MB); open it in a browser", file=sys.stderr)


def print_table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    total: Sequence[str] | None = None,
    *,
    words: Collection[int] = (),
) -> None:
    """A table on stdout, numbers right-aligned, columns in `words` left-aligned; `total` is a last row, set apart."""
    if sys.stdout.isatty():
        _print_rich(header, rows, total, words)
        return
    print("\n".join(aligned([header, *rows, *([total] if total else [])], words)))


def aligned(rows: Sequence[Sequence[str]], words: Collection[int] = ()) -> list[str]:
    """Rows as lines whose columns line up on the right, those in `words` on the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(_cells(row, widths, words)).rstrip() for row in rows]


def _cells(row: Sequence[str], widths: Sequence[int], words: Collection[int]) -> Iterator[str]:
    for column, (cell, width) in enumerate(zip(row, widths, strict=True)):
        yield cell.ljust(width) if column in words else cell.rjust(width)


def _print_rich(
    header: Sequence[str], rows: Sequence[Sequence[str]], total: Sequence[str] | None, words: Collection[int]
) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_footer=total is not None)
    for column, name in enumerate(header):
        in_two_lines = name.replace("/", "/\n").replace(" (", "\n(")
        justify: Literal["left", "right"] = "left" if column in words else "right"
        table.add_column(in_two_lines, footer=total[column] if total else "", justify=justify)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def experiment_names(incomplete: str) -> list[str]:
    """The names of this machine's experiments that begin so, for a shell to complete."""
    from rubberband.home import default_home

    journals = (default_home() / "experiments").glob("*/journal.db")
    return sorted(journal.parent.name for journal in journals if journal.parent.name.startswith(incomplete))


Name = Annotated[
    str,
    typer.Argument(metavar="NAME", help="The experiment's name.", show_default=False, autocompletion=experiment_names),
]
"""Of an experiment, here or at a service."""


# Where a command is carried out: on this machine's experiments, or by a service.


LOCAL = "local"

ServerOption = Annotated[
    str | None,
    typer.Option(
        "--server",
        metavar="URL",
        envvar="RUBBERBAND_SERVER",
        help="Ask this service instead of this machine's own experiments; `local` for these.",
        show_default=False,
        show_envvar=True,
    ),
]
"""Of commands that look at experiments, here or there. The token is RUBBERBAND_TOKEN's."""

ServiceOption = Annotated[
    str | None,
    typer.Option(
        "--server",
        metavar="URL",
        envvar="RUBBERBAND_SERVER",
        help="The service; `local` for the one on this machine. [default: http://127.0.0.1:8265]",
        show_default=False,
        show_envvar=True,
    ),
]
"""Of commands that only a service carries out."""


def client_of(server: str | None) -> Client | None:
    """A client of the service; None if the command is about this machine."""
    return None if not server or server == LOCAL else open_client(server)


def open_client(server: str | None) -> Client:
    """A client of the service, by default the one on this machine. Raises InputError without httpx.

    `local` is the one on this machine, also where RUBBERBAND_SERVER names another one.
    """
    try:
        from rubberband.client.client import Client
        from rubberband.client.sending import DEFAULT_SERVER
    except ImportError:
        from rubberband.distribution import install_hint
        from rubberband.errors import InputError

        raise InputError(f"asking a service needs httpx; {install_hint('client')}") from None
    return Client(DEFAULT_SERVER if server == LOCAL else server)
