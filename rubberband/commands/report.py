"""`rubberband report`, `ps` and `logs`: what an experiment did, or does. They read the journal and change nothing."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rubberband.executor.folder import ExperimentFolder

Name = Annotated[str, typer.Argument(metavar="NAME", help="The experiment's name.", show_default=False)]


class Output(StrEnum):
    """How the answer is printed."""

    text = "text"
    json = "json"


def report(
    name: Name,
    output: Annotated[Output, typer.Option("--output", "-o", help="Print text or JSON.")] = Output.text,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write one self-contained page to FILE.", show_default=False),
    ] = None,
) -> None:
    """Print an experiment's result.

    The best configuration, stages, time and cost planned against actual, where the paid time went, how batch sizes
    adapted, and the trials; also while it runs.
    """
    from rubberband.executor import session

    result = session.read(_folder(name))
    if html is not None:
        from rubberband.commands.show import write_text
        from rubberband.views.report_html import render_html

        write_text(html, render_html(result))
    if output is Output.json:
        from rubberband.commands.show import print_json

        print_json(result.to_json())
    elif html is None:
        from rubberband.views.report_text import print_report

        print_report(result)


def ps(
    output: Annotated[Output, typer.Option("--output", "-o", help="Print text or JSON.")] = Output.text,
) -> None:
    """List the experiments on this machine."""
    from rubberband.commands.show import print_json, print_table
    from rubberband.executor.folder import folders
    from rubberband.tuning import default_home
    from rubberband.units import format_duration, format_usd

    listed = [_listed(folder) for folder in folders(default_home())]
    if output is Output.json:
        print_json({"schema": "rubberband.ps/1", "experiments": [asdict(row) for row in listed]})
        return
    header = ["NAME", "STATE", "TRIALS", "ITERATIONS", "TIME", "COST", "BEST"]
    rows = [
        [
            row.name,
            row.state,
            str(row.trials),
            str(row.iterations),
            format_duration(row.jct_s),
            format_usd(row.cost_usd),
            row.best,
        ]
        for row in listed
    ]
    print_table(header, rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One line of `rubberband ps`."""

    name: str
    state: str
    """running, interrupted (its driver died), done, cancelled, budget, failed, or unreadable."""
    trials: int = 0
    iterations: int = 0
    """Done in all, over all trials."""
    jct_s: float = 0.0
    cost_usd: float = 0.0
    best: str = ""


def _listed(folder: ExperimentFolder) -> Listed:
    from rubberband.errors import RubberbandError
    from rubberband.executor import session

    try:
        result = session.read(folder)
    except RubberbandError as error:
        return Listed(name=folder.name, state="unreadable", best=str(error))
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
    )


def logs(
    name: Name,
    trial: Annotated[int | None, typer.Argument(metavar="[TRIAL]", help="One trial only.", show_default=False)] = None,
) -> None:
    """Print what the trials printed, and why some failed."""
    from rubberband.errors import InputError
    from rubberband.executor import session

    folder = _folder(name)
    events = session.failures(folder)
    num_trials = len(session.read(folder).trials)
    if trial is not None and not 0 <= trial < num_trials:
        raise InputError(f"experiment {name!r} has no trial {trial}; it has 0 to {num_trials - 1}")
    for number in range(num_trials) if trial is None else [trial]:
        path = folder.logs / f"trial-{number:03d}.log"
        printed = path.read_text(errors="replace").splitlines() if path.exists() else []
        failed = [line for failure in events.get(number, []) for line in failure.splitlines()]
        for line in printed + failed:
            print(line if trial is not None else f"[trial {number}] {line}")


def _folder(name: str) -> ExperimentFolder:
    from rubberband.executor.folder import ExperimentFolder
    from rubberband.tuning import default_home

    folder = ExperimentFolder(home=default_home(), name=name)
    folder.require()
    return folder
