"""How a run is shown on stderr while it runs: a table that moves on a terminal, plain lines elsewhere.

A view is an observer of the driver and a context manager. stdout is left to data. `Progress` is what it draws.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Literal, Protocol, Self, TextIO

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rubberband.executor.core.budget import bill_usd
from rubberband.executor.core.controller import Controller
from rubberband.executor.core.events import Event
from rubberband.executor.core.forecast import Forecast, forecast
from rubberband.executor.core.state import Job, Phase, StageRecord, State, TrialStatus
from rubberband.executor.core.trials import best_trial
from rubberband.executor.result import was_interrupted
from rubberband.values.plan import total_iterations
from rubberband.views.narration import Narrator
from rubberband.views.words import counted, duration, number, usd, usd_decimals

# A run at a glance: a frozen picture of the state, taken at an event and read by another thread until the next.


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProgress:
    """Where one stage stands."""

    stage: int
    standing: Literal["done", "current", "planned"]
    running: int
    queued: int
    done: int
    failed: int
    iterations_done: int
    iterations: int
    """Of all its trials."""
    instances: int
    """Held now; the most that were held, of a stage that is over."""
    planned_instances: int
    """By the plan in force, as is what follows."""
    gpus_per_trial: int
    started_s: float | None
    """From the start of the run."""
    ended_s: float | None
    planned_s: float
    before_usd: float
    """The bill when it began."""
    ended_usd: float | None
    """The bill at its SYNC."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run stands; what goes on by itself (time, the bill) is asked for an instant."""

    job: Job
    phase: Phase
    stages: tuple[StageProgress, ...]
    started_at: float
    ended_at: float | None
    best: tuple[int, float] | None
    """(trial, metric)"""
    batch_sizes: tuple[int, ...]
    """Of the running trials, as last reported; empty where the batch is fixed."""
    state: State
    """A copy of all that the bill and the forecast are reckoned from."""

    def elapsed_s(self, now: float) -> float:
        """From the start until `now`, or until the end."""
        return max(0.0, (now if self.ended_at is None else self.ended_at) - self.started_at)

    def spent_usd(self, now: float) -> float:
        """The bill at `now`."""
        return bill_usd(self.job, self.state, now if self.ended_at is None else self.ended_at)

    def expected(self, now: float) -> Forecast:
        """What is expected of the whole run, as of `now`."""
        return forecast(self.job, self.state, max(now, self.state.now))


def observe(job: Job, state: State) -> Progress:
    """A picture of `state`, which shares nothing that will change."""
    best = best_trial(state, job.metric, job.mode) if state.outcome != "done" or state.stages[-1].ranking else None
    value = None if best is None else best.metric(job.metric)
    return Progress(
        job=job,
        phase=state.phase,
        stages=tuple(_stage(job, state, stage) for stage in range(len(job.stages))),
        started_at=state.started_at,
        ended_at=state.ended_at,
        best=None if best is None or value is None else (best.trial, value),
        batch_sizes=tuple(
            trial.reports[-1].batches[-1].batch_size
            for trial in state.running()
            if trial.reports and trial.reports[-1].batches
        ),
        state=_copy(job, state),
    )


def _copy(job: Job, state: State) -> State:
    functions = job.offer.billing == "per_function"
    return replace(
        state,
        trials=[replace(trial, reports=[]) for trial in state.trials],
        instances={name: replace(record) for name, record in state.instances.items()},
        allocations=[replace(use) for use in state.allocations if functions or use.ended_at is None],
        stages=[replace(stage) for stage in state.stages],
        decisions=list(state.decisions),
    )


def _stage(job: Job, state: State, index: int) -> StageProgress:
    stage, chosen, predicted = job.stages[index], state.plan.stages[index], state.predicted[index]
    record = state.stages[index] if index < len(state.stages) else None
    trials = record.trials if record else ()
    before = total_iterations(job.stages[:index])
    over = record is not None and (record.ended_at is not None or state.phase is Phase.FINISHED)
    count = _trials(state, record) if record else Counter[str]()
    instances = 0
    if record is not None:
        instances = record.widest if over else len(state.live())
    started_at = record.started_at if record else None
    ended_at = None
    if record is not None and over:
        ended_at = record.ended_at if record.ended_at is not None else state.ended_at
    return StageProgress(
        stage=index,
        standing="planned" if record is None else "done" if over else "current",
        running=count["running"],
        queued=count["queued"] if record else stage.trials,
        done=count["done"],
        failed=count["failed"],
        iterations_done=sum(min(max(state.trials[t].iterations - before, 0), stage.iterations) for t in trials),
        iterations=stage.iterations * (len(trials) or stage.trials),
        instances=instances,
        planned_instances=chosen.instances,
        gpus_per_trial=chosen.gpus_per_trial,
        started_s=None if started_at is None else started_at - state.started_at,
        ended_s=None if ended_at is None else ended_at - state.started_at,
        planned_s=predicted.provisioning_s + predicted.duration_s,
        before_usd=bill_usd(job, state, started_at) if index and started_at is not None else 0.0,
        ended_usd=None if ended_at is None else bill_usd(job, state, ended_at),
    )


def _trials(state: State, record: StageRecord) -> Counter[str]:
    """How many of the stage's trials run, wait, are done and have failed."""
    if record.ended_at is not None:
        return Counter(done=len(record.ranking), failed=len(record.trials) - len(record.ranking))
    names = {TrialStatus.RUNNING: "running", TrialStatus.QUEUED: "queued", TrialStatus.FAILED: "failed"}
    return Counter(names.get(state.trials[trial].status, "done") for trial in record.trials)


REFRESHES_PER_S = 4.0
_CHEAP_S = 1e-3
"""A picture that takes longer, as of thousands of trials, is not taken at every event."""
_SHARE = 0.1
"""Such pictures take this part of the time at most."""


class View(Protocol):
    """An observer (see `rubberband.executor.driver`) that shows what it is told until it is left."""

    def __call__(self, event: Event, controller: Controller) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_view(job: Job, clock: Callable[[], float], stream: TextIO, is_terminal: bool) -> View:
    """The view for `stream` (stderr): enter it, then give it to the driver as an observer.

    `clock` is the backend's; it is read from another thread.
    """
    return TerminalView(job, clock, stream) if is_terminal else PlainView(job, stream)


class PlainView:
    """One line for each thing worth telling, the time since the start in front."""

    def __init__(self, job: Job, stream: TextIO) -> None:
        self._narrator = Narrator(job)
        self._stream = stream

    def __call__(self, event: Event, controller: Controller) -> None:
        """Write what there is to say about `event`."""
        for line in self._narrator.lines(event, controller):
            print(_stamped(line, controller), file=self._stream, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return


class TerminalView:
    """The stages as a table at the bottom of the terminal, redrawn also between events; the lines pass above it."""

    def __init__(
        self,
        job: Job,
        clock: Callable[[], float],
        stream: TextIO,
        console: Console | None = None,
        stopwatch: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`stopwatch` tells how long pictures take, in seconds."""
        self._narrator = Narrator(job)
        self._stopwatch = stopwatch
        self._next_at = -math.inf
        self._job = job
        self._clock = clock
        self._console = console or Console(file=stream)
        self._progress: Progress | None = None
        self._live = Live(
            get_renderable=self._picture,
            console=self._console,
            refresh_per_second=REFRESHES_PER_S,
            redirect_stdout=False,
        )

    def __call__(self, event: Event, controller: Controller) -> None:
        """Take a picture of the state, and say what there is to say."""
        began_at, state = self._stopwatch(), controller.state
        if self._progress is None or began_at >= self._next_at or state.phase is not self._progress.phase:
            self._progress = observe(controller.job, state)
            ended_at = self._stopwatch()
            took_s = ended_at - began_at
            self._next_at = ended_at + (took_s / _SHARE if took_s > _CHEAP_S else 0.0)
        for line in self._narrator.lines(event, controller):
            self._console.print(Text(_stamped(line, controller), style="dim"))

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def _picture(self) -> Group | Text:
        progress = self._progress
        if progress is None:
            return Text(f"{self._job.name}: starting")
        now = self._clock()
        return Group(stage_table(progress, now, self._console.width), *summary(progress, now))


def stage_table(progress: Progress, now: float, width: int) -> Table:
    """One row a stage: what it does, holds and costs, against the plan; it fits `width` columns from 80 on."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1 if width >= 100 else 0), pad_edge=False, collapse_padding=True)
    table.add_column("stage", justify="right")
    for name in ("run", "wait", "done", "fail"):
        table.add_column(name, justify="right")
    table.add_column("iterations", no_wrap=True)
    table.add_column("inst.\n/plan", justify="right")
    table.add_column("GPUs\n/trial", justify="right")
    table.add_column("USD", justify="right")
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("plan", justify="right", no_wrap=True, style="dim")
    decimals = usd_decimals(max(progress.spent_usd(now), progress.expected(now).cost_usd))
    for stage in progress.stages:
        table.add_row(*_row(progress, stage, now, decimals), style=_STYLES[stage.standing])
    return table


_STYLES = {"done": "", "current": "bold", "planned": "dim"}


def _row(progress: Progress, stage: StageProgress, now: float, decimals: int) -> list[Text | Table]:
    begun = stage.started_s is not None
    spent = time = ""
    if stage.started_s is not None:
        ended_usd = progress.spent_usd(now) if stage.ended_usd is None else stage.ended_usd
        ended_s = progress.elapsed_s(now) if stage.ended_s is None else stage.ended_s
        spent = usd(ended_usd - stage.before_usd, decimals)
        time = duration(max(0.0, ended_s - stage.started_s))
    cells = [str(stage.stage), _some(stage.running), _some(stage.queued), _some(stage.done)]
    failed = Text(_some(stage.failed), style="red")
    held = f"{stage.instances if begun else '-'}/{stage.planned_instances}"
    rest = [Text(held), Text(str(stage.gpus_per_trial)), Text(spent), Text(time), Text(duration(stage.planned_s))]
    return [*(Text(cell) for cell in cells), failed, _bar(stage), *rest]


def _bar(stage: StageProgress) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_row(
        ProgressBar(
            total=max(1, stage.iterations),
            completed=stage.iterations_done,
            width=6,
            complete_style="cyan",
            finished_style="green",
        ),
        Text(f"{stage.iterations_done}/{stage.iterations}"),
    )
    return grid


def _some(count: int) -> str:
    return str(count) if count else ""


def summary(progress: Progress, now: float) -> list[Text]:
    """The lines below the table: time and money, spent and expected, against the limits; the best so far."""
    job, expected = progress.job, progress.expected(now)
    decimals = usd_decimals(max(progress.spent_usd(now), expected.cost_usd))
    elapsed_s, spent_usd = progress.elapsed_s(now), progress.spent_usd(now)
    within = "" if job.deadline_s is None else f" of {duration(job.deadline_s)} (deadline)"
    cap = "" if job.max_cost_usd is None else f" of {usd(job.max_cost_usd, decimals)} (max_cost)"
    lines = [Text(f"elapsed  {duration(elapsed_s)}{within}; spent {usd(spent_usd, decimals)}{cap} USD")]
    if progress.phase not in (Phase.ENDING, Phase.FINISHED):
        ends_s = max(expected.jct_s, elapsed_s)
        line = Text(f"forecast {duration(ends_s)} (plan {duration(job.prediction.jct_s)})")
        if job.deadline_s is not None:
            late_s = ends_s - job.deadline_s
            verdict = f", {duration(abs(late_s))} {'after' if late_s > 0 else 'before'} the deadline"
            line.append(verdict, style="red" if late_s > 0 else "green")
        line.append(f"; {usd(max(expected.cost_usd, spent_usd), decimals)} USD")
        line.append(f" (plan {usd(job.prediction.cost_usd, decimals)})")
        lines.append(line)
    if bought := _bought(progress.state):
        lines.append(Text(f"cloud    {bought}"))
    if progress.batch_sizes:
        lines.append(Text(f"batch    {_range(progress.batch_sizes)}"))
    if progress.best is not None:
        trial, value = progress.best
        lines.append(Text(f"best     {job.metric}={number(value)} (trial {trial})"))
    return lines


def _bought(state: State) -> str:
    """`2 on spot; 1 on demand; interrupted 3 times`; empty where all is on demand."""
    markets = Counter(record.market for record in [*state.live(), *state.leaving()])
    interrupted = sum(was_interrupted(record) for record in state.instances.values())
    if not markets["spot"] and not interrupted:
        return ""
    parts = [f"{count} on {market.replace('on_', '')}" for market, count in sorted(markets.items(), reverse=True)]
    return "; ".join([*parts, *([f"interrupted {counted(interrupted, 'time')}"] if interrupted else [])])


def _range(sizes: Sequence[int]) -> str:
    """`256 (1 trial)`, `64 to 512 (6 trials)`."""
    least, most = min(sizes), max(sizes)
    return f"{least:,}{f' to {most:,}' if most > least else ''} ({counted(len(sizes), 'trial')})"


def _stamped(line: str, controller: Controller) -> str:
    state = controller.state
    return f"{duration(state.now - state.started_at):>8}  {line}"
