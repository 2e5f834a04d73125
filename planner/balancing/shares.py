"""Divisions of a batch among workers: what a look at a gang measures, what limits the shares, and the best shares.

Symbols are those of LB-BSP (SoCC '20, §3.1): worker i computes x_i of the X samples of a batch, its share, and needs
t_i seconds for them. Tuples are by rank.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rubberband.values.balance import scale_shares


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Measurements of all workers over the steps since the last look."""

    shares: tuple[int, ...]
    """x_i, samples per step of each worker."""
    compute_s: tuple[float, ...]
    """t_i, mean own seconds per step: computing and sending, without the wait for others. Not read where x_i = 0."""
    steps: int = 1
    """Steps that the means are over."""
    cpu: tuple[float, ...] | None = None
    """c_i, CPUs that are available to each worker now, so for the steps to come. None on GPUs."""
    memory: tuple[float, ...] | None = None
    """m_i, fraction of each worker's memory (on a GPU, the GPU's) that is available now. None if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareLimits:
    """Limits of every division of a batch."""

    caps: tuple[int, ...]
    """The most samples per step of each worker. If a batch is more than they hold together, all of them are taken in
    the same number of passes."""
    least: int = 1
    """The fewest samples of a worker that has any: 2 with BatchNorm. 0 is always allowed."""
    zero_costs_nothing: bool = False
    """Whether a worker without samples takes no time of its own; otherwise it takes its line's base."""


@dataclass(frozen=True, slots=True)
class Line:
    """t = a + b x of one worker."""

    base_s: float
    """a, seconds of a step whatever the share; at least 0."""
    per_sample_s: float
    """b, seconds per sample; at least 0."""

    def time_s(self, share: int, *, zero_costs_nothing: bool = False) -> float:
        """Return the predicted own seconds of a step with `share` samples."""
        if share == 0 and zero_costs_nothing:
            return 0.0
        return self.base_s + self.per_sample_s * share


class Remembering:
    """Knows things that another one of its kind goes on from."""

    kept: tuple[str, ...] = ()
    """Attributes that `state` carries (without a leading underscore): numbers, arrays, and parts that remember."""

    def state(self) -> Any:
        """Return what `restore` needs, in plain values."""
        return {name: _plain(getattr(self, self._attribute(name))) for name in self.kept}

    def restore(self, state: Any) -> None:
        """Go on where `state` was taken, of as many workers."""
        for name in self.kept:
            attribute = self._attribute(name)
            setattr(self, attribute, _restored(getattr(self, attribute), state[name]))

    def _attribute(self, name: str) -> str:
        return f"_{name}" if f"_{name}" in vars(self) else name


def _plain(value: Any) -> Any:
    if isinstance(value, Remembering):
        return value.state()
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value.tolist() if isinstance(value, np.ndarray) else value


def _restored(now: Any, value: Any) -> Any:
    """Return a plain value as one of the kind that is there now; None stands for nothing yet."""
    if isinstance(now, Remembering):
        now.restore(value)
        return now
    if isinstance(now, list):
        return [_restored(*pair) for pair in zip(now, value, strict=True)]
    if isinstance(now, np.ndarray):
        return np.asarray([] if value is None else value, dtype=now.dtype)
    return tuple(value or ()) if isinstance(now, tuple) else value


class Balancer(Protocol):
    """Proposes the shares of a gang from looks at it. Its memory is bounded."""

    def observe(self, look: Look) -> None:
        """Take in one look."""

    def shares(self, batch_size: int, limits: ShareLimits) -> tuple[int, ...]:
        """Return the samples per worker for the steps to come; equal ones before the first look."""

    def lines(self) -> tuple[Line, ...]:
        """Return the time of each worker as a function of its share; empty before the first look."""

    def step_s(self, shares: Sequence[int], limits: ShareLimits) -> float:
        """Return max_i t_i(x_i), the predicted seconds of a step; nan before the first look."""

    def stragglers(self) -> tuple[int, ...]:
        """Return the ranks whose removal would have made the last 20 steps or more no slower."""

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, in plain values."""

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken; one of another number of workers is ignored."""


_BISECTIONS = 100
_EXACT = 1e-13
"""Relative width of the interval of T at which a bisection ends."""
_LEAST_WEIGHT = 1e-9
_ROUNDING = 1e-12
"""Relative slack of a share that floating point rounds down."""


def held(batch_size: int, limits: ShareLimits) -> ShareLimits:
    """Return limits whose caps hold the batch: the same ones, or those of as few passes as suffice."""
    if max(limits.caps) <= batch_size <= sum(limits.caps):
        return limits
    caps = [min(cap, batch_size) for cap in limits.caps]
    passes = max(1, -(-batch_size // max(1, sum(caps))))
    wide = limits.caps if passes == 1 else tuple(passes * cap for cap in limits.caps)
    if sum(caps) == 0:
        wide = (batch_size,) * len(caps)
    return ShareLimits(
        caps=tuple(min(cap, batch_size) for cap in wide),
        least=limits.least,
        zero_costs_nothing=limits.zero_costs_nothing,
    )


def keeps(shares: Sequence[int], limits: ShareLimits) -> bool:
    """Return whether every share is 0, or at least `least` and at most its cap."""
    return all(share == 0 or limits.least <= share <= cap for share, cap in zip(shares, limits.caps, strict=True))


def proportional_shares(weights: Sequence[float], batch_size: int, limits: ShareLimits) -> tuple[int, ...]:
    """Return shares in proportion to positive weights, or as near as the limits allow."""
    limits = held(batch_size, limits)
    shares = scale_shares(weights, batch_size)
    if keeps(shares, limits):
        return shares
    return min_max_shares([Line(0.0, 1.0 / max(weight, _LEAST_WEIGHT)) for weight in weights], batch_size, limits)


def slowest_s(lines: Sequence[Line], shares: Sequence[int], limits: ShareLimits) -> float:
    """Return max_i t_i(x_i)."""
    free = limits.zero_costs_nothing
    return max(line.time_s(share, zero_costs_nothing=free) for line, share in zip(lines, shares, strict=True))


def min_max_shares(lines: Sequence[Line], batch_size: int, limits: ShareLimits) -> tuple[int, ...]:
    """Return integer shares with the least max_i t_i(x_i) (LB-BSP eq. 3), within the limits, which sum to the batch.

    A bisection on T, the time of the slowest: worker i can do floor((T - a_i) / b_i) samples in it. A share between 0
    and `least` only remains where nothing else sums to the batch.
    """
    limits = held(batch_size, limits)
    shares = _filled(lines, batch_size, limits)
    if keeps(shares, limits):
        return shares
    # Without `least` the time is a lower bound, so the division above is the best one unless it broke that rule.
    return _with_least(lines, batch_size, limits) or shares


MULTIPLE = 8
"""Samples that the matrix units of GPUs take at once."""
ALIGNED_COST = 0.01
"""The part of a step that multiples may cost: less than what a change of shares must save."""


def aligned_shares(lines: Sequence[Line], shares: tuple[int, ...], limits: ShareLimits) -> tuple[int, ...]:
    """Return shares near these, of the same sum, that are multiples of 8, or of 4 or 2 where that costs too much.

    The rest of the batch is one worker's. Even shares stay, as do others where any multiple costs more than
    `ALIGNED_COST` of the step: those of small batches.
    """
    if max(shares) - min(shares) <= 1:
        return shares
    limits, multiple = held(sum(shares), limits), MULTIPLE
    most_s = (1.0 + ALIGNED_COST) * slowest_s(lines, shares, limits)
    while multiple > 1:
        multiples = _in_multiples(lines, shares, limits, multiple)
        if multiples and keeps(multiples, limits) and slowest_s(lines, multiples, limits) <= most_s:
            return multiples
        multiple //= 2
    return shares


def _in_multiples(
    lines: Sequence[Line], shares: Sequence[int], limits: ShareLimits, multiple: int
) -> tuple[int, ...] | None:
    """Round down, and give what is left to the workers that finish it first; None where the caps do not hold it."""
    floors = [share - share % multiple for share in shares]
    left = sum(shares) - sum(floors)
    while left:
        more = min(multiple, left)
        whole = [rank for rank, share in enumerate(floors) if share % multiple == 0]
        room = [rank for rank in whole if floors[rank] + more <= limits.caps[rank]]
        if not room:
            return None
        floors[min(room, key=lambda rank: lines[rank].time_s(floors[rank] + more))] += more
        left -= more
    return tuple(floors)


def _capacity(line: Line, cap: int, time_s: float) -> int:
    """The most samples of a worker in a time; 0 where it cannot do one."""
    if time_s < line.base_s:
        return 0
    room_s = time_s - line.base_s
    if room_s >= cap * line.per_sample_s:
        return cap
    return min(cap, math.floor(room_s / line.per_sample_s * (1.0 + _ROUNDING)))


def _bounds(lines: Sequence[Line], batch_size: int, limits: ShareLimits) -> tuple[float, float]:
    """T below which nothing is feasible, and T of one division."""
    low = 0.0 if limits.zero_costs_nothing else max(line.base_s for line in lines)
    return low, slowest_s(lines, scale_shares(limits.caps, batch_size), limits)


def _filled(lines: Sequence[Line], batch_size: int, limits: ShareLimits) -> tuple[int, ...]:
    """The best division where every share is allowed.

    A worker that can do a part of the batch in less than the best T may keep that part. So the search ends when few
    samples are left over; these go one at a time to the worker that finishes them first.
    """
    workers = list(zip(lines, limits.caps, strict=True))
    low, high = _bounds(lines, batch_size, limits)
    shares = [_capacity(line, cap, low) for line, cap in workers]
    done, most = sum(shares), sum(_capacity(line, cap, high) for line, cap in workers)
    if done >= batch_size:
        return scale_shares(shares, batch_size)
    for turn in range(_BISECTIONS):
        if batch_size - done <= len(lines) or high - low <= _EXACT * high:
            break
        # Every other time where a line through both ends meets the batch: half as many turns as halving alone.
        part = 0.5 if turn % 2 else (batch_size - done) / (most - done)
        middle = low + part * (high - low)
        able = [_capacity(line, cap, middle) for line, cap in workers]
        if sum(able) > batch_size:
            high, most = middle, sum(able)
        else:
            low, shares, done = middle, able, sum(able)
    left = batch_size - sum(shares)
    if left > len(lines):  # where T is reached, a worker whose time does not depend on its share has room for many
        room = [_capacity(line, cap, high) - share for (line, cap), share in zip(workers, shares, strict=True)]
        return tuple(share + more for share, more in zip(shares, scale_shares(room, left), strict=True))
    first = [(line.time_s(share + 1), rank) for rank, (line, share) in enumerate(zip(lines, shares, strict=True))]
    heap = [entry for entry in first if shares[entry[1]] < limits.caps[entry[1]]]
    heapq.heapify(heap)
    for _ in range(left):
        rank = heap[0][1]
        shares[rank] += 1
        if shares[rank] < limits.caps[rank]:
            heapq.heapreplace(heap, (lines[rank].time_s(shares[rank] + 1), rank))
        else:
            heapq.heappop(heap)
    return tuple(shares)


def _with_least(lines: Sequence[Line], batch_size: int, limits: ShareLimits) -> tuple[int, ...] | None:
    """The best division into shares of 0 or at least `least`; None without any."""
    most = batch_size // limits.least
    workers = list(zip(lines, limits.caps, strict=True))

    def members(time_s: float) -> list[tuple[int, int]]:
        """The workers that could do most in a time, as many as can have `least`: what they can do, and their ranks."""
        able = [(_capacity(line, cap, time_s), rank) for rank, (line, cap) in enumerate(workers)]
        return sorted((pair for pair in able if pair[0] >= limits.least), key=lambda pair: (-pair[0], pair[1]))[:most]

    low, _ = _bounds(lines, batch_size, limits)
    high = max(line.time_s(cap) for line, cap in workers)
    if sum(able for able, _ in members(low)) >= batch_size:
        high = low
    if sum(able for able, _ in members(high)) < batch_size:
        return None
    for _ in range(_BISECTIONS):
        if high - low <= _EXACT * high:
            break
        middle = 0.5 * (low + high)
        if sum(able for able, _ in members(middle)) >= batch_size:
            high = middle
        else:
            low = middle
    chosen = members(high)
    room = [able - limits.least for able, _ in chosen]
    left = batch_size - limits.least * len(chosen)
    extra = scale_shares(room, left) if left else (0,) * len(chosen)
    shares = [0] * len(lines)
    for (_, rank), more in zip(chosen, extra, strict=True):
        shares[rank] = limits.least + more
    return tuple(shares)
