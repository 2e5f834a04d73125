"""Results and lists: `rubberband report`, `best`, `export` and `ps`, of this machine or of a service."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rubberband.commands.common import (
    Name,
    OnOption,
    ServerOption,
    TextFormat,
    TextOption,
    argument,
    client_of,
    option,
    print_json,
    print_table,
    write_page,
)
from rubberband.errors import InputError

if TYPE_CHECKING:
    from rubberband.client.client import Client
    from rubberband.client.models import ExperimentView
    from rubberband.executor.journal.folder import ExperimentFolder
    from rubberband.executor.result.parts import TrialResult
    from rubberband.executor.result.result import Result

_FEWEST_OF_BEST, _MOST_OF_BEST = 20, 100
_WHY, _WORDS = 6, {0, 1, 6, 7}
"""Column of `ps` that is cut, and those of words."""


def report(
    name: Name,
    output: TextOption = TextFormat.text,
    html: Annotated[Path | None, option("--html", "FILE", "Write one self-contained page to FILE.")] = None,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", help="Print all tables: also decisions, where the paid time went, and failures."),
    ] = False,
    server: ServerOption = None,
    on: OnOption = None,
) -> None:
    """Print an experiment's result.

    Fits on one screen: the best configuration, time and cost against the limits, the stages, planned and actual, and
    the best trials. Works while the experiment runs, too.
    """
    result = _result(name, client_of(server))
    if html is not None:
        from rubberband.views.charts.search import importance
        from rubberband.views.report.page import render_html

        space = _space(name) if server is None else None
        write_page(html, render_html(result, importance(result, space), space=space))
    if output is TextFormat.json:
        print_json(result.to_json())
    elif html is None:
        from rubberband.views.report.text import print_report

        print_report(result, verbose=verbose)


def _result(name: str, client: Client | None) -> Result:
    if client is None:
        from rubberband.executor.journal.folder import open_folder

        folder = open_folder(name)
        folder.require()
        return _read(folder)
    from rubberband.executor.result.result import Result

    with client:
        return Result.from_json(client.report(name))


def _space(name: str) -> Mapping[str, Any] | None:
    """Return the search space of an experiment of this home; None where its journal is damaged."""
    from rubberband.errors import JournalError
    from rubberband.executor.journal.folder import open_folder
    from rubberband.executor.run.follower import open_journal

    try:
        journal, header = open_journal(open_folder(name))
    except JournalError:
        return None
    with closing(journal):
        space: Mapping[str, Any] | None = header.setup.get("experiment", {}).get("search", {}).get("space")
        return space


def _read(folder: ExperimentFolder) -> Result:
    """Return the result; of a damaged journal as far as it can be read, with a warning."""
    from rubberband.errors import DamagedJournalError
    from rubberband.executor.run.follower import read, salvage

    try:
        return read(folder)
    except DamagedJournalError as error:
        found = salvage(folder)
        if found is None or not found.events:
            raise
        typer.echo(f"warning: {error}", err=True)
        return found.result


def best(
    name: Name,
    out: Annotated[
        Path | None, option("--out", "FOLDER", "Write the files of the trial's checkpoint into this folder.")
    ] = None,
    iteration: Annotated[
        str,
        option("--iteration", "WHICH", "Which checkpoint of the best trial: latest, best (of its evaluations), or N."),
    ] = "latest",
    merge: Annotated[
        bool, typer.Option("--merge", help="With --out: write the base model with the adapter of PEFT merged into it.")
    ] = False,
    output: TextOption = TextFormat.text,
    server: ServerOption = None,
    on: OnOption = None,
) -> None:
    """Print an experiment's best configuration.

    Includes its metrics and the path of its checkpoint. While the experiment runs, this is the best so far. With --out,
    the state_dict of a TorchTrial's model is written into a file (as safetensors, if its name ends so), and the files
    of a checkpoint that is a folder (of a command, transformers or Ray Tune) into another one, a model of Hugging Face
    with a card; `result.load_best` loads other trials in Python.
    """
    from rubberband.views.experiment import plain

    if not (iteration in ("latest", "best") or (iteration.isascii() and iteration.isdigit())):
        raise InputError(f"--iteration {iteration}: give latest, best, or a number of iterations")
    if merge and out is None:
        raise InputError("--merge needs a folder for the merged model; add --out FOLDER")
    which: Any = int(iteration) if iteration.isdigit() else iteration
    result = _result(name, client_of(server))
    found = result.best_at(which)
    if which != "latest":
        result = replace(result, best=found)
    if out is not None:
        with _downloaded(server, name, found, checkpoint=True) as here:
            place = replace(result, best=here).save_best(out)
            print(f"wrote {place}", file=sys.stderr)
        if merge:
            from rubberband.executor.result.adapters import merge as merged

            merged(place)
            print(f"merged the adapter in {place}", file=sys.stderr)
    if output is TextFormat.json:
        names = ("trial", "configuration", "metrics", "iterations", "standing", "checkpoint", "schedule")
        values = {key: plain(getattr(found, key)) for key in names}
        print_json({"schema": "rubberband.best/1", "name": result.name, "metric": result.metric, **values})
        return
    from rubberband.views.report.headlines import best_lines

    print("\n".join(best_lines(result)))


@contextmanager
def _downloaded(
    server: str | None, name: str, trial: TrialResult, *, checkpoint: bool = False
) -> Iterator[TrialResult]:
    """Yield a trial of a service with its checkpoint, or its artifacts, on this machine; one of here stays as it is."""
    from rubberband.executor.checkpoints import reference_to

    client = client_of(server)
    ref = trial.checkpoint if checkpoint else None
    if client is None or (checkpoint and (ref is None or ref.url.startswith("virtual:"))):
        yield trial
        return
    with client, TemporaryDirectory(prefix="rubberband-download-") as folder:
        if ref is not None:
            kept = {one.checkpoint.url: one.iterations for one in trial.checkpoints}
            place = client.save_checkpoint(name, trial.trial, Path(folder, "file"), iterations=kept.get(ref.url))
            whole = reference_to(place.as_uri(), place) if ref.parts else replace(ref, url=place.as_uri())
            yield replace(trial, checkpoint=whole)
            return
        yield replace(
            trial,
            artifacts=tuple(
                replace(one, file=replace(one.file, url=place.as_uri()))
                for at, one in enumerate(trial.artifacts)
                for place in [client.save_artifact(name, trial.trial, one.name, Path(folder, str(at)))]
            ),
        )


def artifacts(
    name: Name,
    trial: Annotated[int | None, argument("TRIAL", "Number of the trial; by default the best one.")] = None,
    to: Annotated[Path | None, option("--to", "FOLDER", "Write the files into this folder.")] = None,
    output: TextOption = TextFormat.text,
    server: ServerOption = None,
    on: OnOption = None,
) -> None:
    """List or write the files that a trial kept.

    Trials give files by `rubberband.artifact(path)`; programs write them below RUBBERBAND_ARTIFACTS.
    """
    from rubberband.executor.result.restoring import save_artifacts
    from rubberband.executor.result.rows import trial_of
    from rubberband.units import format_bytes
    from rubberband.views.experiment import plain
    from rubberband.views.formatting import printable

    result = _result(name, client_of(server))
    found = trial_of(result, trial)
    if to is not None:
        with _downloaded(server, name, found) as here:
            count = len(save_artifacts(here, to))
        print(f"wrote {count} file{'s' * (count != 1)} of trial {found.trial} to {to}", file=sys.stderr)
    if output is TextFormat.json:
        print_json({"schema": "rubberband.artifacts/1", "trial": found.trial, "artifacts": plain(found.artifacts)})
        return
    if not found.artifacts:
        print(f"trial {found.trial} has no artifacts", file=sys.stderr)
    rows = [[printable(one.name), format_bytes(one.file.size_bytes), str(one.iterations)] for one in found.artifacts]
    if rows:
        print_table(["NAME", "SIZE", "AFTER ITERATION"], rows, words={0})


class ExportFormat(StrEnum):
    """Format of exported trials."""

    csv = "csv"
    parquet = "parquet"
    json = "json"


def export(
    name: Name,
    file: Annotated[Path | None, argument("FILE", "Where to write it; by default to stdout.")] = None,
    output: Annotated[
        ExportFormat | None,
        typer.Option("--output", "-o", help="Format. By default as FILE ends, else csv.", show_default=False),
    ] = None,
    reports: Annotated[
        bool, typer.Option("--reports", help="A row for each report of each trial, instead of one for each trial.")
    ] = False,
    to: Annotated[
        str | None, option("--to", "URL", "Write an Optuna study to this database instead, such as sqlite:///study.db.")
    ] = None,
    server: ServerOption = None,
    on: OnOption = None,
) -> None:
    """Write trials as a table or an Optuna study.

    A row for each trial: configuration, metrics, iterations, status, GPU time, its share of the bill, and checkpoint. A
    study is for optuna-dashboard and Optuna's charts: trials that were stopped early are pruned.
    """
    from rubberband.executor.result import rows

    if to is not None:
        if file is not None or output is not None or reports:
            raise InputError("export: --to writes a study to a database; leave out FILE, --output and --reports")
        study = _result(name, client_of(server)).to_study(to)
        print(f"wrote study {study.study_name}; see it with: optuna-dashboard {to}", file=sys.stderr)
        return
    form = output or _form_of(file)
    if form is ExportFormat.parquet and file is None:
        raise InputError("export: Parquet is not text; name a file to write, such as trials.parquet")
    result = _result(name, client_of(server))
    found = rows.report_rows(result) if reports else rows.trial_rows(result)
    if form is ExportFormat.parquet:
        content = rows.to_parquet(found)
    else:
        content = (rows.to_csv(found) if form is ExportFormat.csv else rows.to_json(found)).encode()
    if file is None:
        print(content.decode(), end="")
        return
    try:
        file.write_bytes(content)
    except OSError as error:
        raise InputError(f"{file} cannot be written ({error.strerror}); give another path") from None


def _form_of(file: Path | None) -> ExportFormat:
    """Return the format that the end of a file's name says. Raises InputError for one that is none."""
    if file is None:
        return ExportFormat.csv
    ending = file.suffix.removeprefix(".").lower()
    if ending not in ExportFormat.__members__:
        raise InputError(
            f"{file} does not end with a format; end it with {', '.join(f'.{form}' for form in ExportFormat)}, "
            "or say one: --output csv"
        )
    return ExportFormat(ending)


def ps(
    search: Annotated[
        str,
        option(
            "--search", "WORDS", "Only experiments with these words in name, state, tags, note or (at a service) owner."
        ),
    ] = "",
    tag: Annotated[list[str] | None, option("--tag", "TAG", "Only experiments with this tag; repeats.")] = None,
    archived: Annotated[
        bool, typer.Option("--archived", help="List what `rubberband tag NAME --archive` archived, not the others.")
    ] = False,
    wide: Annotated[bool, typer.Option("--wide", help="Print whole reasons, wider than the terminal.")] = False,
    output: TextOption = TextFormat.text,
    server: ServerOption = None,
    on: OnOption = None,
) -> None:
    """List experiments, here or of a service. On a terminal, reasons are cut to its width."""
    from rubberband.units import duration, format_usd, in_unit

    listed = _all_listed(client_of(server), search, tag or (), archived=archived)
    if output is TextFormat.json:
        print_json({"schema": "rubberband.ps/1", "experiments": [asdict(row) for row in listed]})
        return
    header = ["NAME", "STATE", "TRIALS", "ITERATIONS", "TIME", "COST", "BEST OR WHY", "TAGS"]
    rows = [
        [
            row.name,
            f"{row.state} (rehearsal)" if row.rehearsal else row.state,
            str(row.trials),
            str(row.iterations),
            duration(row.jct_s),
            in_unit(format_usd(row.cost_usd), row.unit),
            "; ".join(part for part in (row.reason, row.best) if part),
            ", ".join(row.tags),
        ]
        for row in listed
    ]
    columns = len(header) if any(row.tags for row in listed) else len(header) - 1
    header, rows = header[:columns], [row[:columns] for row in rows]
    if wide:
        from rubberband.views.formatting import aligned

        print("\n".join(aligned([header, *rows], _WORDS)))
        return
    most = _MOST_OF_BEST
    if sys.stdout.isatty():
        others = sum(max(len(row[at]) for row in (header, *rows)) + 2 for at in range(columns) if at != _WHY)
        most = max(_FEWEST_OF_BEST, min(most, shutil.get_terminal_size().columns - others - 2))
    for row in rows:
        row[_WHY] = row[_WHY] if len(row[_WHY]) <= most else row[_WHY][: most - 1] + "…"
    print_table(header, rows, words=_WORDS)


def _all_listed(client: Client | None, search: str, tags: Sequence[str], *, archived: bool) -> list[Listed]:
    if client is None:
        from rubberband.commands.local_experiment import local_experiments
        from rubberband.installation import default_home, default_store
        from rubberband.states import ACTIVE
        from rubberband.values.submission import matches, same_case

        here = map(_listed, local_experiments(default_home(), default_store()))
        found = [row for row in here if (row.archived and row.state not in ACTIVE) is archived]
        return [
            row
            for row in found
            if {*map(same_case, tags)} <= {*row.tags} and matches(search, row.name, row.state, row.note, *row.tags)
        ]
    with client:
        there = client.experiments(search=search, tags=tags, archived=archived)
        return sorted(map(_listed, there), key=lambda row: row.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """Line of `rubberband ps`."""

    name: str
    state: str
    """running, interrupted (its driver died), done, cancelled, budget, failed, or unreadable; at a service also queued,
    starting, or refused."""
    trials: int = 0
    iterations: int = 0
    """Done by all trials together."""
    jct_s: float = 0.0
    cost_usd: float = 0.0
    unit: str = "USD"
    """Unit of `cost_usd`: GPU-hours (GPU-h) on a Ray cluster without a price."""
    best: str = ""
    rehearsal: bool = False
    """Whether nothing was trained."""
    charged: bool = True
    """Whether `cost_usd` is paid for."""
    reason: str = ""
    """Cause of an early end, of waiting, or of a journal that cannot be read."""
    tags: Sequence[str] = ()
    note: str = ""
    archived: bool = False


def _listed(view: ExperimentView) -> Listed:
    from rubberband.states import EXPLAINED
    from rubberband.values.submission import waiting
    from rubberband.views.formatting import printable
    from rubberband.views.queueing import queue_line

    summary = view["summary"]
    best = summary["best_value"]
    note = f", {summary['best_note']}" if summary.get("best_note") else ""
    why = view["reason"] if view["state"] in EXPLAINED else ""
    if (queue := view.get("queue")) and not why:
        why = queue_line(view["name"], queue)
    waits = waiting(view["name"], view["state"], summary)
    return Listed(
        name=view["name"],
        state=view["state"],
        trials=summary["trials"],
        iterations=summary["iterations"],
        jct_s=summary["jct_s"],
        cost_usd=summary["cost_usd"],
        unit=view["summary"].get("unit", "USD"),
        best="" if best is None else f"{summary['metric']}={best:.6g} (trial {summary['best_trial']}{note})",
        rehearsal=view.get("rehearsal", False),
        charged=view.get("charged", True),
        reason="; ".join(note for note in (printable(why), waits) if note),
        tags=view.get("tags", ()),
        note=view.get("note", ""),
        archived=view.get("archived", False),
    )
