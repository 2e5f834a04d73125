"""Other limits for an experiment: a planning process previews them; they are granted if nothing changed meanwhile."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakValueDictionary

from rubberband.api.experiments.budgets import Budgets
from rubberband.api.experiments.starting import KEY_GOOD_S, raised_as_problems, waits
from rubberband.api.experiments.watcher import Watcher
from rubberband.api.plans.previews import Plans
from rubberband.api.plans.process import RestAnswer, RestQuestion, instant_of, with_limits
from rubberband.api.problems import REFUSED, UNAVAILABLE, HttpProblem
from rubberband.api.settings import Settings
from rubberband.api.store import Store
from rubberband.executor.core.extending import Extension, Limits
from rubberband.executor.journal.inbox import DriverRequest, Inbox, NewTrials
from rubberband.executor.run import allowance
from rubberband.spec.experiment import Experiment
from rubberband.states import ExperimentState
from rubberband.units import format_usd
from rubberband.values.plan import Policy
from rubberband.values.submission import Submission

if TYPE_CHECKING:
    from rubberband.api.experiments import Journals

_TRIES = 5
_PAUSE_S = 0.2
"""The watcher reads a journal somewhat later than a planning process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Other limits, more trials, or both, for an experiment."""

    deadline: object = None
    max_cost_usd: float | None = None
    target: float | None = None
    num_samples: object = None
    """`+16`, or how many trials the search is to have in all."""
    trials: NewTrials | None = None
    """One that is given."""

    @property
    def adds(self) -> bool:
        """Whether trials are to be added."""
        return self.num_samples is not None or self.trials is not None


class LockOfEach:
    """A lock for each experiment: slow work under it, such as reading a journal, holds up no other one."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()
        self._mutex = threading.Lock()

    def of(self, name: str) -> threading.Lock:
        """Return the lock of an experiment, the same one as long as any caller has it."""
        with self._mutex:
            return self._locks.setdefault(name, threading.Lock())


class Extensions:
    """Plans and grants other limits for experiments. Thread-safe; all methods raise Problem."""

    def __init__(
        self, settings: Settings, store: Store, watcher: Watcher, journals: Journals, budgets: Budgets | None
    ) -> None:
        self._settings, self._store, self._watcher, self._journals = settings, store, watcher, journals
        self._budgets = budgets
        self._granting = LockOfEach()

    async def outlook(self, plans: Plans, name: str, wanted: Wanted, caller: str) -> Extension:
        """Return the expected effect of limits or trials, which a planning process previews. Raises Problem."""
        asked = await asyncio.to_thread(self.question, name, wanted)
        found = asked if isinstance(asked, Extension) else (await plans.rest(asked, caller)).extension
        await asyncio.to_thread(self._require_money, name, found)
        return found

    async def planned_and_granted(
        self, plans: Plans, name: str, wanted: Wanted, caller: str, *, request: str
    ) -> Extension:
        """Put limits in force or add trials, once for each `request`, and return the effect. Raises Problem.

        If the experiment's limits or trials change meanwhile, the effect is planned again.
        """
        question = partial(self.question, request=request)
        for _ in range(_TRIES):
            asked = await asyncio.to_thread(question, name, wanted)
            if isinstance(asked, Extension):
                return asked
            answer = await plans.rest(asked, caller)
            if not asked.is_granted:
                await asyncio.to_thread(self._require_money, name, answer.extension)
            found = await asyncio.to_thread(self.grant, asked, answer, request)
            if found is not None:
                return found
            await asyncio.sleep(_PAUSE_S)
        raise HttpProblem(
            UNAVAILABLE, f"the limits of {name!r} are being changed; try again", headers={"Retry-After": "2"}
        )

    def _require_money(self, name: str, extension: Extension) -> None:
        """Raise Problem REFUSED for limits whose cost a pool's cap or the owner's budget does not cover."""
        row = self._store.submission(name)
        if self._budgets is not None and row is not None:
            bill_usd = self._budgets.bill_usd(row)
            self._budgets.require_extension(row, extension, self._settings.clock(), bill_usd=bill_usd)

    def question(self, name: str, wanted: Wanted, *, request: str = "") -> Extension | RestQuestion:
        """Return the question to plan for these limits and trials, or the answer that the same `request` had before."""
        row, deadline, max_cost_usd = self._journals.row(name), wanted.deadline, wanted.max_cost_usd
        if request and (granted := self._granted(row, request)) is not None:
            return granted
        most_usd = self._settings.limits.max_cost_usd
        if most_usd is not None and max_cost_usd is not None and max_cost_usd > most_usd:
            asked = f"max_cost={format_usd(max_cost_usd)}"
            raise HttpProblem(REFUSED, f"{asked} is more than is allowed here ({format_usd(most_usd)})")
        self._journals.require(row, "add" if wanted.adds else "extend")
        with raised_as_problems():
            # A duration counts from the submission, or from the start of what was run by hand.
            instant = deadline if deadline is None or not row.words else instant_of(deadline, row.created_at)
            if waits(row):
                other = with_limits(row.words, cast("datetime | None", instant), max_cost_usd, wanted.target)
                require_runnable(Experiment.kept(other), self._settings)
                now = self._settings.clock()
                return _of_waiting(row, other, now, waits_s=self._wait_of(row, now))
            with self._journals.opened(name) as follower:
                limits = follower.limits(deadline=instant, max_cost_usd=max_cost_usd, target=wanted.target)
                trials = wanted.trials
                if wanted.num_samples is not None:
                    trials = follower.new_trials(wanted.num_samples)
                if max_cost_usd is not None:
                    allowance.require_going_on(follower, self._settings.home, max_cost_usd=max_cost_usd, goes_on=False)
            is_driven = row.state is ExperimentState.RUNNING
            return RestQuestion(name=name, now=self._settings.clock(), limits=limits, trials=trials, driven=is_driven)

    def _wait_of(self, row: Submission, now: float) -> float:
        """Return the seconds until the expected start of a queued experiment; 0 where that is not known."""
        turn = self._watcher.line.turns(now).get(row.name)
        return 0.0 if turn is None or turn.start_at is None else turn.start_at - now

    def grant(self, question: RestQuestion, answer: RestAnswer, request: str) -> Extension | None:
        """Put the limits in force, once for each `request`; None if the limits changed since the answer was planned.

        An experiment without a running process gets them when it is resumed. Raises Problem, also where no money is
        left for them.
        """
        if question.is_granted:
            return replace(answer.extension, applied=True)
        bill_usd = None if self._budgets is None else self._budgets.bill_usd(self._journals.row(question.name))
        with self._granting.of(question.name):
            row = self._journals.row(question.name)
            if isinstance(granted := self._granted(row, request), Extension):
                return granted
            self._journals.require(row, "extend" if question.trials is None else "add")
            if not question.words:
                with self._journals.opened(question.name) as follower:
                    if (follower.limits_in_force, follower.num_trials) != (answer.had, answer.num_trials):
                        return None
            with self._watcher.promising:
                if self._budgets is not None:
                    cost_usd = self._budgets.require_extension(
                        row, answer.extension, self._settings.clock(), bill_usd=bill_usd
                    )
                    row = replace(row, admitted_usd=max(row.admitted_usd, cost_usd))
                if not question.words:
                    self._ask(row, question, request)
                elif not self._kept(row, question, answer, request):
                    return None
        self._watcher.kick(question.name)
        return replace(answer.extension, applied=True)

    def _kept(self, row: Submission, question: RestQuestion, answer: RestAnswer, request: str) -> bool:
        """Change the settings of a queued experiment, and the plan that it counts with."""
        if not waits(row) or row.words != question.words:
            return False
        after, shortest_s = answer.extension.after, row.summary.shortest_jct_s
        if shortest_s is not None:
            shortest_s = min(shortest_s, after.jct_s)
        planned = replace(
            row.summary, planned_jct_s=after.jct_s, planned_cost_usd=after.cost_usd, shortest_jct_s=shortest_s
        )
        return self._store.change(
            question.name,
            at=self._settings.clock(),
            words=question.other,
            summary=planned,
            admitted_usd=row.admitted_usd,
            expected={ExperimentState.QUEUED},
            request=request,
        )

    def _ask(self, row: Submission, question: RestQuestion, request: str) -> None:
        """Leave the request for the driver that runs or resumes it. First it counts with what that may cost."""
        at, asked = self._settings.clock(), list[DriverRequest]()
        if question.trials is None or question.limits != Limits():
            asked.append(DriverRequest(id=request, kind="extend", asked_at=at, **asdict(question.limits)))
        if question.trials is not None:
            asked.append(DriverRequest(id=_of_trials(request), kind="add", asked_at=at, trials=question.trials))
        self._store.change(row.name, at=at, admitted_usd=row.admitted_usd)
        with raised_as_problems():
            for each in asked:
                Inbox(self._watcher.folder(question.name).inbox).put(each)
        self._journals.noted(row, at)

    def _granted(self, row: Submission, request: str) -> Extension | RestQuestion | None:
        """Return the result of an earlier request with this id; a question if the experiment has not started."""
        now = self._settings.clock()
        acted = self._store.has_acted(request, since=now - KEY_GOOD_S)
        if not self._journals.exists(row.name):
            return _of_waiting(row, dict(row.words), now, is_granted=True) if acted and row.words else None
        with self._journals.opened(row.name) as follower:
            taken = acted or follower.has_taken(_of_trials(request)) or follower.has_taken(request)
            return follower.granted() if taken else None


def _of_trials(request: str) -> str:
    """Return the id of the part of a request that asks for trials."""
    return f"{request[:72]}-trials"


def require_runnable(experiment: Experiment, settings: Settings) -> None:
    """Raise InputError if an experiment cannot be run here; the service's pool lends its instances."""
    is_lent = settings.pool is not None and settings.pool.provider == experiment.resources.provider
    allowance.require_runnable(experiment, settings.home, store=settings.store, is_lent=is_lent)


def _of_waiting(
    row: Submission, other: dict[str, Any], now: float, *, waits_s: float = 0.0, is_granted: bool = False
) -> RestQuestion:
    return RestQuestion(
        name=row.name,
        now=now + waits_s,
        waits_s=waits_s,
        submitted_at=row.created_at,
        words=dict(row.words),
        other=other,
        policy=cast(Policy, row.policy),
        is_granted=is_granted,
    )
