"""Reading a journal, also while another process writes it: what is new, and what came of it all so far."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from rubberband.cloud.steady import time_of
from rubberband.errors import DamagedJournalError, JournalError
from rubberband.executor.core.controller import Controller
from rubberband.executor.core.events import Event
from rubberband.executor.journal.folder import ExperimentFolder
from rubberband.executor.journal.inbox import Inbox, asked_limits
from rubberband.executor.journal.journal import Header, Journal, decode_event, decode_job
from rubberband.executor.result import Result, summarise
from rubberband.executor.salvage import explaining


class JournalReader:
    """One experiment's journal, folded as far as it was read. It writes nothing. For one thread at a time."""

    def __init__(self, folder: ExperimentFolder) -> None:
        """Open it; nothing is folded yet.

        Raises InputError if there is no such experiment, JournalError if it cannot be read.
        """
        folder.require()
        self.journal = Journal(folder.journal_url, folder.name)
        try:
            header = self.journal.header()
            if header is None:
                raise DamagedJournalError(f"the journal of {folder.name!r} is damaged (its first entry is missing)")
        except BaseException:
            self.journal.close()
            raise
        self.header = header
        self.controller = Controller(header.job)
        self.seq = -1
        """Of the last event that was folded; -1 before the first."""

    def refresh(self) -> list[tuple[int, Event]]:
        """Fold what was journalled since; returns it, with sequence numbers. One query if nothing is new.

        Raises JournalError if it cannot be read, and nothing is folded then.
        """
        found = list(self.journal.events(after=self.seq))
        for seq, event in found:
            self._fold(seq, event)
        return found

    def read_through(self) -> None:
        """Likewise, of what is read only once: its events are not kept. Raises JournalError."""
        for seq, event in self.journal.events(after=self.seq):
            self._fold(seq, event)

    def _fold(self, seq: int, event: Event) -> None:
        self.controller.handle(event)
        self.seq = seq

    def result(self, now: float) -> Result:
        """What came of what was folded so far; what runs counts up to `now`: Unix time, or that of a virtual run."""
        return summarise(self.controller.job, self.controller.state, self.header.setup, now)

    def close(self) -> None:
        """Let go of the store. Idempotent."""
        self.journal.close()


def read(folder: ExperimentFolder) -> Result:
    """The result as the journal has it now, whether the experiment is over, runs, or was cut off."""
    return read_whole(folder)[0]


def read_whole(folder: ExperimentFolder) -> tuple[Result, bool]:
    """The result, and whether it is final."""
    with explaining(folder):
        reader = JournalReader(folder)
        try:
            reader.read_through()
        finally:
            reader.close()
    live = folder.driven and not reader.header.kind.is_simulated
    found = reader.result(time_of(folder.instances) if live else reader.controller.state.now)
    return found, _is_over(reader.controller, Inbox(folder.inbox))


def _is_over(controller: Controller, inbox: Inbox) -> bool:
    """Whether no resume goes on with it, what is asked for meanwhile included."""
    for event in asked_limits(inbox, controller, controller.state.now):
        controller.handle(event)
    return controller.is_over


# A journal that nobody writes to, read and folded at once: thousands are, where a service finds an old home.
#
# A SQLite file is read without the engine that those who follow one keep.


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeJournal:
    """All that a journal holds, and the state that it leads to."""

    header: Header
    events: Sequence[tuple[int, Event]]
    """With their sequence numbers."""
    controller: Controller


def read_at_once(folder: ExperimentFolder) -> WholeJournal:
    """The journal of an experiment as it is now. Raises JournalError or InputError if it cannot be read."""
    if folder.store is None:
        return _read_file(folder.journal, folder.name)
    reader = JournalReader(folder)
    try:
        return WholeJournal(header=reader.header, events=reader.refresh(), controller=reader.controller)
    finally:
        reader.close()


def _read_file(path: Path, name: str) -> WholeJournal:
    about = "SELECT created_at, job, setup FROM experiments WHERE name = ?"
    all_events = "SELECT seq, kind, body FROM events WHERE experiment = ? ORDER BY seq"
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, isolation_level=None)) as file:
            row = file.execute(about, (name,)).fetchone()
            found = file.execute(all_events, (name,)).fetchall()
    except sqlite3.Error as error:
        raise JournalError(f"the journal of {name!r} cannot be read: {error}") from error
    if row is None:
        raise JournalError(f"the journal of {name!r} cannot be read: {path} is that of another experiment")
    created_at, job, setup = row
    header = Header(name=name, created_at=created_at, job=decode_job(job), setup=json.loads(setup))
    events = [(seq, decode_event(kind, body)) for seq, kind, body in found]
    if [seq for seq, _ in events] != list(range(len(events))):
        raise DamagedJournalError(f"the journal of {name!r} is damaged (events are missing)")
    controller = Controller(header.job)
    for _, event in events:
        controller.handle(event)
    return WholeJournal(header=header, events=events, controller=controller)
