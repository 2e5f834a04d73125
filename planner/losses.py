"""Losses of spot instances, in samples: what they cost the trials of a stage, and the wait before a stage begins.

An instance is taken away after an exponential time, whatever its age, and replaced at once. Its trials go on from
their last checkpoints, on the first slot that is idle or on the replacement; either may be lost again. A stage begins
when all of its instances are ready, those that were lost shortly before included.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rubberband.planner.makespan import Seconds, begins, makespan
from rubberband.planner.table import Floats

_MOST_LOSSES = 100
"""Most losses of one trial in a stage, and rounds of them before it."""
_EPSILON = 1e-5
"""Share of an iteration below which one counts as done, as sums of times are no more exact."""
_LEAST_S = 1e-9
"""Least time of an iteration: the normal law allows trials that take no time."""
_NEVER = np.iinfo(np.int64).max

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
        index, number = where
        found: Seconds = numbers.take(places + (index * 10_007 + number * 20_011), mode="wrap")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposed:
    """The trials of a stage on instances that may be taken away."""

    trials_s: Seconds
    """(trials, rows) Durations without a loss."""
    startup_s: Seconds
    """(trials, rows) Their start-ups."""
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

    def lives_s(self, number: int, groups: Indices, rows: Indices) -> Seconds:
        """Return the time until a loss, by the instance of the trial and its number of losses before."""
        places = groups * self.trials_s.shape[1] + rows
        return self.chances.of(self.chances.lives, (self.index, number), places) / np.float32(self.rate)

    def replaced_s(self, number: int, groups: Indices, rows: Indices) -> Seconds:
        """Return the time from that loss until the replacement is ready."""
        places = groups * self.trials_s.shape[1] + rows
        return self.chances.of(self.chances.replaced_s, (self.index, number), places)


def with_losses(run: Exposed) -> tuple[Floats, Floats]:
    """(rows,) Return the time of the stage, and the sum of the times in which its trials were on instances."""
    num_trials, rows = run.trials_s.shape
    used, groups = min(run.num_slots, num_trials), np.arange(-(-num_trials // run.per_instance))
    lives_s = run.lives_s(0, groups[:, None], np.arange(rows))
    lost = lives_s.repeat(run.per_instance, axis=0)[:num_trials] < run.trials_s
    is_hit = lost.any(axis=0)
    columns = np.flatnonzero(is_hit)
    stage_s, busy_s = np.empty(rows), run.trials_s.sum(axis=0, dtype=np.float64)
    if len(columns) < rows:
        stage_s[~is_hit] = makespan(run.trials_s[:, ~is_hit], used)
    if len(columns):
        some_s = run.trials_s[:, columns]
        begins_s = begins(some_s, used)
        trials, places = np.nonzero(lost[:, columns])
        idle_s = _idle_s(run, begins_s + some_s, lost[:, columns], trials, places)
        took_s, ran_s = _repeated(run, begins_s[trials, places], idle_s, trials, columns[places])
        np.add.at(busy_s, columns[places], ran_s - some_s[trials, places])
        some_s[trials, places] = took_s
        stage_s[columns] = makespan(some_s, used)
    return stage_s, busy_s


def _idle_s(run: Exposed, ends_s: Seconds, lost: npt.NDArray[np.bool_], trials: Indices, places: Indices) -> Floats:
    """Return when each lost trial finds an idle slot on another instance, if only its own is lost.

    A slot is idle for good once no trial is queued; the trials of the lost instance free none, and those with lower
    numbers take the first ones.
    """
    num_trials = len(ends_s)
    order = ends_s.argsort(axis=0)
    ranks = np.empty_like(order)
    np.put_along_axis(ranks, order, np.arange(num_trials)[:, None], axis=0)
    mates = (trials // run.per_instance * run.per_instance)[:, None] + np.arange(run.per_instance)
    there = mates < num_trials
    mates = np.minimum(mates, num_trials - 1)
    first = (lost[mates, places[:, None]] & there & (mates < trials[:, None])).sum(axis=1)
    wanted = num_trials - run.num_slots + run.per_instance - there.sum(axis=1) + first
    at = wanted.copy()
    for rank in np.sort(np.where(there, ranks[mates, places[:, None]], _NEVER), axis=1).T:
        at += rank <= at
    found = np.take_along_axis(ends_s, order, axis=0)[np.clip(at, 0, num_trials - 1), places]
    idle_s: Floats = np.where(wanted < 0, 0.0, np.where(at < num_trials, found, np.inf))
    return idle_s


def _repeated(
    run: Exposed, begins_s: Floats, idle_s: Floats, trials: Indices, columns: Indices
) -> tuple[Floats, Floats]:
    """Return the durations of the lost trials with all that they wait and repeat, and without what they wait."""
    groups = trials // run.per_instance
    startup_s, iteration_s = run.startup_s[trials, columns], run.iteration_s[trials, columns]
    took_s, ran_s, saved = np.zeros(len(trials)), np.zeros(len(trials)), np.zeros(len(trials))
    left_s, every = run.trials_s[trials, columns].astype(np.float64), run.checkpoint_iterations
    at = np.arange(len(trials))
    for number in range(_MOST_LOSSES):
        lives_s = run.lives_s(number, groups[at], columns[at])
        at, lives_s = at[lives_s < left_s[at]], lives_s[lives_s < left_s[at]]
        if not len(at):
            break
        replaced_s = run.replaced_s(number, groups[at], columns[at])
        trained = np.floor(np.maximum(0.0, lives_s - startup_s[at]) / np.maximum(iteration_s[at], _LEAST_S) + _EPSILON)
        kept = (run.before + saved[at] + trained) // every * every - run.before
        saved[at] = np.clip(kept, saved[at], run.iterations)
        took_s[at] += lives_s
        ran_s[at] += lives_s
        took_s[at] += np.clip(idle_s[at] - begins_s[at] - took_s[at], 0.0, replaced_s)
        left_s[at] = startup_s[at] + (run.iterations - saved[at]) * iteration_s[at]
    return took_s + left_s, ran_s + left_s


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
        return self.chances.of(numbers, (self.index, -1 - number), np.arange(len(self.provision_s)))


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
