"""One experiment, followed for the watcher: where it stands by what its folder shows, and what goes into the feed."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from rubberband.api.store.protocol import Entry, Store
from rubberband.errors import DamagedJournalError, JournalError, RubberbandError
from rubberband.executor.core.events import Event
from rubberband.executor.journal.folder import ExperimentFolder
from rubberband.executor.journal.hosting import Ending, Mark, read_ending, read_mark
from rubberband.executor.journal.journal import Header, encode_event
from rubberband.executor.observed import Observed, at_work, outcome_of, summary_of
from rubberband.executor.salvage import explained, salvage
from rubberband.states import ExperimentState
from rubberband.values.submission import Submission, Summary


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
        _error(row, sight) or sight.stopped or "its process ended unexpectedly: it was killed, or the machine restarted"
    )
    return Standing(state=ExperimentState.INTERRUPTED, reason=f"{told}; resume it to continue")


def entries(header: Header, events: Sequence[tuple[int, Event]]) -> list[Entry]:
    """Events of a journal as lines of the feed."""
    return [_entry(header, seq, event) for seq, event in events]


def _entry(header: Header, seq: int, event: Event) -> Entry:
    kind, body = encode_event(event)
    data = json.loads(body)
    occurred_at = data.pop("occurred_at") + header.offset_s
    return Entry(experiment=header.name, seq=seq, kind=kind, occurred_at=occurred_at, data=data)


def sight_of(observed: Observed, at_work: bool) -> Sight:
    """What the folder of a journal shows; `at_work` was looked at before the journal was refreshed."""
    outcome, reason = outcome_of(observed.controller)
    return Sight(
        at_work=at_work,
        mark=read_mark(observed.folder),
        ending=read_ending(observed.folder),
        outcome=outcome,
        reason=reason,
        has_begun=True,
        stopped=observed.controller.state.stopped,
    )


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
        return sight_of(self.observed, busy)

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
