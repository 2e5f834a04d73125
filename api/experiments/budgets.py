"""Money of a pool's experiments: the budgets of tokens, and what is left of the pool's cap of a calendar month (UTC).

An experiment counts with its forecast while it runs, and with its plan before.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rubberband.api.problems import REFUSED, Problem
from rubberband.api.settings import SharedPool
from rubberband.api.store.schema import Promise
from rubberband.api.store.sql import Store
from rubberband.app.month_cap import Expense, MonthCap, Shortage, month_usd
from rubberband.cloud.pool import month_begin
from rubberband.planner.sharing import Span
from rubberband.spec.pool import PoolFolder
from rubberband.states import ACTIVE, ExperimentState
from rubberband.units import MONEY_SLACK_USD, format_usd
from rubberband.values.submission import Submission

_MOST_ROWS = 10_000


class Budgets:
    """Counts what experiments cost, and what they will."""

    def __init__(self, pool: SharedPool, store: Store) -> None:
        self._pool, self._store = pool, store

    def used_usd(self, owner: str, now: float) -> float:
        """Return what the experiments cost that a token has submitted this month, those that go on at their end."""
        promised = self._promised()
        rows = self._store.submitted_by(owner, since=month_begin(now))
        return sum(self._expected_usd(row, promised) for row in rows)

    def require_budget(
        self, owner: str, cost_usd: float, now: float, ask: str = "this plan costs {}; submit a cheaper one"
    ) -> None:
        """Raise Problem REFUSED where a plan costs more than is left of its owner's budget of this month."""
        budget_usd = self._pool.budgets_usd.get(owner)
        if budget_usd is None:
            return
        used_usd = self.used_usd(owner, now)
        if used_usd + cost_usd > budget_usd + MONEY_SLACK_USD:
            used = f"{format_usd(used_usd)} of {format_usd(budget_usd)} are spent or planned this month"
            raise Problem(REFUSED, f"budget of {owner}: {used}, and {ask.format(format_usd(cost_usd))}, or next month")

    def require_extension(self, row: Submission, more_usd: float, jct_s: float, now: float) -> None:
        """Raise Problem REFUSED where no money is left for limits that cost `more_usd` more.

        Its owner's budget of this month has to cover that, and the pool's cap of each month.
        """
        if more_usd <= MONEY_SLACK_USD:
            return
        self.require_budget(row.owner, more_usd, now, "the extension costs {}; extend it by less")
        spans = [Span(gpus=1, duration_s=max(0.0, jct_s - row.summary.jct_s))]
        expense = Expense(cost_usd=more_usd, start_at=now, spans=spans)
        shortage = self.shortage(expense, now) if self._is_member(row) else None
        if shortage is not None:
            raise Problem(REFUSED, f"{shortage.words('the extension')}; extend it by less, or raise the cap")

    def committed_usd(self, now: float) -> Mapping[float, float]:
        """Return the begin of each month from this one on -> what is spent or planned of the pool's money in it."""
        months = Counter({month_begin(now): self._spent_usd(now)})
        for expense in self._expenses(now):
            months.update(expense.by_month(now))
        return months

    def shortage(self, expense: Expense, now: float) -> Shortage | None:
        """Return the month in which the pool's cap leaves least for an expense; None if it fits into all months."""
        pool = self._pool
        if pool.max_usd_per_month is None:
            return None
        committed = self.committed_usd(now)
        cap = MonthCap(
            pool=pool.name, cap_usd=pool.max_usd_per_month, committed_usd=committed, used_words="spent or planned"
        )
        return cap.shortage(expense, now)

    def _spent_usd(self, now: float) -> float:
        """Return the pool's bill of this month; that of its experiments where no broker answers."""
        if self._pool.folder is not None:
            spent_usd = month_usd(PoolFolder(path=Path(self._pool.folder)))
            if spent_usd is not None:
                return spent_usd
        since, store = month_begin(now), self._store
        rows = (row for owner in store.owners(since=since) for row in store.submitted_by(owner, since=since))
        return sum(row.summary.cost_usd for row in rows if self._is_member(row))

    def _expenses(self, now: float) -> Iterator[Expense]:
        """Yield what the experiments that are not over will cost from `now` on."""
        promised = self._promised()
        states = [*ACTIVE, ExperimentState.INTERRUPTED]
        for row in self._store.submissions(states=states, limit=_MOST_ROWS).items:
            promise = promised.get(row.name)
            if not self._is_member(row) or (row.state not in ACTIVE and promise is None):
                continue
            cost_usd = self._expected_usd(row, promised) - row.summary.cost_usd
            if promise is None:
                spans = [Span(gpus=1, duration_s=max(0.0, self._expected_s(row) - row.summary.jct_s))]
                yield Expense(cost_usd=cost_usd, start_at=now, spans=spans)
            else:
                spans = [Span(gpus=gpus, duration_s=duration_s) for gpus, duration_s in promise.spans]
                yield Expense(cost_usd=cost_usd, start_at=promise.start_at, spans=spans)

    def _expected_usd(self, row: Submission, promised: Mapping[str, Promise]) -> float:
        """Return what an experiment will have cost: by its forecast, else by its plan; its bill if it is over."""
        summary, promise = row.summary, promised.get(row.name)
        if row.state not in ACTIVE and promise is None:
            return summary.cost_usd
        if summary.forecast_cost_usd is not None:
            return max(summary.cost_usd, summary.forecast_cost_usd)
        planned_usd = self._planned(row, "cost_usd") if promise is None else promise.cost_usd
        return max(summary.cost_usd, planned_usd)

    def _expected_s(self, row: Submission) -> float:
        forecast_s = row.summary.forecast_jct_s
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

    def _is_member(self, row: Submission) -> bool:
        return bool(row.words.get("resources", {}).get("provider") == self._pool.provider)
