"""One experiment's journal, followed: folded as it grows, for the watcher, and read by requests at the same time."""

from __future__ import annotations

import copy
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from rubberband.api.store.protocol import Store
from rubberband.api.store.records import Entry, Submission, Summary
from rubberband.cloud.steady import time_of
from rubberband.errors import DamagedJournalError, JournalError, RubberbandError
from rubberband.executor.core import rules
from rubberband.executor.core.budget import bill_usd
from rubberband.executor.core.controller import Controller
from rubberband.executor.core.events import Event, TrialFailed
from rubberband.executor.core.forecast import forecast
from rubberband.executor.core.state import Phase, State
from rubberband.executor.core.trials import best_trial
from rubberband.executor.journal.folder import ExperimentFolder
from rubberband.executor.journal.hosting import Ending, Mark, is_hosted, read_ending, read_mark
from rubberband.executor.journal.inbox import Inbox
from rubberband.executor.journal.journal import Header, encode_event
from rubberband.executor.journal.reading import JournalReader
from rubberband.executor.requests import asked_limits
from rubberband.executor.result import Result
from rubberband.executor.salvage import explained, salvage
from rubberband.states import ExperimentState

if TYPE_CHECKING:
    from rubberband.executor.core.extending import Extension, Limits

# What is kept of an experiment's journal: its events as lines of the feed, where it stands, and its summary. Pure.
#
# Instants are Unix time: those of a virtual run, whose clock starts at 0, are counted from when it was made.


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What was seen of an experiment's folder: first whether somebody is at work, then what is written."""

    at_work: bool
    """Whether a process of the service, or a driver that was started by hand, is at work."""
    mark: Mark | None
    ending: Ending | None
    outcome: ExperimentState | None
    """How its journal says that it ended; None while that is open."""
    reason: str
    """The journal's, of the outcome, or of what keeps it from going on."""
    has_begun: bool
    """Whether there is a journal."""
    stopped: str = ""
    """Why its latest driver gave up, by its journal; empty if it did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where an experiment stands, and why."""

    state: ExperimentState
    reason: str = ""


def standing(row: Submission, sight: Sight) -> Standing | None:
    """Where an experiment stands by what was seen; None if the process that it was given was never started."""
    if sight.at_work and sight.mark is not None and sight.mark.waits_for and sight.mark.attempt == row.attempt:
        return Standing(state=ExperimentState.STARTING, reason=sight.mark.waits_for)
    if row.state is ExperimentState.STARTING:
        return _starting(row, sight)
    if not sight.has_begun:
        return Standing(state=row.state, reason=row.reason)
    if sight.outcome is not None:
        return Standing(state=sight.outcome, reason=sight.reason)
    return Standing(state=ExperimentState.RUNNING, reason=sight.reason) if sight.at_work else _cut_off(row, sight)


def _starting(row: Submission, sight: Sight) -> Standing | None:
    if sight.at_work:
        # What was resumed has its old outcome in the journal until its driver goes on.
        settled = sight.outcome is not None and (row.attempt > 1 or not row.words)
        if not sight.has_begun or settled:
            return Standing(state=row.state, reason=row.reason)
        return Standing(state=sight.outcome or ExperimentState.RUNNING, reason=sight.reason)
    if sight.mark is None or sight.mark.attempt < row.attempt:
        return None
    if sight.outcome is not None:
        return Standing(state=sight.outcome, reason=_error(row, sight) or sight.reason)
    if sight.has_begun or _told(row, sight) is None:
        return _cut_off(row, sight)
    cancelled = _told(row, sight) == CANCELLED_EXIT_CODE
    return Standing(
        state=ExperimentState.CANCELLED if cancelled else ExperimentState.REFUSED, reason=_error(row, sight)
    )


CANCELLED_EXIT_CODE = 130


def _told(row: Submission, sight: Sight) -> int | None:
    """The exit code that the row's latest process left."""
    return None if sight.ending is None or sight.ending.attempt != row.attempt else sight.ending.exit_code


def _error(row: Submission, sight: Sight) -> str:
    return "" if sight.ending is None or sight.ending.attempt != row.attempt else sight.ending.error


def _cut_off(row: Submission, sight: Sight) -> Standing:
    told = (
        _error(row, sight)
        or sight.stopped
        or "its process is gone without a word: it was killed, or the machine was restarted"
    )
    return Standing(state=ExperimentState.INTERRUPTED, reason=f"{told}; resume it to go on")


def outcome_of(controller: Controller) -> tuple[ExperimentState | None, str]:
    """How an experiment ended and why, by its journal; None while that is open, and what keeps it from going on."""
    state = controller.state
    if state.phase is not Phase.FINISHED or state.outcome is None:
        return None, rules.fails_to_start(state) if state.failed_starts else ""
    return ExperimentState(state.outcome), state.reason


def entries(header: Header, events: Sequence[tuple[int, Event]]) -> list[Entry]:
    """Events of a journal as lines of the feed."""
    return [_entry(header, seq, event) for seq, event in events]


def _entry(header: Header, seq: int, event: Event) -> Entry:
    kind, body = encode_event(event)
    data = json.loads(body)
    occurred_at = data.pop("occurred_at") + header.offset_s
    return Entry(experiment=header.name, seq=seq, kind=kind, occurred_at=occurred_at, data=data)


def summary_of(header: Header, controller: Controller, now: float) -> Summary:
    """What a list shows of an experiment, as of `now` on the clock of its events."""
    job, state = controller.job, controller.state
    at = state.ended_at if state.ended_at is not None else max(now, state.now)
    begun = state.phase is not Phase.NEW
    expected = forecast(job, state, at) if begun else None
    best = best_trial(state, job.metric, job.mode)
    return Summary(
        trials=len(state.trials),
        stages=len(job.stages),
        stage=state.stages[-1].stage if state.stages else 0,
        iterations=sum(trial.iterations for trial in state.trials),
        target_iterations=sum(stage.trials * stage.iterations for stage in job.stages),
        instances=len(state.current()),
        started_at=state.started_at + header.offset_s if begun else None,
        ended_at=None if state.ended_at is None else state.ended_at + header.offset_s,
        jct_s=_jct_s(state, at) if begun else 0.0,
        cost_usd=bill_usd(job, state, at) if begun else 0.0,
        planned_jct_s=job.prediction.jct_s,
        planned_cost_usd=job.prediction.cost_usd,
        forecast_jct_s=job.prediction.jct_s if expected is None else expected.jct_s,
        forecast_cost_usd=job.prediction.cost_usd if expected is None else expected.cost_usd,
        deadline_s=job.deadline_s,
        max_cost_usd=job.max_cost_usd,
        metric=job.metric,
        mode=job.mode,
        best_value=None if best is None else best.metric(job.metric),
        best_trial=None if best is None else best.trial,
    )


def _jct_s(state: State, at: float) -> float:
    last_sync = state.stages[-1].ended_at if state.outcome == "done" else None
    return (at if last_sync is None else last_sync) - state.started_at


FRESH_S = 0.25
"""A result of a running experiment is given again for so long: only its clock went on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a trial's attempt failed, trace-back included."""

    seq: int
    trial: int
    lines: tuple[str, ...]


class Observed:
    """A journal that is followed. Safe to use from several threads; what is asked between refreshes reads no file."""

    def __init__(self, folder: ExperimentFolder, *, clock: Callable[[], float] | None = None) -> None:
        """Open the journal and read it as far as it goes; `clock` is the experiment's, unless another one is given.

        Raises JournalError or InputError.
        """
        self.folder, self._clock = folder, clock or partial(time_of, folder.instances)
        self._lock = threading.RLock()
        self._reader = JournalReader(folder)
        self._live = False
        self.failures: list[Failure] = []
        self.count = 0
        """How many events were read."""
        self._latest: tuple[int, float, Result] | None = None

    @property
    def header(self) -> Header:
        """What the experiment was before its first event."""
        return self._reader.header

    @property
    def controller(self) -> Controller:
        """The state as far as it was read; to be looked at by the thread that refreshes."""
        return self._reader.controller

    def refresh(self, *, live: bool) -> list[tuple[int, Event]]:
        """Read what is new: (sequence number, event). `live`: a driver is at work, so that time goes on between events.

        Raises JournalError.
        """
        with self._lock:
            self._live = live and not self.header.kind.is_simulated
            events = self._reader.refresh()
            self.count += len(events)
            for seq, event in events:
                if isinstance(event, TrialFailed):
                    said = f"attempt {event.attempt} {event.kind}: {event.message}\n{event.details}"
                    self.failures.append(Failure(seq=seq, trial=event.trial, lines=tuple(said.splitlines())))
            return events

    @property
    def now(self) -> float:
        """The instant up to which it is reckoned, on the clock of its events."""
        return self._clock() if self._live else self.controller.state.now

    @property
    def present(self) -> float:
        """Now, by the experiment's clock, also where nobody is at work on it."""
        return self._clock()

    def summary(self) -> Summary:
        """What a list shows of it."""
        with self._lock:
            return summary_of(self.header, self.controller, self.now)

    def result(self) -> Result:
        """What came of it so far."""
        with self._lock:
            now = self._clock()
            if self._latest is not None:
                count, at, latest = self._latest
                if count == self.count and 0.0 <= now - at < FRESH_S:
                    return latest
            result = self._reader.result(self.now)
            self._latest = self.count, now, result
            return result

    def limits(self, *, deadline: object, max_cost_usd: float | None) -> Limits:
        """Other limits as the driver counts them. Raises InputError for what is none, or less than it has."""
        from rubberband.executor.core.extending import limits_of

        with self._lock:
            controller = self._as_asked()
            return limits_of(
                self.header, controller.job, controller.state, deadline=deadline, max_cost_usd=max_cost_usd
            )

    @property
    def limits_in_force(self) -> Limits:
        """The limits that it has, those that were asked for meanwhile included, as the driver counts them."""
        from rubberband.executor.core.extending import Limits

        with self._lock:
            job = self._as_asked().job
            return Limits(deadline_s=job.deadline_s, max_cost_usd=job.max_cost_usd)

    def extension(self, limits: Limits, *, driven: bool) -> Extension:
        """What other limits would change. It may take long. Raises InputError."""
        from rubberband.executor.core.extending import extension

        with self._lock:
            controller = self._as_asked()
            job, state = controller.job, copy.deepcopy(controller.state)
            now = self.now if self.header.kind.is_simulated else self.present
        # Planning may take long, and who follows the journal must not wait for it.
        limited = {"deadline_s": limits.deadline_s, "max_cost_usd": limits.max_cost_usd}
        return extension(job, state, now, driven=driven, **limited)

    def has_taken(self, request: str) -> bool:
        """Whether its driver took in what was asked by this id, or other limits are about to be."""
        with self._lock:
            return request in self._as_asked().state.requests

    def granted(self) -> Extension:
        """The limits in force, as they are told to who asked for them already."""
        from rubberband.executor.core.extending import Extension, Outlook

        with self._lock:
            controller = self._as_asked()
            job, state = controller.job, controller.state
            expected = forecast(job, state, max(self.now, state.now))
            outlook = Outlook(
                jct_s=expected.jct_s,
                cost_usd=expected.cost_usd,
                deadline_s=job.deadline_s,
                max_cost_usd=job.max_cost_usd,
                plan=state.plan,
                feasible=job.deadline_s is None or expected.jct_s <= job.deadline_s,
                reason="these limits are granted already",
            )
            return Extension(before=outlook, after=outlook, stage=len(state.stages), applied=True)

    @property
    def max_cost_usd(self) -> float | None:
        """What it may cost in all, profiling and limits that were asked for meanwhile included; None: no limit."""
        with self._lock:
            most_usd = self._as_asked().job.max_cost_usd
        used_usd: float = self.header.setup.get("profiling_cost_usd", 0.0)
        return None if most_usd is None else most_usd + used_usd

    def goes_on(self) -> bool:
        """Whether a resume goes on with it, other limits that were asked for meanwhile included."""
        with self._lock:
            return not self._as_asked().is_over

    @property
    def is_ending(self) -> bool:
        """Whether it was giving everything back, to end."""
        with self._lock:
            return self.controller.state.phase is Phase.ENDING

    def _as_asked(self) -> Controller:
        """The controller once the limits are taken in that lie in the inbox."""
        events = asked_limits(Inbox(self.folder.inbox), self.controller, self.controller.state.now)
        if not events:
            return self.controller
        asked = copy.deepcopy(self.controller)
        for event in events:
            asked.handle(event)
        return asked

    def sight(self, at_work: bool) -> Sight:
        """What its folder shows; `at_work` was looked at before this was refreshed."""
        outcome, reason = outcome_of(self.controller)
        return Sight(
            at_work=at_work,
            mark=read_mark(self.folder),
            ending=read_ending(self.folder),
            outcome=outcome,
            reason=reason,
            has_begun=True,
            stopped=self.controller.state.stopped,
        )

    def close(self) -> None:
        """Let go of the journal. What was read can still be asked for."""
        with self._lock:
            self._reader.close()


def at_work(folder: ExperimentFolder) -> bool:
    """Whether a process of the service, or a driver that was started by hand, is at work on an experiment."""
    return is_hosted(folder) or folder.driven


def sight_before(folder: ExperimentFolder, at_work: bool) -> Sight:
    """What the folder of an experiment shows that has no journal."""
    return Sight(
        at_work=at_work, mark=read_mark(folder), ending=read_ending(folder), outcome=None, reason="", has_begun=False
    )


# One experiment, followed step by step: what its process journals goes into the feed, and where it stands is kept.


log = logging.getLogger("rubberband.api.experiments.service")

BATCH = 1000
"""Events that are added to the feed in one write."""
BUSY_S = 0.5
"""A summary is kept so often while events come."""
IDLE_S = 2.0
"""Likewise while only its clock and its bill go on."""
MISREADS = 5
"""A journal that could not be read so often in a row is taken to be unreadable."""


class Follower:
    """Follows one experiment. For one thread; `observed` may be read by others."""

    def __init__(
        self,
        folder: ExperimentFolder,
        store: Store,
        wake: Callable[[], None],
        *,
        patience: int = MISREADS,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`wake` is called when there is more to read in the feed; after `patience` misreads it is unreadable.

        `clock` is Unix time, in place of this machine's and of the experiment's own.
        """
        self._patience = patience
        self._folder, self._store, self._wake = folder, store, wake
        self._clock, self._experiments_clock = clock or time.time, clock
        self.observed: Observed | None = None
        """Its journal, from when there is one."""
        self._told = -1
        """The last place of the journal that is in the feed."""
        self._pending: list[tuple[int, Event]] = []
        self._misreads = 0
        self._summarised_at = 0.0
        self._summarised_count = -1

    def step(self, row: Submission) -> Submission | None:
        """See what is new; its row as it is kept now, or None if the process that it was given was never started.

        Raises JournalError if the service's store does not answer; nothing is lost then.
        """
        found = self._seen(row)
        return None if found is None else self._keep(row, found)

    def first_row(self) -> Submission | None:
        """The row of an experiment that was run by hand, with its events told; None as long as it cannot be read."""
        header_at = self._clock()
        row = Submission(
            name=self._folder.name, state=ExperimentState.RUNNING, created_at=header_at, changed_at=header_at
        )
        found = self._seen(row)
        if found is None or (self.observed is None and found.state is not ExperimentState.UNREADABLE):
            return None
        created_at, summary = header_at, Summary()
        if self.observed is not None:
            created_at, summary = self.observed.header.created_at, self.observed.summary()
        elif (left := salvage(self._folder)) is not None:
            created_at = left.header.created_at
            summary = summary_of(left.header, left.controller, left.controller.state.now)
        return replace(row, created_at=created_at, state=found.state, reason=found.reason, summary=summary)

    def _seen(self, row: Submission) -> Standing | None:
        try:
            sight = self._sight()
        except Exception as error:
            return self._unreadable(row, error)
        self._misreads = 0
        self._tell()
        return standing(row, sight)

    def _sight(self) -> Sight:
        """Somebody at work is looked for first: what ended since is not taken to be cut off before the next look."""
        busy = at_work(self._folder)
        if self.observed is None:
            if not self._folder.exists:
                return sight_before(self._folder, busy)
            told = self._store.last_seqs([self._folder.name]).get(self._folder.name, -1)
            self.observed, self._told = Observed(self._folder, clock=self._experiments_clock), told
        mark = read_mark(self._folder)
        fresh = self.observed.refresh(live=busy and not (mark is not None and mark.waits_for))
        self._pending += [(seq, event) for seq, event in fresh if seq > self._told]
        return self.observed.sight(busy)

    def _tell(self) -> None:
        told = 0
        try:
            while self.observed is not None and (batch := self._pending[told : told + BATCH]):
                self._store.append(entries(self.observed.header, batch))
                told += len(batch)
                self._wake()
        finally:
            del self._pending[:told]

    def _unreadable(self, row: Submission, error: Exception) -> Standing:
        self._store.check()
        self.close()
        self._misreads += 1
        if self._misreads < self._patience:
            return Standing(state=row.state, reason=row.reason)
        if isinstance(error, DamagedJournalError):
            if row.state is ExperimentState.UNREADABLE:  # it took long enough to find out what is left of it
                return Standing(state=row.state, reason=row.reason)
            error = explained(self._folder, error)
        told = f"its journal cannot be read: {' '.join(str(error).split()) or type(error).__name__}"
        if row.state is not ExperimentState.UNREADABLE:
            log.error("experiment %s: %s", row.name, told, exc_info=not isinstance(error, RubberbandError))
        return Standing(state=ExperimentState.UNREADABLE, reason=told)

    def _keep(self, row: Submission, found: Standing) -> Submission:
        """Write down what changed."""
        moved = (found.state, found.reason) != (row.state, row.reason)
        summary = self._summary(row, at_once=moved)
        if not moved and summary is None:
            return row
        at = self._clock()
        kept = self._store.change(
            row.name,
            at=at,
            state=found.state if moved else None,
            reason=found.reason if moved else None,
            expected={row.state},
            summary=summary,
        )
        if not kept:  # a request changed it meanwhile
            return self._store.submission(row.name) or row
        if moved:
            self._wake()
        return replace(row, state=found.state, reason=found.reason, changed_at=at, summary=summary or row.summary)

    def _summary(self, row: Submission, *, at_once: bool) -> Summary | None:
        """Its summary, if that changed and is due."""
        if self.observed is None:
            return None
        now, count = time.monotonic(), self.observed.count
        due_s = IDLE_S if count == self._summarised_count else BUSY_S
        if not at_once and now - self._summarised_at < due_s:
            return None
        self._summarised_at, self._summarised_count = now, count
        summary = self.observed.summary()
        return None if summary == row.summary else summary

    def close(self) -> None:
        """Let go of the journal."""
        observed, self.observed = self.observed, None
        self._pending = []
        if observed is not None:
            with suppress(JournalError):
                observed.close()
