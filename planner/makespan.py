"""When the last of many trials ends that share few slots, for many samples at once.

List scheduling: the slot that is free first takes the next trial. The result depends on the multiset of the times at
which slots are free, so that many trials can be taken at a time as long as none of them ends before the last begins.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rubberband.planner.table import Floats

Times = npt.NDArray[Any]
"""Seconds, in single or double precision."""

_FEW_SLOTS = 16
"""Up to this number of slots, trials are inserted one after another between the times at which slots are free."""
_MANY_WAVES = 12
_MANY_TRIALS = 512
"""Of more waves, and more trials, only the last waves are scheduled."""
_LAST_WAVES = 5
_SHARE = 16
"""One in this number of slots is filled at once, even where a slot that ends early could take the last trial."""


def makespan(trials_s: Times, num_slots: int) -> Floats:
    """(rows,) When the last of the trials (n, rows) ends, if the first slot to be free takes the next one.

    Exact up to 31 slots and 512 trials; beyond, within 0.1 % on average unless times vary as much as their mean (1 %).
    """
    num_trials = len(trials_s)
    if num_slots >= num_trials or num_slots == 1:
        latest = trials_s.sum(axis=0, dtype=np.float64) if num_slots == 1 else trials_s.max(axis=0)
        return np.asarray(latest, np.float64)
    free_s = trials_s[:num_slots]
    rest_s = trials_s[num_slots:]
    head = 0
    if num_trials > max(_MANY_WAVES * num_slots, _MANY_TRIALS):
        head = (num_trials // num_slots - _LAST_WAVES) * num_slots
        free_s, rest_s = _after_many(trials_s[:head], num_slots), trials_s[head:]
    ends_s = _inserted(free_s, rest_s) if num_slots <= _FEW_SLOTS else _in_batches(free_s, rest_s)
    if head:
        ends_s = np.maximum(ends_s, _stragglers(trials_s[:head], num_slots))
    return np.asarray(ends_s, np.float64)


def _inserted(free_s: Times, rest_s: Times) -> Times:
    """One trial after another; the times at which slots are free stay sorted."""
    free_s = np.sort(free_s, axis=0)
    first, others, held = free_s[0], free_s[1:], np.empty_like(free_s)
    for trial_s in rest_s:
        ends_s = first + trial_s
        np.maximum(others, ends_s, out=held[1:])
        np.minimum(others[0], ends_s, out=held[0])
        np.minimum(held[1:-1], others[1:], out=held[1:-1])
        free_s, held = held, free_s
        first, others = free_s[0], free_s[1:]
    latest: Times = free_s[-1]
    return latest


def _in_batches(free_s: Times, rest_s: Times) -> Times:
    """As many trials at once as begin before the first of them ends, in all rows (or nearly)."""
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
    latest: Times = free_s.max(axis=1)
    return latest


def _stragglers(head_s: Times, num_slots: int) -> Times:
    """(rows,) When the trials end that take longer than all of the last waves, which begin after them; else 0."""
    trial_s = head_s.mean(axis=0)
    long = np.flatnonzero(head_s.max(axis=0) > (_LAST_WAVES - 1) * trial_s)
    ends_s: Times = np.zeros_like(trial_s)
    if len(long):
        few_s = head_s[:, long].astype(np.float64)
        begins_s = (np.cumsum(few_s, axis=0) - few_s) / num_slots - trial_s[long] / 2.0
        ends_s[long] = (begins_s + few_s).max(axis=0)
    return ends_s


def _after_many(head_s: Times, num_slots: int) -> Times:
    """(slots, rows) When slots are free after many waves: each has taken trials of its own, one after another.

    The total time of a slot's share of the trials, whole trials aside, says where it stands between two ends: all
    slots are at about the same point while times vary little, and anywhere when they vary. The total time of all trials
    is kept.
    """
    shared_s = head_s.reshape(-1, num_slots, head_s.shape[1]).sum(axis=0, dtype=np.float64)
    total_s = shared_s.mean(axis=0)
    trial_s = total_s / (len(head_s) // num_slots)
    beyond_s = shared_s - total_s
    beyond_s -= np.round(beyond_s / trial_s) * trial_s
    free_s: Times = (beyond_s - beyond_s.mean(axis=0) + total_s).astype(head_s.dtype)
    return free_s
