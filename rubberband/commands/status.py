"""`rubberband status`: how an experiment stands, on this machine or at a service."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rubberband.commands.remote import ServerOption, client_of
from rubberband.commands.report import Name, Output

if TYPE_CHECKING:
    from rubberband.client.client import Client

View = dict[str, Any]
LOOK_EVERY_S = 1.0


def status(
    name: Name,
    output: Annotated[Output, typer.Option("--output", "-o", help="Print text or JSON.")] = Output.text,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Stay and show it again, until it is over.")] = False,
    server: ServerOption = None,
) -> None:
    """Show how an experiment stands.

    Time and money against their limits and the plan, the forecast, progress by stage, the best so far. With --watch the
    exit code is that of the run: 0 done, 1 failed or ended by max_cost, 4 done after its deadline, 130 cancelled.
    """
    client = client_of(server)
    if client is None:
        from rubberband.commands.standing import local_experiment

        with local_experiment(name) as found:
            _show(found.look, output, watch)
        return
    with client:
        _show(lambda: dict(client.experiment(name)), output, watch)


def watch_remote(client: Client, name: str) -> None:
    """Show an experiment of a service until it is over; exits with its code."""
    _show(lambda: dict(client.experiment(name)), Output.text, True)


def _show(look: Callable[[], View], output: Output, watch: bool) -> None:
    view = _watched(look) if watch else look()
    if output is Output.json:
        from rubberband.commands.show import print_json

        print_json({"schema": "rubberband.status/1", **view})
    else:
        from rubberband.views.report_text import print_document

        print_document(*_document(view), ("bold", "", "", "", "bold green"))
    if watch:
        from rubberband.views.status import exit_code

        code = exit_code(view)
        if code:
            raise typer.Exit(code)


def _document(view: View) -> tuple[list[str], list[Any]]:
    from rubberband.views.status import lines, stage_table

    return lines(view), [stage_table(view["stages"])] if view.get("stages") else []


def _watched(look: Callable[[], View]) -> View:
    """Look again and again, and show what has changed on stderr; the last look, once it is over."""
    return _redrawn(look) if sys.stderr.isatty() else _told(look)


def _redrawn(look: Callable[[], View]) -> View:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from rubberband.views.report_text import render_document

    with Live(console=Console(file=sys.stderr), auto_refresh=False, transient=True) as live:
        while True:
            view = look()
            live.update(Text(render_document(*_document(view))), refresh=True)
            if _is_over(view):
                return view
            time.sleep(LOOK_EVERY_S)


def _told(look: Callable[[], View]) -> View:
    from rubberband.views.status import headline

    told = ""
    while True:
        view = look()
        summary = view["summary"]
        line = headline(view)
        if summary["target_iterations"]:
            line += f"; {summary['iterations']} of {summary['target_iterations']} iterations"
        if line != told:
            print(line, file=sys.stderr, flush=True)
            told = line
        if _is_over(view):
            return view
        time.sleep(LOOK_EVERY_S)


def _is_over(view: View) -> bool:
    from rubberband.states import ACTIVE

    return view["state"] not in ACTIVE
