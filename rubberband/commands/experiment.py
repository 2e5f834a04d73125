"""`rubberband status`, `logs`, `cancel`, `stop`, `extend`, `add`, `clone`, `scale`: on this machine or at a service."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rubberband.commands.common import (
    ConfirmOption,
    Name,
    OnOption,
    ServerOption,
    TextFormat,
    TextOption,
    argument,
    client_of,
    option,
    print_json,
    say,
)
from rubberband.errors import InputError
from rubberband.units import counted, in_unit

if TYPE_CHECKING:
    from rubberband.client.client import Client
    from rubberband.client.models import ExperimentDetail
    from rubberband.commands.local_experiment import LocalExperiment

LOOK_EVERY_S = 1.0
_STYLES = ("bold", "bold green")


def status(
    name: Name,
    output: TextOption = TextFormat.text,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep refreshing until it ends.")] = False,
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
    follow = _redrawn if sys.stderr.isatty() else _printed
    view = follow(look) if watch else look()
    if output is TextFormat.json:
        print_json({"schema": "rubberband.status/1", **view})
    else:
        from rubberband.views.document import print_document

        print_document(*_document(view), _STYLES, unit=view["summary"].get("unit", "USD"))
    if watch:
        from rubberband.views.live.status import exit_code

        code = exit_code(view)
        if code:
            raise typer.Exit(code)


def _document(view: ExperimentDetail) -> tuple[list[str], list[Any]]:
    from rubberband.views.live.progress import stage_table
    from rubberband.views.live.status import lines, story_table
    from rubberband.views.story import stage_of

    tables = [stage_table([*map(stage_of, view["stages"])])] if view.get("stages") else []
    return lines(view), [*tables, story_table(view["story"])] if view.get("story") else tables


def _redrawn(look: Callable[[], ExperimentDetail]) -> ExperimentDetail:
    """Look repeatedly, and show changes on stderr. Returns the last view, once the experiment is over."""
    from rich.console import Console, Group
    from rich.live import Live

    from rubberband.views.document import drawn, localised

    console = Console(file=sys.stderr, highlight=False)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            view = look()
            shown = localised(*_document(view), unit=view["summary"].get("unit", "USD"))
            live.update(Group(*drawn(*shown, _STYLES, width=console.width)), refresh=True)
            if _is_over(view):
                return view
            time.sleep(LOOK_EVERY_S)


def _printed(look: Callable[[], ExperimentDetail]) -> ExperimentDetail:
    from rubberband.views.formatting import local_times
    from rubberband.views.live.status import headline

    last = ""
    while True:
        view = look()
        summary = view["summary"]
        line = headline(view)
        if summary["target_iterations"]:
            line += f"; {summary['iterations']} of {counted(summary['target_iterations'], 'iteration')}"
        if line != last:
            say(local_times(line, time.time()))
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
    is not changed, but trials and limits that wait for a resume are withdrawn.
    """
    with open_experiment(name, server) as experiment:
        print(experiment.cancel(), file=sys.stderr)


def stop(
    name: Name,
    trials: Annotated[list[int], argument("TRIAL", "Numbers of trials.")],
    server: ServerOption = None,
    on: OnOption = None,
) -> None:
    """Stop single trials of a running experiment.

    They train no more, also after a resume, and are not promoted; their GPUs are free for the others. The latest report
    and checkpoint of each are kept, and it is the best trial if its metric is the best. The experiment goes on.
    """
    with open_experiment(name, server) as experiment:
        experiment.stop(trials)
    stopped = f"trial{'s' * (len(trials) > 1)} {', '.join(map(str, trials))}"
    print(f"{name}: stop of {stopped} requested", file=sys.stderr)


DeadlineOption = Annotated[
    str | None,
    option(
        "--deadline",
        "TIME",
        "The new deadline: a duration from the start (at a service, from the submission) such as 40m, or"
        " a time with its zone.",
    ),
]
MaxCostOption = Annotated[str | None, option("--max-cost", "USD", "The new limit, for the whole experiment.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", "-n", help="Only show what would change.")]
_VALUES = "Values of parameters, such as lr=0.1 width=64."


def extend(
    name: Name,
    deadline: DeadlineOption = None,
    max_cost: MaxCostOption = None,
    num_samples: Annotated[
        str | None, option("--num-samples", "N", "More trials: +16, or how many the search is to have in all.")
    ] = None,
    target: Annotated[
        float | None, option("--target", "VALUE", "The new value of the metric that ends the search (search.stop).")
    ] = None,
    yes: ConfirmOption = False,
    dry_run: DryRunOption = False,
    output: TextOption = TextFormat.text,
    server: ServerOption = None,
    on: OnOption = None,
) -> None:
    """Give more time, money, trials, a target.

    Shows the new plan with its time and cost first, and asks for confirmation. A running experiment uses the new limits
    from the next SYNC on, and a target at once. An experiment that stopped at max_cost, or that reached its target, can
    then be resumed.

    The experiment's sampler draws the trials as if they had been there from the start. They join a bracket in its first
    stage; after that, and after the end of the search, they are a further bracket. Resume a search that has ended to
    train them.
    """
    if (deadline, max_cost, target, num_samples) == (None, None, None, None):
        raise InputError(
            "extend: nothing to change; give --deadline 40m, --max-cost 5, --target 0.98 or --num-samples +16"
        )
    _change(name, deadline, max_cost, target, num_samples, yes=yes, dry_run=dry_run, output=output, server=server)


def add(
    name: Name,
    values: Annotated[list[str], argument("KEY=VALUE", _VALUES)],
    yes: ConfirmOption = False,
    dry_run: DryRunOption = False,
    output: TextOption = TextFormat.text,
    server: ServerOption = None,
    on: OnOption = None,
) -> None:
    """Add a configuration to a search.

    Parameters that are left out are drawn at random; a value outside the space is refused. Shows time and cost first,
    and asks for confirmation. The trial trains to the end of the stage that ends first, and is ranked with the others.
    Resume a search that has ended to train it.
    """
    trials = {"configuration": configuration_of(values)}
    _change(name, None, None, None, trials, yes=yes, dry_run=dry_run, output=output, server=server)


def clone(
    name: Name,
    trial: Annotated[int, argument("TRIAL", "Number of the trial.", min=0)],
    values: Annotated[list[str] | None, argument("[KEY=VALUE]...", _VALUES)] = None,
    from_checkpoint: Annotated[
        bool, typer.Option("--from-checkpoint", help="Continue from the trial's latest checkpoint.")
    ] = False,
    yes: ConfirmOption = False,
    dry_run: DryRunOption = False,
    output: TextOption = TextFormat.text,
    server: ServerOption = None,
    on: OnOption = None,
) -> None:
    """Add a changed copy of a trial.

    Its other values are those of the trial. It trains from the beginning with a seed of its own or, with
    --from-checkpoint, continues from the trial's latest checkpoint. Shows time and cost first, and asks for
    confirmation.
    """
    changes = {"configuration": configuration_of(values or []), "clone_of": trial, "from_checkpoint": from_checkpoint}
    _change(name, None, None, None, changes, yes=yes, dry_run=dry_run, output=output, server=server)


def configuration_of(values: Sequence[str]) -> dict[str, Any]:
    """Return the values of `KEY=VALUE` texts, each as in a file. Raises InputError."""
    from rubberband.spec.loading import YamlError, read_yaml

    found: dict[str, Any] = {}
    for text in values:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise InputError(f"{text!r} is no KEY=VALUE; write it as lr=0.1")
        if key in found:
            raise InputError(f"{key} is given twice; leave one out")
        try:
            found[key], _ = read_yaml(value)
        except YamlError as error:
            raise InputError(f"{key}: {error.reason}") from None
    return found


def _change(
    name: str,
    deadline: str | None,
    max_cost: str | None,
    target: float | None,
    trials: str | dict[str, Any] | None,
    *,
    yes: bool,
    dry_run: bool,
    output: TextFormat,
    server: str | None,
) -> None:
    """Show the effect of other limits or more trials, and ask for them once the user has confirmed."""
    from rubberband.states import ACTIVE
    from rubberband.units import parse_usd
    from rubberband.views.formatting import local_times
    from rubberband.views.live.status import extension_lines

    max_cost_usd = None if max_cost is None else parse_usd(max_cost)
    with open_experiment(name, server) as experiment:
        found = experiment.extension(deadline, max_cost_usd, target, trials, granted=False)
        view = experiment.look()
        unit = view["summary"].get("unit", "USD")
        for line in extension_lines(found):
            say(local_times(in_unit(line, unit), time.time()))
        if not dry_run and (yes or typer.confirm("Apply it?", err=True)):
            found = experiment.extension(deadline, max_cost_usd, target, trials, granted=True)
            does = "trains them" if trials else "continues it"
            later = f"; `rubberband resume {name}` {does}" if view["state"] not in ACTIVE else ""
            say(f"applied{later}")
    if output is TextFormat.json:
        print_json({"schema": "rubberband.extension/1", **found})


def scale(
    name: Name,
    max_instances: Annotated[
        str,
        option(
            "--max-instances", "N", "The most instances from now on; 0 pauses the experiment, `none` removes the limit."
        ),
    ],
    server: ServerOption = None,
    on: OnOption = None,
) -> None:
    """Limit a running experiment's instances.

    With fewer instances, trials stop at their next checkpoints, and instances are released. With more, the experiment
    grows within its stage. The rest is planned again at once, within the resources of the file. `rubberband status`
    shows the limit.
    """
    most = _instances(max_instances)
    with open_experiment(name, server) as experiment:
        experiment.limit(most)
    limit = "limit removed" if most is None else f"at most {counted(most, 'instance')} from now on"
    print(f"{name}: {limit}", file=sys.stderr)


def _instances(text: str) -> int | None:
    """Return a number of instances; None for `none`. Raises InputError."""
    if text == "none":
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 6):
        raise InputError(f"--max-instances: {text!r} is not a number of instances; give 0 or more, or none")
    return int(text)


class RemoteExperiment:
    """Experiment of a service, with the methods of `local_experiment.LocalExperiment`."""

    def __init__(self, client: Client, name: str) -> None:
        self._client, self._name = client, name

    def look(self) -> ExperimentDetail:
        """Return the answer of `GET /v1/experiments/NAME`."""
        return self._client.experiment(self._name)

    def cancel(self) -> str:
        """Request a clean end. Returns the effect in one line."""
        from rubberband.states import ACTIVE
        from rubberband.values.submission import WITHDRAWN

        found = self._client.cancel(self._name)
        ended = WITHDRAWN if found["state"] == "done" else "it has ended"
        return f"{self._name}: {found['state']}; {'cancellation requested' if found['state'] in ACTIVE else ended}"

    def extension(
        self,
        deadline: str | None,
        max_cost_usd: float | None,
        target: float | None = None,
        trials: str | dict[str, Any] | None = None,
        *,
        granted: bool,
    ) -> dict[str, Any]:
        """Return the effect of other limits or more trials, and ask for them if `granted`."""
        name, dry_run = self._name, not granted
        if isinstance(trials, dict):
            return dict(self._client.add(name, **trials, dry_run=dry_run))
        limits: dict[str, Any] = {"deadline": deadline, "max_cost": max_cost_usd, "target": target}
        return dict(self._client.extend(name, num_samples=trials, dry_run=dry_run, **limits))

    def limit(self, max_instances: int | None) -> None:
        """Limit its instances from now on."""
        self._client.limit(self._name, max_instances)

    def stop(self, trials: Sequence[int]) -> None:
        """Stop trials, one after another."""
        for trial in trials:
            self._client.stop(self._name, trial)

    def lines(
        self, trial: int | None, *, rank: int | None = None, process: bool, follow: bool
    ) -> Iterator[tuple[int | None, int | None, str]]:
        """Iterate over the output as (trial, rank, text); with `follow`, wait for more until it has ended."""
        source = "process" if process else "trials"
        for line in self._client.logs(self._name, trial=trial, rank=rank, source=source, follow=follow):
            yield line["trial"], line.get("rank"), line["text"]


@contextmanager
def open_experiment(name: str, server: str | None) -> Iterator[LocalExperiment | RemoteExperiment]:
    """Open an experiment of this machine, or of the service. Raises InputError if it is not on this machine."""
    client = client_of(server)
    if client is None:
        from rubberband.commands.local_experiment import local_experiment

        with local_experiment(name) as found:
            yield found
    else:
        with client:
            yield RemoteExperiment(client, name)


def logs(
    name: Name,
    trial: Annotated[int | None, argument("TRIAL", "One trial only.")] = None,
    rank: Annotated[
        int | None, typer.Option("--rank", min=0, help="Only lines of the worker of a gang that has this rank.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing new output until the experiment ends.")
    ] = False,
    process: Annotated[
        bool,
        typer.Option(
            "--process", help="Print the output of the experiment's process instead, if a service started it."
        ),
    ] = False,
    server: ServerOption = None,
    on: OnOption = None,
) -> None:
    """Print the output and the errors of trials."""
    from rubberband.views.formatting import harmless

    is_terminal = sys.stdout.isatty()
    with open_experiment(name, server) as experiment:
        for printed_by, its_rank, line in experiment.lines(trial, rank=rank, process=process, follow=follow):
            text = harmless(line) if is_terminal else line
            by_trial = "" if trial is not None or printed_by is None else f"[trial {printed_by}] "
            by_rank = "" if rank is not None or its_rank is None else f"rank {its_rank} | "
            print(f"{by_trial}{by_rank}{text}", flush=True)
