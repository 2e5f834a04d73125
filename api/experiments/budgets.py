"""Money at every door: what an experiment costs, and who pays.

The owner's budget of a calendar month (UTC) pays, and on a pool its cap of the month. The money spent in a month
counts in it, and the money to come wholly in each month in which it is planned. An experiment counts with the cost for
which it was admitted (its plan's, or that of a resume or an extension) until it ends, or with its forecast where that
is more. A submission, a resume, an extension, a restart and a start all ask `require`; what asks and adds holds the
lock of the pool's promises (`Watcher.promising`) meanwhile.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rubberband.api.problems import REFUSED, UNAVAILABLE, HttpProblem
from rubberband.api.settings import Settings, SharedPool
from rubberband.api.store import Store
from rubberband.api.store.schema import Promise
from rubberband.cloud.pool import RemotePool
from rubberband.errors import ProviderError
from rubberband.executor.core.extending import Extension
from rubberband.executor.core.forecast import Forecast
from rubberband.planning.month_cap import Expense, MonthCap, Shortage
from rubberband.spec.experiment import Experiment
from rubberband.spec.pool import PoolFolder
from rubberband.states import ACTIVE, AT_WORK, ExperimentState
from rubberband.units import MONEY_SLACK_USD, format_usd, month_begin
from rubberband.values.submission import Submission

QUEUED, INTERRUPTED = ExperimentState.QUEUED, ExperimentState.INTERRUPTED


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Words of a door: what asks for money, and what to do where none is left."""

    what: str
    instead: str
    counts: bool = False
    """Whether the experiment counts already, if it goes on."""
    queued: bool = True
    """Whether the experiments in the queue count."""


PLAN = Ask(what="this plan", instead="submit a cheaper one")
UNPLANNED = Ask(what="an experiment without a profile, which counts with its max_cost,", instead="lower that")
RESUME = Ask(what="the rest of it", instead="resume it once others have ended", counts=True)
EXTENSION = Ask(what="the extension", instead="extend it by less", counts=True)
START = Ask(what="this experiment", instead="it starts once others have ended", queued=False)


class Budgets:
    """Counts what experiments cost, and what they will."""

    def __init__(self, pool: SharedPool, store: Store) -> None:
        self._pool, self._store = pool, store

    def require(
        self,
        row: Submission,
        cost_usd: float,
        now: float,
        ask: Ask,
        *,
        bill_usd: float | None,
        jct_s: float = 0.0,
        promise: Promise | None = None,
    ) -> None:
        """Raise Problem REFUSED where no money is left for an experiment that costs `cost_usd` in all.

        It takes `jct_s`, or has the GPUs of `promise`. `bill_usd` is that of the method, before a lock was taken.
        """
        counted_usd = self._expected_usd(row, self._promised(), now) if ask.counts else row.summary.cost_usd
        more_usd = cost_usd - counted_usd
        if more_usd <= MONEY_SLACK_USD:
            return
        expense = _expense(row, more_usd, now, jct_s, promise)
        self.require_budget(row.owner, expense, now, ask)
        shortage = self.shortage(expense, now, queued=ask.queued, bill_usd=bill_usd) if self.is_member(row) else None
        if shortage is not None:
            raise HttpProblem(REFUSED, f"{shortage.words(f'{ask.what} costs')}; {ask.instead}, or raise the cap")

    def require_budget(self, owner: str, expense: Expense, now: float, ask: Ask = PLAN) -> None:
        """Raise Problem REFUSED where an expense is more than is left of its owner's budget of a month."""
        budget_usd = self._pool.budgets_usd.get(owner)
        if budget_usd is None:
            return
        used = self._owner_usd(owner, now, queued=ask.queued)
        cap = MonthCap(title=f"budget of {owner}", cap_usd=budget_usd, committed_usd=used)
        if (short := cap.shortage(expense, now)) is not None:
            later = "next month" if short.next_at is not None else "ask the operator for a larger budget"
            raise HttpProblem(REFUSED, f"{short.words(f'{ask.what} costs')}; {ask.instead}, or {later}")

    def require_resume(
        self, row: Submission, expected: Forecast | None, now: float, *, bill_usd: float | None
    ) -> float:
        """Return what an experiment costs in all if it is resumed, `expected` by its journal. Raises Problem."""
        if expected is not None:
            cost_usd, jct_s = expected.cost_usd, expected.jct_s
        else:
            has_plan = row.words.get("profile") is not None
            planned_usd = (row.admitted_usd or self._planned(row, "cost_usd")) if has_plan else None
            cost_usd = self.most_usd(Experiment.kept(row.words), row.owner, planned_usd)
            jct_s = self._expected_s(row)
        self.require(row, cost_usd, now, RESUME, bill_usd=bill_usd, jct_s=jct_s)
        return cost_usd

    def require_extension(self, row: Submission, extension: Extension, now: float, *, bill_usd: float | None) -> float:
        """Return what an experiment costs in all with the limits of an extension. Raises Problem.

        One that does not go on asks for what they add; the rest is asked for when it is resumed.
        """
        cost_usd = row.summary.profiling_cost_usd + extension.after.cost_usd
        if row.state not in ACTIVE:
            cost_usd = row.summary.cost_usd + extension.added_usd
        self.require(row, cost_usd, now, EXTENSION, bill_usd=bill_usd, jct_s=extension.after.jct_s)
        return cost_usd

    def require_start(self, row: Submission, now: float) -> None:
        """Raise Problem where what runs by now leaves no money for an experiment of the queue, or that is not known."""
        promised = self._promised()
        cost_usd, promise = self._expected_usd(row, promised, now), promised.get(row.name)
        jct_s = self._expected_s(row)
        self.require(row, cost_usd, now, START, bill_usd=self.bill_usd(row), jct_s=jct_s, promise=promise)

    def most_usd(self, experiment: Experiment, owner: str, planned_usd: float | None) -> float:
        """Return what an experiment costs before it began: its plan.

        Without a profile there is no plan yet, and max_cost covers the profile, too. Raises Problem REFUSED if it has
        none, and a budget or a cap limits it.
        """
        constraints = experiment.constraints
        if planned_usd is not None:
            return planned_usd
        if constraints.max_cost_usd is not None:
            return constraints.max_cost_usd
        limit = "" if self._pool.budgets_usd.get(owner) is None else f"budget of {owner}"
        if experiment.resources.provider == self._pool.provider and self._pool.max_usd_per_month is not None:
            limit = limit or f"max_usd_per_month of pool {self._pool.name}"
        if limit:
            why = f"without a profile its cost is not known, and it counts in the {limit}"
            raise HttpProblem(REFUSED, f"constraints.max_cost: {why}; set it, or run `rubberband profile` first")
        return 0.0

    def used_up(self, owners: Set[str], now: float) -> Mapping[str, str]:
        """Return the owners that have spent their budgets of this month -> that they have, and what to do."""
        found = {}
        for owner in owners & self._pool.budgets_usd.keys():
            spent_usd, budget_usd = self._spent_usd(now, owner=owner), self._pool.budgets_usd[owner]
            if spent_usd > budget_usd + MONEY_SLACK_USD:
                text = f"{format_usd(spent_usd)} of {format_usd(budget_usd)} are spent this month"
                found[owner] = f"budget of {owner}: {text}; resume it next month, or once the budget is raised"
        return found

    def used_usd(self, owner: str, now: float) -> float:
        """Return what a token's experiments have cost in this month, and what is planned in it."""
        return self._owner_usd(owner, now).get(month_begin(now), 0.0)

    def bill_usd(self, row: Submission | None = None) -> float | None:
        """Return the pool's bill of this month; None without a broker that knows it, or a cap that `row` counts in.

        It may take seconds. Raises Problem UNAVAILABLE where the broker does not answer: one is started then.
        """
        if self._pool.folder is None or self._pool.max_usd_per_month is None:
            return None
        if row is not None and not self.is_member(row):
            return None
        try:
            return RemotePool(PoolFolder(path=Path(self._pool.folder))).month_usd(starts=True)
        except ProviderError as error:
            text = f"{error}, so the bill of this month is not known; try again"
            raise HttpProblem(UNAVAILABLE, text, headers={"Retry-After": "2"}) from None

    def committed_usd(self, now: float, *, bill_usd: float | None, queued: bool = True) -> Mapping[float, float]:
        """Return the begin of each month from this one on -> what is spent or planned of the pool's money in it.

        Without `bill_usd`, the bills of its experiments are what is spent.
        """
        rows = [row for row in self._store.going_on() if self.is_member(row)]
        if bill_usd is None:
            bill_usd = self._spent_usd(now, provider=self._pool.provider)
        return self._by_month(rows, bill_usd, now, queued=queued)

    def shortage(self, expense: Expense, now: float, *, bill_usd: float | None, queued: bool = True) -> Shortage | None:
        """Return the month in which the pool's cap leaves least for an expense; None if it fits into all months."""
        pool = self._pool
        if pool.max_usd_per_month is None:
            return None
        committed = self.committed_usd(now, bill_usd=bill_usd, queued=queued)
        title = f"pool {pool.name}'s max_usd_per_month"
        return MonthCap(title=title, cap_usd=pool.max_usd_per_month, committed_usd=committed).shortage(expense, now)

    def is_member(self, row: Submission) -> bool:
        """Whether the pool pays for an experiment."""
        return bool(row.words.get("resources", {}).get("provider") == self._pool.provider)

    def _owner_usd(self, owner: str, now: float, *, queued: bool = True) -> Mapping[float, float]:
        """Return the begin of each month from this one on -> what a token's experiments cost in it."""
        rows = self._store.going_on(owner)
        return self._by_month(rows, self._spent_usd(now, owner=owner), now, queued=queued)

    def _spent_usd(self, now: float, **whose: str) -> float:
        """Return what experiments have cost since the begin of the month of `now`; `whose` is that of `Store.bills`."""
        return sum(bill.month_usd(now) for bill in self._store.bills(since=month_begin(now), **whose))

    def _by_month(
        self, rows: Iterable[Submission], spent_usd: float, now: float, *, queued: bool
    ) -> Mapping[float, float]:
        """Return the begin of each month -> what was spent in this one, and what will be from `now` on."""
        promised, months = self._promised(), {month_begin(now): spent_usd}
        for row in rows:
            to_come_usd = self._expected_usd(row, promised, now) - row.summary.cost_usd
            if to_come_usd > 0.0 and (queued or row.state is not QUEUED):
                expense = _expense(row, to_come_usd, now, self._expected_s(row), promised.get(row.name))
                for month in expense.months(now):
                    months[month] = months.get(month, 0.0) + to_come_usd
        return months

    def _expected_usd(self, row: Submission, promised: Mapping[str, Promise], now: float) -> float:
        """Return what an experiment will have cost in all; its bill if it does not go on."""
        summary, promise = row.summary, promised.get(row.name)
        if row.state not in ACTIVE and promise is None and not _is_lost(row, now):
            return summary.cost_usd
        known = [row.admitted_usd, 0.0 if summary.forecast_cost_usd is None else summary.forecast_cost_usd]
        if not any(known):  # submitted before the service had a pool
            known.append(self._planned(row, "cost_usd"))
        return max(summary.cost_usd, *known)

    def _expected_s(self, row: Submission) -> float:
        forecast_s = row.summary.forecast_jct_s or row.summary.planned_jct_s
        return self._planned(row, "jct_s") if forecast_s is None else forecast_s

    def _planned(self, row: Submission, key: str) -> float:
        """Return the mean of a figure of the plan with which an experiment was submitted; 0 without one."""
        plan = None if row.plan is None else self._store.plan(row.plan)
        if plan is None or plan.status != 200:
            return 0.0
        prediction: dict[str, Any] = json.loads(plan.body)["prediction"]
        return float(prediction[key]["mean"])

    def _promised(self) -> dict[str, Promise]:
        return {promise.experiment: promise for promise in self._store.promises()}


def _expense(row: Submission, cost_usd: float, now: float, jct_s: float, promise: Promise | None) -> Expense:
    """Return a cost to come of an experiment that takes `jct_s` in all, or is promised its time."""
    if promise is None:
        return Expense(cost_usd=cost_usd, start_at=now, duration_s=jct_s - row.summary.jct_s)
    return Expense(cost_usd=cost_usd, start_at=promise.start_at, duration_s=promise.end_at - promise.start_at)


def _is_lost(row: Submission, now: float) -> bool:
    """Whether its process died this month while it measured its profile: what that cost is not known."""
    measured = row.words.get("profile") is None and row.summary.started_at is None
    return row.state is INTERRUPTED and measured and row.changed_at >= month_begin(now)


# Money as the watcher asks for it: may a queued experiment start, and has an owner used his budget up.

ASK_EVERY_S = 5.0
"""Time after which it is asked again whether there is money for an experiment that waits for it."""
COUNT_EVERY_S = 1.0
"""Interval of counting what owners have spent."""
COUNTING_SHARE = 0.02
"""Largest share of the time spent counting, where there are very many experiments."""


class Spending:
    """Asks a pool's budgets, not too often. For one thread."""

    def __init__(self, settings: Settings, store: Store) -> None:
        """Without a pool there is money for everything."""
        self._clock = settings.clock
        self.budgets = None if settings.pool is None else Budgets(settings.pool, store)
        self._ask_at: dict[str, float] = {}
        """Experiments that wait for money -> the instant of the monotonic clock at which to ask again."""
        self._bill_at = self._count_at = -math.inf
        self._asked_to_end: set[tuple[str, int]] = set()

    def is_due(self, row: Submission) -> bool:
        """Whether to ask for an experiment of the queue now."""
        now = time.monotonic()
        return now >= self._ask_at.get(row.name, -math.inf) and now >= self._bill_at

    def shortage(self, row: Submission) -> str:
        """Return why an experiment of the queue waits for money; empty if it may start."""
        self._ask_at.pop(row.name, None)
        if self.budgets is None:
            return ""
        try:
            self.budgets.require_start(row, self._clock())
        except HttpProblem as problem:
            self._ask_at[row.name] = time.monotonic() + ASK_EVERY_S
            if problem.kind is UNAVAILABLE:  # the broker is asked for all of them
                self._bill_at = time.monotonic() + ASK_EVERY_S
            return f"it waits for money: {problem.detail}"
        return ""

    def to_end(self, rows: Iterable[Submission]) -> list[tuple[Submission, str]]:
        """Return the running experiments whose owners have spent their budgets of the month, and why they end.

        Those that `ends` was called with are left out.
        """
        begin = time.monotonic()
        if self.budgets is None or begin < self._count_at:
            return []
        at_work = [row for row in rows if row.state in AT_WORK and (row.name, row.attempt) not in self._asked_to_end]
        why = self.budgets.used_up({row.owner for row in at_work}, self._clock())
        self._count_at = time.monotonic() + max(COUNT_EVERY_S, (time.monotonic() - begin) / COUNTING_SHARE)
        return [(row, why[row.owner]) for row in at_work if row.owner in why]

    def ends(self, row: Submission) -> None:
        """Note that an experiment was asked to end."""
        self._asked_to_end.add((row.name, row.attempt))
