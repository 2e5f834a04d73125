"""How experiments start: which may, and its process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rubberband.api.body import require_allowed
from rubberband.api.experiments.recording import ExperimentSnapshot
from rubberband.api.problems import CONFLICT, REFUSED, HttpProblem, problem_of
from rubberband.api.settings import Settings, child_environment
from rubberband.api.store import Store
from rubberband.api.store.holding import elsewhere
from rubberband.errors import InputError, JournalError, RubberbandError
from rubberband.executor.journal.folder import ExperimentFolder
from rubberband.executor.journal.inbox import HostedRun, Inbox, holding, read_ending, read_mark, write_order
from rubberband.executor.run.follower import JournalFollower, outcome_of
from rubberband.executor.run.notices import SERVICE_VARIABLE
from rubberband.spec.experiment import Experiment
from rubberband.spec.pool import PoolFolder, without_pool
from rubberband.states import ExperimentState
from rubberband.units import MONEY_SLACK_USD, format_usd
from rubberband.values.kinds import kind_in
from rubberband.values.submission import Submission

# Which experiments may start, resume or restart automatically, by the settings of now.

KEY_GOOD_S = 24 * 3600.0
"""A repeated request is recognised by its Idempotency-Key for this long."""


def conflict(row: Submission, obstacle: str) -> HttpProblem:
    """Return the problem of an impossible action; `obstacle` gives the cause and an alternative."""
    why = row.reason if row.state is ExperimentState.UNREADABLE else obstacle
    return HttpProblem(CONFLICT, f"experiment {row.name!r} is {row.state.value}: {why}", state=row.state.value)


def require_here(row: Submission) -> None:
    """Raise Problem CONFLICT for an experiment that the service of another home drives."""
    if row.home:
        raise conflict(row, elsewhere(row.home))


def waits(row: Submission) -> bool:
    """Whether it is queued and was never started."""
    return row.state is ExperimentState.QUEUED and bool(row.words) and not row.attempt


def loses_profile(row: Submission) -> bool:
    """Whether a restart without a journal would measure a profile on rented instances again.

    The cost of an interrupted measurement is unknown, so a second one could exceed max_cost.
    """
    return bool(row.attempt) and kind_in(row.words).is_rented and row.words.get("profile") is None


@contextmanager
def raised_as_problems() -> Iterator[None]:
    """Turn errors with messages for users into problems."""
    try:
        yield
    except (InputError, JournalError) as error:
        raise problem_of(error) from None


GOES_ON = "its process ended unexpectedly (killed, or the machine restarted); it restarts automatically"
_ONCE_IN_S = 30 * 24 * 3600.0
"""An automatic restart without progress since is remembered for this long."""


class AdmissionPolicy:
    """Decides for one server."""

    def __init__(self, settings: Settings, store: Store) -> None:
        self._settings, self._store = settings, store

    def refused(self, row: Submission, folder: ExperimentFolder) -> ExperimentSnapshot | None:
        """Return state and reason of an experiment that may not start under the settings of now; None if it may."""
        if not folder.exists:
            reason = self._reason(row, None)
            return ExperimentSnapshot(state=ExperimentState.REFUSED, reason=reason) if reason else None
        try:
            with closing(JournalFollower(folder)) as follower:
                follower.refresh(live=False)
                reason, outcome = self._reason(row, follower), outcome_of(follower.controller)[0]
        except RubberbandError:  # its process reports what is wrong with the journal
            return None
        return ExperimentSnapshot(state=outcome or ExperimentState.INTERRUPTED, reason=reason) if reason else None

    def resumption(self, row: Submission, folder: ExperimentFolder, follower: JournalFollower | None) -> str | None:
        """Return the id of an automatic restart after the process ended; None if a user must resume it.

        The id stays the same until the experiment makes progress, and is used once. Waiting for the checkpoint store
        does not count as an attempt. `follower` is that of the journal, if there is one. Raises JournalError.
        """
        now = self._settings.clock()
        if not self._settings.auto_resume or not _goes_on(row, folder, follower, now):
            return None
        done = 0 if follower is None else follower.summary().iterations
        mark = read_mark(folder)
        waited = f" waited {row.attempt}" if mark is not None and mark.waits_for else ""
        id = f"goes-on {row.name} {row.created_at!r} {done}{waited}"
        return None if self._store.has_acted(id, since=now - _ONCE_IN_S) else id

    def _reason(self, row: Submission, follower: JournalFollower | None) -> str:
        """Return why it may not start; empty if it may."""
        try:
            if follower is not None:
                require_going_on(follower, self._settings)
            if row.words:
                require_allowed(Experiment.kept(self._own_words(row)), self._settings)
        except HttpProblem as problem:
            return f"the operator changed what may be run: {problem.detail}"
        except (InputError, ValidationError) as error:
            return f"this version of rubberband cannot read it: {' '.join(str(error).split())}"
        return ""

    def _own_words(self, row: Submission) -> Mapping[str, Any]:
        """Return the words that the user may be refused: the settings of a pool's instances are the operator's."""
        pool = self._settings.pool
        if pool is None or pool.folder is None or row.words.get("resources", {}).get("provider") != pool.provider:
            return row.words
        return without_pool(row.words, PoolFolder(path=Path(pool.folder)))


def require_going_on(follower: JournalFollower, settings: Settings) -> None:
    """Raise Problem REFUSED if a started experiment violates the providers or the max_cost allowed now."""
    provider, max_cost_usd = follower.header.setup["provider"], follower.max_cost_usd
    most_usd, reason = settings.limits.max_cost_usd, ""
    if provider not in settings.providers:
        allowed = ", ".join(settings.providers)
        reason = f"resources.provider: {provider} is not allowed here; allowed: {allowed}"
    elif most_usd is not None and (max_cost_usd is None or max_cost_usd > most_usd + MONEY_SLACK_USD):
        has = "none" if max_cost_usd is None else format_usd(max_cost_usd)
        reason = f"constraints.max_cost: {has} is not allowed here; at most {format_usd(most_usd)}"
    if reason:
        by_hand = f"continue it with `rubberband resume {follower.folder.name}` on the machine where it was run"
        raise HttpProblem(REFUSED, f"{reason}; {by_hand}")


def _goes_on(row: Submission, folder: ExperimentFolder, follower: JournalFollower | None, now: float) -> bool:
    """Whether a submitted experiment lost its process in this home without an exit status, a pending cancel, an end in
    its journal or a deadline that has passed.
    """
    mark, ending = read_mark(folder), read_ending(folder)
    if not row.words or mark is None or mark.attempt != row.attempt:
        return False
    if ending is not None and ending.attempt == row.attempt:
        return False
    if any(request.kind == "cancel" for request in Inbox(folder.inbox).pending()):
        return False
    if follower is not None:
        return not follower.is_ending and not _is_late(follower)
    if loses_profile(row):
        return False
    return row.deadline_at is None or row.deadline_at > now


def _is_late(follower: JournalFollower) -> bool:
    summary = follower.summary()
    if follower.header.kind.is_simulated or summary.deadline_s is None or summary.started_at is None:
        return False
    return summary.started_at + summary.deadline_s <= follower.present


# Processes of experiments, each started at most once. Nothing here depends on being their parent.

HOSTED: Sequence[str] = (sys.executable, "-P", "-m", "rubberband.running.hosted")
"""Command; HOME, NAME and the descriptor of the lock follow. -P: the current folder must not hide modules."""

_LAST_S = 0.5
"""Time for the previous process to end before a start fails."""


class NotStartedError(RubberbandError):
    """A process could not be started."""


class Processes:
    """Processes that this server started. They continue without it."""

    def __init__(
        self, command: Sequence[str] = HOSTED, secrets: Collection[str] = (), notify: Collection[str] = ()
    ) -> None:
        """`secrets`: variables that a process has only if its experiment lists them; `notify`: those with addresses of
        notices.
        """
        self._command, self._secrets, self._notify = command, frozenset(secrets), tuple(notify)
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, folder: ExperimentFolder, order: HostedRun) -> bool:
        """Start a process with `order`; return False if one runs already. Raises NotStartedError.

        The process inherits the lock: as long as the lock is free, no process exists.
        """
        try:
            with holding(folder, wait_s=_LAST_S) as lock:
                if lock is None:
                    return False
                write_order(folder, order)
                self._spawn(folder, order, lock)
        except (OSError, InputError) as error:
            raise NotStartedError(f"its process could not be started: {error}") from None
        return True

    def _spawn(self, folder: ExperimentFolder, order: HostedRun, lock: int) -> None:
        log = os.open(folder.process_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self._children[folder.name] = subprocess.Popen(
                [*self._command, str(folder.home), folder.name, str(lock)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=child_environment(
                    order.store, self._secrets - {*order.words.get("resources", {}).get("secrets", ()), *self._notify}
                )
                | {SERVICE_VARIABLE: ",".join(self._notify)},
                cwd=next((path for path in order.code if os.path.isdir(path)), folder.path),
                start_new_session=True,
                pass_fds=(lock,),
            )
        finally:
            os.close(log)

    def reap(self) -> None:
        """Collect processes that ended, so that no zombie stays."""
        self._children = {name: child for name, child in self._children.items() if child.poll() is None}

    def let_go(self) -> None:
        """Stop being their parent; they continue."""
        self.reap()
        for child in self._children.values():
            child.returncode = 0  # or Popen would warn that it still runs
        self._children = {}
