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
from typing import Any, Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from rubberband import markup
from rubberband.executor.core.bill import bill_usd
from rubberband.executor.core.controller import Controller
from rubberband.executor.core.events import Event
from rubberband.executor.core.forecast import Forecast, forecast
from rubberband.executor.core.job import Job
from rubberband.executor.core.ranking import best_trained, standing
from rubberband.executor.core.state import LaneState, Phase, StageRecord, State
from rubberband.executor.core.trial_index import RunningTrials, WaitingTrials
from rubberband.executor.core.trial_state import TrialState, TrialStatus
from rubberband.executor.result.parts import StageResult
from rubberband.executor.result.summary import stage_results
from rubberband.executor.run.driver import Observer
from rubberband.units import counted, duration
from rubberband.values.asynchronous import AsyncUse
from rubberband.values.balance import BalanceUse
from rubberband.values.ranking import Standing
from rubberband.views.document import drawn, localised
from rubberband.views.formatting import TextTable, ends, hanging, number, unequal
from rubberband.views.live.narration import Narrator
from rubberband.views.live.progress import cost_line, stage_table, time_line
from rubberband.views.report.tables import update_line


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of a run: a frozen copy, taken at an event and read by another thread until the next.

    Time and bill grow between events, so they are methods of the present time.
    """

    job: Job
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

    def stages(self, now: float) -> tuple[StageResult, ...]:
        """Return the stages at `now`, planned against actual."""
        return stage_results(self.state, self._until(now))

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
        lines, tables = shown(progress, now, is_rehearsal=self._is_rehearsal)
        styles = () if progress.best is None else ("bold green",)
        return Group(*drawn(lines, tables, styles, width=self._console.width))


def shown(progress: Progress, now: float, *, is_rehearsal: bool = False) -> tuple[list[str], list[TextTable]]:
    """Return the lines and the table of a run, as `rubberband status` shows them."""
    lines = summary(progress, now, is_rehearsal=is_rehearsal)
    return localised(lines, [stage_table(progress.stages(now))], unit=progress.job.offer.unit)


def summary(progress: Progress, now: float, *, is_rehearsal: bool = False) -> list[str]:
    """Return the best so far, time and cost against the limits, and use of the cloud, the batch and the workers."""
    job, expected = progress.job, progress.expected(now)
    elapsed_s, spent_usd = progress.elapsed_s(now), progress.spent_usd(now)
    is_over = progress.phase in (Phase.ENDING, Phase.FINISHED)
    at = None if is_rehearsal else progress.state.started_at + expected.jct_s
    lines = []
    if progress.best is not None:
        trial, found = progress.best
        lines.append(f"best      {job.metric}={number(found.value or 0.0)} (trial {trial}{found.note})")
    lines += [
        time_line(
            elapsed_s,
            deadline=job.deadline or None,
            end="" if is_over else ends(at, expected.jct_s - elapsed_s),
            slack_s=None if is_over or job.deadline_s is None else job.deadline_s - expected.jct_s,
            planned_s=job.prediction.jct_s,
        ),
        cost_line(
            spent_usd,
            max_cost_usd=job.max_cost_usd,
            forecast_usd=None if is_over else max(expected.cost_usd, spent_usd),
            planned_usd=job.prediction.cost_usd,
        ),
    ]
    if bought := _bought(progress.state):
        lines.append(f"cloud     {bought}")
    if progress.batch_sizes:
        lines.append(f"batch     {_range(progress.batch_sizes)}")
    if progress.balances:
        trial, use = max(progress.balances, key=lambda one: one[1].saved)
        more = f"; {counted(len(progress.balances) - 1, 'more trial')}" if len(progress.balances) > 1 else ""
        lines.append(f"workers   trial {trial}: {unequal(use)}{more}")
    if progress.updates:
        trial, made = max(progress.updates, key=lambda one: one[1].updates_per_s)
        lines.append(f"updates   trial {trial}: {update_line(made)}")
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
    lines, (table,) = shown(progress, now, is_rehearsal=is_rehearsal)
    return markup.card(
        progress.job.name, markup.lines(lines), markup.table(table.header, table.rows), markup.lines(said)
    )
