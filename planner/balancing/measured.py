"""The part that all balancers of measured lines share: when shares change, who is probed, and who is a straggler."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rubberband.planner.balancing.balancer import Balancer, Line, Look, ShareLimits
from rubberband.planner.balancing.shares import (
    even_shares,
    held,
    keeps,
    min_max_shares,
    proportional_shares,
    scale_shares,
    slowest_s,
)
from rubberband.planner.balancing.worker_times import WorkerTimes

WORTHWHILE = 0.02
"""Least part of a step that a change of shares must save."""
SURE = 3.0
"""Standard errors of the predicted times by which it must."""
FIRST_DOUBT = 0.15
"""Assumed standard error of even shares at the first look, half of it at the second, and so on: most
gangs are equal, and the noise of their looks is not known yet."""
STRAGGLER_STEPS = 20
"""Steps after which a worker that slows the gang is reported."""
PROBE_COST = 0.005
"""Part of the time for giving workers that have no samples a few, to see whether they have recovered."""
LEAST_WAIT, MOST_WAIT = 20, 2000
"""Looks between two such probes."""


class MeasuredBalancer(Balancer):
    """Changes shares where the lines say that it pays, and otherwise keeps them."""

    def __init__(self, num_workers: int, *, moves: bool = True) -> None:
        """Without `moves` the shares stay even, and the lines are only for predictions."""
        self.num_workers = num_workers
        self._moves = moves
        self._shares: tuple[int, ...] | None = None
        self._looks = 0
        self._idle = [0] * num_workers
        """Looks since each worker last had samples."""
        self._slow_steps = [0] * num_workers
        self._steps = 0
        """Steps of the last look; 0 once its stragglers are counted."""
        self._times = [WorkerTimes() for _ in range(num_workers)]
        self._lines: tuple[Line, ...] = ()
        """Those after the last look; empty after a restart."""

    @abstractmethod
    def lines(self) -> tuple[Line, ...]: ...

    @abstractmethod
    def _learn(self, look: Look) -> None:
        """Take the look into the lines."""

    @abstractmethod
    def _proposal(self, lines: Sequence[Line], batch_size: int, limits: ShareLimits) -> tuple[int, ...]:
        """The best shares by the lines."""

    @abstractmethod
    def _error(self) -> float:
        """Relative standard error of the lines' times."""

    def observe(self, look: Look) -> None:
        """Take in one look."""
        self._learn(look)
        self._time(look)
        self._shares, self._steps = look.shares, look.steps
        self._looks += 1
        self._idle = [0 if share else idle + 1 for share, idle in zip(look.shares, self._idle, strict=True)]

    def _time(self, look: Look) -> None:
        """Take the times of the workers that had samples."""
        equal_share = sum(look.shares) / self.num_workers
        self._lines = lines = self.lines()
        for rank, (share, seconds) in enumerate(zip(look.shares, look.compute_s, strict=True)):
            if share and 0.0 < seconds < math.inf:
                self._times[rank].observe(share, seconds, equal_share, lines[rank])

    def shares(self, batch_size: int, limits: ShareLimits) -> tuple[int, ...]:
        """Return the present shares, or others that save more than `WORTHWHILE` and more than noise could pretend."""
        lines = self._lines or self.lines()
        if not lines or self._shares is None:
            return self._even(batch_size, limits)
        limits = held(batch_size, limits)
        present = scale_shares(self._shares, batch_size)
        self._count_stragglers(lines, present, limits)
        if not self._moves:
            return self._even(batch_size, limits)
        found = self._proposal(lines, batch_size, limits)
        if keeps(present, limits):
            present_s = slowest_s(lines, present, limits)
            if 1.0 - slowest_s(lines, found, limits) / present_s < self._threshold(present):
                # Between shares that noise cannot tell apart, even ones are the likelier.
                even = self._even(batch_size, limits)
                found = even if slowest_s(lines, even, limits) < present_s else present
        return self._with_probe(lines, found, limits)

    def _threshold(self, present: Sequence[int]) -> float:
        """The least gain for which shares change."""
        is_even = max(present) - min(present) <= 1
        error = max(self._error(), FIRST_DOUBT / self._looks if is_even else 0.0)
        return max(WORTHWHILE, SURE * error)

    def _even(self, batch_size: int, limits: ShareLimits) -> tuple[int, ...]:
        even = even_shares(batch_size, self.num_workers)
        limits = held(batch_size, limits)
        return even if keeps(even, limits) else proportional_shares((1.0,) * self.num_workers, batch_size, limits)

    def _with_probe(self, lines: Sequence[Line], shares: tuple[int, ...], limits: ShareLimits) -> tuple[int, ...]:
        """The shares, with a few samples for the worker that has had none for longest, if it is time."""
        step_s = slowest_s(lines, shares, limits)
        giver = max(range(self.num_workers), key=lambda rank: shares[rank])
        for rank in sorted(range(self.num_workers), key=lambda rank: -self._idle[rank]):
            few = limits.least
            if shares[rank] or self._idle[rank] < LEAST_WAIT:
                return shares
            late = lines[rank].time_s(few) / step_s - 1.0 if step_s > 0.0 else 0.0
            wait = min(MOST_WAIT, math.ceil(late / PROBE_COST))
            if self._idle[rank] >= wait and limits.caps[rank] >= few and shares[giver] >= 2 * few:
                probed = list(shares)
                probed[rank], probed[giver] = few, shares[giver] - few
                return tuple(probed)
        return shares

    def step_s(self, shares: Sequence[int], limits: ShareLimits) -> float:
        """Return max_i t_i(x_i), the predicted seconds of a step; nan before the first look.

        Each time is by the look at the nearest share: a line tells little about shares that are far from the present.
        """
        lines = self.lines()
        if not lines:
            return math.nan
        workers = zip(self._times, shares, lines, strict=True)
        free = limits.zero_costs_nothing
        return max(times.time_s(share, line) if share or not free else 0.0 for times, share, line in workers)

    def stragglers(self) -> tuple[int, ...]:
        """Return the ranks whose removal would have made the last 20 steps or more no slower."""
        return tuple(rank for rank, steps in enumerate(self._slow_steps) if steps >= STRAGGLER_STEPS)

    def _count_stragglers(self, lines: Sequence[Line], shares: tuple[int, ...], limits: ShareLimits) -> None:
        """Once per look: without those that take longest, would the others do the whole batch in less time?

        A worker that is left without samples is one too, if there are samples for all.
        """
        if not self._steps or not lines:
            return
        steps, self._steps = self._steps, 0
        batch_size = sum(shares)
        idle = {rank for rank, share in enumerate(shares) if not share}
        free = limits.zero_costs_nothing
        times_s = [line.time_s(share, zero_costs_nothing=free) for line, share in zip(lines, shares, strict=True)]
        step_s = max(times_s)
        slow = {rank for rank, time_s in enumerate(times_s) if time_s >= (1.0 - WORTHWHILE) * step_s} - idle
        if batch_size < self.num_workers * limits.least:
            idle = set()
        if slow and len(slow | idle) <= self.num_workers // 2:
            caps = tuple(0 if rank in slow | idle else batch_size for rank in range(self.num_workers))
            alone = replace(limits, caps=caps, zero_costs_nothing=True)
            without_s = slowest_s(lines, min_max_shares(lines, batch_size, alone), alone)
            slow = slow if without_s < (1.0 - WORTHWHILE) * step_s else set()
        else:
            slow = set()
        late = slow | idle
        self._slow_steps = [so_far + steps if rank in late else 0 for rank, so_far in enumerate(self._slow_steps)]

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, in plain values."""
        return {
            "num_workers": self.num_workers,
            "shares": None if self._shares is None else list(self._shares),
            "looks": self._looks,
            "idle": list(self._idle),
            "slow_steps": list(self._slow_steps),
            "times": [times.state() for times in self._times],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken; one of another number of workers is ignored."""
        if state.get("num_workers") != self.num_workers:
            return
        self._shares = None if state["shares"] is None else tuple(state["shares"])
        self._looks, self._lines = state["looks"], ()
        self._idle, self._slow_steps = list(state["idle"]), list(state["slow_steps"])
        for times, numbers in zip(self._times, state["times"], strict=True):
            times.restore(numbers)
