"""`rubberband check`: try one iteration of an experiment's trial."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Annotated

import typer

from rubberband.commands.common import FileArgument, Overrides, TextFormat, TextOption, print_json

if TYPE_CHECKING:
    from rubberband.running.check import CheckReport
    from rubberband.spec.experiment import Experiment

_STDERR = 2
"""File descriptor."""
_LAST_LINES = 20
"""Lines of the trial's output that a problem shows."""
_MOST_BYTES = 20_000


def check(
    file: FileArgument,
    limit: Annotated[str, typer.Option("--limit", metavar="DURATION", help="Time limit of the trial.")] = "5m",
    quick: Annotated[bool, typer.Option("--quick", help="Do not try a program with other values.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show all that the trial prints, on stderr.")] = False,
    output: TextOption = TextFormat.text,
    overrides: Overrides = None,
) -> None:
    """Try one iteration; nothing is rented. FILE may also be a script or a command line.

    Imports the entry point, trains one iteration of one configuration, saves a checkpoint, restores it in a new trial,
    and trains one more iteration if that takes only seconds. A TorchTrial trains two short iterations with a restart
    between them and without, and on two workers if it may get several GPUs. A program is started again from its
    checkpoint, compared with an unbroken run, and tried with other values: one parameter at a time, for its effect, and
    the extreme values of all ranges; --quick leaves these out. A script such as train.py, or a command line in quotes,
    is checked with the experiment that `rubberband init` writes for it. Reports the metrics, the size of the checkpoint
    and the time of each step. The trial runs on this machine, in a process of its own, without Ray. Exit code 1: there
    are problems; each is printed with its fix, below the last lines that the trial printed.
    """
    from rubberband.features import parts
    from rubberband.running.check import check_experiment
    from rubberband.spec.loading import load_experiment
    from rubberband.units import parse_duration
    from rubberband.views.document import print_remark

    is_file = file.suffix in (".yaml", ".yml", ".json") and file.exists()
    is_found = not is_file and any(programs.is_program(str(file)) for programs in parts("programs"))
    experiment = _found(str(file), overrides or []) if is_found else load_experiment(file, overrides or [])
    search_path = (Path.cwd() if is_found else file.absolute().parent, Path.cwd())
    limit_s = parse_duration(limit)
    with TemporaryFile() as folded:
        report = check_experiment(
            experiment, search_path=search_path, limit_s=limit_s, output=_STDERR if verbose else folded, quick=quick
        )
        last = [] if verbose or report.ok else _last_lines(folded)
    if output is TextFormat.json:
        print_json(report.to_json())
    else:
        for line in _lines(report):
            print_remark(line, sys.stdout)
    _show_problems(report, last)
    if not report.ok:
        raise typer.Exit(1)
    if output is TextFormat.text:
        quoted = shlex.quote(str(file))
        follows = f"write its experiment: rubberband init {quoted}" if is_found else f"run it: rubberband run {quoted}"
        print(f"{file} passes; {follows}")


def _found(program: str, overrides: Sequence[str]) -> Experiment:
    """Return the experiment that `init` would write for a program, in the current folder."""
    from rubberband.commands.init import DEFAULT_FILE, looked_at, seen_in
    from rubberband.running.first_file import text_of
    from rubberband.spec.loading import parse_experiment

    path = Path(DEFAULT_FILE)
    seen = looked_at(seen_in(program, path), path)
    for remark in seen.remarks:
        print(f"note: {remark}", file=sys.stderr)
    return parse_experiment(text_of(seen, path), source=program, overrides=overrides)


def _lines(report: CheckReport) -> Iterator[str]:
    """Iterate over the steps that were done, a line each."""
    from rubberband.executor.training.check_findings import brief

    trial, seconds = report.trial, report.trial.seconds
    if trial.kind:
        imported = "" if trial.kind == "program" else f", imported in {seconds['import']:.2f} s"
        yield f"entry point    {report.entrypoint} ({trial.kind}){imported}"
        yield f"configuration  {brief(report.configuration)}"
    if trial.metrics:
        metrics = " ".join(f"{name}={value:.6g}" for name, value in trial.metrics.items())
        set_up = f"on the {report.hardware}, after {seconds['set-up']:.2f} s of set-up"
        yield f"iteration      {seconds['iteration']:.2f} s {set_up}: {metrics}"
    if trial.line:
        yield f"read from      {trial.line if len(trial.line) <= 100 else f'{trial.line[:99]}…'}"
    if trial.checkpoint_bytes is not None:
        size = f"{trial.checkpoint_bytes / 1e6:.3g} MB, saved in {seconds['save']:.2f} s"
        restored = f", restored in {seconds['restore']:.2f} s" if _succeeded(report, "restore") else ""
        went_on = ", and continued by another iteration" if _succeeded(report, "continue") else ""
        yield f"checkpoint     {size}{restored}{went_on}"
    for line in report.memory:
        yield f"memory         {line}"
    if trial.to_try:
        yield f"values         {trial.tried} of {trial.to_try} tried: each parameter alone, and extreme values together"
    if trial.restart:
        yield f"restart        {trial.restart}"
    if _succeeded(report, "fork"):
        yield "fork           it continues from its checkpoint with a changed configuration"
    if _succeeded(report, "restart"):
        yield f"restart        a fresh process goes on from a checkpoint alike, compared in {seconds['restart']:.2f} s"
    if _succeeded(report, "gang"):
        yield f"gang           two workers train what one trains, compared in {seconds['gang']:.2f} s"


def _succeeded(report: CheckReport, step: str) -> bool:
    return step in report.trial.seconds and not any(p.line.startswith(f"{step}: ") for p in report.trial.problems)


def _last_lines(output: IO[bytes]) -> list[str]:
    """Return the last lines of the trial's output."""
    output.seek(max(0, output.seek(0, os.SEEK_END) - _MOST_BYTES))
    return output.read().decode("utf-8", "replace").rstrip().splitlines()[-_LAST_LINES:]


def _show_problems(report: CheckReport, last: Sequence[str]) -> None:
    """Print the findings, the problems last: above them what the trial printed, or where it failed."""
    from rubberband.files import home_notes
    from rubberband.installation import default_home

    details = [each for problem in report.problems for each in problem.details.splitlines()[-_LAST_LINES:]]
    for line in details or last:
        print(line, file=sys.stderr)
    for remark in (*report.remarks, *home_notes(default_home())):
        print(f"note: {remark}", file=sys.stderr)
    for problem in report.problems:
        print(f"problem: {problem.line}", file=sys.stderr)
