"""Care for experiments: their labels, and the end of what is kept of those that have ended."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from rubberband.api.experiments.extending import LockOfEach
from rubberband.api.experiments.starting import conflict, raised_as_problems
from rubberband.api.experiments.watcher import Watcher
from rubberband.api.problems import CONFLICT, NOT_FOUND, UNAVAILABLE, HttpProblem
from rubberband.api.store import Store
from rubberband.errors import InputError, JournalError
from rubberband.executor.journal.labelling import write_labels
from rubberband.executor.run.removing import Removal, removal, remove
from rubberband.states import OVER
from rubberband.units import shown
from rubberband.values.labels import LabelChange
from rubberband.values.submission import Submission

if TYPE_CHECKING:
    from rubberband.api.experiments import Journals

log = logging.getLogger("rubberband.api.experiments")


class Care:
    """Labels and deletes experiments. Thread-safe; all methods raise Problem."""

    def __init__(self, store: Store, watcher: Watcher, journals: Journals, resuming: LockOfEach) -> None:
        """`resuming` is held while an experiment is resumed."""
        self._store, self._watcher, self._journals, self._resuming = store, watcher, journals, resuming
        self._labelling = LockOfEach()

    def label(self, name: str, change: LabelChange) -> Submission:
        """Change the labels of an experiment, and return it."""
        with self._labelling.of(name), raised_as_problems():
            labels = self._store.upkeep.label(name, change)
            if labels is None:
                raise HttpProblem(NOT_FOUND, f"experiment {shown(name)} not found")
            row = self._journals.row(name)
            if not row.home:
                try:
                    write_labels(self._watcher.folder(name), labels)  # for the commands that ask no service
                except InputError as error:
                    log.warning("the home keeps no labels of %s: %s", name, error)
        return replace(row, labels=labels)

    def removal(self, name: str) -> Removal:
        """Return the effect of deleting an experiment. Raises Problem CONFLICT, with the remedy, if it must stay."""
        row = self._journals.row(name)
        self._journals.require(row, "delete")
        folder = self._watcher.folder(name)
        try:
            if not self._journals.exists(name):
                return removal(folder, None)
            with self._journals.opened(name) as follower:
                return removal(folder, follower)
        except InputError as error:
            raise HttpProblem(CONFLICT, str(error)) from None

    def delete(self, name: str) -> Removal:
        """Delete an experiment that has ended: its folder, its journal, its events. Its bill counts on."""
        with self._resuming.of(name), self._labelling.of(name):
            row, going = self._journals.row(name), self.removal(name)
            try:
                remove(self._watcher.folder(name), going)
            except (InputError, JournalError) as error:
                log.error("experiment %s is not deleted: %s", name, error)
                why = f"the files of {name!r} cannot be deleted; the log of the service has the cause"
                raise HttpProblem(UNAVAILABLE, why, headers={"Retry-After": "5"}) from None
            if not self._store.upkeep.delete(row, expected=OVER):
                raise conflict(row, "it has just changed; reload and try again")
        self._watcher.kick(name)
        return going
