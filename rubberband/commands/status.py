"""`rubberband status`, `cancel`, `extend` and `scale`: an experiment on this machine or at a service."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rubberband.commands.common import (
    Name,
    OnOption,
    RemoteExperiment,
    ServerOption,
    TextFormat,
    TextOption,
    open_experiment,
    option,
    print_json,
)
from rubberband.units import counted

if TYPE_CHECKING:
    from rubberband.client.client import Client
    from rubberband.client.models import ExperimentDetail

LOOK_EVERY_S = 1.0


def status(
    name: Name,
    output: TextOption = TextFormat.text,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Stay and refresh until it ends.")] = False,
    server: ServerOption = None,
    on: OnOption = None,
) -> None:
    """Show an experiment's status.

    Shows time and money against limits and plan, the forecast, progress by stage, and the best so far. With --watch the
    exit code is that of the run: 0 done, 1 failed or ended by max_cost, 4 done after its deadline, 130 cancelled.
    """
    with open_experiment(name, server) as found:
        _show(found.look, output, watch)


def watch_remote(client: Client, name: str) -> None:
    """Show an experiment of a service until it ends, and exit with its code."""
    _show(RemoteExperiment(client, name).look, TextFormat.text, True)


def _show(look: Callable[[], ExperimentDetail], output: TextFormat, watch: bool) -> None:
    view = _watched(look) if watch else look()
    if output is TextFormat.json:
        print_json({"schema": "rubberband.status/1", **view})
    else:
        from rubberband.views.report.text import print_document

        print_document(*_document(view), ("bold", "", "", "", "bold green"))
    if watch:
        from rubberband.views.live.status import exit_code

        code = exit_code(view)
        if code:
            raise typer.Exit(code)


def _document(view: ExperimentDetail) -> tuple[list[str], list[Any]]:
    from rubberband.views.live.status import lines, stage_table

    return lines(view), [stage_table(view["stages"])] if view.get("stages") else []


def _watched(look: Callable[[], ExperimentDetail]) -> ExperimentDetail:
    """Look repeatedly, and show changes on stderr. Returns the last view, once the experiment is over."""
    return _redrawn(look) if sys.stderr.isatty() else _printed(look)


def _redrawn(look: Callable[[], ExperimentDetail]) -> ExperimentDetail:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from rubberband.views.report.text import render_document

    with Live(console=Console(file=sys.stderr), auto_refresh=False, transient=True) as live:
        while True:
            view = look()
            live.update(Text(render_document(*_document(view))), refresh=True)
            if _is_over(view):
                return view
            time.sleep(LOOK_EVERY_S)


def _printed(look: Callable[[], ExperimentDetail]) -> ExperimentDetail:
    from rubberband.views.live.status import headline

    last = ""
    while True:
        view = look()
        summary = view["summary"]
        line = headline(view)
        if summary["target_iterations"]:
            line += f"; {summary['iterations']} of {counted(summary['target_iterations'], 'iteration')}"
        if line != last:
            print(line, file=sys.stderr, flush=True)
            last = line
        if _is_over(view):
            return view
        time.sleep(LOOK_EVERY_S)


def _is_over(view: ExperimentDetail) -> bool:
    from rubberband.states import ACTIVE

    return view["state"] not in ACTIVE


def cancel(name: Name, server: ServerOption = None, on: OnOption = None) -> None:
    """Cancel a running experiment.

    Instances are released and the best so far is kept; `rubberband resume` continues it. An experiment that has ended
    is not changed.
    """
    with open_experiment(name, server) as experiment:
        print(experiment.cancel(), file=sys.stderr)


def extend(
    name: Name,
    deadline: Annotated[
        str | None,
        option(
            "--deadline",
            "TIME",
            "The new deadline: a duration from its start (or its submission to a service) such as 40m, or a time with "
            "its zone.",
        ),
    ] = None,
    max_cost: Annotated[str | None, option("--max-cost", "USD", "For the whole experiment.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Only show what would change.")] = False,
    output: TextOption = TextFormat.text,
    server: ServerOption = None,
    on: OnOption = None,
) -> None:
    """Give an experiment a later deadline or a larger budget.

    Shows the new plan with its time and cost first, and asks for confirmation. A running experiment uses the new limits
    from the next SYNC on. An experiment that stopped at max_cost can then be resumed.
    """
    from rubberband.errors import InputError
    from rubberband.units import parse_usd
    from rubberband.views.live.status import extension_lines

    if deadline is None and max_cost is None:
        raise InputError("extend: nothing to change; give --deadline 40m, --max-cost 5, or both")
    max_cost_usd = None if max_cost is None else parse_usd(max_cost)
    with open_experiment(name, server) as experiment:
        found = experiment.extension(deadline, max_cost_usd, granted=False)
        for line in extension_lines(found):
            print(line, file=sys.stderr)
        if not dry_run and (yes or typer.confirm("Grant it?", err=True)):
            found = experiment.extension(deadline, max_cost_usd, granted=True)
            print("granted", file=sys.stderr)
    if output is TextFormat.json:
        print_json({"schema": "rubberband.extension/1", **found})


def scale(
    name: Name,
    max_instances: Annotated[
        str, option("--max-instances", "N", "The most instances from now on; 0 pauses it, `none` lifts the limit.")
    ],
    server: ServerOption = None,
    on: OnOption = None,
) -> None:
    """Limit the instances of a running experiment.

    With fewer, trials stop at their next checkpoints, and instances are given back; with more it grows within the
    stage. It is planned again at once, within the resources of its file. `rubberband status` shows the limit.
    """
    most = _instances(max_instances)
    with open_experiment(name, server) as experiment:
        experiment.limit(most)
    told = "limit lifted" if most is None else f"at most {counted(most, 'instance')} from now on"
    print(f"{name}: {told}", file=sys.stderr)


def _instances(text: str) -> int | None:
    """Return a number of instances; None for `none`. Raises InputError."""
    from rubberband.errors import InputError

    if text == "none":
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 6):
        raise InputError(f"--max-instances: {text!r} is not a number of instances; give 0 or more, or none")
    return int(text)
