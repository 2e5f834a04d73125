"""Output, arguments and options that commands share, and the client of a service."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rubberband.errors import InputError

if TYPE_CHECKING:
    from rubberband.client.client import Client


def say(line: str) -> None:
    """Print a remark on stderr."""
    if not sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)
        return
    from rubberband.views.document import print_remark

    print_remark(line, sys.stderr)


def print_json(value: Any) -> None:
    """Print one JSON value on stdout."""
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def write_page(path: Path, text: str) -> None:
    """Write a page, and print its path on stderr. Raises InputError if it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}); give another path") from None
    print(f"Wrote {path.absolute()} ({len(text.encode()) / 1e6:.1f} MB); open it in a browser", file=sys.stderr)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, words: Collection[int] = ()) -> None:
    """Print a table: figures to the right, columns in `words` to the left; folded on a terminal that is narrower."""
    from rubberband.views.formatting import TextTable, aligned

    if not sys.stdout.isatty():
        print("\n".join(aligned([header, *rows], words)))
        return
    from rich.console import Console

    from rubberband.views.document import drawn_table, print_drawn

    console, found = Console(highlight=False), tuple(map(tuple, rows))
    table = TextTable(title="", header=tuple(header), rows=found, words=frozenset(words))
    print_drawn(console, drawn_table(table, console.width))


# Arguments and options that several commands have.


class PlanPolicy(StrEnum):
    """Search for the plan."""

    optimal = "optimal"
    greedy = "greedy"
    static = "static"
    naive_elastic = "naive_elastic"


class TableFormat(StrEnum):
    """Output of a command that prints tables."""

    table = "table"
    json = "json"


class TextFormat(StrEnum):
    """Output of a command that prints text."""

    text = "text"
    json = "json"


def experiment_names(incomplete: str) -> list[str]:
    """Return the names of this machine's experiments that begin so, for completion in a shell."""
    from rubberband.installation import default_home

    journals = (default_home() / "experiments").glob("*/journal.db")
    return sorted(journal.parent.name for journal in journals if journal.parent.name.startswith(incomplete))


def group(name: str, help: str) -> typer.Typer:
    """Return a command that has commands."""
    return typer.Typer(name=name, help=help, no_args_is_help=True, add_completion=False, rich_markup_mode=None)


def argument(metavar: str, help: str, **more: Any) -> Any:
    """Return an argument whose default is not shown."""
    return typer.Argument(metavar=metavar, help=help, show_default=False, **more)


def option(name: str, metavar: str | None, help: str, **more: Any) -> Any:
    """Return an option whose default is not shown."""
    return typer.Option(name, metavar=metavar, help=help, show_default=False, **more)


Name = Annotated[str, argument("NAME", "The experiment's name.", autocompletion=experiment_names)]
"""Name of an experiment, here or at a service."""
FileArgument = Annotated[Path, argument("FILE", "The experiment file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="Override a value of the file; repeats.", show_default=False),
]
PolicyOption = Annotated[
    PlanPolicy,
    typer.Option(
        "--policy",
        help="optimal: the best plan, whose instances change from stage to stage; static: a cluster of a "
        "fixed size; naive_elastic: the same GPUs per trial throughout; greedy: the search of the "
        "RubberBand paper.",
    ),
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before money is spent.")]
NoCapOption = Annotated[
    bool, typer.Option("--no-cap", help="Rent instances without a max_cost; nothing limits the bill.")
]
ConfirmOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
TextOption = Annotated[TextFormat, typer.Option("--output", "-o", help="Print text or JSON.")]
TableOption = Annotated[TableFormat, typer.Option("--output", "-o", help="Print a table or JSON.")]
HtmlOption = Annotated[Path | None, option("--html", "FILE", "Write a page with charts to FILE as well.")]

# A question before money is spent.


def confirm_bill(bill: str, what: str, *, yes: bool) -> None:
    """Ask on a terminal whether to spend what `bill` says; elsewhere go on. Raises Cancelled if the answer is no.

    A signal ends the question, whatever the command does with signals otherwise.
    """
    if yes or not (sys.stdin.isatty() and (sys.stderr.isatty() or sys.stdout.isatty())):
        return
    import signal

    from rubberband.errors import Cancelled
    from rubberband.interrupts import ENDS, AtOnce

    refused = Cancelled("not confirmed; nothing was rented")
    before = {number: signal.getsignal(number) for number in ENDS}
    AtOnce(refused).handle(ENDS)
    try:
        is_granted = typer.confirm(f"{bill}; {what}?", default=True, err=sys.stderr.isatty())
    except typer.Abort:
        raise refused from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if not is_granted:
        raise refused


# A head on EC2 (`rubberband run FILE --on head`) as the place where a command acts.


class OtherMachine(StrEnum):
    """Another machine of one's own on which a command runs."""

    head = "head"


OnOption = Annotated[
    OtherMachine | None,
    option("--on", "head", "Ask the head on EC2 on which `rubberband run FILE --on head` started it."),
]
"""Place of a command that asks for an experiment by its name; the command line carries it out (rubberband.cli)."""


def forward(context: typer.Context) -> int:
    """Carry a command out on the head of the provider that has heads, and return its exit code."""
    from rubberband.values.kinds import KINDS, part_of

    provider = next((name for name, kind in KINDS.items() if kind.head is not None), None)
    if provider is None:
        raise InputError("--on: no provider of this installation has heads; leave it out")
    return int(part_of(provider, "head").forward(context))


# The place where a command acts: this machine, or a service. The token is RUBBERBAND_TOKEN's.

LOCAL = "local"

ServerOption = Annotated[
    str | None,
    option(
        "--server",
        "URL",
        "The service to ask, in place of this machine's own experiments; `local`: this machine.",
        envvar="RUBBERBAND_SERVER",
        show_envvar=True,
    ),
]
"""Service of a command that works on this machine's experiments too."""
ServiceOption = Annotated[
    str | None,
    option(
        "--server",
        "URL",
        "The service; `local` for the one on this machine. [default: http://127.0.0.1:8642]",
        envvar="RUBBERBAND_SERVER",
        show_envvar=True,
    ),
]
"""Service of a command that needs one."""


def client_of(server: str | None) -> Client | None:
    """Return a client of the service, or None if the command is for this machine."""
    return None if not server or server == LOCAL else open_client(server)


def open_client(server: str | None) -> Client:
    """Return a client of the service, by default of the one on this machine. Raises InputError without httpx.

    `local` is the one on this machine, even if RUBBERBAND_SERVER names another one.
    """
    from rubberband.installation import require

    require("asking a service", "httpx", "httpx_sse")
    from rubberband.client.calls import DEFAULT_SERVER
    from rubberband.client.client import Client

    return Client(DEFAULT_SERVER if server == LOCAL else server)
