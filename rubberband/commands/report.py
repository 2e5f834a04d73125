"""`rubberband report`, `ps` and `logs`: what an experiment did, or does. They change nothing.

They read the journals of this machine, or ask a service.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rubberband.commands.common import Name, ServerOption, client_of

if TYPE_CHECKING:
    from rubberband.client.calls import ExperimentView
    from rubberband.client.client import Client
    from rubberband.executor.journal.folder import ExperimentFolder
    from rubberband.executor.result import Result

_MOST_OF_BEST = 100


class ReportFormat(StrEnum):
    """How the answer is printed."""

    text = "text"
    json = "json"


def report(
    name: Name,
    output: Annotated[ReportFormat, typer.Option("--output", "-o", help="Print text or JSON.")] = ReportFormat.text,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write one self-contained page to FILE.", show_default=False),
    ] = None,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", help="Print all tables: also decisions, where the paid time went, and failures."),
    ] = False,
    server: ServerOption = None,
) -> None:
    """Print an experiment's result.

    One screen: the best configuration, time and cost against the limits, the stages, planned and actual, and the best
    trials. Also while it runs.
    """
    result = _result(name, client_of(server))
    if html is not None:
        from rubberband.commands.common import write_page
        from rubberband.views.report_html import render_html

        write_page(html, render_html(result))
    if output is ReportFormat.json:
        from rubberband.commands.common import print_json

        print_json(result.to_json())
    elif html is None:
        from rubberband.views.report_text import print_report

        print_report(result, verbose=verbose)


def _result(name: str, client: Client | None) -> Result:
    if client is None:
        return _read(_folder(name))
    from rubberband.executor.result import Result

    with client:
        return Result.from_json(client.report(name))


def _read(folder: ExperimentFolder) -> Result:
    """The result; of a damaged journal, as far as it can be read, with a warning."""
    from rubberband.errors import DamagedJournalError
    from rubberband.executor.journal.reading import read
    from rubberband.executor.salvage import salvage

    try:
        return read(folder)
    except DamagedJournalError as error:
        found = salvage(folder)
        if found is None or not found.num_events:
            raise
        typer.echo(f"warning: {error}", err=True)
        return found.result


def ps(
    output: Annotated[ReportFormat, typer.Option("--output", "-o", help="Print text or JSON.")] = ReportFormat.text,
    server: ServerOption = None,
) -> None:
    """List the experiments on this machine, or those of a service."""
    from rubberband.commands.common import print_json, print_table
    from rubberband.units import format_duration, format_usd

    listed = _all_listed(client_of(server))
    if output is ReportFormat.json:
        print_json({"schema": "rubberband.ps/1", "experiments": [asdict(row) for row in listed]})
        return
    header = ["NAME", "STATE", "TRIALS", "ITERATIONS", "TIME", "COST", "BEST OR WHY"]
    rows = [
        [
            row.name,
            row.state,
            str(row.trials),
            str(row.iterations),
            format_duration(row.jct_s),
            format_usd(row.cost_usd),
            _cut("; ".join(part for part in (row.reason, row.best) if part)),
        ]
        for row in listed
    ]
    print_table(header, rows, words={0, 1, len(header) - 1})


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_OF_BEST else text[: _MOST_OF_BEST - 1] + "…"


def _all_listed(client: Client | None) -> list[Listed]:
    if client is None:
        from rubberband.executor.journal.folder import folders
        from rubberband.home import default_home, default_store

        return [_listed(folder) for folder in folders(default_home(), default_store())]
    with client:
        return sorted((_listed_there(view) for view in client.experiments()), key=lambda row: row.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One line of `rubberband ps`."""

    name: str
    state: str
    """running, interrupted (its driver died), done, cancelled, budget, failed, or unreadable; at a service also queued,
    starting, or refused."""
    trials: int = 0
    iterations: int = 0
    """Done in all, over all trials."""
    jct_s: float = 0.0
    cost_usd: float = 0.0
    best: str = ""
    reason: str = ""
    """Why it ended before it was done, what it waits for, or why it cannot be read."""


def _listed(folder: ExperimentFolder) -> Listed:
    from rubberband.errors import RubberbandError
    from rubberband.executor.journal.reading import read
    from rubberband.states import EXPLAINED
    from rubberband.views.words import printable

    try:
        result = read(folder)
    except RubberbandError as error:
        return Listed(name=folder.name, state="unreadable", reason=str(error))
    state: str = result.outcome
    if state == "unfinished":
        state = "running" if folder.driven else "interrupted"
    best = result.best
    return Listed(
        name=folder.name,
        state=state,
        trials=len(result.trials),
        iterations=sum(trial.iterations for trial in result.trials),
        jct_s=result.actual_jct_s,
        cost_usd=result.actual_cost_usd,
        best="" if best is None else f"{result.metric}={best.metrics[result.metric]:.6g} (trial {best.trial})",
        reason=printable(result.reason) if state in EXPLAINED else "",
    )


def _listed_there(view: ExperimentView) -> Listed:
    from rubberband.states import EXPLAINED
    from rubberband.views.words import printable

    summary = view["summary"]
    best = summary["best_value"]
    return Listed(
        name=view["name"],
        state=view["state"],
        trials=summary["trials"],
        iterations=summary["iterations"],
        jct_s=summary["jct_s"],
        cost_usd=summary["cost_usd"],
        best="" if best is None else f"{summary['metric']}={best:.6g} (trial {summary['best_trial']})",
        reason=printable(view["reason"]) if view["state"] in EXPLAINED else "",
    )


def logs(
    name: Name,
    trial: Annotated[int | None, typer.Argument(metavar="[TRIAL]", help="One trial only.", show_default=False)] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing new output until the experiment ends.")
    ] = False,
    process: Annotated[bool, typer.Option("--process", help="Output of its process, if a service started it.")] = False,
    server: ServerOption = None,
) -> None:
    """Print the trials' output, and why some failed."""
    client = client_of(server)
    if client is None:
        from rubberband.commands.standing import local_experiment

        with local_experiment(name) as experiment:
            for line in experiment.lines(trial, process=process, follow=follow):
                _print_line(line.trial, line.text, trial)
        return
    with client:
        source = "process" if process else "trials"
        for told in client.logs(name, trial=trial, source=source, follow=follow):
            _print_line(told["trial"], told["text"], trial)


def _print_line(of: int | None, text: str, asked: int | None) -> None:
    print(text if asked is not None or of is None else f"[trial {of}] {text}", flush=True)


def _folder(name: str) -> ExperimentFolder:
    from rubberband.executor.journal.folder import open_folder

    folder = open_folder(name)
    folder.require()
    return folder
