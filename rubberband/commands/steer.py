"""`rubberband cancel` and `extend`: change the course of an experiment that runs, here or at a service."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from rubberband.commands.remote import ServerOption, client_of
from rubberband.commands.report import Name, Output


def cancel(name: Name, server: ServerOption = None) -> None:
    """Ask a running experiment for a clean end.

    Instances are given back and the best so far is kept; `rubberband resume` goes on with it. What has ended already
    stays as it is.
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

    told = "asked to end" if found["state"] in ACTIVE else "it is over"
    print(f"{name}: {found['state']}; {told}", file=sys.stderr)


def extend(
    name: Name,
    deadline: Annotated[
        str | None,
        typer.Option(
            "--deadline",
            metavar="TIME",
            help="From its start, or from its submission to a service, as 40m; or a time with its zone.",
            show_default=False,
        ),
    ] = None,
    max_cost: Annotated[
        float | None, typer.Option("--max-cost", metavar="USD", help="For the whole of it.", show_default=False)
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Grant it without asking.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Only show what it would change.")] = False,
    output: Annotated[Output, typer.Option("--output", "-o", help="Print text or JSON.")] = Output.text,
    server: ServerOption = None,
) -> None:
    """Give an experiment a later deadline or a larger budget.

    Shows first how the rest would be planned and what it would take and cost, and asks. It takes effect while the
    experiment runs, from the next SYNC on; one that max_cost has ended can be resumed then.
    """
    from rubberband.errors import InputError

    if deadline is None and max_cost is None:
        raise InputError("extend: nothing to change; give --deadline 40m, --max-cost 5, or both")
    client = client_of(server)
    if client is None:
        from rubberband.commands.standing import local_experiment

        with local_experiment(name) as experiment:
            _extend(lambda granted: experiment.extension(deadline, max_cost, granted=granted), yes, dry_run, output)
        return
    with client:
        _extend(
            lambda granted: dict(client.extend(name, deadline=deadline, max_cost=max_cost, dry_run=not granted)),
            yes,
            dry_run,
            output,
        )


def _extend(ask: Callable[[bool], dict[str, Any]], yes: bool, dry_run: bool, output: Output) -> None:
    """Show what other limits would change, and grant them if that is wanted: `ask` is given whether they are."""
    from rubberband.views.status import extension_lines

    found = ask(False)
    for line in extension_lines(found):
        print(line, file=sys.stderr)
    if not dry_run and (yes or typer.confirm("Grant it?", err=True)):
        found = ask(True)
        print("granted", file=sys.stderr)
    if output is Output.json:
        from rubberband.commands.show import print_json

        print_json({"schema": "rubberband.extension/1", **found})
