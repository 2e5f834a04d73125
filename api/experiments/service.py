"""The experiments of the service: each runs in a process of its own, which outlives the server and is adopted again."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Literal, cast

from rubberband.api.experiments.body import require_allowed
from rubberband.api.experiments.gate import Gate, require_going_on
from rubberband.api.experiments.limit_preview import RestAnswer, RestQuestion, instant_of, with_instant, with_limits
from rubberband.api.experiments.reading import Journals
from rubberband.api.experiments.states import KEY_GOOD_S, conflict, told_as_problems, waits
from rubberband.api.experiments.watcher import HOSTED, Processes, Watcher
from rubberband.api.problems import NAME_TAKEN, NOT_FOUND, REFUSED, Problem
from rubberband.api.settings import Settings
from rubberband.api.store.protocol import Store
from rubberband.executor.core.extending import Extension
from rubberband.executor.journal.folder import ExperimentFolder
from rubberband.executor.journal.inbox import DriverRequest, Inbox
from rubberband.executor.log_pages import PrintedLine, page, trial_files
from rubberband.executor.observed import Failure, at_work
from rubberband.executor.result import Result
from rubberband.spec.experiment import Experiment
from rubberband.states import AT_WORK, Action, ExperimentState
from rubberband.units import format_usd
from rubberband.values.plan import Policy
from rubberband.values.submission import Submission

# Other limits for experiments: what is to be planned before they are granted, and that they are granted once.
#
# `rubberband.api.routes.experiments` plans them; what the plan assumed is checked again here.


class Extensions:
    """Safe to use from several threads. Everything raises Problem."""

    def __init__(self, settings: Settings, store: Store, watcher: Watcher, journals: Journals) -> None:
        self._settings, self._store, self._watcher, self._journals = settings, store, watcher, journals
        self._granting = threading.Lock()

    def question(
        self, name: str, *, deadline: object = None, max_cost_usd: float | None = None, request: str = ""
    ) -> Extension | RestQuestion:
        """What is to be planned to tell what these limits bring; if `request` had them granted already, what it was
        told then.
        """
        row = self._journals.row(name)
        if request and (granted := self._granted(row, request)) is not None:
            return granted
        self._require_within(max_cost_usd)
        self._journals.require(row, "extend")
        with told_as_problems():
            instant = self._instant(row, deadline)
            if waits(row):
                other = with_limits(row.words, cast("datetime | None", instant), max_cost_usd)
                return _of_waiting(row, other)
            with self._journals.opened(name) as observed:
                limits = observed.limits(deadline=instant, max_cost_usd=max_cost_usd)
            return RestQuestion(name=name, limits=limits, driven=row.state is ExperimentState.RUNNING)

    def grant(self, question: RestQuestion, answer: RestAnswer, request: str) -> Extension | None:
        """Put the limits in force; None if it has other ones by now than those that the answer was reckoned from.

        `request` makes it happen once. What nobody is at work on has them from when it is resumed.
        """
        if question.is_granted:
            return replace(answer.extension, applied=True)
        with self._granting:
            row = self._journals.row(question.name)
            if isinstance(granted := self._granted(row, request), Extension):
                return granted
            self._journals.require(row, "extend")
            kept = self._kept(row, question, request) if question.words else self._asked(question, answer, request)
        self._watcher.kick(question.name)
        return replace(answer.extension, applied=True) if kept else None

    def _kept(self, row: Submission, question: RestQuestion, request: str) -> bool:
        """Change the words of what waits."""
        if not waits(row) or row.words != question.words:
            return False
        queued = {ExperimentState.QUEUED}
        return self._store.change(question.name, at=time.time(), words=question.other, expected=queued, request=request)

    def _asked(self, question: RestQuestion, answer: RestAnswer, request: str) -> bool:
        """Ask the driver, or whoever resumes it."""
        with self._journals.opened(question.name) as observed:
            if observed.limits_in_force != answer.had:
                return False
        limits = question.limits
        asked = DriverRequest(
            id=request,
            kind="extend",
            asked_at=time.time(),
            deadline_s=limits.deadline_s,
            max_cost_usd=limits.max_cost_usd,
        )
        with told_as_problems():
            Inbox(self._watcher.folder(question.name).inbox).put(asked)
        return True

    def _granted(self, row: Submission, request: str) -> Extension | RestQuestion | None:
        """What came of the request, if it was made before; the question what that was, of what has not begun."""
        acted = self._store.has_acted(request, since=time.time() - KEY_GOOD_S)
        if not self._journals.exists(row.name):
            return _of_waiting(row, dict(row.words), is_granted=True) if acted and row.words else None
        with self._journals.opened(row.name) as observed:
            return observed.granted() if acted or observed.has_taken(request) else None

    def _instant(self, row: Submission, deadline: object) -> object:
        """A duration counts from the submission; of what was run by hand, from its start."""
        return deadline if deadline is None or not row.words else instant_of(deadline, row.created_at)

    def _require_within(self, max_cost_usd: float | None) -> None:
        most_usd = self._settings.limits.max_cost_usd
        if most_usd is not None and max_cost_usd is not None and max_cost_usd > most_usd:
            raise Problem(
                REFUSED, f"max_cost={format_usd(max_cost_usd)} is more than is allowed here ({format_usd(most_usd)})"
            )


def _of_waiting(row: Submission, other: dict[str, Any], *, is_granted: bool = False) -> RestQuestion:
    policy = cast(Policy, row.policy)
    return RestQuestion(name=row.name, words=dict(row.words), other=other, policy=policy, is_granted=is_granted)


class Runs:
    """Starts, adopts, watches and ends the processes of experiments, and reads what they journal."""

    def __init__(
        self, settings: Settings, store: Store, wake: Callable[[], None], *, command: Sequence[str] = HOSTED
    ) -> None:
        """`wake` is called when something was added to the feed. `command` is what an experiment's process runs."""
        self._settings, self._store = settings, store
        self._watcher = Watcher(
            store,
            Processes(command),
            wake,
            home=settings.home,
            journals=settings.store,
            code=settings.code,
            entrypoints=settings.entrypoints,
            most_usd=settings.limits.max_cost_usd,
            max_running=settings.limits.max_running,
            gate=Gate(settings, store),
        )
        self._journals = Journals(store, self._watcher)
        self.extensions = Extensions(settings, store, self._watcher, self._journals)
        """Other limits for experiments."""
        self._resuming = threading.Lock()

    def start(self) -> None:
        """Adopt what runs, start what waits, and watch from now on (in a thread)."""
        self._watcher.start()

    def close(self) -> None:
        """Watch no longer. The experiments go on."""
        self._watcher.close()

    @property
    def alive(self) -> bool:
        """Whether experiments are watched, and the store answers."""
        return self._watcher.is_well

    def submit(
        self,
        experiment: Experiment,
        *,
        policy: Policy = "optimal",
        owner: str = "",
        plan: str | None = None,
        request: str = "",
    ) -> Submission:
        """Accept an experiment; its process starts as soon as fewer run than may.

        Asked again by the same `request`, it is the submission that there is. Raises Problem (NAME_TAKEN, …).
        """
        now = time.time()
        with told_as_problems():
            experiment.require_runnable()
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
        )
        if (known := self.submitted(row.name, request)) is not None:
            return known
        with told_as_problems():
            self._watcher.folder(row.name).require_free()
            if not self._store.add(row):
                if (known := self.submitted(row.name, request)) is not None:
                    return known
                raise Problem(NAME_TAKEN, f"the name {row.name!r} is taken; give another one, such as {row.name}-2")
        self._watcher.kick(row.name)
        return row

    def submitted(self, name: str, request: str) -> Submission | None:
        """What the same request had submitted before, if it had."""
        known = self._store.submission(name) if request else None
        return known if known is not None and known.request == request else None

    def cancel(self, name: str, *, request: str = "") -> Submission:
        """Ask for a clean end: instances are given back, the best so far is kept. Idempotent. Raises Problem.

        What the same `request` had asked for already is not asked for again.
        """
        row = self._row(name)
        id = f"cancel-{request or secrets.token_hex(8)}"
        if self._has_acted(request) or (request and self._has_taken(name, id)):
            return row
        if row.state is ExperimentState.QUEUED:
            row = self._withdraw(row, request)
            if row.state not in AT_WORK:
                return row
        if row.state in AT_WORK:
            self._ask_to_end(name, id)
            if request:
                self._store.note_act(request, at=time.time())
            return self._row(name)
        if row.state is ExperimentState.CANCELLED:
            return row
        if row.state is ExperimentState.INTERRUPTED and self._settings.auto_resume:
            self._ask_to_end(name, id)  # it may be about to go on by itself; whoever resumes it withdraws this
        self._journals.require(row, "cancel")
        return row

    def _ask_to_end(self, name: str, id: str) -> None:
        inbox = Inbox(self._watcher.folder(name).inbox)
        if not any(request.kind == "cancel" for request in inbox.pending()):
            with told_as_problems():
                inbox.put(DriverRequest(id=id, kind="cancel", asked_at=time.time()))
        self._watcher.kick(name)

    def _has_acted(self, request: str) -> bool:
        """Whether the request was served before, and its answer was lost."""
        return bool(request) and self._store.has_acted(request, since=time.time() - KEY_GOOD_S)

    def _has_taken(self, name: str, id: str) -> bool:
        if not self._journals.exists(name):
            return False
        with self._journals.opened(name) as observed:
            return observed.has_taken(id)

    def _withdraw(self, row: Submission, request: str) -> Submission:
        """Take it from the queue: what had begun is then as its journal has it."""
        state, reason = ExperimentState.CANCELLED, "cancelled before it started"
        if row.attempt or not row.words:
            state, reason = self._before_queueing(row)
        queued = {ExperimentState.QUEUED}
        self._store.change(row.name, at=time.time(), state=state, reason=reason, expected=queued, request=request)
        self._watcher.kick(row.name)
        return self._row(row.name)

    def _before_queueing(self, row: Submission) -> tuple[ExperimentState, str]:
        settled = self._journals.settled(row)
        if settled is None or settled.result.outcome == "unfinished":
            return ExperimentState.INTERRUPTED, "its resumption was cancelled while queued; resume it to continue"
        return ExperimentState(settled.result.outcome), settled.result.reason

    def resume(self, name: str, *, request: str = "") -> Submission:
        """Go on with what was interrupted, cancelled, or ended by a budget that was raised since. Raises Problem.

        What the same `request` had go on already is not gone on with again.
        """
        row = self._row(name)
        if self._has_acted(request):
            return row
        self._journals.require(row, "resume")
        folder = self._watcher.folder(name)
        self._require_allowed(row, folder)
        with self._resuming:  # who comes second must not withdraw what was asked since of the one that goes on
            row = self._row(name)
            self._journals.require(row, "resume")
            Inbox(folder.inbox).withdraw_cancels()
            queued = ExperimentState.QUEUED
            if not self._store.change(
                name, at=time.time(), state=queued, reason="", expected={row.state}, request=request
            ):
                raise conflict(self._row(name), "it has just changed; reload and try again")
        self._watcher.kick(name)
        return self._row(name)

    def _require_allowed(self, row: Submission, folder: ExperimentFolder) -> None:
        """What was begun goes on here only where submissions may run, and for no more than they may cost now."""
        if row.words:
            require_allowed(Experiment.kept(row.words), self._settings, to_run=True)
        if not folder.exists:
            return
        with self._journals.opened(row.name) as observed:
            require_going_on(observed, self._settings)

    def possible(self, row: Submission) -> frozenset[Action]:
        """What may be done with it now. Raises Problem if that depends on a journal that cannot be read."""
        return self._journals.possible(row)

    def result(self, name: str) -> Result | None:
        """What came of it so far; None while nothing is journalled. Raises Problem if there is none of the name."""
        observed = self._watcher.observed(name)
        if observed is not None:
            return observed.result()
        settled = self._journals.settled(self._row(name))
        return None if settled is None else settled.result

    def lines(
        self,
        name: str,
        *,
        source: Literal["trials", "process"] = "trials",
        trial: int | None = None,
        cursor: str | None = None,
        limit: int = 1000,
    ) -> tuple[list[PrintedLine], str]:
        """Lines of the logs past `cursor` (`tail`: the last ones), and the cursor to ask again with. Raises Problem."""
        row = self._row(name)
        folder = self._watcher.folder(name)
        is_whole = not at_work(folder)
        with told_as_problems():
            if source == "process":
                return page({None: folder.process_log}, (), cursor=cursor, limit=limit, is_whole=is_whole)
            if trial is not None:
                self._require_trial(name, trial)
            failures = [failure for failure in self._failures(row) if trial in (None, failure.trial)]
            return page(trial_files(folder.logs, trial), failures, cursor=cursor, limit=limit, is_whole=is_whole)

    def _require_trial(self, name: str, trial: int) -> None:
        result = self.result(name)
        if result is not None and not 0 <= trial < len(result.trials):
            last = len(result.trials) - 1
            raise Problem(NOT_FOUND, f"experiment {name!r} has no trial {trial}; it has 0 to {last}")

    def _failures(self, row: Submission) -> Sequence[Failure]:
        observed = self._watcher.observed(row.name)
        if observed is not None:
            return list(observed.failures)
        settled = self._journals.settled(row)
        return () if settled is None else settled.failures

    def _row(self, name: str) -> Submission:
        return self._journals.row(name)
