"""Experiments that were run by hand in the service's home: found there, and taken in, those that are over by many."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Container
from pathlib import Path

from rubberband.api.experiments.following import Sight, entries, standing
from rubberband.api.store.protocol import Store
from rubberband.api.store.records import TakenIn
from rubberband.executor.journal.folder import ExperimentFolder, folders
from rubberband.executor.journal.reading import WholeJournal, read_at_once
from rubberband.executor.observed import at_work, outcome_of, summary_of
from rubberband.states import ExperimentState
from rubberband.values.submission import Submission

log = logging.getLogger("rubberband.api.experiments.service")

AT_ONCE = 200
"""So many are taken in with one write,"""
EVENTS_AT_ONCE = 2000
"""about so many of their events,"""
MOMENT_S, LONG_MOMENT_S = 0.1, 0.5
"""and what can be read in so long: in less where some run, which must not wait."""

_NAME = re.compile(r"[a-z0-9-]{1,63}")
"""Other folders are none that were made for an experiment."""

Stamp = tuple[tuple[int, int], ...] | None
"""When the files of a journal were written last, and their sizes; None if it is in a store."""


class Newcomers:
    """Those that the service does not know yet. For one thread."""

    def __init__(self, store: Store, wake: Callable[[], None], *, home: Path, journals: str | None) -> None:
        """`wake` is called when there is more to read in the feed."""
        self._store, self._wake = store, wake
        self._home, self._journals = home, journals
        self.found: list[ExperimentFolder] = []
        self.others: list[ExperimentFolder] = []
        """Those of them that somebody is at work on, or that cannot be read at once: to be followed."""

    def look(self, known: Container[str]) -> None:
        """Find those that are not known. Raises JournalError if the store of the journals cannot be read."""
        listed = [folder for folder in folders(self._home, self._journals) if folder.name not in known]
        found = [folder for folder in listed if _NAME.fullmatch(folder.name) and folder.path.is_dir()]
        self.found, self.others = found[::-1], []

    def take(self, known: Callable[[str], bool], moment_s: float = MOMENT_S) -> list[tuple[Submission, Stamp]]:
        """Take in as many of those that are over as a moment allows: their rows, and when their journals were written.

        Raises JournalError if the service's store cannot be written; they are found again then.
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
            return taken_in(read_at_once(folder), at=time.time(), events_s=self._store.keeping.events_s)
        except Exception:
            log.debug("the journal of %s cannot be read at once", folder.name, exc_info=True)
            return None


def taken_in(journal: WholeJournal, *, at: float, events_s: float) -> TakenIn:
    """What is kept of an experiment that nobody is at work on. Its events are told unless it ended `events_s` ago."""
    header, controller = journal.header, journal.controller
    outcome, reason = outcome_of(controller)
    row = Submission(name=header.name, state=ExperimentState.RUNNING, created_at=header.created_at, changed_at=at)
    found = standing(row, Sight(at_work=False, mark=None, ending=None, outcome=outcome, reason=reason, has_begun=True))
    assert found is not None, "only what was given a process may lack it"
    now = controller.state.now
    is_old = now + header.offset_s <= at - events_s
    return TakenIn(
        submission=Submission(
            name=header.name,
            state=found.state,
            reason=found.reason,
            created_at=header.created_at,
            changed_at=at,
            summary=summary_of(header, controller, now),
        ),
        entries=() if is_old else entries(header, journal.events),
        last_seq=journal.events[-1][0] if journal.events else -1,
    )


def stamp_of(folder: ExperimentFolder) -> Stamp:
    """When its journal was written last."""
    if folder.store is not None:
        return None
    found = []
    for path in (folder.journal, folder.journal.with_name("journal.db-wal")):
        try:
            stat = os.stat(path)
        except OSError:
            continue
        if stat.st_size:
            found.append((stat.st_mtime_ns, stat.st_size))
    return tuple(found)
