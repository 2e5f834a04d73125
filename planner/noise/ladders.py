"""`rubberband.values.schedulers.Rungs` of many simulated runs at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rubberband.planner.exact.table import Bools, Ints
from rubberband.values.schedulers import Ladder

_SHIFT = 6
Words = npt.NDArray[np.uint64]
_BITS: Words = np.uint64(1) << np.arange(64, dtype=np.uint64)
_FROM = ~(_BITS - np.uint64(1))
"""Bit -> it and all above it."""
_UP_TO = (_BITS - np.uint64(1)) | _BITS
"""Bit -> it and all below it."""


class BitSets:
    """Sets of ranks: a trie of words, in which a bit says whether the word below it has any."""

    def __init__(self, size: int, ranks: int) -> None:
        self._levels: list[tuple[int, Words]] = []
        width = ranks
        while not self._levels or width > 1:
            width = (width - 1 >> _SHIFT) + 1
            self._levels.append((width, np.zeros(size * width, np.uint64)))

    def _at(self, width: int, sets: Ints, ranks: Ints) -> tuple[Ints, Words]:
        """Return the word of each rank, and its bit there."""
        if width == 1:
            return sets, _BITS.take(ranks)
        return sets * width + (ranks >> _SHIFT), _BITS.take(ranks & 63)

    def add(self, sets: Ints, ranks: Ints) -> None:
        """Add a rank to each of the sets, which are different ones."""
        for width, words in self._levels:
            at, bits = self._at(width, sets, ranks)
            words[at] = words.take(at) | bits
            ranks = ranks >> _SHIFT

    def has(self, sets: Ints, ranks: Ints) -> Bools:
        """Return which of the sets have a rank."""
        width, words = self._levels[0]
        at, bits = self._at(width, sets, ranks)
        found: Bools = words.take(at) & bits != 0
        return found

    def neighbour(self, sets: Ints, ranks: Ints, step: int, level: int = 0) -> Ints:
        """Return the next member of each set above a rank (`step` is 1), or below it (-1); there is one."""
        width, words = self._levels[level]
        near = ranks + step
        within = (_FROM if step > 0 else _UP_TO).take(near & 63)
        if width == 1:
            found = words.take(sets) & within
            return _lowest_bit(found) if step > 0 else _highest_bit(found)
        blocks = near >> _SHIFT
        found = words.take(sets * width + blocks) & within
        empty = (found == 0).nonzero()[0]
        if len(empty):
            blocks[empty] = self.neighbour(sets[empty], blocks[empty], step, level + 1)
            found[empty] = words.take(sets[empty] * width + blocks[empty])
        return (blocks << _SHIFT) + (_lowest_bit(found) if step > 0 else _highest_bit(found))


def _lowest_bit(words: Words) -> Ints:
    return _exponent(words & -words)


def _highest_bit(words: Words) -> Ints:
    # Without neighbours, the bits below the highest one do not round up.
    return _exponent(words & ~(words >> 1))


def _exponent(words: npt.NDArray[Any]) -> Ints:
    found: Ints = (words.astype(np.float64).view(np.int64) >> 52) - 1023
    return found


_OPEN = np.int64(1 << 50)
"""Bit of `due` of a run in which repeats of a configuration are still to go on."""


class Ladders:
    """`rubberband.values.schedulers.Rungs` of many runs: a set of ranks for each rung and run.

    The threshold is the last of the best that may go on. With a new result it stays, or moves to a neighbour. The
    result may go on or, where those are one more, the new threshold.
    """

    def __init__(self, ladder: Ladder, ranks: Ints, columns: Ints, *, defers: bool) -> None:
        """`ranks` are those of `Draw`, and `columns` has the sample of each run.

        Unless a run `defers` promotions, each result is one of `settle`: who may go on does so before the next one.
        """
        first, last = int(columns.min()), int(columns.max())
        ranks, repeats = ranks[:, first : last + 1], ladder.repeats
        if repeats > 1:  # configurations are as good as their first trials
            ranks = ranks[:, :, ::repeats].argsort(axis=2).argsort(axis=2)
        rungs, (levels, samples, trials) = len(ladder.totals), ranks.shape
        order = np.empty_like(ranks)
        np.put_along_axis(order, ranks, np.arange(trials)[None, None], axis=2)
        self._rows, self.defers = len(columns), defers
        self._ranks, self._order = ranks.ravel(), order.ravel()
        self._cell, self._per_rung = (columns - first) * trials, 0 if levels == 1 else samples * trials
        size = rungs * self._rows
        ends = trials + 1 if defers else trials
        self._recorded, self._promoted = BitSets(size, ends), BitSets(size, ends)
        if defers:
            self._recorded.add(np.arange(size), np.full(size, trials))  # every rank has one behind it
        quotas = [ladder.quota(results) for results in range(trials + 1)]
        self._grows = np.diff([*quotas, *[quotas[-1]] * (trials + 1)]) > 0
        """Results in a rung before a new one -> whether one more may go on with it."""
        self._results = np.zeros(size, np.int64)
        self._results[-self._rows :] = trials  # the last rung promotes none
        self._threshold, self._best = np.full(size, -1), np.full(size, trials)
        self.due = np.zeros(self._rows, np.int64)
        """(runs,) Bit set of the rungs that may promote a trial."""
        self._configurations, self._last_rung = trials, rungs - 1
        self._repeats, self._ended = repeats, np.zeros(size * trials if repeats > 1 else 0, np.int64)
        """Repeats of each configuration that have ended each rung."""
        self.awaited = np.zeros(self._rows, np.int64)
        """(runs,) Repeats that wait for others of their configuration on a rung that promotes."""
        self._open = np.full((3, self._rows), 0)
        """Repeats that are still to start of the configuration that goes on, its first trial, and the rung."""

    def settle(self, at: Ints, rungs: Ints, trials: Ints) -> Ints:
        """A trial of each of the runs has ended its rung; return the one that goes on from there: -1 for none."""
        cells = self._cells(at, rungs)
        ranks, sets = self._ranks.take(cells + trials), rungs * self._rows + at
        due, grows = self._recording(sets, ranks)
        goes = due | grows
        up = (grows > due).nonzero()[0]
        if len(up):  # the new threshold goes on, unless it did once
            some = sets.take(up)
            ranks[up] = above = self._threshold.take(some)
            goes[up] = ~self._promoted.has(some, above)
        found = np.full(len(at), -1)
        on = goes.nonzero()[0]
        if len(on):
            best = ranks.take(on)
            self._promoted.add(sets.take(on), best)
            found[on] = self._order.take(cells.take(on) + best)
        return found

    def record(self, at: Ints, rungs: Ints, trials: Ints) -> None:
        """A trial of each of the runs, which defer promotions, has ended its rung."""
        if self._repeats > 1:
            at, rungs, trials = self._whole(at, rungs, trials // self._repeats)
        ranks, sets = self._ranks.take(self._cells(at, rungs) + trials), rungs * self._rows + at
        self._recording(sets, ranks)
        self._best[sets] = best = np.minimum(self._best.take(sets), ranks)
        self._mark(at, sets, rungs, best)

    def _recording(self, sets: Ints, ranks: Ints) -> tuple[Bools, Bools]:
        """Add results and move the thresholds; return which are below them, and where one more may go on."""
        self._recorded.add(sets, ranks)
        results = self._results.take(sets)
        grows = self._grows.take(results)
        self._results[sets] = results + 1
        threshold = self._threshold.take(sets)
        due = ranks < threshold
        down, up = (due > grows).nonzero()[0], (grows > due).nonzero()[0]
        for moved, step in ((down, -1), (up, 1)):
            if len(moved):
                some = sets.take(moved)
                self._threshold[some] = self._recorded.neighbour(some, threshold.take(moved), step)
        return due, grows

    def _whole(self, at: Ints, rungs: Ints, configurations: Ints) -> tuple[Ints, Ints, Ints]:
        """Count a repeat of each of the runs; return those whose configuration has ended its rung with it."""
        cells = (rungs * self._rows + at) * self._configurations + configurations
        self._ended[cells] = ended = self._ended.take(cells) + 1
        is_whole, is_last = ended == self._repeats, rungs == self._last_rung
        self.awaited[at] += np.where(is_last, 0, np.where(is_whole, 1 - self._repeats, 1))
        return at[is_whole], rungs[is_whole], configurations[is_whole]

    def _mark(self, at: Ints, sets: Ints, rungs: Ints, best: Ints) -> None:
        """Mark the rungs whose best trial may go on."""
        is_due = best <= self._threshold.take(sets)
        self.due[at] = self.due.take(at) & ~(1 << rungs) | is_due << rungs

    def promote(self, at: Ints) -> tuple[Ints, Ints]:
        """Return the trial of each of the runs that goes on, from the highest rung, and that rung; -1 for none."""
        trials, rungs = np.full((2, len(at)), -1)
        due = self.due.take(at).nonzero()[0]
        if len(due):
            some = at.take(due)
            trials[due], rungs[due] = self._promote_repeats(some) if self._repeats > 1 else self._promote(some)
        return trials, rungs

    def _promote_repeats(self, at: Ints) -> tuple[Ints, Ints]:
        """The repeats of a configuration go on one after another, before those of any other."""
        left, first, rungs = self._open
        new = at[left.take(at) == 0]
        if len(new):
            self.due[new] &= ~_OPEN
            configurations, of = self._promote(new)
            left[new], first[new], rungs[new] = self._repeats, configurations * self._repeats, of
        trials = first.take(at) + self._repeats - left.take(at)
        left[at] -= 1
        self.due[at] = np.where(left.take(at) > 0, self.due.take(at) | _OPEN, self.due.take(at) & ~_OPEN)
        return trials, rungs.take(at)

    def _promote(self, at: Ints) -> tuple[Ints, Ints]:
        due = self.due.take(at)
        rungs = _highest_bit(due.view(np.uint64))
        sets = rungs * self._rows + at
        best = self._best.take(sets)
        self._promoted.add(sets, best)
        self._best[sets] = after = self._after(sets, best)
        self._mark(at, sets, rungs, after)
        return self._order.take(self._cells(at, rungs) + best), rungs

    def _after(self, sets: Ints, ranks: Ints) -> Ints:
        """Return the next result of each set behind some ranks that was not promoted."""
        found = self._recorded.neighbour(sets, ranks, 1)
        again = self._promoted.has(sets, found).nonzero()[0]
        while len(again):
            found[again] = self._recorded.neighbour(sets[again], found[again], 1)
            again = again[self._promoted.has(sets[again], found[again])]
        return found

    def _cells(self, at: Ints, rungs: Ints) -> Ints:
        cells: Ints = self._cell.take(at)
        return cells + rungs * self._per_rung if self._per_rung else cells
