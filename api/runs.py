"""The experiments of the service: each runs in a process of its own, which outlives the server and is adopted again."""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal, cast

from rubberband.api.conflicts import (
    AT_WORK,
    EXTENDED,
    NOT_CANCELLED,
    NOT_EXTENDED,
    NOT_RESUMED,
    RESUMED,
    conflict,
    require_unmeasured,
    told_as_problems,
)
from rubberband.api.observing import Failure, Observed, at_work
from rubberband.api.problems import CONFLICT, NAME_TAKEN, NOT_FOUND, REFUSED, UNAVAILABLE, Problem
from rubberband.api.processes import HOSTED, Processes
from rubberband.api.run_logs import LogLine, page, trial_files
from rubberband.api.settings import Settings
from rubberband.api.store.protocol import Store
from rubberband.api.store.records import ExperimentState, Submission
from rubberband.api.waiting import instant_of, waiting_extension, with_instant, with_limits
from rubberband.api.watching import Watcher
from rubberband.errors import RubberbandError
from rubberband.executor.extending import Extension, Limits
from rubberband.executor.folder import ExperimentFolder
from rubberband.executor.inbox import DriverRequest, Inbox
from rubberband.executor.purse import MONEY_SLACK_USD
from rubberband.executor.result import Result
from rubberband.experiment import Experiment
from rubberband.planner.families import Policy
from rubberband.units import format_usd, shown

EXTENDING_S = 2.0
"""So long who asks for other limits waits for who asked before; threads that wait serve nobody else."""
KEPT_RESULTS = 16
"""Results of experiments that do not run, which are kept to be asked for again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """What the journal of an experiment says that nobody is at work on."""

    changed_at: float
    """Of its row when it was read."""
    result: Result
    failures: Sequence[Failure]


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
            max_running=settings.limits.max_running,
        )
        self._settled: OrderedDict[str, Settled] = OrderedDict()
        self._reading, self._extending, self._resuming = threading.Lock(), threading.Lock(), threading.Lock()

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
        if self._is_mine(row.name, request):
            return self._row(row.name)
        with told_as_problems():
            self._watcher.folder(row.name).require_free()
            if not self._store.add(row):
                if self._is_mine(row.name, request):
                    return self._row(row.name)
                raise Problem(NAME_TAKEN, f"the name {row.name!r} is taken; give another one, such as {row.name}-2")
        self._watcher.kick(row.name)
        return row

    def _is_mine(self, name: str, request: str) -> bool:
        known = self._store.submission(name) if request else None
        return known is not None and known.request == request

    def cancel(self, name: str) -> Submission:
        """Ask for a clean end: instances are given back, the best so far is kept. Idempotent. Raises Problem."""
        row = self._row(name)
        if row.state is ExperimentState.QUEUED:
            row = self._withdraw(row)
            if row.state not in AT_WORK:
                return row
        if row.state in AT_WORK:
            inbox = Inbox(self._watcher.folder(name).inbox)
            if not any(request.kind == "cancel" for request in inbox.pending()):
                asked = DriverRequest(id=f"cancel-{secrets.token_hex(8)}", kind="cancel", asked_at=time.time())
                with told_as_problems():
                    inbox.put(asked)
            self._watcher.kick(name)
            return self._row(name)
        if row.state is ExperimentState.CANCELLED:
            return row
        raise conflict(row, NOT_CANCELLED)

    def _withdraw(self, row: Submission) -> Submission:
        """Take it from the queue: what had begun is then as its journal has it."""
        state, reason = ExperimentState.CANCELLED, "cancelled before it began"
        if row.attempt or not row.words:
            state, reason = self._before_queueing(row)
        self._store.change(row.name, at=time.time(), state=state, reason=reason, expected={ExperimentState.QUEUED})
        self._watcher.kick(row.name)
        return self._row(row.name)

    def _before_queueing(self, row: Submission) -> tuple[ExperimentState, str]:
        settled = self._read(row)
        if settled is None or settled.result.outcome == "unfinished":
            return ExperimentState.INTERRUPTED, "it waited to go on, and was withdrawn; resume it to go on"
        return ExperimentState(settled.result.outcome), settled.result.reason

    def resume(self, name: str) -> Submission:
        """Go on with what was interrupted, cancelled, or ended by a budget that was raised since. Raises Problem."""
        row = self._row(name)
        if row.state not in RESUMED:
            raise conflict(row, NOT_RESUMED)
        folder = self._watcher.folder(name)
        if row.state in (ExperimentState.BUDGET, ExperimentState.FAILED):
            self._require_open(row)
        self._require_allowed(row, folder)
        with self._resuming:  # who comes second must not withdraw what was asked since of the one that goes on
            now = self._row(name)
            if now.state is not row.state:
                raise conflict(now, NOT_RESUMED)
            Inbox(folder.inbox).withdraw_cancels()
            if not self._store.change(
                name, at=time.time(), state=ExperimentState.QUEUED, reason="", expected={row.state}
            ):
                raise conflict(self._row(name), NOT_RESUMED)
        self._watcher.kick(name)
        return self._row(name)

    def _require_open(self, row: Submission) -> None:
        """What its budget ended goes on once that is raised; what failed, if instances were all that it lacked."""
        with self._opened(row.name) as observed:
            if not observed.goes_on():
                raise conflict(row, NOT_RESUMED)

    def _require_allowed(self, row: Submission, folder: ExperimentFolder) -> None:
        """What was begun goes on here only where submissions may run, and for no more than they may cost now."""
        if not folder.exists:
            require_unmeasured(row)
            return
        if not folder.is_here:
            raise Problem(CONFLICT, f"experiment {row.name!r} was begun in another home; go on with it where it is")
        with self._opened(row.name) as observed:
            provider, max_cost_usd = observed.header.setup["provider"], observed.max_cost_usd
        most_usd, reason = self._settings.limits.max_cost_usd, ""
        if provider not in self._settings.providers:
            allowed = ", ".join(self._settings.providers)
            reason = f"resources.provider: {provider} is not among those that may be used here ({allowed})"
        elif most_usd is not None and (max_cost_usd is None or max_cost_usd > most_usd + MONEY_SLACK_USD):
            has = "none" if max_cost_usd is None else format_usd(max_cost_usd)
            reason = f"constraints.max_cost: it has {has}, and at most {format_usd(most_usd)} may be spent here"
        if reason:
            by_hand = f"go on with it by `rubberband resume {row.name}` on the machine where it was run"
            raise Problem(REFUSED, f"{reason}; {by_hand}")

    def extension(self, name: str, *, deadline: object = None, max_cost_usd: float | None = None) -> Extension:
        """What another deadline or budget would change: the plan of the rest, before and after. Raises Problem."""
        with self._planning():
            return self._extension(self._row(name), deadline, max_cost_usd)[0]

    @contextmanager
    def _planning(self) -> Iterator[None]:
        """One at a time: it may take long, in this process, and what one changes is what the next begins with."""
        if not self._extending.acquire(timeout=EXTENDING_S):
            raise Problem(UNAVAILABLE, "other limits are being planned; ask again soon", headers={"Retry-After": "2"})
        try:
            yield
        finally:
            self._extending.release()

    def extend(
        self, name: str, *, deadline: object = None, max_cost_usd: float | None = None, request: str
    ) -> Extension:
        """Change the limits; `request` is an id that makes it happen once. Raises Problem.

        What nobody is at work on has them from when it is resumed.
        """
        with self._planning():
            return self._extended(self._row(name), deadline, max_cost_usd, request)

    def _extended(self, row: Submission, deadline: object, max_cost_usd: float | None, request: str) -> Extension:
        name = row.name
        if (granted := self._granted(row, request)) is not None:
            return granted
        found, limits, words = self._extension(row, deadline, max_cost_usd)
        if words is not None:
            if not self._store.change(name, at=time.time(), words=words, expected={ExperimentState.QUEUED}):
                raise Problem(CONFLICT, f"experiment {name!r} has just begun; ask again")
        else:
            asked = DriverRequest(
                id=request,
                kind="extend",
                asked_at=time.time(),
                deadline_s=limits.deadline_s,
                max_cost_usd=limits.max_cost_usd,
            )
            with told_as_problems():
                Inbox(self._watcher.folder(name).inbox).put(asked)
        self._watcher.kick(name)
        return replace(found, applied=True)

    def _granted(self, row: Submission, request: str) -> Extension | None:
        """What came of the request, if it was made before."""
        if row.state is ExperimentState.QUEUED or not self._watcher.folder(row.name).exists:
            return None
        with self._opened(row.name) as observed:
            return observed.granted(request)

    def _extension(
        self, row: Submission, deadline: object, max_cost_usd: float | None
    ) -> tuple[Extension, Limits, dict[str, Any] | None]:
        """The extension, the limits as a driver counts them, and the new words of what still waits."""
        self._require_within(max_cost_usd)
        if row.state not in EXTENDED:
            raise conflict(row, NOT_EXTENDED)
        with told_as_problems():
            instant = self._instant(row, deadline)
            if row.state is ExperimentState.QUEUED and row.words and not row.attempt:
                words = with_limits(row.words, cast("datetime | None", instant), max_cost_usd)
                policy = cast(Policy, row.policy)
                return waiting_extension(row.words, words, policy, time.time()), Limits(), words
            if not self._watcher.folder(row.name).exists:
                raise Problem(CONFLICT, f"experiment {row.name!r} has not begun; ask again once it runs")
            with self._opened(row.name) as observed:
                driven = row.state is ExperimentState.RUNNING
                found, limits = observed.extension(deadline=instant, max_cost_usd=max_cost_usd, driven=driven)
                return found, limits, None

    def _instant(self, row: Submission, deadline: object) -> object:
        """A duration counts from the submission; of what was run by hand, from its start."""
        return deadline if deadline is None or not row.words else instant_of(deadline, row.created_at)

    def _require_within(self, max_cost_usd: float | None) -> None:
        most_usd = self._settings.limits.max_cost_usd
        if most_usd is not None and max_cost_usd is not None and max_cost_usd > most_usd:
            raise Problem(
                REFUSED, f"max_cost={format_usd(max_cost_usd)} is more than is allowed here ({format_usd(most_usd)})"
            )

    def result(self, name: str) -> Result | None:
        """What came of it so far; None while nothing is journalled. Raises Problem if there is none of the name."""
        observed = self._watcher.observed(name)
        if observed is not None:
            return observed.result()
        settled = self._read(self._row(name))
        return None if settled is None else settled.result

    def lines(
        self,
        name: str,
        *,
        source: Literal["trials", "process"] = "trials",
        trial: int | None = None,
        cursor: str | None = None,
        limit: int = 1000,
    ) -> tuple[list[LogLine], str]:
        """Lines of the logs past `cursor` (`tail`: the last ones), and the cursor to ask again with. Raises Problem."""
        row = self._row(name)
        folder = self._watcher.folder(name)
        is_whole = not at_work(folder)
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
        settled = self._read(row)
        return () if settled is None else settled.failures

    # What is read on demand

    def _row(self, name: str) -> Submission:
        row = self._store.submission(name)
        if row is None:
            raise Problem(NOT_FOUND, f"there is no experiment {shown(name)}")
        return row

    def _read(self, row: Submission) -> Settled | None:
        """The journal of what is not followed; None if there is none."""
        with self._reading:
            known = self._settled.get(row.name)
            if known is not None and known.changed_at == row.changed_at:
                self._settled.move_to_end(row.name)
                return known
            with told_as_problems():
                if not self._watcher.folder(row.name).exists:
                    return None
            with self._opened(row.name) as observed:
                found = Settled(changed_at=row.changed_at, result=observed.result(), failures=tuple(observed.failures))
            self._settled[row.name] = found
            while len(self._settled) > KEPT_RESULTS:
                self._settled.popitem(last=False)
            return found

    @contextmanager
    def _opened(self, name: str) -> Iterator[Observed]:
        """The journal: as the watcher follows it, or read for this once. Raises Problem UNAVAILABLE."""
        followed = self._watcher.observed(name)
        if followed is not None:
            yield followed
            return
        folder = self._watcher.folder(name)
        try:
            observed = Observed(folder)
        except RubberbandError as error:
            raise Problem(UNAVAILABLE, f"the journal of {name!r} cannot be read: {error}") from None
        try:
            try:
                observed.refresh(live=at_work(folder))
            except Exception as error:
                raise Problem(UNAVAILABLE, f"the journal of {name!r} cannot be read: {error}") from error
            yield observed
        finally:
            observed.close()
