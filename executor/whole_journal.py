"""A journal that nobody writes to, read and folded at once: thousands are, where a service finds an old home.

A SQLite file is read without the engine that those who follow one keep.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from rubberband.errors import DamagedJournalError, JournalError
from rubberband.executor.codec import decode_event, decode_job
from rubberband.executor.controller import Controller
from rubberband.executor.events import Event
from rubberband.executor.folder import ExperimentFolder
from rubberband.executor.journal import Header
from rubberband.executor.reading import JournalReader


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
