"""The experiments of the service: each runs in a process of its own, which outlives the server and is adopted again."""

from __future__ import annotations

import logging
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from rubberband.api.body import require_allowed
from rubberband.api.experiments.admission import Admission
from rubberband.api.experiments.extending import Extensions, LockOfEach, require_runnable
from rubberband.api.experiments.queueing import Line
from rubberband.api.experiments.starting import (
    HOSTED,
    KEY_GOOD_S,
    Processes,
    conflict,
    loses_profile,
    raised_as_problems,
    require_going_on,
    require_here,
    waits,
)
from rubberband.api.experiments.watcher import Watcher
from rubberband.api.plans.process import with_instant
from rubberband.api.problems import CONFLICT, NAME_TAKEN, NOT_FOUND, UNAVAILABLE, HttpProblem, problem_of
from rubberband.api.settings import Settings
from rubberband.api.store import Store
from rubberband.api.store.schema import Promise
from rubberband.errors import DamagedJournalError, InputError, JournalError
from rubberband.executor.journal.folder import ExperimentFolder, write_labels
from rubberband.executor.journal.inbox import DriverRequest, Inbox
from rubberband.executor.logs.pages import ALL_LINES, PrintedLine, Wanted, page, trial_files
from rubberband.executor.result.result import Result
from rubberband.executor.run import allowance
from rubberband.executor.run.follower import Failure, JournalFollower, at_work, explained, salvage
from rubberband.executor.run.removing import Removal, removal, remove
from rubberband.spec.experiment import Experiment
from rubberband.states import AT_WORK, OVER, Action, ExperimentState, Fact, obstacle, pool_sets_instances, possible
from rubberband.units import shown
from rubberband.values.plan import Policy
from rubberband.values.submission import LabelChange, Submission, Summary
from rubberband.views.trial import why_not_stopped

log = logging.getLogger("rubberband.api.experiments")

KEPT_RESULTS = 16
"""Results of experiments that do not run are cached up to this number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """Journal of an experiment without a running process."""

    changed_at: float
    """`changed_at` of its row when the journal was read."""
    result: Result
    failures: Sequence[Failure]


class Journals:
    """Rows and journals of experiments for requests: as the watcher follows them, or read once. Thread-safe."""

    def __init__(self, store: Store, watcher: Watcher) -> None:
        self._store, self._watcher = store, watcher
        self._settled: OrderedDict[str, Settled] = OrderedDict()
        self._reading, self._caching = LockOfEach(), threading.Lock()

    def row(self, name: str) -> Submission:
        """Return an experiment's row. Raises Problem NOT_FOUND."""
        row = self._store.submission(name)
        if row is None:
            raise HttpProblem(NOT_FOUND, f"experiment {shown(name)} not found")
        return row

    def settled(self, row: Submission) -> Settled | None:
        """Return the readable part of a journal that is not followed; None if there is none. Raises Problem."""
        with self._reading.of(row.name):
            with self._caching:
                known = self._settled.get(row.name)
                if known is not None and known.changed_at == row.changed_at:
                    self._settled.move_to_end(row.name)
                    return known
            found = self._read(row)
            with self._caching:
                if found is not None:
                    self._settled[row.name] = found
                while len(self._settled) > KEPT_RESULTS:
                    self._settled.popitem(last=False)
            return found

    def _read(self, row: Submission) -> Settled | None:
        if not self.exists(row.name):
            return None
        try:
            with self._opened(row.name) as follower:
                result, failures = follower.result(), tuple(follower.failures)
        except DamagedJournalError:
            left = salvage(self._watcher.folder(row.name))
            if left is None:
                return None
            result, failures = left.result, ()
        return Settled(changed_at=row.changed_at, result=result, failures=failures)

    def exists(self, name: str) -> bool:
        """Whether there is a journal. Raises Problem."""
        with raised_as_problems():
            return self._watcher.folder(name).exists

    def require(self, row: Submission, action: Action) -> None:
        """Raise Problem CONFLICT, with an alternative, unless the action is possible now."""
        require_here(row)
        why = obstacle(row.state, action, lambda fact: self._holds(row, fact))
        if why:
            raise conflict(row, why)

    def possible(self, row: Submission) -> frozenset[Action]:
        """Return the actions that are possible now. Raises Problem if that depends on an unreadable journal."""
        return frozenset() if row.home else possible(row.state, lambda fact: self._holds(row, fact))

    def _holds(self, row: Submission, fact: Fact) -> bool:
        match fact:
            case "here":
                return not self.exists(row.name) or self._watcher.folder(row.name).is_here
            case "targeted":
                settled = self.settled(row)
                ended_by = None if settled is None else settled.result.ended_by
                return ended_by is not None and ended_by.rule == "target"
            case "begun":
                return self.exists(row.name) or (waits(row) and row.words.get("profile") is not None)
            case "measured":
                return not loses_profile(row) or self.exists(row.name)
            case "ended":
                settled = self.settled(row)
                return settled is None or settled.result.outcome != "unfinished"
            case "asked":
                return bool(Inbox(self._watcher.folder(row.name).inbox).extensions())
            case "open":
                settled = self.settled(row)
                if settled is not None and not Inbox(self._watcher.folder(row.name).inbox).pending():
                    return settled.result.resumable
                with self.opened(row.name) as follower:  # includes limits that were requested meanwhile
                    return follower.goes_on()

    def noted(self, row: Submission, at: float) -> Submission:
        """Return the row with what waits for a resume, and store that. Raises Problem."""
        if row.state in AT_WORK:  # its watcher does
            return row
        with self.opened(row.name) as follower:
            summary = follower.summary()
        self._store.change(row.name, at=at, summary=summary, expected={row.state})
        return self.row(row.name)

    @contextmanager
    def opened(self, name: str) -> Iterator[JournalFollower]:
        """Open the journal. Raises Problem: UNAVAILABLE, or CONFLICT if it is damaged."""
        try:
            with self._opened(name) as follower:
                yield follower
        except DamagedJournalError as error:
            raise problem_of(explained(self._watcher.folder(name), error)) from None

    @contextmanager
    def _opened(self, name: str) -> Iterator[JournalFollower]:
        followed = self._watcher.follower(name)
        if followed is not None:
            yield followed
            return
        folder = self._watcher.folder(name)
        with ExitStack() as stack:
            try:
                follower = stack.enter_context(closing(JournalFollower(folder)))
                follower.refresh(live=at_work(folder))
            except DamagedJournalError:
                raise
            except Exception as error:
                raise HttpProblem(UNAVAILABLE, f"the journal of {name!r} cannot be read: {error}") from error
            yield follower


class ExperimentRuns:
    """Starts, adopts, watches and ends the processes of experiments, and reads what they journal."""

    def __init__(
        self, settings: Settings, store: Store, wake: Callable[[], None], *, command: Sequence[str] = HOSTED
    ) -> None:
        """`wake` is called after additions to the feed. `command` starts the process of an experiment."""
        self._settings, self._store = settings, store
        self.watcher = Watcher(store, Processes(command, settings.secrets, settings.notify), wake, settings)
        """Starts and follows the processes."""
        self.journals = Journals(store, self.watcher)
        """Reads what they journal."""
        self.admission = None if settings.pool is None else Admission(settings.pool, store)
        """Promises of the pool; None without a pool."""
        self._budgets = None if self.admission is None else self.admission.budgets
        self.extensions = Extensions(settings, store, self.watcher, self.journals, self._budgets)
        """Other limits for experiments."""
        self._resuming = LockOfEach()
        self.care = Care(store, self.watcher, self.journals, self._resuming)
        """Labels, and the end of what is kept."""

    def start(self) -> None:
        """Adopt running experiments, start queued ones, and watch all of them in a thread."""
        self.watcher.start()

    def close(self) -> None:
        """Stop watching. The experiments continue."""
        self.watcher.close()

    @property
    def line(self) -> Line:
        """The queue and its slots, as they were at the latest look."""
        return self.watcher.line

    @property
    def alive(self) -> bool:
        """Whether experiments are watched and the store answers."""
        return self.watcher.is_well

    def submit(
        self,
        experiment: Experiment,
        *,
        policy: Policy = "optimal",
        owner: str = "",
        plan: str | None = None,
        request: str = "",
        promise: Promise | None = None,
        admitted_usd: float = 0.0,
        summary: Summary | None = None,
    ) -> Submission:
        """Accept an experiment; its process starts as soon as a slot is free, or at once with a `promise`.

        `admitted_usd` is what it costs at most, and `summary` has the time and cost that are planned. A repeated
        `request` returns the existing submission. Raises Problem (NAME_TAKEN, …).
        """
        now = self._settings.clock()
        with raised_as_problems():
            require_runnable(experiment, self._settings)
            words = with_instant(experiment.to_words(), now)
        row = Submission(
            name=experiment.name,
            state=ExperimentState.QUEUED,
            created_at=now,
            changed_at=now,
            owner=owner,
            words=words,
            policy=policy,
            plan=plan,
            request=request,
            summary=summary or Summary(),
            admitted_usd=admitted_usd,
        )
        return self.submitted(row.name, request) or self._added(row, promise)

    def _added(self, row: Submission, promise: Promise | None) -> Submission:
        """Add an experiment; return it, or the one that the same request has just added. Raises Problem."""
        bill_usd = None if self._budgets is None else self._budgets.bill_usd(row)
        with raised_as_problems():
            self.watcher.folder(row.name).require_free(f"submit this one under another name: -s name={row.name}-2")
            with self.watcher.promising:
                if self.admission is not None:
                    self.admission.require(row, promise, row.created_at, bill_usd=bill_usd)
                is_new = self._store.add(row, promise)
        if is_new:
            self.watcher.kick(row.name)
            return row
        known = self.submitted(row.name, row.request)
        if known is None:
            raise HttpProblem(NAME_TAKEN, f"the name {row.name!r} is taken; give another one, such as {row.name}-2")
        return known

    def submitted(self, name: str, request: str) -> Submission | None:
        """Return the submission that the same request made before, if any."""
        known = self._store.submission(name) if request else None
        return known if known is not None and known.request == request else None

    def cancel(self, name: str, *, request: str = "") -> Submission:
        """Request a clean end: instances are released, the best trial so far is kept. Idempotent. Raises Problem.

        A repeated `request` has no second effect.
        """
        row = self.journals.row(name)
        id = f"cancel-{request or secrets.token_hex(8)}"
        if self._has_acted(request) or (request and self._has_taken(name, id)):
            return row
        if not waits(row):  # its service finds that it is withdrawn
            require_here(row)
        if row.state is ExperimentState.QUEUED:
            row = self._withdraw(row, request)
            if row.state not in AT_WORK:
                return row
        if row.state in AT_WORK:
            self._ask_to_end(name, id)
            if request:
                self._store.note_act(request, at=self._settings.clock())
            return self.journals.row(name)
        if row.state is ExperimentState.CANCELLED:
            return row
        if row.state is ExperimentState.INTERRUPTED and self._settings.auto_resume:
            self._ask_to_end(name, id)  # it may restart automatically now; a user who resumes it withdraws this
        return self._withdraw_extensions(name, request)

    def _withdraw_extensions(self, name: str, request: str) -> Submission:
        """Withdraw the trials and limits that wait for a resume of an experiment that has ended. Raises Problem."""
        with self._resuming.of(name):
            row = self.journals.row(name)
            self.journals.require(row, "cancel")
            inbox = Inbox(self.watcher.folder(name).inbox)
            for asked in inbox.extensions():
                inbox.discard(asked.id)
            if at_work(self.watcher.folder(name)):  # resumed by hand at this moment
                self._ask_to_end(name, f"cancel-{request or secrets.token_hex(8)}")
            if request:
                self._store.note_act(request, at=self._settings.clock())
            return self.journals.noted(row, self._settings.clock())

    def _ask_to_end(self, name: str, id: str) -> None:
        inbox = Inbox(self.watcher.folder(name).inbox)
        if not any(request.kind == "cancel" for request in inbox.pending()):
            with raised_as_problems():
                inbox.put(DriverRequest(id=id, kind="cancel", asked_at=self._settings.clock()))
        self.watcher.kick(name)

    def limit(self, name: str, *, max_instances: int | None, request: str = "") -> Submission:
        """Ask a running experiment to hold at most `max_instances` from now on; None lifts the limit. Raises Problem.

        A repeated `request` has no second effect.
        """
        row = self.journals.row(name)
        id = f"limit-{request or secrets.token_hex(8)}"
        if self._has_acted(request) or (request and self._has_taken(name, id)):
            return row
        self.journals.require(row, "limit")
        if self._settings.pool is not None and self.watcher.shares_pool(row):
            raise conflict(row, pool_sets_instances(self._settings.pool.name))
        asked = DriverRequest(id=id, kind="limit", asked_at=self._settings.clock(), max_instances=max_instances)
        with raised_as_problems():
            Inbox(self.watcher.folder(name).inbox).put(asked)
        self.watcher.kick(name)
        return row

    def stop(self, name: str, *, trial: int, request: str = "") -> Submission:
        """Ask a running experiment to train a trial no more. Raises Problem for one that is over or unknown.

        A repeated `request` has no second effect.
        """
        row = self.journals.row(name)
        id = f"stop-{request or secrets.token_hex(8)}"
        if self._has_acted(request) or (request and self._has_taken(name, id)):
            return row
        self.journals.require(row, "stop")
        if why := why_not_stopped(self.result(name), trial):
            raise conflict(row, why)
        with raised_as_problems():
            asked = DriverRequest(id=id, kind="stop", asked_at=self._settings.clock(), trial=trial)
            Inbox(self.watcher.folder(name).inbox).put(asked)
        self.watcher.kick(name)
        return row

    def _has_acted(self, request: str) -> bool:
        """Whether the request took effect before; its answer was lost."""
        return bool(request) and self._store.has_acted(request, since=self._settings.clock() - KEY_GOOD_S)

    def _has_taken(self, name: str, id: str) -> bool:
        if not self.journals.exists(name):
            return False
        with self.journals.opened(name) as follower:
            return follower.has_taken(id)

    def _withdraw(self, row: Submission, request: str) -> Submission:
        """Take it from the queue; an experiment that ran before gets the state in its journal."""
        state, reason = ExperimentState.CANCELLED, "cancelled before it started"
        if row.attempt or not row.words:
            settled, state = self.journals.settled(row), ExperimentState.INTERRUPTED
            reason = "its resumption was cancelled while queued; resume it to continue"
            if settled is not None and settled.result.outcome != "unfinished":
                state, reason = ExperimentState(settled.result.outcome), settled.result.reason
        queued = {ExperimentState.QUEUED}
        self._store.change(
            row.name, at=self._settings.clock(), state=state, reason=reason, expected=queued, request=request
        )
        self.watcher.kick(row.name)
        return self.journals.row(row.name)

    def resume(self, name: str, *, request: str = "") -> Submission:
        """Resume an experiment that was interrupted, cancelled, or ended by a budget raised since. Raises Problem.

        A repeated `request` has no second effect.
        """
        row = self.journals.row(name)
        if self._has_acted(request):
            return row
        self.journals.require(row, "resume")
        folder = self.watcher.folder(name)
        self._require_allowed(row, folder)
        with self._resuming.of(name):  # a second request must not withdraw cancels that arrived after the first
            inbox = Inbox(folder.inbox)
            before = inbox.pending()  # before the look at the row: what is asked later is for the next attempt
            row = self.journals.row(name)
            self.journals.require(row, "resume")
            if not self._requeue(row, request):
                raise conflict(self.journals.row(name), "it has just changed; reload and try again")
            inbox.withdraw_cancels(before)
        self.watcher.kick(name)
        return self.journals.row(name)

    def _requeue(self, row: Submission, request: str) -> bool:
        """Queue an experiment again, if its state is still the same. Raises Problem where no money is left for it."""
        expected = None
        if self._budgets is not None and self.journals.exists(row.name):
            with self.journals.opened(row.name) as follower:
                expected = follower.resumed()
        now, cost_usd = self._settings.clock(), None
        bill_usd = None if self._budgets is None else self._budgets.bill_usd(row)
        with self.watcher.promising:
            if self._budgets is not None:
                cost_usd = self._budgets.require_resume(row, expected, now, bill_usd=bill_usd)
            change = partial(self._store.change, row.name, at=now, state=ExperimentState.QUEUED, reason="")
            return change(admitted_usd=cost_usd, expected={row.state}, request=request)

    def _require_allowed(self, row: Submission, folder: ExperimentFolder) -> None:
        """Raise Problem REFUSED if the settings of now do not allow it."""
        if row.words:
            require_allowed(Experiment.kept(row.words), self._settings)
        if not folder.exists:
            return
        with self.journals.opened(row.name) as follower, raised_as_problems():
            require_going_on(follower, self._settings)
            allowance.require_going_on(follower, self._settings.home, max_cost_usd=follower.max_cost_usd)

    def possible(self, row: Submission) -> frozenset[Action]:
        """Return the actions that are possible now. Raises Problem if that depends on an unreadable journal."""
        return self.journals.possible(row)

    def result(self, name: str) -> Result | None:
        """Return the result so far; None without a journal. Raises Problem NOT_FOUND."""
        follower = self.watcher.follower(name)
        if follower is not None:
            return follower.result()
        settled = self.journals.settled(self.journals.row(name))
        return None if settled is None else settled.result

    def lines(
        self,
        name: str,
        *,
        source: Literal["trials", "process"] = "trials",
        trial: int | None = None,
        cursor: str | None = None,
        limit: int = 1000,
        wanted: Wanted = ALL_LINES,
    ) -> tuple[list[PrintedLine], str]:
        """Return wanted log lines past `cursor` (`tail`: the last ones) and the next cursor. Raises Problem."""
        row = self.journals.row(name)
        folder = self.watcher.folder(name)
        read = partial(page, cursor=cursor, limit=limit, is_whole=not at_work(folder), wanted=wanted)
        with raised_as_problems():
            if source == "process":
                return read({None: folder.process_log}, ())
            if trial is not None:
                self._require_trial(name, trial)
            failures = [failure for failure in self._failures(row) if trial in (None, failure.trial)]
            return read(trial_files(folder.logs, trial), failures)

    def _require_trial(self, name: str, trial: int) -> None:
        result = self.result(name)
        if result is not None and not 0 <= trial < len(result.trials):
            last = len(result.trials) - 1
            raise HttpProblem(NOT_FOUND, f"experiment {name!r} has no trial {trial}; it has 0 to {last}")

    def _failures(self, row: Submission) -> Sequence[Failure]:
        follower = self.watcher.follower(row.name)
        if follower is not None:
            return list(follower.failures)
        settled = self.journals.settled(row)
        return () if settled is None else settled.failures


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
