"""A journal that is read: followed as it grows, for several threads, or whole, or as far as a damaged one goes.

Instants are Unix time; a virtual run, whose clock starts at 0, counts from its creation.
"""

from __future__ import annotations

import copy
import json
import re
import sqlite3
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rubberband.cloud.clock import time_of
from rubberband.errors import DamagedJournalError, InputError, JournalError
from rubberband.executor.core.bill import bill_usd
from rubberband.executor.core.controller import Controller
from rubberband.executor.core.events import Event, TrialFailed
from rubberband.executor.core.forecast import Forecast, expected_iterations, forecast
from rubberband.executor.core.limits import fails_to_start
from rubberband.executor.core.ranking import best_trained, standing
from rubberband.executor.core.state import Phase, State
from rubberband.executor.core.trial_state import TrialStatus
from rubberband.executor.journal.folder import ExperimentFolder
from rubberband.executor.journal.inbox import DriverRequest, Inbox, NewTrials, asked_first, is_hosted
from rubberband.executor.journal.journal import (
    Header,
    Journal,
    UnknownWordsError,
    decode_event,
    decode_job,
    from_elsewhere,
    written_by,
)
from rubberband.executor.result.result import Result
from rubberband.executor.result.summary import jct_s, summarise
from rubberband.executor.sampling import Additions
from rubberband.states import ExperimentState
from rubberband.units import month_begin, shown
from rubberband.values.submission import Summary

if TYPE_CHECKING:
    from rubberband.executor.core.extending import Extension, Limits


def outcome_of(controller: Controller) -> tuple[ExperimentState | None, str]:
    """Return how an experiment ended and why; None while it has not, and what keeps it from starting."""
    state = controller.state
    if state.phase is not Phase.FINISHED or state.outcome is None:
        return None, fails_to_start(state) if state.fleet.failed_starts else ""
    return ExperimentState(state.outcome), state.reason


def summary_of(header: Header, controller: Controller, now: float) -> Summary:
    """Return an experiment's row in a list, as of `now` on the clock of its events."""
    job, state = controller.job, controller.state
    as_of = state.ended_at if state.ended_at is not None else max(now, state.now)
    begun = state.phase is not Phase.NEW
    expected = forecast(state, as_of) if begun else None
    profile_usd = profiling_usd(header)
    cost_usd = profile_usd + (bill_usd(state, as_of) if begun else 0.0)
    month_at = month_begin(as_of + header.offset_s)
    best = best_trained(state)
    found = None if best is None else standing(state, best)
    return Summary(
        trials=len(state.trials),
        stages=len(job.stages),
        stage=_stage_of(state),
        brackets=len(job.all_brackets()),
        iterations=sum(trial.iterations for trial in state.trials),
        target_iterations=expected_iterations(state),
        instances=len(state.fleet.current()),
        max_instances=state.instance_cap,
        started_at=state.started_at + header.offset_s if begun else None,
        ended_at=None if state.ended_at is None else state.ended_at + header.offset_s,
        jct_s=jct_s(state, as_of) if begun else 0.0,
        unit=job.offer.unit,
        cost_usd=cost_usd,
        profiling_cost_usd=profile_usd,
        month_at=month_at,
        month_cost_usd=cost_usd - _before_usd(header, state, month_at),
        planned_jct_s=job.prediction.jct_s,
        planned_cost_usd=profile_usd + job.prediction.cost_usd,
        forecast_jct_s=job.prediction.jct_s if expected is None else expected.jct_s,
        forecast_cost_usd=profile_usd + (job.prediction.cost_usd if expected is None else expected.cost_usd),
        deadline_s=job.deadline_s,
        deadline=job.deadline,
        max_cost_usd=None if job.max_cost_usd is None else profile_usd + job.max_cost_usd,
        metric=job.metric,
        mode=job.mode,
        best_value=None if found is None else found.value,
        best_trial=None if best is None else best.trial,
        best_note="" if found is None else found.note.removeprefix(", "),
        is_rehearsal=not job.trains,
        is_charged=header.kind.is_charged(job.offer.unit),
    )


def profiling_usd(header: Header) -> float:
    """Return the cost of measuring the profile before the run: it is no part of the bill of its events."""
    return float(header.setup.get("profiling_cost_usd", 0.0))


def _before_usd(header: Header, state: State, month_at: float) -> float:
    """Return the cost before the begin of a month (Unix time); the profile was measured when the journal was made."""
    profile_usd = profiling_usd(header) if header.created_at < month_at else 0.0
    ran_before = state.phase is not Phase.NEW and state.started_at + header.offset_s < month_at
    return profile_usd + (bill_usd(state, month_at - header.offset_s) if ran_before else 0.0)


def _stage_of(state: State) -> int:
    if state.job.is_divided:
        return sum(stage.ended_at is not None for stage in state.stages)
    return state.stages[-1].stage if state.stages else 0


FRESH_S = 0.25
"""The result of a running experiment is cached for this long without events."""
_LONG_S = 0.25
"""A result that takes longer to make, as that of 20,000 trials, is cached for three times its duration, also while
events come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a trial's attempt failed, trace-back included."""

    seq: int
    trial: int
    lines: tuple[str, ...]


def open_journal(folder: ExperimentFolder) -> tuple[Journal, Header]:
    """Open the journal of an experiment. Raises InputError if that is missing, JournalError if it cannot be read."""
    folder.require()
    journal = Journal(folder.journal_url, folder.name)
    try:
        header = journal.header()
        if header is None:
            raise DamagedJournalError(f"the journal of {folder.name!r} is damaged (its first entry is missing)")
    except BaseException:
        journal.close()
        raise
    return journal, header


class JournalFollower:
    """One experiment's journal, folded as far as it was read. One thread reads it; others may ask about it."""

    def __init__(self, folder: ExperimentFolder, *, clock: Callable[[], float] | None = None) -> None:
        """Open the journal; nothing is folded yet. `clock` replaces the experiment's own.

        Raises InputError if the experiment is missing, JournalError if it cannot be read.
        """
        self.folder, self._clock = folder, clock or partial(time_of, folder.instances)
        self._lock = threading.RLock()
        self.journal, self.header = open_journal(folder)
        self.controller = Controller(self.header.job)
        """The state as far as it was read; only for the thread that reads."""
        self.seq = -1
        """Sequence number of the last folded event; -1 before the first."""
        self.failures: list[Failure] = []
        self._live = self._driven = False
        self._latest: tuple[int, float, float, Result] | None = None
        """Sequence number, instant and duration of the latest result, and the result."""

    def refresh(self, *, live: bool) -> list[tuple[int, Event]]:
        """Fold the events that were journalled since, and return them with their sequence numbers.

        `live`: a driver runs, so that time passes between events. It takes one query if nothing is new. Raises
        JournalError if they cannot be read; then nothing is folded.
        """
        with self._lock:
            self._note_driver(live)
            entries = list(self.journal.events(after=self.seq))
            for seq, event in entries:
                self._fold(seq, event)
            return entries

    def each(self, *, live: bool = False) -> Iterator[tuple[int, Event]]:
        """Fold the events that were journalled since, each before it is yielded; none is kept. Raises JournalError."""
        self._note_driver(live)
        for seq, event in self.journal.events(after=self.seq):
            with self._lock:
                self._fold(seq, event)
            yield seq, event

    def _note_driver(self, live: bool) -> None:
        self._driven, self._live = live, live and not self.header.kind.is_simulated

    def _fold(self, seq: int, event: Event) -> None:
        self.controller.handle(event)
        self.seq = seq
        if isinstance(event, TrialFailed):
            said = f"attempt {event.attempt} {event.kind}: {event.message}\n{event.details}"
            self.failures.append(Failure(seq=seq, trial=event.trial, lines=tuple(said.splitlines())))

    @property
    def now(self) -> float:
        """The instant up to which time and cost count, on the clock of its events."""
        return self._clock() if self._live else self.controller.state.now

    @property
    def present(self) -> float:
        """Now, by the experiment's clock, also without a driver; that of a rehearsal stands still then."""
        return self.controller.state.now if self.header.kind.is_simulated else self._clock()

    def summary(self) -> Summary:
        """Return its row in a list."""
        with self._lock:
            found = summary_of(self.header, self.controller, self.now)
            return found if self._driven else replace(found, **self._waiting())

    def _waiting(self) -> dict[str, Any]:
        """Return what was asked for since it has had a driver: trials, and limits with which a resume continues it."""
        asked, state = self._as_asked(), self.controller.state
        first = 0 if state.outcome == "done" and state.ended_by is None else len(state.trials)
        added = sum(trial.status is TrialStatus.QUEUED for trial in asked.state.trials[first:])
        return {"added_trials": added, "is_extended": state.outcome in ("done", "budget") and not asked.is_over}

    def result(self) -> Result:
        """Return the result so far."""
        with self._lock:
            now = self._clock()
            if self._latest is not None:
                seq, made_at, took_s, latest = self._latest
                is_long = took_s > _LONG_S and self.controller.state.ended_at is None
                fresh_s = 3.0 * took_s if is_long else FRESH_S
                if (seq == self.seq or is_long) and 0.0 <= now - made_at < fresh_s:
                    return latest
            began_at = time.perf_counter()
            result = summarise(self.controller.state, self.header.setup, self.now)
            took_s = time.perf_counter() - began_at
            self._latest = self.seq, now, took_s, result
            return result

    def limits(self, *, deadline: object, max_cost_usd: float | None, target: float | None = None) -> Limits:
        """Return other limits as the driver counts them. Raises InputError if invalid, or below the present ones."""
        from rubberband.executor.core.extending import limits_of

        with self._lock:
            controller = self._as_asked()
            return limits_of(self.header, controller.state, deadline=deadline, max_cost_usd=max_cost_usd, target=target)

    @property
    def limits_in_force(self) -> Limits:
        """The present limits as the driver counts them, and the trials, requested ones included."""
        from rubberband.executor.core.extending import Limits

        with self._lock:
            job = self._as_asked().job
            return Limits(deadline_s=job.deadline_s, max_cost_usd=job.max_cost_usd, target=job.stop.target)

    @property
    def has_reached(self) -> bool:
        """Whether a trial that reached the target has ended it."""
        ended_by = self.controller.state.ended_by
        return ended_by is not None and ended_by.rule == "target"

    @property
    def num_trials(self) -> int:
        """Trials of the search, requested ones included."""
        with self._lock:
            return len(self._as_asked().state.trials)

    def new_trials(self, num_samples: object) -> NewTrials:
        """Return the trials that `num_samples` asks for: `+16`, or a total of the search. Raises InputError."""
        with self._lock:
            state = self._as_asked().state
            has = state.sampled_trials // state.job.repeats
        text = str(num_samples).strip()
        if not re.fullmatch(r"\+?[0-9]{1,7}", text):
            raise InputError(
                f"num_samples: {shown(num_samples)} is no number of trials; give +16, or {has + 16} in all"
            )
        count = int(text) if text.startswith("+") else int(text) - has
        if count < 1:
            raise InputError(f"num_samples: the search already has {has}; give +16, or more than {has} in all")
        return NewTrials(count=count)

    def extension(self, limits: Limits, *, driven: bool, trials: NewTrials | None = None) -> Extension:
        """Return the effect of other limits, and of trials that are added. It may take long. Raises InputError."""
        from rubberband.executor.core.extending import extension

        with self._lock:
            controller = self._as_asked()
            state = copy.deepcopy(controller.state)
            now = self.present
            added = None
            if trials is not None:
                asked = DriverRequest(id="preview", kind="add", asked_at=now, trials=trials)
                added = Additions(self.header.setup, previews=True)(state, asked, now)
        # Planning may take long, and must not block other threads.
        return extension(state, now, driven=driven, added=added, **asdict(limits))

    def has_taken(self, request: str) -> bool:
        """Whether the request of this id is applied, or, if it asks for limits, about to be."""
        with self._lock:
            return request in self._as_asked().state.requests

    def granted(self) -> Extension:
        """Return the limits in force, in answer to a request that is applied already."""
        from rubberband.executor.core.extending import Extension, outlook_of

        with self._lock:
            state = self._as_asked().state
            expected = forecast(state, max(self.now, state.now))
            outlook = outlook_of(state.job, expected, state.plan, "these limits already apply")
            return Extension(before=outlook, after=outlook, stage=len(state.stages), applied=True)

    @property
    def max_cost_usd(self) -> float | None:
        """The cap of the total cost, profiling and requested limits included; None: no limit."""
        with self._lock:
            most_usd = self._as_asked().job.max_cost_usd
        return None if most_usd is None else most_usd + profiling_usd(self.header)

    def resumed(self) -> Forecast:
        """Return the time and the whole cost that are expected if it is resumed now, with requested limits.

        A run with a max_cost costs no more than that.
        """
        from rubberband.executor.core.extending import resumed

        with self._lock:
            controller = self._as_asked()
            job, now = controller.job, self.present
            expected = forecast(resumed(controller.state, now), now)
            cost_usd = expected.cost_usd if job.max_cost_usd is None else min(expected.cost_usd, job.max_cost_usd)
            return Forecast(jct_s=expected.jct_s, cost_usd=profiling_usd(self.header) + cost_usd)

    def goes_on(self) -> bool:
        """Whether a resume continues it, with requested limits."""
        with self._lock:
            return not self._as_asked().is_over

    @property
    def is_ending(self) -> bool:
        """Whether it is releasing everything, to end."""
        with self._lock:
            return self.controller.state.phase is Phase.ENDING

    def _as_asked(self) -> Controller:
        """Return the controller with the limits and trials in the inbox applied."""
        asked, inbox = self.controller, Inbox(self.folder.inbox)
        if not inbox.pending(asked.state.requests):
            return asked
        asked = copy.deepcopy(asked)
        additions = Additions(self.header.setup, previews=True)
        for event in asked_first(inbox, asked, asked.state.now, additions, trials=True):
            asked.handle(event)
        return asked

    def close(self) -> None:
        """Close the journal. The state that was read remains."""
        with self._lock:
            self.journal.close()


def at_work(folder: ExperimentFolder) -> bool:
    """Whether a process of the service, or a driver that was started by hand, runs the experiment."""
    return is_hosted(folder) or folder.driven


# Reading a journal whole, or as far as a damaged one goes.


def read(folder: ExperimentFolder) -> Result:
    """Return the result as the journal has it now, whether the experiment has ended, runs, or was cut off."""
    return read_whole(folder)[0]


def read_whole(folder: ExperimentFolder) -> tuple[Result, bool]:
    """Return the result, and whether it is final: no resume continues it, requested limits included."""
    with explaining(folder), closing(JournalFollower(folder)) as follower:
        for _ in follower.each(live=folder.driven):
            pass
        return follower.result(), not follower.goes_on()


# A journal without a writer, read and folded at once. A service that finds an old home reads thousands of them, so a
# SQLite file is read without the engine that a follower keeps.


class WholeJournal:
    """Events of a journal from the first on, and the state that they lead to."""

    def __init__(self, header: Header, events: Iterable[tuple[int, Event]] = ()) -> None:
        self.header, self.controller = header, Controller(header.job)
        self.events: list[tuple[int, Event]] = []
        """With their sequence numbers."""
        for seq, event in events:
            self.fold(seq, event)

    def fold(self, seq: int, event: Event) -> None:
        """Add the next event. Raises if it makes no sense; then it is not added."""
        self.controller.handle(event)
        self.events.append((seq, event))

    @property
    def result(self) -> Result:
        """The result of the experiment up to the last of these events."""
        state = self.controller.state
        return summarise(state, self.header.setup, state.now)


def read_at_once(folder: ExperimentFolder) -> WholeJournal:
    """Return the journal of an experiment as it is now. Raises JournalError or InputError if it cannot be read."""
    if folder.store is None:
        return read_file(folder.journal, folder.name)
    journal, header = open_journal(folder)
    with closing(journal):
        return WholeJournal(header, journal.events())


def read_file(path: Path, name: str, options: str = "mode=rw") -> WholeJournal:
    """Return the journal in a SQLite file, which is opened with SQLite's URI `options`. Raises JournalError."""
    about = "SELECT created_at, job, setup FROM experiments WHERE name = ?"
    all_events = "SELECT seq, kind, body FROM events WHERE experiment = ? ORDER BY seq"
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?{options}", uri=True, isolation_level=None)) as file:
            row = file.execute(about, (name,)).fetchone()
            rows = file.execute(all_events, (name,)).fetchall()
    except sqlite3.Error as error:
        raise JournalError(f"the journal of {name!r} cannot be read: {error}") from error
    if row is None:
        raise JournalError(f"the journal of {name!r} cannot be read: {path} is that of another experiment")
    try:
        events = [(seq, decode_event(kind, body)) for seq, kind, body in rows]
        header = _header(name, *row)
    except UnknownWordsError as error:
        raise from_elsewhere(name, error, written_by(row[1])) from None
    if [seq for seq, _ in events] != list(range(len(events))):
        raise DamagedJournalError(f"the journal of {name!r} is damaged (events are missing)")
    return WholeJournal(header, events)


def _header(name: str, created_at: float, job: str, setup: str) -> Header:
    return Header(name=name, created_at=created_at, job=decode_job(job), setup=json.loads(setup))


# A damaged journal: its events from the first on, until one is broken. A SQLite file is read from a copy. Events
# after a gap are left out, since the events that led to them are not known.


def salvage(folder: ExperimentFolder) -> WholeJournal | None:
    """Return the readable part of a journal; None if even its header is lost."""
    readable: WholeJournal | None = None
    with suppress(Exception):  # the first record that cannot be read, or makes no sense, ends the readable part
        records = _from_file(folder) if folder.store is None else _from_store(folder)
        for record in records:
            if isinstance(record, Header):
                readable = WholeJournal(record)
            elif readable is not None:
                readable.fold(*record)
    return readable


def _from_file(folder: ExperimentFolder) -> Iterator[Header | tuple[int, Event]]:
    with tempfile.TemporaryDirectory(prefix="rubberband-") as place:
        for suffix in ("", "-wal"):
            # Copied by another process: one that closes a file drops the locks that SQLite has on it.
            command = ["cp", "--", f"{folder.journal}{suffix}", f"{place}/journal.db{suffix}"]
            subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        with closing(sqlite3.connect(f"{place}/journal.db")) as file:
            file.execute("PRAGMA writable_schema=ON")  # SQLite then opens a file that is shorter than it should be
            yield _header(folder.name, *file.execute("SELECT created_at, job, setup FROM experiments").fetchone())
            rows = file.execute("SELECT seq, kind, body FROM events NOT INDEXED ORDER BY rowid")
            for expected, (seq, kind, body) in enumerate(rows):
                if seq != expected:
                    return
                yield seq, decode_event(kind, body)


def _from_store(folder: ExperimentFolder) -> Iterator[Header | tuple[int, Event]]:
    journal, header = open_journal(folder)
    with closing(journal):
        yield header
        yield from journal.events()


def explained(folder: ExperimentFolder, error: DamagedJournalError) -> DamagedJournalError:
    """Return the error with what can still be read, and what to do."""
    readable = salvage(folder)
    backup = "the database from a backup" if folder.store is not None else f"{folder.journal} from a backup"
    if readable is None or not readable.events:
        what, else_do = "none of its events can be read", f"run it again under another name: -s name={folder.name}-2"
    else:
        what = f"its first {len(readable.events)} events can be read, {_reached(readable)}"
        else_do = f"see what can be read by `rubberband report {folder.name}`"
    saved = str(folder.checkpoints) if readable is None else readable.header.setup.get("checkpoints", "")
    if saved and (readable is not None or folder.checkpoints.is_dir()):
        what += f"; its checkpoints are in {saved}"
    return DamagedJournalError(f"{error}: {what}. Nothing is written to it; restore {backup}, or {else_do}")


def _reached(readable: WholeJournal) -> str:
    result, state = readable.result, readable.controller.state
    last_at = readable.header.offset_s + state.now
    reached = f"up to {datetime.fromtimestamp(last_at, UTC):%Y-%m-%d %H:%M:%S} UTC"
    best = result.best
    if best is None:
        return reached
    return f"{reached} (best: {result.metric}={best.metrics[result.metric]:.6g} of trial {best.trial})"


@contextmanager
def explaining(folder: ExperimentFolder) -> Iterator[None]:
    """Add to the error of a damaged journal what can still be read of it. Raises DamagedJournalError."""
    try:
        yield
    except DamagedJournalError as error:
        raise explained(folder, error) from error
