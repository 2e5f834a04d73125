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
    begins_s = np.zeros_like(trials_s)
    if num_slots >= len(trials_s):
        return begins_s, None
    if len(trials_s) > MANY_TRIALS:
        waves = np.arange(len(trials_s)) // num_slots
        np.multiply(waves[:, None], trials_s.mean(axis=0), out=begins_s, casting="same_kind")
        return begins_s, np.sort(begins_s + trials_s, axis=0)[-num_slots:]
    return begins_s, _inserted(trials_s[:num_slots], trials_s[num_slots:], begins_s[num_slots:])


def _inserted(free_s: Seconds, rest_s: Seconds, begins_s: Seconds | None = None) -> Seconds:
    """Place one trial after another. Return the times at which slots are free, which stay sorted."""
    free_s = np.ascontiguousarray(np.sort(free_s.T, axis=1).T)  # twice as fast as along the first axis
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
    least, size, placed = max(1, num_slots // _SHARE), num_slots, 0
    while placed < num_trials:
        free_s.sort(axis=1)
        size = min(size, num_trials - placed)
        ends_s = free_s[:, :size] + rest_s[:, placed : placed + size]
        while size > least and (ends_s[:, : size - 1].min(axis=1) < free_s[:, size - 1]).any():
            size = max(least, size * 7 // 8)
            ends_s = ends_s[:, :size]
        free_s[:, :size] = ends_s
        placed += size
        size = min(num_slots, size * 5 // 4 + 1)
    return np.asarray(free_s.max(axis=1))


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
    return np.asarray((beyond_s - beyond_s.mean(axis=0) + total_s).astype(head_s.dtype))


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


# Losses of spot instances: what they cost the trials of a stage, and the wait before a stage begins.
#
# An instance is taken away after an exponential time, whatever its age, and replaced at once. Its trials go on from
# their last checkpoints, on the first slot that is idle or on the replacement; either may be lost again. A stage begins
# when all of its instances are ready, those that were lost shortly before included.

_MOST_LOSSES = 100
"""Most losses of one trial in a stage, and rounds of them before it."""
_EPSILON = 1e-5
"""Share of an iteration below which one counts as done, as sums of times are no more exact."""
_LEAST_S = 1e-9
"""Least time of an iteration: the normal law allows trials that take no time."""

Indices = npt.NDArray[np.intp]
"""Trials, instances, rows, or places in an array."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chances:
    """Random numbers of a chunk, each used at several places, as drawing them takes longest."""

    lives: Seconds
    """Exponential numbers with mean 1."""
    scale_s: Seconds
    """SCALE of a replacement."""
    replaced_s: Seconds
    """From the loss of an instance until its replacement is ready."""

    def of(self, numbers: Seconds, where: tuple[int, int], places: Indices) -> Seconds:
        """Return the numbers of some places in the stage and the round `where`."""
        return np.asarray(numbers.take(places + self._first(where), mode="wrap"))

    def all(self, numbers: Seconds, where: tuple[int, int], size: int) -> Seconds:
        """(size,) Return the numbers of the first places there."""
        first = self._first(where) % len(numbers)
        if first + size <= len(numbers):
            return numbers[first : first + size]
        return self.of(numbers, where, np.arange(size))

    @staticmethod
    def _first(where: tuple[int, int]) -> int:
        return where[0] * 10_007 + where[1] * 20_011


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposed:
    """The trials of a stage on instances that may be taken away."""

    trials_s: Seconds
    """(trials, rows) Durations without a loss."""
    startup_s: Seconds | np.float32
    """(trials, rows) Their start-ups; one number where these do not vary."""
    iteration_s: Seconds
    """(trials, rows) Their times per iteration."""
    iterations: int
    before: int
    """Iterations of each trial before the stage."""
    checkpoint_iterations: int
    num_slots: int
    per_instance: int
    """Slots of an instance; trials that share one are neighbours, as slots are filled in order."""
    rate: float
    """Losses of a trial per second."""
    index: int
    chances: Chances
    is_billed: bool = True
    """Whether the time in which the trials are on instances is asked for."""

    def lives_s(self, number: int, places: Indices) -> Seconds:
        """Return the time until a loss, by the place of the trial's instance and its number of losses before."""
        return self.chances.of(self.chances.lives, (self.index, number), places) / np.float32(self.rate)

    def lost(self) -> npt.NDArray[np.bool_]:
        """(trials, rows) Return which trials lose their instance."""
        num_trials, rows = self.trials_s.shape
        groups = -(-num_trials // self.per_instance)
        lives = self.chances.all(self.chances.lives, (self.index, 0), groups * rows).reshape(groups, rows)
        if self.per_instance > 1:
            lives = lives.repeat(self.per_instance, axis=0)[:num_trials]
        return np.asarray(lives / np.float32(self.rate) < self.trials_s)

    def replaced_s(self, number: int, places: Indices) -> Seconds:
        """Return the time from that loss until the replacement is ready."""
        return self.chances.of(self.chances.replaced_s, (self.index, number), places)


def with_losses(run: Exposed) -> tuple[Floats, Floats | None]:
    """(rows,) Return the time of the stage, and the sum of the times in which its trials were on instances."""
    num_trials, rows = run.trials_s.shape
    used, lost = min(run.num_slots, num_trials), run.lost()
    is_hit = lost.any(axis=0)
    # An index instead of `take` and `compress` would lay columns, not rows, side by side: twice as slow after it.
    columns = np.flatnonzero(is_hit)
    stage_s = np.empty(rows)
    busy_s: Floats | None = run.trials_s.sum(axis=0, dtype=np.float64) if run.is_billed else None
    if len(columns) < rows:
        stage_s[~is_hit] = makespan(run.trials_s.compress(~is_hit, axis=1), used)
    if len(columns):
        some_s, lost = run.trials_s.take(columns, axis=1), lost.take(columns, axis=1)
        begins_s, free_s = begins(some_s, used)
        trials, places = np.nonzero(lost)
        ends_s, began_s = begins_s + some_s, begins_s[trials, places]
        idle_s = _idle_s(run, ends_s, free_s, lost, (trials, places))
        took_s, ran_s = _repeated(run, began_s, idle_s, trials, columns[places])
        if busy_s is not None:
            busy_s += np.bincount(columns[places], ran_s - some_s[trials, places], rows)
        # A trial that ends after all have begun delays no other; of very many, it is not known which do.
        delays = np.full(len(columns), num_trials > MANY_TRIALS and used < num_trials)
        delays[places[ends_s[trials, places] <= begins_s[-1, places]]] = True
        ends_s[trials, places], some_s[trials, places] = began_s + took_s, took_s
        stage_s[columns] = ends_s.max(axis=0)
        if delays.any():
            stage_s[columns[delays]] = makespan(some_s.compress(delays, axis=1), used)
    return stage_s, busy_s


def _idle_s(
    run: Exposed, ends_s: Seconds, free_s: Seconds | None, lost: npt.NDArray[np.bool_], where: tuple[Indices, Indices]
) -> Floats:
    """Return when each lost trial finds an idle slot on another instance, if only its own is lost.

    A slot is idle for good once no trial is queued; the trials of the lost instance free none, and those with lower
    numbers take the first ones. `free_s` has the times at which slots are idle, None where each has one trial at most.
    """
    trials, places = where
    num_trials, rows = ends_s.shape
    shared, first = min(run.per_instance, num_trials), trials // run.per_instance * run.per_instance
    mates = np.minimum(first + np.arange(shared)[:, None], num_trials - 1)
    there, flat = np.minimum(shared, num_trials - first), mates * rows + places
    earlier = (lost.ravel().take(flat) & (mates < trials)).sum(axis=0) if shared > 1 else 0
    # The lost instance's own slots, of which those that no trial takes are spare ones.
    least = run.per_instance - there + earlier - (run.num_slots - min(run.num_slots, num_trials))
    if (least < 0).all():
        return np.zeros(len(trials))
    free_s = np.sort(ends_s, axis=0) if free_s is None else free_s
    mates_s, slot, before = ends_s.ravel().take(flat), least, None
    mates_s[np.arange(shared)[:, None] >= there] = np.inf
    while before is None or (slot != before).any():
        begin_s = free_s.ravel().take(np.minimum(np.maximum(slot, 0), len(free_s) - 1) * rows + places)
        slot, before = least + ((mates_s <= begin_s) & (least >= 0)).sum(axis=0), slot
    return np.where(slot < 0, 0.0, np.where(slot < len(free_s), begin_s, np.inf))


def _repeated(
    run: Exposed, begins_s: Floats, idle_s: Floats, trials: Indices, columns: Indices
) -> tuple[Seconds, Seconds]:
    """Return the durations of the lost trials with all that they wait and repeat, and without what they wait."""
    rows, every = run.trials_s.shape[1], run.checkpoint_iterations
    flat, places = trials * rows + columns, trials // run.per_instance * rows + columns
    startup_s = np.broadcast_to(run.startup_s, run.trials_s.shape)[trials, columns]
    iteration_s = np.maximum(run.iteration_s.ravel().take(flat), np.float32(_LEAST_S))
    took_s, waited_s, saved = (np.zeros(len(trials), np.float32) for _ in range(3))
    left_s, idle_s, lives_s = np.empty(len(trials), np.float32), idle_s - begins_s, run.lives_s(0, places)
    running: Any = slice(None)
    for number in range(_MOST_LOSSES):
        trained = np.floor(
            np.maximum(np.float32(0.0), lives_s - startup_s[running]) / iteration_s[running] + np.float32(_EPSILON)
        )
        before, passed_s = saved[running], took_s[running] + lives_s
        kept = np.floor((run.before + before + trained) / every) * every - run.before
        saved[running] = np.minimum(np.maximum(kept, before), run.iterations)
        wait_s = np.minimum(np.maximum(idle_s[running] - passed_s, 0.0), run.replaced_s(number, places[running]))
        waited_s[running] += wait_s
        took_s[running] = passed_s + wait_s
        left_s[running] = startup_s[running] + (run.iterations - saved[running]) * iteration_s[running]
        lives_s = run.lives_s(number + 1, places[running])
        lost = lives_s < left_s[running]
        running, lives_s = np.flatnonzero(lost) if number == 0 else running[lost], lives_s[lost]
        if not len(running):
            break
    took_s += left_s
    return took_s, took_s - waited_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Settling:
    """The begin of a stage on spot instances."""

    held: int
    """Instances that the stage before leaves."""
    instances: int
    rate: float
    """Losses of an instance per second."""
    provision_s: Floats
    """(rows,) SCALE, 0 if the cluster does not grow."""
    init_s: Floats
    """(rows,) INIT_INSTANCE of the slowest, 0 if the cluster does not grow."""
    index: int
    chances: Chances

    def drawn(self, numbers: Seconds, number: int) -> Seconds:
        """(rows,) Return numbers of a round."""
        return self.chances.all(numbers, (self.index, -1 - number), len(self.provision_s))


def unsettled_s(begin: Settling) -> Floats:
    """(rows,) Return how much longer than SCALE and INIT_INSTANCE it takes until all instances are ready at once."""
    rate, held = begin.rate, begin.held
    settled_s = planned_s = begin.provision_s + begin.init_s
    if held > 1:
        # The last trial of the stage before was on one; what does not run yet is given up first.
        left_s = begin.drawn(begin.chances.replaced_s, 0) - begin.drawn(begin.chances.lives, 0) / (rate * (held - 1))
        if begin.instances < held:
            left_s -= begin.drawn(begin.chances.scale_s, 0)
        settled_s = np.maximum(planned_s, left_s)
    since_s, others = np.zeros_like(settled_s), max(1, begin.instances - 1)
    ages_s = _ages_s(begin, settled_s)
    for number in range(2, _MOST_LOSSES):
        is_lost = ages_s < settled_s - since_s
        if not is_lost.any():
            break
        again_s = np.where(is_lost, settled_s - ages_s + begin.drawn(begin.chances.replaced_s, number), 0.0)
        since_s, settled_s = settled_s, np.maximum(settled_s, again_s)
        ages_s = begin.drawn(begin.chances.lives, number) / (rate * others)
    return settled_s - planned_s


def _ages_s(begin: Settling, settled_s: Floats) -> Floats:
    """(rows,) Return how long before all seem to be ready the latest loss is: new instances are lost from INIT on."""
    risks = begin.drawn(begin.chances.lives, 1) / begin.rate
    ages_s = risks / begin.instances
    new_s = settled_s - begin.provision_s
    earlier_s = new_s + (risks - begin.instances * new_s) / begin.held if begin.held else np.inf
    return np.where((ages_s > new_s) & (begin.provision_s > 0.0), earlier_s, ages_s)
