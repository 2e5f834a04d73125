"""Experiments, recorded for the watcher: their states by their folders, and their journals' events for the feed."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from rubberband.api.settings import Settings
from rubberband.api.store import Store
from rubberband.api.store.schema import Entry, TakenIn
from rubberband.errors import DamagedJournalError, InputError, JournalError, RubberbandError
from rubberband.executor.core.events import Event
from rubberband.executor.journal.folder import ExperimentFolder, Stamp, folders, read_labels, stamp_of
from rubberband.executor.journal.inbox import Ending, HostMark, read_ending, read_mark
from rubberband.executor.journal.journal import Header, encode_event
from rubberband.executor.run.follower import (
    JournalFollower,
    WholeJournal,
    at_work,
    explained,
    outcome_of,
    read_at_once,
    salvage,
    summary_of,
)
from rubberband.states import ExperimentState
from rubberband.units import month_begin
from rubberband.values.submission import Labels, Submission, Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """Observation of an experiment's folder: first whether a process runs, then its files."""

    at_work: bool
    """Whether a process of the service, or a driver started by hand, runs."""
    mark: HostMark | None
    ending: Ending | None
    outcome: ExperimentState | None
    """Outcome by its journal; None while it is open."""
    reason: str
    """Reason by its journal: of the outcome, or of a delay."""
    has_begun: bool
    """Whether there is a journal."""
    stopped: str = ""
    """Why its latest driver stopped, by its journal; empty if it did not."""

    def waits_for(self, row: Submission) -> str:
        """Return what the process of the row's attempt waits for, holding nothing; empty if it does not wait."""
        mark = self.mark
        return mark.waits_for if self.at_work and mark is not None and mark.attempt == row.attempt else ""


@dataclass(frozen=True, slots=True)
class ExperimentSnapshot:
    """State of an experiment, and the reason."""

    state: ExperimentState
    reason: str = ""


def snapshot_of(row: Submission, sight: Sight) -> ExperimentSnapshot | None:
    """Return the state by an observation; None if the process of this attempt was never started."""
    if waits_for := sight.waits_for(row):
        return ExperimentSnapshot(ExperimentState.STARTING, waits_for)
    if row.state is ExperimentState.STARTING:
        return _starting(row, sight)
    if not sight.has_begun:
        return ExperimentSnapshot(row.state, row.reason)
    if sight.outcome is not None:
        return ExperimentSnapshot(sight.outcome, sight.reason)
    return ExperimentSnapshot(ExperimentState.RUNNING, sight.reason) if sight.at_work else _cut_off(row, sight)


def _starting(row: Submission, sight: Sight) -> ExperimentSnapshot | None:
    if sight.at_work:
        # A resumed experiment has its old outcome in the journal until its driver continues.
        settled = sight.outcome is not None and (row.attempt > 1 or not row.words)
        if not sight.has_begun or settled:
            return ExperimentSnapshot(row.state, row.reason)
        return ExperimentSnapshot(sight.outcome or ExperimentState.RUNNING, sight.reason)
    if sight.mark is None or sight.mark.attempt < row.attempt:
        return None
    ending = _ending(row, sight)
    if sight.outcome is not None:
        return ExperimentSnapshot(sight.outcome, (ending.error if ending else "") or sight.reason)
    if sight.has_begun or ending is None:
        return _cut_off(row, sight)
    is_cancelled = ending.exit_code == CANCELLED_EXIT_CODE
    return ExperimentSnapshot(ExperimentState.CANCELLED if is_cancelled else ExperimentState.REFUSED, ending.error)


CANCELLED_EXIT_CODE = 130


def _ending(row: Submission, sight: Sight) -> Ending | None:
    """Return the ending that the row's latest process recorded."""
    return sight.ending if sight.ending is not None and sight.ending.attempt == row.attempt else None


def _cut_off(row: Submission, sight: Sight) -> ExperimentSnapshot:
    ending = _ending(row, sight)
    why = (ending.error if ending else "") or sight.stopped
    why = why or "its process ended unexpectedly: it was killed, or the machine restarted"
    return ExperimentSnapshot(ExperimentState.INTERRUPTED, f"{why}; resume it to continue")


def entries(header: Header, events: Sequence[tuple[int, Event]]) -> list[Entry]:
    """Return events of a journal as events of the feed."""
    found = []
    for seq, event in events:
        kind, body = encode_event(event)
        data = json.loads(body)
        occurred_at = data.pop("occurred_at") + header.offset_s
        found.append(Entry(experiment=header.name, seq=seq, kind=kind, occurred_at=occurred_at, data=data))
    return found


log = logging.getLogger("rubberband.api.experiments")

BATCH = 1000
"""Events added to the feed in one write."""
BUSY_S = 0.5
"""Interval of summaries while events arrive."""
IDLE_S = 2.0
"""Interval of summaries while only time and cost change."""
MISREADS = 5
"""A journal is unreadable after this many failed reads in a row."""


class Recorder:
    """Records one experiment in the service's store. For one thread; others may read `follower`."""

    def __init__(
        self,
        folder: ExperimentFolder,
        store: Store,
        wake: Callable[[], None],
        *,
        patience: int = MISREADS,
        clock: Callable[[], float],
    ) -> None:
        """`wake` is called after additions to the feed; after `patience` misreads the journal is unreadable.

        `clock` is the service's; events have the experiment's own.
        """
        self._patience = patience
        self._folder, self._store, self._wake = folder, store, wake
        self._clock = clock
        self.follower: JournalFollower | None = None
        """Journal, once there is one."""
        self.waits = False
        """Whether its process waits for its checkpoint store, and holds nothing."""
        self._recorded_seq = -1
        """Last place of the journal in the feed."""
        self._pending: list[tuple[int, Event]] = []
        self._misreads = 0
        self._summarised_at = 0.0
        self._summarised_seq = -1

    def first_row(self) -> Submission | None:
        """Return the row of an experiment run by hand, its events in the feed; None while it cannot be read."""
        header_at = self._clock()
        row = Submission(
            name=self._folder.name, state=ExperimentState.RUNNING, created_at=header_at, changed_at=header_at
        )
        found = self.look(row)
        if found is None or (self.follower is None and found.state is not ExperimentState.UNREADABLE):
            return None
        created_at, summary = header_at, Summary()
        if self.follower is not None:
            created_at, summary = self.follower.header.created_at, self.follower.summary()
        elif (left := salvage(self._folder)) is not None:
            created_at = left.header.created_at
            summary = summary_of(left.header, left.controller, left.controller.state.now)
        labels = labels_found(self._folder)
        return replace(
            row, created_at=created_at, state=found.state, reason=found.reason, summary=summary, labels=labels
        )

    def look(self, row: Submission) -> ExperimentSnapshot | None:
        """Add news to the feed; return the state now, or None if the process of this attempt was never started.

        Raises JournalError if the service's store does not answer; nothing is lost then.
        """
        try:
            sight = self._sight()
        except Exception as error:
            return self._unreadable(row, error)
        self._misreads, self.waits = 0, bool(sight.waits_for(row))
        self._tell()
        return snapshot_of(row, sight)

    def _sight(self) -> Sight:
        # A process is looked for first: one that ends after that is judged by the next look.
        busy = at_work(self._folder)
        if self.follower is None:
            if not self._folder.exists:
                return self._sight_of(busy)
            recorded = self._store.last_seqs([self._folder.name]).get(self._folder.name, -1)
            self.follower, self._recorded_seq = JournalFollower(self._folder), recorded
        mark = read_mark(self._folder)
        fresh = self.follower.refresh(live=busy and not (mark is not None and mark.waits_for))
        self._pending += [(seq, event) for seq, event in fresh if seq > self._recorded_seq]
        return self._sight_of(busy)

    def _sight_of(self, busy: bool) -> Sight:
        controller = None if self.follower is None else self.follower.controller
        outcome, reason = (None, "") if controller is None else outcome_of(controller)
        return Sight(
            at_work=busy,
            mark=read_mark(self._folder),
            ending=read_ending(self._folder),
            outcome=outcome,
            reason=reason,
            has_begun=controller is not None,
            stopped="" if controller is None else controller.state.stopped,
        )

    def _tell(self) -> None:
        added = 0
        try:
            while self.follower is not None and (batch := self._pending[added : added + BATCH]):
                self._store.append(entries(self.follower.header, batch))
                added += len(batch)
                self._wake()
        finally:
            del self._pending[:added]

    def _unreadable(self, row: Submission, error: Exception) -> ExperimentSnapshot:
        self._store.check()
        self.close()
        self._misreads += 1
        if self._misreads < self._patience:
            return ExperimentSnapshot(row.state, row.reason)
        if isinstance(error, DamagedJournalError):
            if row.state is ExperimentState.UNREADABLE:  # salvaging takes long: once is enough
                return ExperimentSnapshot(row.state, row.reason)
            error = explained(self._folder, error)
        text = f"its journal cannot be read: {' '.join(str(error).split()) or type(error).__name__}"
        if row.state is not ExperimentState.UNREADABLE:
            log.error("experiment %s: %s", row.name, text, exc_info=not isinstance(error, RubberbandError))
        return ExperimentSnapshot(ExperimentState.UNREADABLE, text)

    def keep(self, row: Submission, found: ExperimentSnapshot, *, restarts: bool = False) -> Submission:
        """Store changes of state and summary; return the row as stored now.

        With `restarts` the state is left to the caller, who queues it: it is never shown as interrupted then.
        """
        if restarts:
            found = ExperimentSnapshot(row.state, row.reason)
        moved = (found.state, found.reason) != (row.state, row.reason)
        summary = self._summary(row, at_once=moved or restarts)
        if not moved and summary is None:
            return row
        at, words = self._clock(), self._sized_words(row)
        kept = self._store.change(
            row.name,
            at=at,
            state=found.state if moved else None,
            reason=found.reason if moved else None,
            expected={row.state},
            summary=summary,
            words=words,
            admitted_usd=self._planned_usd(row, found),
        )
        if not kept:  # a request changed it meanwhile
            return self._store.submission(row.name) or row
        if moved:
            self._wake()
        row = replace(row, state=found.state, reason=found.reason, changed_at=at, summary=summary or row.summary)
        return row if words is None else replace(row, words=words)

    def _planned_usd(self, row: Submission, found: ExperimentSnapshot) -> float | None:
        """Return what it counts with once the profile that it was submitted without is measured, and it is planned."""
        is_planned = row.state is ExperimentState.STARTING and found.state is ExperimentState.RUNNING
        if self.follower is None or not is_planned or row.words.get("profile") is not None:
            return None
        return self.follower.summary().planned_cost_usd

    def _sized_words(self, row: Submission) -> Mapping[str, Any] | None:
        """Return the words with the scheduler that is run, if its size was auto; None if they have it already."""
        search = row.words.get("search", {})
        if self.follower is None or "auto" not in search.get("scheduler", {}).values():
            return None
        scheduler = self.follower.header.setup["experiment"]["search"]["scheduler"]
        return {**row.words, "search": {**search, "scheduler": scheduler}}

    def _measuring(self, row: Submission) -> Summary | None:
        """Return the summary of what ended before its run began: only its profile cost money. None if it did not."""
        ending, summary = read_ending(self._folder), row.summary
        if ending is None or ending.attempt != row.attempt or not ending.spent_usd:
            return None
        return replace(
            summary,
            cost_usd=summary.cost_usd + ending.spent_usd,
            profiling_cost_usd=summary.profiling_cost_usd + ending.spent_usd,
            month_at=month_begin(ending.at),
            month_cost_usd=ending.spent_usd,
        )

    def _summary(self, row: Submission, *, at_once: bool) -> Summary | None:
        """Return its summary if it changed and is due."""
        if self.follower is None:
            return self._measuring(row) if at_once else None
        now, seq = time.monotonic(), self.follower.seq
        due_s = IDLE_S if seq == self._summarised_seq else BUSY_S
        if not at_once and now - self._summarised_at < due_s:
            return None
        self._summarised_at, self._summarised_seq = now, seq
        summary = self.follower.summary()
        return None if summary == row.summary else summary

    def close(self) -> None:
        """Close the journal."""
        follower, self.follower = self.follower, None
        self._pending = []
        if follower is not None:
            with suppress(JournalError):
                follower.close()


# Experiments that were run by hand in the service's home. Finished ones are added to the store many at a time.

AT_ONCE, EVENTS_AT_ONCE = 200, 2000
"""Largest number of experiments, and about the largest number of their events, added in one write."""
MOMENT_S, LONG_MOMENT_S = 0.1, 0.5
"""Time for reading them in one round: while experiments run, and otherwise."""

_NAME = re.compile(r"[a-z0-9-]{1,63}")
"""Folders with other names hold no experiment."""


class Newcomers:
    """Experiments that the service does not know yet. For one thread."""

    def __init__(self, settings: Settings, store: Store, wake: Callable[[], None]) -> None:
        """`wake` is called after additions to the feed."""
        self._settings, self._store, self._wake = settings, store, wake
        self.found: list[ExperimentFolder] = []
        self.others: list[ExperimentFolder] = []
        """Experiments that run, or that cannot be read at once: the watcher follows them."""

    def look(self, known: Container[str]) -> None:
        """Find unknown experiments. Raises JournalError if the store of the journals cannot be read."""
        listed = [folder for folder in folders(self._settings.home, self._settings.store) if folder.name not in known]
        found = [folder for folder in listed if _NAME.fullmatch(folder.name) and folder.path.is_dir()]
        self.found, self.others = found[::-1], []

    def take(self, known: Callable[[str], bool], moment_s: float = MOMENT_S) -> list[tuple[Submission, Stamp]]:
        """Add finished experiments for `moment_s`; return their rows, and the stamps of their journals.

        Raises JournalError if the service's store cannot be written; they are found again later.
        """
        taken: dict[str, tuple[TakenIn, Stamp]] = {}
        until, events = time.monotonic() + moment_s, 0
        while self.found and len(taken) < AT_ONCE and events < EVENTS_AT_ONCE and time.monotonic() < until:
            folder = self.found.pop()
            if known(folder.name):
                continue
            read = None if at_work(folder) else self._read(folder)
            if read is None:
                self.others.append(folder)
            else:
                taken[folder.name] = read, stamp_of(folder)
                events += len(read.entries)
        if not taken:
            return []
        new = self._store.take_in([one for one, _ in taken.values()])
        self._wake()
        return [(one.submission, stamp) for name, (one, stamp) in taken.items() if name in new]

    def _read(self, folder: ExperimentFolder) -> TakenIn | None:
        try:
            at, events_s = self._settings.clock(), self._store.keeping.events_s
            return taken_in(read_at_once(folder), at=at, events_s=events_s, labels=labels_found(folder))
        except Exception:
            log.debug("the journal of %s cannot be read at once", folder.name, exc_info=True)
            return None


def labels_found(folder: ExperimentFolder) -> Labels:
    """Return the labels of an experiment that was run by hand; none if they cannot be read."""
    try:
        return read_labels(folder)
    except InputError as error:
        log.warning("experiment %s has no labels: %s", folder.name, error)
        return Labels()


def taken_in(journal: WholeJournal, *, at: float, events_s: float, labels: Labels) -> TakenIn:
    """Return the row of a finished experiment, and its events unless it ended more than `events_s` ago."""
    header, controller = journal.header, journal.controller
    outcome, reason = outcome_of(controller)
    row = Submission(name=header.name, state=ExperimentState.RUNNING, created_at=header.created_at, changed_at=at)
    found = snapshot_of(
        row, Sight(at_work=False, mark=None, ending=None, outcome=outcome, reason=reason, has_begun=True)
    )
    assert found is not None, "only an experiment that was given a process may lack one"
    now = controller.state.now
    is_old = now + header.offset_s <= at - events_s
    return TakenIn(
        submission=replace(
            row, state=found.state, reason=found.reason, summary=summary_of(header, controller, now), labels=labels
        ),
        entries=() if is_old else entries(header, journal.events),
        last_seq=journal.events[-1][0] if journal.events else -1,
    )
