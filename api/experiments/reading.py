"""What requests read of experiments: the row, and the journal, as the watcher follows it or read for this once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rubberband.api.experiments.states import conflict, limited, loses_profile, told_as_problems, waits
from rubberband.api.experiments.watcher import Watcher
from rubberband.api.problems import NOT_FOUND, UNAVAILABLE, Problem, problem_of
from rubberband.api.store.protocol import Store
from rubberband.errors import DamagedJournalError, RubberbandError
from rubberband.executor.journal.inbox import Inbox
from rubberband.executor.observed import Failure, Observed, at_work
from rubberband.executor.result import Result
from rubberband.executor.salvage import explained, salvage
from rubberband.states import Action, Fact, obstacle, possible
from rubberband.units import shown
from rubberband.values.submission import Submission

KEPT_RESULTS = 16
"""Results of experiments that do not run, which are kept to be asked for again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """What the journal of an experiment says that nobody is at work on."""

    changed_at: float
    """Of its row when it was read."""
    result: Result
    failures: Sequence[Failure]


class Journals:
    """Safe to use from several threads."""

    def __init__(self, store: Store, watcher: Watcher) -> None:
        self._store, self._watcher = store, watcher
        self._settled: OrderedDict[str, Settled] = OrderedDict()
        self._reading = threading.Lock()

    def row(self, name: str) -> Submission:
        """What is kept of an experiment. Raises Problem NOT_FOUND."""
        row = self._store.submission(name)
        if row is None:
            raise Problem(NOT_FOUND, f"experiment {shown(name)} not found")
        return row

    def settled(self, row: Submission) -> Settled | None:
        """The journal of what is not followed, as far as it can be read; None if there is none. Raises Problem."""
        with self._reading:
            known = self._settled.get(row.name)
            if known is not None and known.changed_at == row.changed_at:
                self._settled.move_to_end(row.name)
                return known
            if not self.exists(row.name):
                return None
            try:
                with self._opened(row.name) as observed:
                    result, failures = observed.result(), tuple(observed.failures)
            except DamagedJournalError:
                left = salvage(self._watcher.folder(row.name))
                if left is None:
                    return None
                result, failures = left.result, ()
            found = self._settled[row.name] = Settled(changed_at=row.changed_at, result=result, failures=failures)
            while len(self._settled) > KEPT_RESULTS:
                self._settled.popitem(last=False)
            return found

    def exists(self, name: str) -> bool:
        """Whether there is a journal. Raises Problem."""
        with told_as_problems():
            return self._watcher.folder(name).exists

    def require(self, row: Submission, action: Action) -> None:
        """Raise Problem CONFLICT, with what to do instead, unless the action is possible now."""
        why = obstacle(row.state, action, lambda fact: self._holds(row, fact))
        if why:
            raise conflict(row, why)

    def possible(self, row: Submission) -> frozenset[Action]:
        """What may be done with it now. Raises Problem if that depends on a journal that cannot be read."""
        return possible(row.state, lambda fact: self._holds(row, fact))

    def _holds(self, row: Submission, fact: Fact) -> bool:
        match fact:
            case "here":
                return not self.exists(row.name) or self._watcher.folder(row.name).is_here
            case "limited":
                return limited(row)
            case "begun":
                return self.exists(row.name) or (waits(row) and row.words.get("profile") is not None)
            case "measured":
                return not loses_profile(row) or self.exists(row.name)
            case "open":
                settled = self.settled(row)
                if settled is not None and not Inbox(self._watcher.folder(row.name).inbox).pending():
                    return settled.result.resumable
                with self.opened(row.name) as observed:  # with the limits that are asked for meanwhile
                    return observed.goes_on()

    @contextmanager
    def opened(self, name: str) -> Iterator[Observed]:
        """The journal: as the watcher follows it, or read for this once.

        Raises Problem: UNAVAILABLE, or CONFLICT if it is damaged.
        """
        try:
            with self._opened(name) as observed:
                yield observed
        except DamagedJournalError as error:
            raise problem_of(explained(self._watcher.folder(name), error)) from None

    @contextmanager
    def _opened(self, name: str) -> Iterator[Observed]:
        followed = self._watcher.observed(name)
        if followed is not None:
            yield followed
            return
        folder = self._watcher.folder(name)
        try:
            observed = Observed(folder)
        except DamagedJournalError:
            raise
        except RubberbandError as error:
            raise Problem(UNAVAILABLE, f"the journal of {name!r} cannot be read: {error}") from None
        try:
            try:
                observed.refresh(live=at_work(folder))
            except DamagedJournalError:
                raise
            except Exception as error:
                raise Problem(UNAVAILABLE, f"the journal of {name!r} cannot be read: {error}") from error
            yield observed
        finally:
            observed.close()
