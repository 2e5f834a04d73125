"""Reading a journal: as it grows, whole at once, or as far as a damaged one goes. Nothing here writes to it."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rubberband.cloud.steady import time_of
from rubberband.errors import DamagedJournalError, JournalError
from rubberband.executor.core.controller import Controller
from rubberband.executor.core.events import Event
from rubberband.executor.journal.folder import ExperimentFolder
from rubberband.executor.journal.inbox import Inbox, asked_limits
from rubberband.executor.journal.journal import (
    Header,
    Journal,
    UnknownWordsError,
    decode_event,
    decode_job,
    from_elsewhere,
    written_by,
)
from rubberband.executor.result import Result, summarise


class JournalReader:
    """One experiment's journal, folded as far as it was read. For one thread at a time."""

    def __init__(self, folder: ExperimentFolder) -> None:
        """Open the journal; nothing is folded yet.

        Raises InputError if the experiment is missing, JournalError if it cannot be read.
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
        """Sequence number of the last folded event; -1 before the first."""

    def refresh(self) -> list[tuple[int, Event]]:
        """Fold the events that were journalled since, and return them with their sequence numbers.

        It takes one query if nothing is new. Raises JournalError if they cannot be read; then nothing is folded.
        """
        found = list(self.journal.events(after=self.seq))
        for seq, event in found:
            self._fold(seq, event)
        return found

    def each(self) -> Iterator[tuple[int, Event]]:
        """Read the new events at once, then fold them one by one, each before it is yielded. Raises JournalError."""
        for seq, event in list(self.journal.events(after=self.seq)):
            self._fold(seq, event)
            yield seq, event

    def read_through(self) -> None:
        """Fold the events as `refresh` does, without keeping them. Raises JournalError."""
        for seq, event in self.journal.events(after=self.seq):
            self._fold(seq, event)

    def _fold(self, seq: int, event: Event) -> None:
        self.controller.handle(event)
        self.seq = seq

    def result(self, now: float) -> Result:
        """Return the result so far; running parts count up to `now` (Unix time, or the clock of a virtual run)."""
        return summarise(self.controller.job, self.controller.state, self.header.setup, now)

    def close(self) -> None:
        """Close the store. Idempotent."""
        self.journal.close()


def read(folder: ExperimentFolder) -> Result:
    """Return the result as the journal has it now, whether the experiment has ended, runs, or was cut off."""
    return read_whole(folder)[0]


def read_whole(folder: ExperimentFolder) -> tuple[Result, bool]:
    """Return the result, and whether it is final: no resume continues it, requested limits included."""
    with explaining(folder), closing(JournalReader(folder)) as reader:
        reader.read_through()
    controller = reader.controller
    live = folder.driven and not reader.header.kind.is_simulated
    found = reader.result(time_of(folder.instances) if live else controller.state.now)
    for event in asked_limits(Inbox(folder.inbox), controller, controller.state.now):
        controller.handle(event)
    return found, controller.is_over


# A journal without a writer, read and folded at once. A service that finds an old home reads thousands of them, so a
# SQLite file is read without the engine that a follower keeps.


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeJournal:
    """All events of a journal, and the state that they lead to."""

    header: Header
    events: Sequence[tuple[int, Event]]
    """With their sequence numbers."""
    controller: Controller


def read_at_once(folder: ExperimentFolder) -> WholeJournal:
    """Return the journal of an experiment as it is now. Raises JournalError or InputError if it cannot be read."""
    if folder.store is None:
        return read_file(folder.journal, folder.name)
    with closing(JournalReader(folder)) as reader:
        return WholeJournal(header=reader.header, events=reader.refresh(), controller=reader.controller)


def read_file(path: Path, name: str, options: str = "mode=rw") -> WholeJournal:
    """Return the journal in a SQLite file, which is opened with SQLite's URI `options`. Raises JournalError."""
    about = "SELECT created_at, job, setup FROM experiments WHERE name = ?"
    all_events = "SELECT seq, kind, body FROM events WHERE experiment = ? ORDER BY seq"
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?{options}", uri=True, isolation_level=None)) as file:
            row = file.execute(about, (name,)).fetchone()
            found = file.execute(all_events, (name,)).fetchall()
    except sqlite3.Error as error:
        raise JournalError(f"the journal of {name!r} cannot be read: {error}") from error
    if row is None:
        raise JournalError(f"the journal of {name!r} cannot be read: {path} is that of another experiment")
    try:
        events = [(seq, decode_event(kind, body)) for seq, kind, body in found]
        header = _header(name, *row)
    except UnknownWordsError as error:
        raise from_elsewhere(name, error, written_by(row[1])) from None
    if [seq for seq, _ in events] != list(range(len(events))):
        raise DamagedJournalError(f"the journal of {name!r} is damaged (events are missing)")
    controller = Controller(header.job)
    for _, event in events:
        controller.handle(event)
    return WholeJournal(header=header, events=events, controller=controller)


def _header(name: str, created_at: float, job: str, setup: str) -> Header:
    return Header(name=name, created_at=created_at, job=decode_job(job), setup=json.loads(setup))


# A damaged journal: its events from the first on, until one is broken. A SQLite file is read from a copy. Events
# after a gap are left out, since the events that led to them are not known.


@dataclass(frozen=True, slots=True, kw_only=True)
class Salvaged:
    """The readable part of a damaged journal."""

    header: Header
    controller: Controller
    num_events: int

    @property
    def result(self) -> Result:
        """The result of the experiment up to the last of these events."""
        state = self.controller.state
        return summarise(self.controller.job, state, self.header.setup, state.now)


def salvage(folder: ExperimentFolder) -> Salvaged | None:
    """Return the readable part of a journal; None if even its header is lost."""
    header: Header | None = None
    controller: Controller | None = None
    done = 0
    with suppress(Exception):  # the first record that cannot be read, or makes no sense, ends the readable part
        for found in _from_file(folder) if folder.store is None else _from_store(folder):
            if isinstance(found, Header):
                header, controller = found, Controller(found.job)
                continue
            assert controller is not None
            controller.handle(found)
            done += 1
    if header is None or controller is None:
        return None
    return Salvaged(header=header, controller=controller, num_events=done)


def _from_file(folder: ExperimentFolder) -> Iterator[Header | Event]:
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
                yield decode_event(kind, body)


def _from_store(folder: ExperimentFolder) -> Iterator[Header | Event]:
    with closing(Journal(folder.journal_url, folder.name)) as journal:
        header = journal.header()
        if header is not None:
            yield header
            yield from (event for _, event in journal.events())


def explained(folder: ExperimentFolder, error: DamagedJournalError) -> DamagedJournalError:
    """Return the error with what can still be read, and what to do."""
    found = salvage(folder)
    backup = "the database from a backup" if folder.store is not None else f"{folder.journal} from a backup"
    if found is None or not found.num_events:
        what, else_do = "none of its events can be read", f"run it again under another name: -s name={folder.name}-2"
    else:
        what = f"its first {found.num_events} events can be read, {_reached(found)}"
        else_do = f"see what can be read by `rubberband report {folder.name}`"
    saved = str(folder.checkpoints) if found is None else found.header.setup.get("checkpoints", "")
    if saved and (found is not None or folder.checkpoints.is_dir()):
        what += f"; its checkpoints are in {saved}"
    return DamagedJournalError(f"{error}: {what}. Nothing is written to it; restore {backup}, or {else_do}")


def _reached(found: Salvaged) -> str:
    result, state = found.result, found.controller.state
    at = found.header.offset_s + state.now
    reached = f"up to {datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"
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
