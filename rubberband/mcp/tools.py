"""The tools of agents. Each answers in a few lines of text, since an agent pays for every word that it reads."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import anyio
import anyio.to_thread
from pydantic import Field

from rubberband.errors import InputError
from rubberband.files import EXCLUSIVE, locked, make_directories, private
from rubberband.mcp.caps import TAG, AgentCaps
from rubberband.mcp.place import LOOK_S, START_S, Here, Place, Service
from rubberband.spec.experiment import Experiment, ProfilesByType
from rubberband.spec.loading import load_experiment
from rubberband.states import ACTIVE
from rubberband.units import counted, duration, format_usd, in_unit, shown
from rubberband.views.live.status import extension_lines, lines

_T = TypeVar("_T")
_FILES = (".yaml", ".yml", ".json")
_MOST_NOTES = 5
_MOST_LISTED = 20
_ALONE_S = 60.0
"""Longest wait for another agent that starts an experiment."""

File = Annotated[str, Field(description="Experiment file, below the folder in which the server was started.")]
Overrides = Annotated[
    list[str], Field(description="Values over those of the file, such as constraints.max_cost=5 or name=digits-2.")
]
DryRun = Annotated[bool, Field(description="Only show the effect.")]
Name = Annotated[str, Field(description="Name of the experiment.")]


class Tools:
    """The tools, at a service or on this machine, for the files below one folder."""

    def __init__(self, home: Path, server: str | None, folder: Path) -> None:
        self._home, self._folder = home, folder.resolve()
        self._place: Place = Here(home) if server is None else Service(server)

    def end(self) -> None:
        """End what a tool is doing; experiments go on."""
        self._place.end()

    async def plan(self, file: File, overrides: Overrides = []) -> str:  # noqa: B006 - pydantic copies it
        """Predict time and cost of an experiment file; nothing is started or spent. Says whether submit would be
        refused, and why. Call it before submit, and after each change of the file."""
        path, experiment = await _aside(self._load, file, overrides)
        found = await self._place.plan(path, overrides)
        refused = ""
        try:
            await _aside(self._require_start, experiment)
        except InputError as error:
            refused = str(error)
        last = f"submit is refused: {refused}" if refused else f"submit would start it ({self._caps().words()})"
        return "\n".join([*(in_unit(line, experiment.resources.unit) for line in _plan_lines(found)), last])

    async def submit(self, file: File, overrides: Overrides = []) -> str:  # noqa: B006
        """Plan an experiment file and start it. It runs on without this session; ask for its status. It must have a
        max_cost within the cap that a person has set."""
        path, experiment = await _aside(self._load, file, overrides)

        def start() -> None:
            with self._alone():
                self._require_start(experiment)
                self._place.start(experiment, path)

        await _aside(start)
        until = time.monotonic() + START_S
        while (text := await _aside(self._place.starting, experiment.name)) and time.monotonic() < until:
            await anyio.sleep(LOOK_S)
        return text or f"{experiment.name}: started\n{await self.status(experiment.name)}"

    async def status(
        self,
        name: Annotated[str, Field(description="Name of the experiment; empty lists those of agents.")] = "",
        wait_s: Annotated[
            float, Field(ge=0, le=50, description="Seconds to wait for its end, to ask less often.")
        ] = 0.0,
    ) -> str:
        """Show the state, best value, time and cost of an experiment, or list those of agents."""
        if not name:
            found = await _aside(lambda: list(self._place.bills()))
            listed = [f"{bill.name}: {bill.state.value}, {_spent(bill.summary)}" for bill in found[-_MOST_LISTED:]]
            more = [f"{len(found) - _MOST_LISTED} more"] if len(found) > _MOST_LISTED else []
            return "\n".join([*listed, *more]) or "no experiment of an agent yet"
        until = time.monotonic() + wait_s
        while True:
            text, is_over = await _aside(self._look, name)
            if is_over or time.monotonic() >= until:
                return text
            await anyio.sleep(LOOK_S)

    def _look(self, name: str) -> tuple[str, bool]:
        if text := self._place.starting(name):
            return text, False
        with self._place.open(name) as experiment:
            view: Any = experiment.look()
        best = view.get("best")
        config = [f"configuration of trial {best['trial']}: {_pairs(best['configuration'])}"] if best else []
        found = in_unit("\n".join([*lines(view), *config]), view["summary"].get("unit", "USD"))
        return found, view["state"] not in ACTIVE

    async def report(
        self,
        name: Name,
        trials: Annotated[int, Field(ge=0, le=100, description="How many of the best trials are listed.")] = 5,
    ) -> str:
        """Show the result of an experiment: the best configuration, time and cost planned and seen, stages and the best
        trials. Works while it runs, too."""

        def read() -> str:
            from rubberband.views.document import render_document
            from rubberband.views.report.text import screen

            result = self._place.result(name)
            found, tables = screen(result, trials)
            return in_unit(render_document(found, tables).rstrip(), result.unit)

        return await _aside(read)

    async def extend(
        self,
        name: Name,
        deadline: Annotated[
            str | None, Field(description="Later deadline: a duration from the start such as 2h, or a time with zone.")
        ] = None,
        max_cost: Annotated[float | None, Field(gt=0, description="New max_cost of all of it, in USD.")] = None,
        target: Annotated[
            float | None, Field(description="New value of the metric that ends the search (search.stop.target).")
        ] = None,
        num_samples: Annotated[
            str | None, Field(description="More trials, drawn by its sampler: +16, or how many it is to have in all.")
        ] = None,
        dry_run: DryRun = False,
    ) -> str:
        """Give an experiment of an agent a later deadline, a larger max_cost, another target or more trials, within the
        cap. One that has ended is resumed then."""
        if (deadline, max_cost, target, num_samples) == (None, None, None, None):
            raise InputError("extend: nothing to change; give deadline, max_cost, target or num_samples")
        return await _aside(self._change, name, (deadline, max_cost, target, num_samples), dry_run)

    async def add(
        self,
        name: Name,
        configuration: Annotated[
            dict[str, Any], Field(description="Values of parameters; those left out are drawn at random.")
        ],
        dry_run: DryRun = False,
    ) -> str:
        """Add a trial with a configuration to an experiment of an agent, planned before it is accepted. One that has
        ended is resumed then."""
        return await _aside(self._change, name, (None, None, None, {"configuration": configuration}), dry_run)

    async def clone(
        self,
        name: Name,
        trial: Annotated[int, Field(ge=0, description="Number of the trial.")],
        changes: Annotated[dict[str, Any], Field(description="Values that the new trial has in place of its.")],
        from_checkpoint: Annotated[bool, Field(description="Continue from its latest checkpoint.")] = False,
        dry_run: DryRun = False,
    ) -> str:
        """Add a changed copy of a trial to an experiment of an agent, as `add` does."""
        wanted = {"configuration": changes, "clone_of": trial, "from_checkpoint": from_checkpoint}
        return await _aside(self._change, name, (None, None, None, wanted), dry_run)

    def _change(self, name: str, wanted: tuple[Any, ...], dry_run: bool) -> str:
        """Show the effect of other limits and more trials, and ask for them within the cap."""
        max_cost, trials = wanted[1], wanted[3]
        with self._alone(), self._place.open(name) as experiment:
            view = self._own(experiment.look())
            goes_on = view["state"] not in ACTIVE
            if goes_on or max_cost is not None or trials is not None:
                most_usd = view["summary"]["max_cost_usd"] if max_cost is None else max_cost
                self._caps().require_extension(view["provider"], name, most_usd, self._place.bills())
            found = experiment.extension(*wanted, granted=not dry_run)
        if goes_on and not dry_run:
            self._place.resume(name)
        done = [] if dry_run else ["applied; it goes on" if goes_on else "applied"]
        return "\n".join([*extension_lines(found), *done])

    async def stop(
        self,
        name: Name,
        trials: Annotated[
            list[int], Field(description="Numbers of trials to stop; without any, the whole experiment ends.")
        ] = [],  # noqa: B006
    ) -> str:
        """Stop trials of a running experiment of an agent, or end all of it: instances are released, and the best so
        far is kept."""

        def ask() -> str:
            with self._place.open(name) as experiment:
                self._own(experiment.look())
                if not trials:
                    return experiment.cancel()
                experiment.stop(trials)
            return f"{name}: stop of {counted(len(trials), 'trial')} requested"

        return await _aside(ask)

    def _own(self, view: Any) -> Any:
        """Return an experiment. Raises InputError for one that no agent has submitted."""
        if TAG not in view["tags"]:
            raise InputError(
                f"experiment {view['name']!r} was not submitted by an agent; ask a person to change it with "
                "`rubberband extend` or `rubberband stop`"
            )
        return view

    def _require_start(self, experiment: Experiment) -> None:
        asks_service = self._place.server is not None
        self._caps().require_start(experiment, asks_service=asks_service, bills=self._place.bills())

    def _caps(self) -> AgentCaps:
        return AgentCaps.of(self._home)

    def _load(self, file: str, overrides: Sequence[str]) -> tuple[Path, Experiment]:
        """Return an experiment file and what it says. Raises InputError for files of other folders: an error of reading
        them would quote them."""
        path = (self._folder / file).resolve()
        if not self._has(path) or path.suffix not in _FILES:
            raise InputError(f"file: {shown(file)} is not a {' or '.join(_FILES)} file below {self._folder}")
        experiment = load_experiment(path, overrides)
        profile = experiment.profile
        by_type = profile.by_instance_type if isinstance(profile, ProfilesByType) else {"": profile}
        for read in (experiment.resources.catalogue, *by_type.values()):
            if isinstance(read, str) and not self._has(Path(read).resolve()):
                raise InputError(f"{shown(read)} is not below {self._folder}; copy it there")
        return path, experiment

    def _has(self, path: Path) -> bool:
        return path.is_relative_to(self._folder)

    def _alone(self) -> Any:
        return _Alone(self._home / "agents.lock")


class _Alone:
    """One process and thread at a time looks at the cap, and starts or extends."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        make_directories(self._path.parent)
        self._file = open(self._path, "a", opener=private)
        if not locked(self._file, EXCLUSIVE, wait_s=_ALONE_S):
            self._file.close()
            raise InputError(f"{self._path} is locked by another process; try again")

    def __exit__(self, *_: object) -> None:
        self._file.close()


async def _aside(function: Callable[..., _T], *arguments: Any) -> _T:
    """Call a function that reads files or asks a service, beside the protocol."""
    return await anyio.to_thread.run_sync(partial(function, *arguments), abandon_on_cancel=True)


def _plan_lines(found: dict[str, Any]) -> list[str]:
    """Return the plan of an estimate in lines: the prediction, the stages, and the first notes."""
    predicted, limits = found["prediction"], found["constraints"]
    deadline = "no deadline" if limits["deadline_s"] is None else f"deadline {duration(limits['deadline_s'])}"
    cap = "no max_cost" if limits["max_cost_usd"] is None else f"max_cost {format_usd(limits['max_cost_usd'])}"
    time_s, cost_usd = predicted["jct_s"], predicted["cost_usd"]
    first = (
        f"{found['experiment']}: {duration(time_s['mean'])} and {format_usd(cost_usd['mean'])} predicted "
        f"(in 95 % at most {duration(time_s['p95'])} and {format_usd(cost_usd['p95'])}); {deadline}, {cap}"
    )
    stages = [
        f"stage {stage['stage']}: {counted(stage['trials'], 'trial')} x {counted(stage['iterations'], 'iteration')} on "
        f"{counted(stage['instances'], 'instance')} of {stage['instance_type']}, "
        f"{counted(stage['gpus_per_trial'], 'GPU')} per trial: {duration(stage['duration_s'])}, "
        f"{format_usd(stage['cost_usd'])}"
        for stage in found["plan"]["stages"]
    ]
    notes: Sequence[str] = found["notes"]
    left = [f"note: {len(notes) - _MOST_NOTES} more, by `rubberband estimate`"] if len(notes) > _MOST_NOTES else []
    return [first, *stages, *(f"note: {note}" for note in notes[:_MOST_NOTES]), *left]


def _pairs(configuration: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in configuration.items())


def _spent(summary: Any) -> str:
    best = "" if summary.best_value is None else f", best {summary.metric}={summary.best_value:.6g}"
    cap = "" if summary.max_cost_usd is None else f" of {format_usd(summary.max_cost_usd)}"
    return f"{format_usd(summary.cost_usd)}{cap}{best}"
