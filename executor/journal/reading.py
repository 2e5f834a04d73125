"""Reading a journal whole, or as far as a damaged one goes; `JournalFollower` reads one that grows."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from rubberband.errors import DamagedJournalError, JournalError
from rubberband.executor.core.controller import Controller
from rubberband.executor.core.events import Event
from rubberband.executor.journal.folder import ExperimentFolder
from rubberband.executor.journal.journal import (
    Header,
    UnknownWordsError,
    decode_event,
    decode_job,
    from_elsewhere,
    written_by,
)
from rubberband.executor.result.result import Result, summarise
from rubberband.executor.run.follower import JournalFollower, open_journal


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
    return WholeJournal(header, events)


def _header(name: str, created_at: float, job: str, setup: str) -> Header:
    return Header(name=name, created_at=created_at, job=decode_job(job), setup=json.loads(setup))


# A damaged journal: its events from the first on, until one is broken. A SQLite file is read from a copy. Events
# after a gap are left out, since the events that led to them are not known.


def salvage(folder: ExperimentFolder) -> WholeJournal | None:
    """Return the readable part of a journal; None if even its header is lost."""
    found: WholeJournal | None = None
    with suppress(Exception):  # the first record that cannot be read, or makes no sense, ends the readable part
        records = _from_file(folder) if folder.store is None else _from_store(folder)
        for record in records:
            if isinstance(record, Header):
                found = WholeJournal(record)
            elif found is not None:
                found.fold(*record)
    return found


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
    found = salvage(folder)
    backup = "the database from a backup" if folder.store is not None else f"{folder.journal} from a backup"
    if found is None or not found.events:
        what, else_do = "none of its events can be read", f"run it again under another name: -s name={folder.name}-2"
    else:
        what = f"its first {len(found.events)} events can be read, {_reached(found)}"
        else_do = f"see what can be read by `rubberband report {folder.name}`"
    saved = str(folder.checkpoints) if found is None else found.header.setup.get("checkpoints", "")
    if saved and (found is not None or folder.checkpoints.is_dir()):
        what += f"; its checkpoints are in {saved}"
    return DamagedJournalError(f"{error}: {what}. Nothing is written to it; restore {backup}, or {else_do}")


def _reached(found: WholeJournal) -> str:
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
