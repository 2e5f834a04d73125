"""A cap on the bill of a calendar month (UTC): a pool's, a token's budget, or the policy's; what a plan takes of it.

A cost counts wholly in each month in which it is paid, so that no month has more than its cap, whatever its days cost.
Idle time of instances is not planned; the broker stops the pool at the cap in any case.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rubberband.errors import InfeasibleError
from rubberband.spec.pool import PoolFile, PoolFolder
from rubberband.units import MONEY_SLACK_USD, format_usd, instant_text, month_begin, month_end

_LONGEST_S = 10 * 366 * 24 * 3600.0
"""Months that begin later than this are not looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expense:
    """A cost to come, and when it is paid: from `start_at` (Unix time) on."""

    cost_usd: float
    start_at: float
    duration_s: float

    def months(self, now: float) -> list[float]:
        """Return the begin of each month (Unix time) in which it is paid from `now` on; one at least."""
        found, end_at = [month_begin(max(now, self.start_at))], min(self.start_at + self.duration_s, now + _LONGEST_S)
        while (month := month_end(found[-1])) < end_at:
            found.append(month)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """A month whose cap an expense would pass."""

    cap: MonthCap
    expense: Expense
    month: float
    """Its begin, in Unix time."""
    next_at: float | None
    """Begin of the first later month that has room for the whole expense; None if it is above the cap."""

    @property
    def left_usd(self) -> float:
        return max(0.0, self.cap.cap_usd - self.cap.committed_usd.get(self.month, 0.0))

    def words(self, asked: str = "this plan costs") -> str:
        """Return the cap, what is used of it, and how much more is `asked`."""
        cap, month = self.cap, f"{datetime.fromtimestamp(self.month, UTC):%B %Y}"
        used = f"{format_usd(cap.committed_usd.get(self.month, 0.0))} of {format_usd(cap.cap_usd)} are {cap.used_words}"
        left = f"{format_usd(self.left_usd)} are left, and {asked} {format_usd(self.expense.cost_usd)}"
        return f"{cap.title}: {used} in {month}, {left}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MonthCap:
    """The cap of each month, and what is used of it."""

    title: str
    """Its name in a refusal: `pool team's max_usd_per_month`, or `budget of ann`."""
    cap_usd: float
    committed_usd: Mapping[float, float]
    """Begin of a month (Unix time) -> what is used in it."""
    used_words: str = "spent or planned"

    def shortage(self, expense: Expense, now: float) -> Shortage | None:
        """Return the month in which the cap leaves least for an expense; None if it fits into all months."""
        found = [
            Shortage(cap=self, expense=expense, month=month, next_at=self._next_at(month, expense))
            for month in expense.months(now)
            if self.committed_usd.get(month, 0.0) + expense.cost_usd > self.cap_usd + MONEY_SLACK_USD
        ]
        return min(found, key=lambda one: one.left_usd, default=None)

    def refusal(self, cost_usd: float, jct_s: float, now: float, what: str = "this plan") -> str | None:
        """Return why what starts `now` does not fit into the cap, and what to do; None if it fits."""
        found = self.shortage(Expense(cost_usd=cost_usd, start_at=now, duration_s=jct_s), now)
        if found is None:
            return None
        ways = ["set a lower constraints.max_cost", "make the search smaller"] if what == "this plan" else []
        last = "raise the cap"
        if found.next_at is not None:
            last = f"start it from {instant_text(found.next_at)} on"
        return f"{found.words(f'{what} costs')}; {', '.join([*ways, f'or {last}' if ways else last])}"

    def _next_at(self, month: float, expense: Expense) -> float | None:
        """Return the begin of the first month after `month` with room for all of it; None if that is above the cap."""
        most_usd = self.cap_usd - expense.cost_usd + MONEY_SLACK_USD
        if most_usd < 0.0:
            return None
        month = month_end(month)
        while self.committed_usd.get(month, 0.0) > most_usd:
            month = month_end(month)
        return month


def month_cap(path: Path, now: float, *, starts: bool = False) -> MonthCap | None:
    """Return the cap of the pool of a folder, and what it has spent; None without a cap.

    `starts`: a broker that does not answer is started, and waited for. Raises ProviderError where none answers, and
    InputError for a pool that was never up.
    """
    folder = PoolFolder(path=path)
    pool = PoolFile(**folder.read())
    if pool.max_usd_per_month is None:
        return None
    broker = folder.broker()
    if starts:
        broker.ensure_broker()
    committed = {month_begin(now): broker.month_usd()}
    title = f"pool {pool.name}'s max_usd_per_month"
    return MonthCap(title=title, cap_usd=pool.max_usd_per_month, committed_usd=committed, used_words="spent")


def require_money(path: Path, cost_usd: float, jct_s: float, what: str) -> None:
    """Raise InfeasibleError where the cap of a pool's month does not cover what starts now, with a fix.

    `what` costs `cost_usd` from now on, and takes `jct_s`. Raises ProviderError where the pool's bill is not known.
    """
    now = time.time()
    cap = month_cap(path, now, starts=True) if cost_usd > MONEY_SLACK_USD else None
    refused = None if cap is None else cap.refusal(cost_usd, jct_s, now, what)
    if refused is not None:
        raise InfeasibleError(refused, shortest_jct_s=jct_s, cheapest_usd=cost_usd)
