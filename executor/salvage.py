"""What can still be read of a journal that is damaged: its events from the first on, as far as they are whole.

Nothing is written: a SQLite file is read from a copy. Events after a gap are left out: what led to them is not known.
"""

from __future__ import annotations

import json
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from rubberband.errors import DamagedJournalError
from rubberband.executor.core.controller import Controller
from rubberband.executor.core.events import Event
from rubberband.executor.journal.folder import ExperimentFolder
from rubberband.executor.journal.journal import Header, Journal, decode_event, decode_job
from rubberband.executor.result import Result, summarise


@dataclass(frozen=True, slots=True, kw_only=True)
class Salvaged:
    """What is whole of a journal."""

    header: Header
    controller: Controller
    num_events: int

    @property
    def result(self) -> Result:
        """What came of the experiment up to the last of these events."""
        state = self.controller.state
        return summarise(self.controller.job, state, self.header.setup, state.now)


def salvage(folder: ExperimentFolder) -> Salvaged | None:
    """What can be read; None if not even what the experiment was."""
    header: Header | None = None
    controller: Controller | None = None
    done = 0
    with suppress(Exception):  # whatever it is that cannot be read, or makes no sense: it ends what is whole
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
            _copy(f"{folder.journal}{suffix}", f"{place}/journal.db{suffix}")
        with closing(sqlite3.connect(f"{place}/journal.db")) as file:
            file.execute("PRAGMA writable_schema=ON")  # SQLite then opens a file that is shorter than it should be
            created_at, job, setup = file.execute("SELECT created_at, job, setup FROM experiments").fetchone()
            yield Header(name=folder.name, created_at=created_at, job=decode_job(job), setup=json.loads(setup))
            rows = file.execute("SELECT seq, kind, body FROM events NOT INDEXED ORDER BY rowid")
            for expected, (seq, kind, body) in enumerate(rows):
                if seq != expected:
                    return
                yield decode_event(kind, body)


def _copy(path: str, to: str) -> None:
    """Copy what is there, in another process: one that closes a file lets go of the locks that SQLite has on it."""
    subprocess.run(["cp", "--", path, to], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def _from_store(folder: ExperimentFolder) -> Iterator[Header | Event]:
    with closing(Journal(folder.journal_url, folder.name)) as journal:
        header = journal.header()
        if header is not None:
            yield header
            yield from (event for _, event in journal.events())


def explained(folder: ExperimentFolder, error: DamagedJournalError) -> DamagedJournalError:
    """The error with what can still be read, and what to do."""
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
    """Have a damaged journal say what can still be read of it. Raises DamagedJournalError."""
    try:
        yield
    except DamagedJournalError as error:
        raise explained(folder, error) from error
