"""`rubberband status`: how an experiment stands, on this machine or at a service."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rubberband.commands.common import Name, ServerOption, client_of
from rubberband.commands.report import ReportFormat

if TYPE_CHECKING:
    from rubberband.client.client import Client

View = dict[str, Any]
LOOK_EVERY_S = 1.0


def status(
    name: Name,
    output: Annotated[ReportFormat, typer.Option("--output", "-o", help="Print text or JSON.")] = ReportFormat.text,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Stay and refresh until it ends.")] = False,
    server: ServerOption = None,
) -> None:
    """Show an experiment's status.

    Shows time and money against limits and plan, the forecast, progress by stage, and the best so far. With --watch the
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
    """Show an experiment of a service until it ends; exits with its code."""
    _show(lambda: dict(client.experiment(name)), ReportFormat.text, True)


def _show(look: Callable[[], View], output: ReportFormat, watch: bool) -> None:
    view = _watched(look) if watch else look()
    if output is ReportFormat.json:
        from rubberband.commands.common import print_json

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


# `rubberband cancel` and `extend`: change the course of an experiment that runs, here or at a service.


def cancel(name: Name, server: ServerOption = None) -> None:
    """Cancel a running experiment.

    Instances are released and the best so far is kept; `rubberband resume` continues it. An experiment that has ended
    is not changed.
    """
    client = client_of(server)
    if client is None:
        from rubberband.commands.standing import local_experiment

        with local_experiment(name) as experiment:
            print(experiment.cancel(), file=sys.stderr)
        return
    with client:
        found = client.cancel(name)
    from rubberband.states import ACTIVE

    told = "cancellation requested" if found["state"] in ACTIVE else "it has ended"
    print(f"{name}: {found['state']}; {told}", file=sys.stderr)


def extend(
    name: Name,
    deadline: Annotated[
        str | None,
        typer.Option(
            "--deadline",
            metavar="TIME",
            help="The new deadline: a duration from its start (or its submission to a service) such as 40m, or a "
            "time with its zone.",
            show_default=False,
        ),
    ] = None,
    max_cost: Annotated[
        str | None, typer.Option("--max-cost", metavar="USD", help="For the whole experiment.", show_default=False)
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Only show what would change.")] = False,
    output: Annotated[ReportFormat, typer.Option("--output", "-o", help="Print text or JSON.")] = ReportFormat.text,
    server: ServerOption = None,
) -> None:
    """Give an experiment a later deadline or a larger budget.

    Shows the new plan with its time and cost first, and asks for confirmation. A running experiment uses the new limits
    from the next SYNC on. An experiment that stopped at max_cost can then be resumed.
    """
    from rubberband.errors import InputError
    from rubberband.units import parse_usd

    if deadline is None and max_cost is None:
        raise InputError("extend: nothing to change; give --deadline 40m, --max-cost 5, or both")
    max_cost_usd = None if max_cost is None else parse_usd(max_cost)
    client = client_of(server)
    if client is None:
        from rubberband.commands.standing import local_experiment

        with local_experiment(name) as experiment:
            _extend(lambda granted: experiment.extension(deadline, max_cost_usd, granted=granted), yes, dry_run, output)
        return
    with client:
        _extend(
            lambda granted: dict(client.extend(name, deadline=deadline, max_cost=max_cost_usd, dry_run=not granted)),
            yes,
            dry_run,
            output,
        )


def _extend(ask: Callable[[bool], dict[str, Any]], yes: bool, dry_run: bool, output: ReportFormat) -> None:
    """Show what other limits would change, and grant them if that is wanted: `ask` is given whether they are."""
    from rubberband.views.status import extension_lines

    found = ask(False)
    for line in extension_lines(found):
        print(line, file=sys.stderr)
    if not dry_run and (yes or typer.confirm("Grant it?", err=True)):
        found = ask(True)
        print("granted", file=sys.stderr)
    if output is ReportFormat.json:
        from rubberband.commands.common import print_json

        print_json({"schema": "rubberband.extension/1", **found})
