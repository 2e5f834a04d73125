"""Views of a run on stderr while it runs: a table that moves on a terminal, plain lines elsewhere.

A view is an observer of the driver and a context manager. It draws a `Progress`. stdout is for data only.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, TextIO

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from rubberband import markup
from rubberband.executor.core.bill import bill_usd, lane_bill_usd
from rubberband.executor.core.controller import Controller
from rubberband.executor.core.events import Event
from rubberband.executor.core.forecast import Forecast, expected_iterations, forecast
from rubberband.executor.core.history import Promotion
from rubberband.executor.core.job import Job
from rubberband.executor.core.ranking import best_trained, standing
from rubberband.executor.core.state import LaneState, Phase, StageRecord, State
from rubberband.executor.core.trial_index import RunningTrials, WaitingTrials
from rubberband.executor.core.trial_state import TrialState, TrialStatus
from rubberband.executor.run.driver import Observer
from rubberband.units import counted, duration, gpus_each, in_unit
from rubberband.values.asynchronous import AsyncUse
from rubberband.values.balance import BalanceUse
from rubberband.values.ranking import Standing
from rubberband.views.formatting import ends, hanging, local_times, number, unequal, usd, usd_decimals
from rubberband.views.live.narration import Narrator
from rubberband.views.report.tables import update_line


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProgress:
    """Progress of a stage."""

    stage: int
    bracket: int | None
    """None where there is only one."""
    rung: int
    """Its number in its bracket."""
    phase: Literal["done", "current", "planned"]
    running: int
    queued: int
    done: int
    failed: int
    iterations_done: int
    iterations: int
    """Iterations of all its trials together."""
    instances: int
    """Held now, or at most if the stage is over."""
    planned_instances: int
    """By the current plan, as the following figures."""
    gpus_per_trial: int
    started_s: float | None
    """From the start of the run."""
    ended_s: float | None
    planned_s: float
    before_usd: float
    """Bill at its start; of several brackets, that of its lane."""
    ended_usd: float | None
    """Bill at its SYNC, likewise."""

    @property
    def name(self) -> str:
        """Return its number, or `bracket.stage` if there are several brackets."""
        return str(self.stage) if self.bracket is None else f"{self.bracket}.{self.rung}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of a run: a frozen copy, taken at an event and read by another thread until the next.

    Time and bill grow between events, so they are methods of the present time.
    """

    job: Job
    stages: tuple[StageProgress, ...]
    best: tuple[int, Standing] | None
    """Trial, and its standing."""
    batch_sizes: tuple[int, ...]
    """Last reported by the running trials; empty if the batch is fixed."""
    balances: tuple[tuple[int, BalanceUse], ...]
    """Running trials whose workers are unequal, with the latest shares."""
    updates: tuple[tuple[int, AsyncUse], ...]
    """Running trials that train asynchronously, with their latest iteration."""
    state: State
    """Copy of the data for the bill and the forecast."""

    @property
    def phase(self) -> Phase:
        """Phase of the run."""
        return self.state.phase

    def elapsed_s(self, now: float) -> float:
        """Return the time from the start until `now`, or until the end."""
        return max(0.0, self._until(now) - self.state.started_at)

    def spent_usd(self, now: float) -> float:
        """Return the bill at `now`, or at the end."""
        return bill_usd(self.state, self._until(now))

    def stage_usd(self, stage: StageProgress, now: float) -> float:
        """Return the bill at `now`, or, of several brackets, that of the stage's lane."""
        if stage.bracket is None:
            return self.spent_usd(now)
        lane = self.state.lanes[self.job.bracket_of(stage.stage).lane]
        return lane_bill_usd(lane, now)

    def expected(self, now: float) -> Forecast:
        """Return the forecast of the whole run at `now`."""
        return forecast(self.state, max(now, self.state.now))

    def _until(self, now: float) -> float:
        return now if self.state.ended_at is None else self.state.ended_at


def observe(job: Job, state: State) -> Progress:
    """Return the progress of `state`, without references to parts that will change."""
    best = best_trained(state)
    found = None if best is None else standing(state, best)
    latest = [(trial.trial, trial.reports[-1]) for trial in state.running() if trial.reports]
    return Progress(
        job=job,
        stages=tuple(_stage(job, state, stage) for stage in range(len(job.stages))),
        best=None if best is None or found is None or found.value is None else (best.trial, found),
        batch_sizes=tuple(report.batches[-1].batch_size for _, report in latest if report.batches),
        balances=tuple((trial, report.balance) for trial, report in latest if report.balance is not None),
        updates=tuple((trial, report.updates) for trial, report in latest if report.updates is not None),
        state=_copy(state),
    )


def _copy(state: State) -> State:
    trials = [
        replace(trial, reports=[*trial.reports] if trial.status is TrialStatus.RUNNING else [])
        for trial in state.trials
    ]
    records = {id(stage): replace(stage) for stage in state.stages}
    instances = {name: replace(record) for name, record in state.instances.items()}
    return replace(
        state,
        trials=trials,
        lanes=[_copy_of_lane(lane, trials, records) for lane in state.lanes],
        fleet=replace(state.fleet, instances=instances),
        allocations=[replace(use) if use.ended_at is None else use for use in state.allocations],
        stages=[records[id(stage)] for stage in state.stages],
        decisions=list(state.decisions),
    )


def _copy_of_lane(lane: LaneState, trials: Sequence[TrialState], records: Mapping[int, StageRecord]) -> LaneState:
    copy = replace(lane, stages=[records[id(stage)] for stage in lane.stages])
    copy.runners = RunningTrials(trials[trial.trial] for trial in lane.running())
    copy.waiters = WaitingTrials(trials[trial.trial] for trial in lane.queued())
    return copy


def _stage(job: Job, state: State, index: int) -> StageProgress:
    stage, chosen, predicted = job.stages[index], state.plan.stages[index], state.predicted[index]
    bracket, record = job.bracket_of(index), state.record_of(index)
    lane = state.lanes[bracket.lane]
    trials = record.trials if record else ()
    before = job.iterations_by(index) - stage.iterations
    over = record is not None and (record.ended_at is not None or state.course == "finished")
    count = _trials(state, record) if record else Counter[str]()
    instances = 0 if record is None else record.widest if over else len(lane.held.live)
    started_at = record.started_at if record else None
    ended_at = None if record is None or not over else state.ended_at if record.ended_at is None else record.ended_at

    def spent_usd(at: float | None) -> float | None:
        if at is None:
            return None
        return lane_bill_usd(lane, at) if job.is_divided else bill_usd(state, at)

    return StageProgress(
        stage=index,
        bracket=bracket.bracket if job.is_divided else None,
        rung=index - bracket.first_stage,
        phase="planned" if record is None else "done" if over else "current",
        running=count["running"],
        queued=count["queued"] if record else stage.trials,
        done=count["done"],
        failed=count["failed"],
        iterations_done=sum(min(max(state.trials[t].iterations - before, 0), stage.iterations) for t in trials),
        iterations=expected_iterations(state)
        if not stage.has_sync
        else stage.iterations * (len(trials) or stage.trials) - _unneeded(state, trials, before, stage.iterations),
        instances=instances,
        planned_instances=chosen.instances,
        gpus_per_trial=chosen.gpus_per_trial,
        started_s=None if started_at is None else started_at - state.started_at,
        ended_s=None if ended_at is None else ended_at - state.started_at,
        planned_s=predicted.provisioning_s + predicted.duration_s,
        before_usd=(spent_usd(started_at) or 0.0) if index else 0.0,
        ended_usd=spent_usd(ended_at),
    )


def _unneeded(state: State, trials: Sequence[int], before: int, iterations: int) -> int:
    """Return the iterations of a stage that trials leave out which ended by themselves, or which the user stopped."""
    over = [trial for trial in map(state.trials.__getitem__, trials) if trial.ended or trial.stopped_at is not None]
    return sum(max(0, before + iterations - max(before, trial.iterations)) for trial in over)


def _trials(state: State, record: StageRecord) -> Counter[str]:
    """Count the stage's trials that run, wait, are done and have failed."""
    if record.ended_at is not None and not state.history.of(Promotion):
        failed = sum(state.trials[trial].status is TrialStatus.FAILED for trial in record.trials)
        return Counter(done=len(record.trials) - failed, failed=failed)
    names = {TrialStatus.RUNNING: "running", TrialStatus.QUEUED: "queued", TrialStatus.FAILED: "failed"}
    return Counter(names.get(state.trials[trial].status, "done") for trial in record.trials)


REFRESHES_PER_S = 4.0
_CHEAP_S = 1e-3
"""A picture that takes longer, for example of thousands of trials, is not taken at every event."""
_SHARE = 0.1
"""Largest share of the time for such pictures."""


def open_view(
    job: Job,
    clock: Callable[[], float],
    stream: TextIO,
    is_terminal: bool,
    *,
    details: bool = True,
    is_rehearsal: bool = False,
) -> AbstractContextManager[Observer]:
    """Return the view for `stream` (stderr): enter it, then give it to the driver as an observer.

    `clock` is the backend's; it is read from another thread. `details`: also the lines about instances. The clock
    of a rehearsal shows no time of day.
    """
    if is_terminal:
        return TerminalView(job, clock, stream, details=details, is_rehearsal=is_rehearsal)
    return PlainView(job, stream, details=details)


class Pictures:
    """Latest picture of a run. One that takes long is taken seldom: it shares the driver's thread."""

    def __init__(self, stopwatch: Callable[[], float] = time.perf_counter) -> None:
        """`stopwatch` is a clock in seconds that measures how long pictures take."""
        self._stopwatch, self._next_at = stopwatch, -math.inf
        self.latest: Progress | None = None

    def take(self, controller: Controller) -> None:
        """Take a picture, unless the one before took long and is fresh."""
        began_at, state = self._stopwatch(), controller.state
        if self.latest is None or began_at >= self._next_at or state.phase is not self.latest.phase:
            self.latest = observe(controller.job, state)
            ended_at = self._stopwatch()
            took_s = ended_at - began_at
            self._next_at = ended_at + (took_s / _SHARE if took_s > _CHEAP_S else 0.0)


class PlainView:
    """View that prints a line for each thing to report, after the time since the start."""

    def __init__(self, job: Job, stream: TextIO, *, details: bool = True) -> None:
        self._narrator = Narrator(job, details=details)
        self._stream = stream

    def __call__(self, event: Event, controller: Controller) -> None:
        """Print the lines about `event`."""
        for line in self._narrator.lines(event, controller):
            print(stamped(line, controller), file=self._stream, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return


class TerminalView:
    """View with the stages in a table at the bottom of the terminal, redrawn also between events, below the lines."""

    def __init__(
        self,
        job: Job,
        clock: Callable[[], float],
        stream: TextIO,
        console: Console | None = None,
        stopwatch: Callable[[], float] = time.perf_counter,
        details: bool = True,
        is_rehearsal: bool = False,
    ) -> None:
        """`stopwatch` is that of the pictures."""
        self._narrator = Narrator(job, details=details)
        self._pictures = Pictures(stopwatch)
        self._job, self._is_rehearsal = job, is_rehearsal
        self._clock = clock
        self._console = console or Console(file=stream)
        self._live = Live(
            get_renderable=self._picture,
            console=self._console,
            refresh_per_second=REFRESHES_PER_S,
            redirect_stdout=False,
        )

    def __call__(self, event: Event, controller: Controller) -> None:
        """Take a picture of the state, and print the lines about `event`."""
        self._pictures.take(controller)
        for line in self._narrator.lines(event, controller):
            text = Text(hanging(stamped(line, controller), self._console.width), style="dim")
            self._console.print(text, soft_wrap=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def _picture(self) -> Group | Text:
        progress = self._pictures.latest
        if progress is None:
            return Text(f"{self._job.name}: starting")
        now = self._clock()
        lines = Table.grid(Column(no_wrap=True), Column())
        for line in summary(progress, now, is_rehearsal=self._is_rehearsal):
            lines.add_row(line[:_LABEL], line[_LABEL:])
        return Group(lines, stage_table(progress, now, self._console.width))


_LABEL = len("time      ")
"""Letters of a label in `summary`, with its blanks."""


def stage_table(progress: Progress, now: float, width: int) -> Table:
    """Return a row for each stage: its trials, instances and cost, against the plan; fits 80 columns and more."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1 if width >= 100 else 0), pad_edge=False, collapse_padding=True)
    for name in ("stage", "run", "wait", "done", "fail"):
        table.add_column(name, justify="right")
    table.add_column("iterations", no_wrap=True)
    for name in ("inst.\n/plan", f"{progress.job.offer.place}s\n/trial", progress.job.offer.unit):
        table.add_column(name, justify="right")
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("plan", justify="right", no_wrap=True, style="dim")
    decimals = usd_decimals(max(progress.spent_usd(now), progress.expected(now).cost_usd))
    for stage in progress.stages:
        table.add_row(*_row(progress, stage, now, decimals), style=_STYLES[stage.phase])
    return table


_STYLES = {"done": "", "current": "bold", "planned": "dim"}


def _row(progress: Progress, stage: StageProgress, now: float, decimals: int) -> list[Text | Table]:
    *counts, failed, _, held, gpus, spent, time, planned = stage_cells(progress, stage, now, decimals)
    rest = [Text(cell) for cell in (held, gpus, spent, time, planned)]
    return [*(Text(cell) for cell in counts), Text(failed, style="red"), _bar(stage), *rest]


def stage_cells(progress: Progress, stage: StageProgress, now: float, decimals: int) -> list[str]:
    """Return the cells of a stage's row, in the order of the columns of `stage_table`."""
    begun = stage.started_s is not None
    spent = time = ""
    if stage.started_s is not None:
        ended_usd = progress.stage_usd(stage, now) if stage.ended_usd is None else stage.ended_usd
        ended_s = progress.elapsed_s(now) if stage.ended_s is None else stage.ended_s
        spent = usd(ended_usd - stage.before_usd, decimals)
        time = duration(max(0.0, ended_s - stage.started_s))
    counts = [str(count or "") for count in (stage.running, stage.queued, stage.done, stage.failed)]
    held = f"{stage.instances if begun else '-'}/{stage.planned_instances}"
    done = f"{stage.iterations_done}/{stage.iterations}"
    gpus = gpus_each(stage.gpus_per_trial, progress.job.offer.trials_per_gpu)
    return [stage.name, *counts, done, held, gpus, spent, time, duration(stage.planned_s)]


def _bar(stage: StageProgress) -> Table:
    grid = Table.grid(padding=(0, 1))
    done, total = stage.iterations_done, stage.iterations
    bar = ProgressBar(max(1, total), done, width=6, complete_style="cyan", finished_style="green")
    grid.add_row(bar, Text(f"{done}/{total}"))
    return grid


def summary(progress: Progress, now: float, *, is_rehearsal: bool = False) -> list[Text]:
    """Return the lines of `rubberband status`: the best so far, time and cost against the limits, and the cloud."""
    job, expected = progress.job, progress.expected(now)
    decimals = usd_decimals(max(progress.spent_usd(now), expected.cost_usd))
    elapsed_s, spent_usd = progress.elapsed_s(now), progress.spent_usd(now)
    within = "" if job.deadline_s is None else f", deadline {local_times(job.deadline, now)}"
    cap = "" if job.max_cost_usd is None else f" of {usd(job.max_cost_usd)}"
    cap += f" {job.offer.unit}" + (" (max_cost)" if cap else "")
    lines = []
    if progress.best is not None:
        trial, found = progress.best
        text = f"best      {job.metric}={number(found.value or 0.0)} (trial {trial}{found.note})"
        lines.append(Text(text, style="bold green"))
    time = Text(f"time      {duration(elapsed_s)}{within}")
    cost = Text(f"cost      {usd(spent_usd, decimals)}{cap}")
    if progress.phase not in (Phase.ENDING, Phase.FINISHED):
        at = None if is_rehearsal else progress.state.started_at + expected.jct_s
        time.append(f"; {ends(at, expected.jct_s - elapsed_s)}")
        if job.deadline_s is not None:
            spare_s = job.deadline_s - expected.jct_s
            verdict = f", {duration(abs(spare_s))} {'to spare' if spare_s >= 0 else 'late'}"
            time.append(verdict, style="green" if spare_s >= 0 else "red")
        cost.append(f"; forecast {usd(max(expected.cost_usd, spent_usd), decimals)}")
    time.append(f"; planned {duration(job.prediction.jct_s)}")
    cost.append(f"; planned {usd(job.prediction.cost_usd, decimals)}")
    lines += [time, cost]
    if bought := _bought(progress.state):
        lines.append(Text(f"cloud     {bought}"))
    if progress.batch_sizes:
        lines.append(Text(f"batch     {_range(progress.batch_sizes)}"))
    if progress.balances:
        trial, use = max(progress.balances, key=lambda one: one[1].saved)
        more = f"; {counted(len(progress.balances) - 1, 'more trial')}" if len(progress.balances) > 1 else ""
        lines.append(Text(f"workers   trial {trial}: {unequal(use)}{more}"))
    if progress.updates:
        trial, made = max(progress.updates, key=lambda one: one[1].updates_per_s)
        lines.append(Text(f"updates   trial {trial}: {update_line(made)}"))
    return lines


def _bought(state: State) -> str:
    """Return `2 on spot; 1 on demand; interrupted 3 times`; empty if all is on demand."""
    markets = Counter(record.market for record in [*state.fleet.live(), *state.fleet.leaving()])
    interrupted = sum(record.was_interrupted for record in state.instances.values())
    if not markets["spot"] and not interrupted:
        return ""
    parts = [f"{count} on {market.replace('on_', '')}" for market, count in sorted(markets.items(), reverse=True)]
    return "; ".join([*parts, *([f"interrupted {counted(interrupted, 'time')}"] if interrupted else [])])


def _range(sizes: Sequence[int]) -> str:
    """Return `256 (1 trial)` or `64 to 512 (6 trials)`."""
    least, most = min(sizes), max(sizes)
    return f"{least:,}{f' to {most:,}' if most > least else ''} ({counted(len(sizes), 'trial')})"


def stamped(line: str, controller: Controller) -> str:
    """Return a line after the time since the start."""
    state = controller.state
    return f"{duration(state.now - state.started_at):>8}  {line}"


REFRESH_S = 1.0
_MOST_LINES = 8
_HEADER = (
    *("stage", "running", "waiting", "done", "failed", "iterations", "instances / plan"),
    *("GPUs per trial", "USD", "time", "plan"),
)
Show = Callable[[str], Callable[[str], None]]
"""Shows HTML, and returns the function that replaces it."""


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


def show_in_cell(text: str) -> Callable[[str], None]:
    """Display HTML in the current cell."""
    from IPython.display import HTML, display

    handle: Any = display(HTML(text), display_id=True)
    return lambda later: handle.update(HTML(later))


class NotebookView:
    """View that redraws once a second, also between events, until it is left."""

    def __init__(
        self,
        job: Job,
        clock: Callable[[], float],
        *,
        details: bool = False,
        show: Show = show_in_cell,
        is_rehearsal: bool = False,
    ) -> None:
        """`clock` is the backend's."""
        self._job, self._clock, self._show, self._is_rehearsal = job, clock, show, is_rehearsal
        self._narrator, self._pictures = Narrator(job, details=details), Pictures()
        self._lines: deque[str] = deque(maxlen=_MOST_LINES)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._redraw, name="rubberband notebook", daemon=True)
        self._update: Callable[[str], None] = lambda _text: None

    def __call__(self, event: Event, controller: Controller) -> None:
        """Take a picture of the state, and keep the lines about `event`."""
        self._pictures.take(controller)
        self._lines.extend(stamped(line, controller) for line in self._narrator.lines(event, controller))

    def __enter__(self) -> Self:
        self._update = self._show(self._picture())
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._update(self._picture())

    def _redraw(self) -> None:
        drawn = ""
        while not self._over.wait(REFRESH_S):
            text = self._picture()
            if text != drawn:
                self._update(text)
                drawn = text

    def _picture(self) -> str:
        progress = self._pictures.latest
        if progress is None:
            return markup.card(self._job.name, markup.lines(["starting"]))
        return progress_html(progress, self._clock(), tuple(self._lines), is_rehearsal=self._is_rehearsal)


def progress_html(progress: Progress, now: float, said: tuple[str, ...] = (), *, is_rehearsal: bool = False) -> str:
    """Return the stages, time and cost, and the latest lines."""
    decimals = usd_decimals(max(progress.spent_usd(now), progress.expected(now).cost_usd))
    rows = [stage_cells(progress, stage, now, decimals) for stage in progress.stages]
    lines = [line.plain for line in summary(progress, now, is_rehearsal=is_rehearsal)]
    offer = progress.job.offer
    header = [in_unit(name.replace("GPU", offer.place), offer.unit) for name in _HEADER]
    return markup.card(progress.job.name, markup.lines(lines), markup.table(header, rows), markup.lines(said))
