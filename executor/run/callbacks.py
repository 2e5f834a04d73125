"""Callbacks: Python objects of the user that are called while an experiment runs, in the driver's process.

Each has a thread that follows the journal. A slow callback holds up nothing, and each call is about durable events.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

from rubberband.errors import InputError
from rubberband.executor.core.bill import bill_usd
from rubberband.executor.core.controller import Controller
from rubberband.executor.core.events import Event, TrialReported
from rubberband.executor.core.state import Phase, StageRecord, State
from rubberband.executor.core.trial_state import TrialStatus
from rubberband.executor.journal.folder import ExperimentFolder
from rubberband.executor.result.result import Result
from rubberband.executor.run.follower import JournalFollower

PAUSE_S = 0.25
"""Between two looks at the journal."""
RETRY_S = 20.0
"""Between two tries to reach a tracker."""
_log = logging.getLogger("rubberband.callbacks")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """An experiment that a driver begins or resumes.

    Examples:
        >>> class Start(rubberband.Callback):
        ...     def on_experiment_start(self, run):
        ...         print(run.name)
    """

    name: str
    metric: str
    mode: Literal["max", "min"]
    num_trials: int
    experiment: Mapping[str, Any]
    """The experiment in the words of its file."""
    is_resumed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportInfo:
    """An iteration that a trial has reported.

    Examples:
        >>> class Progress(rubberband.Callback):
        ...     def on_trial_report(self, report):
        ...         print(report.trial, report.iteration, report.metrics)
    """

    trial: int
    config: Mapping[str, Any]
    iterations: int
    """Done by the trial in all. A trial that lost a checkpoint reports the iterations since again."""
    metrics: Mapping[str, float]
    stage: int
    elapsed_s: float
    """From the start of the experiment."""
    reported_at: float
    """Unix time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureInfo:
    """A trial that has failed for good: it is not tried again.

    Examples:
        >>> class Alarm(rubberband.Callback):
        ...     def on_trial_failure(self, failure):
        ...         print(f"trial {failure.trial}: {failure.failure}")
    """

    trial: int
    config: Mapping[str, Any]
    iterations: int
    """Done by the trial in all."""
    failure: str
    """The reason, in one line."""
    elapsed_s: float
    """From the start of the experiment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncInfo:
    """The end of a stage: its trials are ranked, and the best go on.

    Examples:
        >>> class Ranking(rubberband.Callback):
        ...     def on_sync(self, sync):
        ...         print(sync.stage, sync.ranking[:3], f"{sync.cost_usd:.2f} USD")
    """

    stage: int
    bracket: int | None
    """None if there is only one."""
    trials: tuple[int, ...]
    ranking: tuple[int, ...]
    """Best first, without failed trials."""
    promoted: tuple[int, ...]
    """The trials that go on; after the last stage of a bracket, none."""
    elapsed_s: float
    """From the start of the experiment."""
    cost_usd: float
    """The bill so far."""


class Callback:
    """Base class of what is called while an experiment runs: `tune(..., callbacks=[MyCallback()])`.

    Override the methods that you need. They run in the driver's process, in a thread of the callback, one at a time and
    in order; a slow one does not hold up the run, and `tune` returns after the last. An exception is logged once, and
    the run continues. After a resume only new reports arrive.

    Examples:
        >>> class Bill(rubberband.Callback):
        ...     def on_end(self, result):
        ...         print(result.outcome, len(result.trials))
        >>> experiment = rubberband.load_experiment("experiment.yaml")
        >>> _ = rubberband.tune(experiment=experiment, new=True, verbose=0, callbacks=[Bill()])
        done 8
    """

    def on_experiment_start(self, run: RunInfo) -> None:
        """The driver begins the experiment, or resumes it."""

    def on_trial_report(self, report: ReportInfo) -> None:
        """A trial has reported an iteration."""

    def on_trial_failure(self, failure: FailureInfo) -> None:
        """A trial has failed, and is not tried again."""

    def on_sync(self, sync: SyncInfo) -> None:
        """A stage is over."""

    def on_end(self, result: Result) -> None:
        """The experiment has ended: done, failed, cancelled or by its budget."""


class Tracker(Callback):
    """Callback that writes elsewhere, and continues there after a resume.

    It may keep what it was given until `flush`. If a call or `flush` raises, it is tried again later, so calls must
    be safe to repeat.
    """

    label = "tracker"
    """Its name in messages."""

    def open(self, state: dict[str, Any]) -> int:
        """Return the sequence number of the last event that it has kept; -1: it wants all.

        `state` is saved after each `flush`, and given back after a resume.
        """
        return int(state.get("seq", -1))

    def flush(self) -> None:
        """Write what was taken in."""

    def close(self) -> None:
        """Release everything."""


Notice = RunInfo | ReportInfo | FailureInfo | SyncInfo | Result


@dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    seq: int
    notice: Notice


class Translator:
    """Turns the events of a growing journal into calls; it sees every event once."""

    def __init__(self, follower: JournalFollower) -> None:
        self._follower = follower
        self._synced: set[int] = set()
        self._reported: dict[int, object] = {}
        self._failures = 0
        self._has_ended = False

    @property
    def run(self) -> RunInfo:
        """The experiment; whether it is resumed is known once its journal was read."""
        job = self._follower.header.job
        return RunInfo(
            name=job.name,
            metric=job.metric,
            mode=job.mode,
            num_trials=job.num_trials,
            experiment=self._follower.header.setup.get("experiment", {}),
            is_resumed=self._follower.seq >= 0,
        )

    def read(self) -> Iterator[_Item]:
        """Read the new events, and yield what they mean."""
        for seq, event in self._follower.each():
            for notice in self._meaning(event):
                yield _Item(seq=seq, notice=notice)

    @property
    def _state(self) -> State:
        return self._follower.controller.state

    def _meaning(self, event: Event) -> Iterator[Notice]:
        state = self._state
        if isinstance(event, TrialReported):
            yield from self._report(event)
        yield from self._failed()
        for stage in state.stages:
            if stage.ended_at is not None and stage.stage not in self._synced:
                self._synced.add(stage.stage)
                yield self._sync(stage)
        has_ended = state.phase is Phase.FINISHED
        if has_ended and not self._has_ended:
            yield self._follower.result()
        self._has_ended = has_ended

    def _report(self, event: TrialReported) -> Iterator[ReportInfo]:
        """Yield a report that counted: one of an attempt that was stopped does not."""
        trial = self._state.trials[event.trial]
        reports = trial.reports
        if not trial.has_reported or reports[-1] is self._reported.get(event.trial):
            return
        self._reported[event.trial] = reports[-1]
        yield ReportInfo(
            trial=event.trial,
            config=self._config(event.trial),
            iterations=event.iterations,
            metrics=event.metrics,
            stage=reports[-1].stage,
            elapsed_s=event.occurred_at - self._state.started_at,
            reported_at=event.occurred_at + self._follower.header.offset_s,
        )

    def _failed(self) -> Iterator[FailureInfo]:
        """Yield the trials that have failed for good since the last call."""
        state = self._state
        new, self._failures = state.failed[self._failures :], len(state.failed)
        for trial in map(state.trials.__getitem__, new):
            if trial.status is TrialStatus.FAILED and trial.failure is not None:
                yield FailureInfo(
                    trial=trial.trial,
                    config=self._config(trial.trial),
                    iterations=trial.iterations,
                    failure=trial.failure[1],
                    elapsed_s=state.now - state.started_at,
                )

    def _config(self, trial: int) -> Mapping[str, Any]:
        state = self._state
        drawn = state.forked_configs.get(trial) or state.sampled_configs.get(trial)
        return drawn or self._follower.header.setup["configurations"][trial]

    def _sync(self, stage: StageRecord) -> SyncInfo:
        job, state = self._follower.controller.job, self._state
        bracket = job.bracket_of(stage.stage)
        goes_on = stage.ranking and stage.stage + 1 < bracket.end_stage
        return SyncInfo(
            stage=stage.stage,
            bracket=bracket.bracket if job.is_divided else None,
            trials=tuple(stage.trials),
            ranking=tuple(stage.ranking),
            promoted=tuple(job.promoted(stage)) if goes_on else (),
            elapsed_s=state.now - state.started_at,
            cost_usd=bill_usd(state, state.now),
        )


class CallbackThread:
    """Thread of one callback, which follows the journal; an observer of the driver, which wakes it."""

    def __init__(
        self,
        folder: ExperimentFolder,
        callback: Callback,
        *,
        state: dict[str, Any] | None = None,
        save: Callable[[], None] = lambda: None,
        last_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`state` is what a tracker keeps over a resume, and `save` makes it durable. `last_s` is the longest wait for
        its last calls; None: no limit.
        """
        self._callback, self._state, self._save, self._last_s, self._clock = callback, state, save, last_s, clock
        self._follower = JournalFollower(folder)
        self._translator = Translator(self._follower)
        earlier = deque(self._translator.read())
        self._after = self._follower.seq
        self._pending = deque([_Item(seq=-1, notice=self._translator.run)])
        if isinstance(callback, Tracker):
            self._after = callback.open(state if state is not None else {})
            self._pending += [item for item in earlier if item.seq > self._after]
        self._news, self._closing = threading.Event(), threading.Event()
        self._unsaved: deque[_Item] = deque()
        """Items that a tracker has taken in and not flushed yet."""
        self._has_warned = False
        self._retry_at = 0.0
        self._thread = threading.Thread(target=self._run, name=f"rubberband {self._name}", daemon=True)

    @property
    def _name(self) -> str:
        return self._callback.label if isinstance(self._callback, Tracker) else type(self._callback).__name__

    def __call__(self, event: Event, controller: Controller) -> None:
        """Wake the thread."""
        self._news.set()

    def start(self) -> None:
        """Begin to call."""
        self._news.set()
        self._thread.start()

    def close(self, error: BaseException | None = None) -> None:
        """Wait for the last calls."""
        self._closing.set()
        self._news.set()
        self._thread.join(self._last_s)
        if self._thread.is_alive():
            _log.warning("%s does not answer; %s", self._name, self._lacking())

    def _run(self) -> None:
        with closing(self._follower):
            while True:
                self._news.wait(RETRY_S if self._pending or self._unsaved else None)
                self._news.clear()
                is_last = self._closing.is_set()
                try:
                    self._pending += self._translator.read()
                    self._deliver(is_last)
                except Exception:  # such as a journal that cannot be read, which the driver reports
                    _log.warning("%s has stopped", self._name, exc_info=True)
                    return
                if is_last:
                    break
                self._closing.wait(PAUSE_S)
        if self._pending or self._unsaved:
            _log.warning("%s", self._lacking())
        if isinstance(self._callback, Tracker):
            self._guarded(self._callback.close)

    def _deliver(self, is_last: bool) -> None:
        if self._clock() < self._retry_at and not is_last:
            return
        callback = self._callback
        if not isinstance(callback, Tracker):
            while self._pending:
                self._guarded(partial(self._tell, self._pending.popleft().notice))
            return
        while self._pending:
            if not self._guarded(partial(self._tell, self._pending[0].notice)):
                self._retry_at = self._clock() + RETRY_S
                return
            self._unsaved.append(self._pending.popleft())
        if self._unsaved and self._guarded(callback.flush):
            self._acknowledge()
        elif self._unsaved:
            self._retry_at = self._clock() + RETRY_S

    def _acknowledge(self) -> None:
        self._has_warned = False
        if self._state is not None:
            self._state["seq"] = max(self._unsaved[-1].seq, self._after)
            self._guarded(self._save)
        self._unsaved.clear()

    def _tell(self, notice: Notice) -> None:
        match notice:
            case RunInfo():
                self._callback.on_experiment_start(notice)
            case ReportInfo():
                self._callback.on_trial_report(notice)
            case FailureInfo():
                self._callback.on_trial_failure(notice)
            case SyncInfo():
                self._callback.on_sync(notice)
            case _:
                self._callback.on_end(notice)

    def _guarded(self, call: Callable[[], None]) -> bool:
        """Call; log what it raises, once. Returns whether it did not raise."""
        try:
            call()
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                if isinstance(self._callback, Tracker):
                    reason = " ".join(str(error).split())[:300]
                    _log.warning(
                        "%s cannot be reached (%s: %s); the run continues, and it is tried again",
                        *(self._name, type(error).__name__, reason),
                    )
                else:
                    _log.warning(
                        "the callback %s raised an error, which is shown once; the run continues",
                        self._name,
                        exc_info=True,
                    )
            return False
        return True

    def _lacking(self) -> str:
        reports = sum(isinstance(item.notice, ReportInfo) for item in (*self._unsaved, *self._pending))
        return f"{self._name} lacks {reports} reports; `rubberband export --reports` has them"


class JournalThread(Protocol):
    """Thread that follows the journal; an observer of the driver, which wakes it."""

    def __call__(self, event: Event, controller: Controller) -> None: ...
    def start(self) -> None: ...
    def close(self, error: BaseException | None = None) -> None: ...


@contextmanager
def calling(threads: Sequence[JournalThread]) -> Iterator[Sequence[JournalThread]]:
    """Run the threads, to be given to the driver as observers; at the end, wait for their last calls."""
    for thread in threads:
        thread.start()
    ended_by = None
    try:
        yield threads
    except BaseException as error:
        ended_by = error
        raise
    finally:
        for thread in threads:
            thread.close(ended_by)


def check_callbacks(callbacks: Sequence[Any]) -> None:
    """Raise InputError for an object that is no Callback."""
    for callback in callbacks:
        if not isinstance(callback, Callback):
            kind = callback.__qualname__ if isinstance(callback, type) else type(callback).__name__
            remedy = f"give {kind}()" if isinstance(callback, type) else "inherit from rubberband.Callback"
            raise InputError(f"callbacks: {kind} is not an instance of rubberband.Callback; {remedy}")
