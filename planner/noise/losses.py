"""Losses of spot instances, in samples: what they cost the trials of a stage, and the wait before a stage begins.

An instance is taken away after an exponential time, whatever its age, and replaced at once. Its trials go on from
their last checkpoints, on the first slot that is idle or on the replacement; either may be lost again. A stage begins
when all of its instances are ready, those that were lost shortly before included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rubberband.planner.exact.table import Floats
from rubberband.planner.noise.makespan import MANY_TRIALS, Seconds, begins, makespan

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
        found: Seconds = numbers.take(places + self._first(where), mode="wrap")
        return found

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
        lost: npt.NDArray[np.bool_] = lives / np.float32(self.rate) < self.trials_s
        return lost

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
    mates_s, at, before = ends_s.ravel().take(flat), least, None
    mates_s[np.arange(shared)[:, None] >= there] = np.inf
    while before is None or (at != before).any():
        found = free_s.ravel().take(np.minimum(np.maximum(at, 0), len(free_s) - 1) * rows + places)
        at, before = least + ((mates_s <= found) & (least >= 0)).sum(axis=0), at
    idle_s: Floats = np.where(at < 0, 0.0, np.where(at < len(free_s), found, np.inf))
    return idle_s


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
    at: Any = slice(None)
    for number in range(_MOST_LOSSES):
        trained = np.floor(
            np.maximum(np.float32(0.0), lives_s - startup_s[at]) / iteration_s[at] + np.float32(_EPSILON)
        )
        before, passed_s = saved[at], took_s[at] + lives_s
        kept = np.floor((run.before + before + trained) / every) * every - run.before
        saved[at] = np.minimum(np.maximum(kept, before), run.iterations)
        wait_s = np.minimum(np.maximum(idle_s[at] - passed_s, 0.0), run.replaced_s(number, places[at]))
        waited_s[at] += wait_s
        took_s[at] = passed_s + wait_s
        left_s[at] = startup_s[at] + (run.iterations - saved[at]) * iteration_s[at]
        lives_s = run.lives_s(number + 1, places[at])
        lost = lives_s < left_s[at]
        at, lives_s = np.flatnonzero(lost) if number == 0 else at[lost], lives_s[lost]
        if not len(at):
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
    found: Floats = np.where((ages_s > new_s) & (begin.provision_s > 0.0), earlier_s, ages_s)
    return found
