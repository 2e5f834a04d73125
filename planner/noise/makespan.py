"""The time of a stage, and time and cost of a plan, for many samples at once.

The makespan is that of list scheduling: the slot that is free first takes the next trial. It depends only on the
multiset of times at which slots are free. Several trials are placed at once if none ends before the last begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rubberband.planner.exact.model import Rates, Times, Value
from rubberband.planner.exact.table import Floats
from rubberband.values.offer import Offer
from rubberband.values.plan import Cohort, Market, Plan, StagePlan

Seconds = npt.NDArray[Any]
"""Seconds, in single or double precision."""

_FEW_SLOTS = 16
"""Up to this number of slots, trials are placed one after another."""
_MANY_WAVES = 12
MANY_TRIALS = 512
"""With more waves and more trials, only the last waves are scheduled."""
_LAST_WAVES = 5
_SHARE = 16
"""One in this number of slots is filled at once, even if a slot that ends early could take the last trial."""


def makespan(trials_s: Seconds, num_slots: int) -> Floats:
    """(rows,) Return the end of the last of the trials (n, rows), if the slot that is free first takes the next one.

    Exact up to 31 slots and 512 trials; beyond, within 0.1 % on average unless times vary as much as their mean (1 %).
    """
    num_trials = len(trials_s)
    if num_slots >= num_trials or num_slots == 1:
        latest = trials_s.sum(axis=0, dtype=np.float64) if num_slots == 1 else trials_s.max(axis=0)
        return np.asarray(latest, np.float64)
    free_s = trials_s[:num_slots]
    rest_s = trials_s[num_slots:]
    head = 0
    if num_trials > max(_MANY_WAVES * num_slots, MANY_TRIALS):
        head = (num_trials // num_slots - _LAST_WAVES) * num_slots
        free_s, rest_s = _after_many(trials_s[:head], num_slots), trials_s[head:]
    ends_s = _inserted(free_s, rest_s)[-1] if num_slots <= _FEW_SLOTS else _in_batches(free_s, rest_s)
    if head:
        ends_s = np.maximum(ends_s, _stragglers(trials_s[:head], num_slots))
    return np.asarray(ends_s, np.float64)


def begins(trials_s: Seconds, num_slots: int) -> tuple[Seconds, Seconds | None]:
    """Return when each trial begins (trials, rows), and when slots are idle for good (slots, rows), in order.

    The instants are approximate for very many trials. None where no slot takes two trials: the order of their ends is
    seldom needed.
    """
    found = np.zeros_like(trials_s)
    if num_slots >= len(trials_s):
        return found, None
    if len(trials_s) > MANY_TRIALS:
        waves = np.arange(len(trials_s)) // num_slots
        np.multiply(waves[:, None], trials_s.mean(axis=0), out=found, casting="same_kind")
        return found, np.sort(found + trials_s, axis=0)[-num_slots:]
    return found, _inserted(trials_s[:num_slots], trials_s[num_slots:], found[num_slots:])


def _inserted(free_s: Seconds, rest_s: Seconds, begins_s: Seconds | None = None) -> Seconds:
    """Place one trial after another. Return the times at which slots are free, which stay sorted."""
    free_s = np.sort(free_s, axis=0)
    if len(free_s) == 1:
        ends_s = np.cumsum(np.concatenate([free_s, rest_s]), axis=0)
        if begins_s is not None:
            begins_s[:] = ends_s[:-1]
        return ends_s[-1:]
    held = np.empty_like(free_s)
    for number, trial_s in enumerate(rest_s):
        first, others = free_s[0], free_s[1:]
        if begins_s is not None:
            begins_s[number] = first
        ends_s = first + trial_s
        np.maximum(others, ends_s, out=held[1:])
        np.minimum(others[0], ends_s, out=held[0])
        np.minimum(held[1:-1], others[1:], out=held[1:-1])
        free_s, held = held, free_s
    return free_s


def _in_batches(free_s: Seconds, rest_s: Seconds) -> Seconds:
    """Place as many trials at once as begin before the first of them ends, in all rows (or nearly)."""
    free_s, rest_s = np.ascontiguousarray(free_s.T), np.ascontiguousarray(rest_s.T)
    num_slots, num_trials = free_s.shape[1], rest_s.shape[1]
    least, size, at = max(1, num_slots // _SHARE), num_slots, 0
    while at < num_trials:
        free_s.sort(axis=1)
        size = min(size, num_trials - at)
        ends_s = free_s[:, :size] + rest_s[:, at : at + size]
        while size > least and (ends_s[:, : size - 1].min(axis=1) < free_s[:, size - 1]).any():
            size = max(least, size * 7 // 8)
            ends_s = ends_s[:, :size]
        free_s[:, :size] = ends_s
        at += size
        size = min(num_slots, size * 5 // 4 + 1)
    latest: Seconds = free_s.max(axis=1)
    return latest


def _stragglers(head_s: Seconds, num_slots: int) -> Seconds:
    """(rows,) Return the end of trials that take longer than all of the last waves, which begin after them; else 0."""
    trial_s = head_s.mean(axis=0)
    long = np.flatnonzero(head_s.max(axis=0) > (_LAST_WAVES - 1) * trial_s)
    ends_s: Seconds = np.zeros_like(trial_s)
    if len(long):
        few_s = head_s[:, long].astype(np.float64)
        begins_s = (np.cumsum(few_s, axis=0) - few_s) / num_slots - trial_s[long] / 2.0
        ends_s[long] = (begins_s + few_s).max(axis=0)
    return ends_s


def _after_many(head_s: Seconds, num_slots: int) -> Seconds:
    """(slots, rows) Return when slots are free after many waves: each has run its own trials, one after another.

    A slot's total time, modulo one trial, says how far it is between two ends. If times vary little, all slots are at
    about the same point, else anywhere. The total time of all trials is kept.
    """
    shared_s = head_s.reshape(-1, num_slots, head_s.shape[1]).sum(axis=0, dtype=np.float64)
    total_s = shared_s.mean(axis=0)
    trial_s = total_s / (len(head_s) // num_slots)
    beyond_s = shared_s - total_s
    beyond_s -= np.round(beyond_s / trial_s) * trial_s
    free_s: Seconds = (beyond_s - beyond_s.mean(axis=0) + total_s).astype(head_s.dtype)
    return free_s


# Total time and cost of a plan for many samples at once: the sums of `model.walk`, without its stages.
#
# A bill is a sum of spans of time, each with the price of the instances held. Instances that live shorter than the
# billing minimum owe more: that is added where there may be any.


@dataclass(slots=True)
class _StartGroup:
    """Instances that were started together."""

    instances: int
    since: int
    """Index of the first span in which they are billed; -1: held from the start."""
    held_s: float
    """Seconds billed before."""


@dataclass(slots=True)
class _Bill:
    """Spans of time one after another, each with the price of its seconds."""

    rates: Rates
    market: Market
    groups: list[_StartGroup]
    """Oldest first."""
    held: int
    spans_s: list[Value] = field(default_factory=list)
    passed_s: list[Value] = field(default_factory=lambda: [0.0])
    """Start of each span, and the end of the last one."""
    usd_per_s: list[float] = field(default_factory=list)
    fixed_usd: float = 0.0
    extra_usd: list[Value] = field(default_factory=list)

    def add(self, index: int, choice: StagePlan, times: Times) -> None:
        """Add a stage: release what it does not need, start what it lacks, hold all while it lasts."""
        if choice.market != self.market:
            self.release(self.held)
            self.market = choice.market
        before = self.held
        self.release(before - choice.instances)
        started = choice.instances - before
        if started > 0:
            self._span(times.provision_s(index))
            self.groups.append(_StartGroup(started, len(self.spans_s), 0.0))
            self.held += started
            self.fixed_usd += started * self.rates.once_usd
            self._span(times.init_s(index, started))
        if choice.market == "spot":
            self._span(times.unsettled_s(index, choice, before))
        self._span(times.stage_s(index, choice))
        if self.rates.trials_usd_per_s[choice.market]:
            self.extra_usd.append(self.rates.trials_usd(index, choice, times))

    def _span(self, seconds: Value) -> None:
        """Hold all instances for `seconds`."""
        self.spans_s.append(seconds)
        self.passed_s.append(self.passed_s[-1] + seconds)
        price_usd_per_s = self.rates.prices_usd_per_s[self.market]
        self.usd_per_s.append(self.held * price_usd_per_s + self.rates.head_usd_per_s)

    def release(self, surplus: int) -> None:
        """Release `surplus` instances, those billed longest first."""
        while surplus > 0:
            oldest = self.groups[0]
            released = min(surplus, oldest.instances)
            self._owed(oldest, released)
            oldest.instances -= released
            self.held -= released
            surplus -= released
            if not oldest.instances:
                del self.groups[0]

    def _owed(self, group: _StartGroup, instances: int) -> None:
        """Bill released instances for the rest of the billing minimum; prepaid time costs nothing."""
        price, minimum_s = self.rates.prices_usd_per_s[self.market], self.rates.minimum_s
        if price == 0.0 or group.held_s >= minimum_s:
            return
        self.fixed_usd -= instances * price * (minimum_s - group.held_s if group.since < 0 else 0.0)
        lived_s: Value = group.held_s + (self.passed_s[-1] - self.passed_s[max(0, group.since)])
        if np.min(lived_s) < minimum_s:
            self.extra_usd.append(instances * price * np.maximum(0.0, minimum_s - lived_s))

    def sums(self) -> tuple[Value, Value]:
        """Return total seconds and US dollars."""
        both_usd: Value = self.fixed_usd
        arrays, weights = [], []
        for seconds, usd_per_s in zip(self.spans_s, self.usd_per_s, strict=True):
            if isinstance(seconds, np.ndarray):
                arrays.append(seconds)
                weights.append(usd_per_s)
            else:
                both_usd = both_usd + usd_per_s * seconds
        if arrays:
            both_usd = both_usd + np.array(weights) @ np.array(arrays)
        for owed_usd in self.extra_usd:
            both_usd = both_usd + owed_usd
        return self.passed_s[-1], both_usd


def totals(plan: Plan, offer: Offer, times: Times, held: Sequence[Cohort] = ()) -> tuple[Value, Value]:
    """Return total seconds and US dollars of a plan: the sums of `model.walk` over its stages, up to rounding."""
    oldest_first = sorted(held, key=lambda cohort: -cohort.held_s)
    groups = [_StartGroup(cohort.instances, -1, float(cohort.held_s)) for cohort in oldest_first if cohort.instances]
    market: Market = held[0].market if held else plan.stages[0].market
    bill = _Bill(Rates.of(offer), market, groups, sum(group.instances for group in groups))
    for index, choice in enumerate(plan.stages):
        bill.add(index, choice, times)
    bill.release(bill.held)
    return bill.sums()
