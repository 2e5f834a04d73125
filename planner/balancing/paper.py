"""The paper's own algorithms: the baseline (LB-BSP, SoCC '20, Algorithms 1 and 2).

Algorithm 1 is as printed but for its network: `Narx` is trained for all workers, and used from 500 samples of all of
them together on, where the paper has one per worker and 500 iterations.

Algorithm 2 keeps the traps of its pseudo-code. Line 5 returns before a fine-tune phase can begin. The phase is entered
once for all time, and the window is not reset by a move. A step is 5 samples, whatever the batch. There is no dead
band, so shares move to and fro. A straggler that no share makes faster loses samples all the same. The leader may have
memory for less than a step. Where only the straggler has memory left, it is its own leader.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rubberband.planner.balancing.balancer import Look, ShareLimits
from rubberband.planner.balancing.line_balancer import LineBalancer
from rubberband.planner.balancing.predictors import Narx
from rubberband.planner.balancing.shares import held, keeps, proportional_shares
from rubberband.planner.balancing.speed_balancer import ForecastBalancer

STEP, WINDOW = 5, 5
"""Delta and D of the fast-approach phase."""
FINE_STEP, FINE_WINDOW = 1, 20
"""Delta and D of the fine-tune phase."""
MOST_MEMORY = 0.95
"""A worker that uses more of its memory is not the leader."""


class Algorithm2:
    """Batch sizes of GPU workers. All past times are kept as what lines 7 and 9 ask of them, per pair of workers."""

    def __init__(self, num_workers: int) -> None:
        self.step, self.window = STEP, WINDOW
        self._led = np.zeros((num_workers, num_workers), dtype=np.int64)
        """Looks in a row, up to now, in which worker i was faster than worker j."""
        self._was_slower = np.zeros((num_workers, num_workers), dtype=np.bool_)
        """Whether worker i has ever been slower than worker j."""

    def update(self, shares: Sequence[int], times_s: Sequence[float], memory: Sequence[float]) -> tuple[int, ...]:
        """Return x^k from x^(k-1), t^(k-1) and the fractions m^k of memory in use."""
        times = np.asarray(times_s, dtype=np.float64)
        faster = times[:, None] < times[None, :]
        self._led = np.where(faster, self._led + 1, 0)
        self._was_slower |= faster.T
        free = [rank for rank, used in enumerate(memory) if used <= MOST_MEMORY]
        found = list(shares)
        if not free:  # the print has no leader then
            return tuple(found)
        leader = min(free, key=lambda rank: times_s[rank])
        straggler = max(range(len(found)), key=lambda rank: times_s[rank])
        if found[straggler] <= self.step:
            return tuple(found)
        if self._led[leader, straggler] >= self.window:
            found[leader] += self.step
            found[straggler] -= self.step
        elif self._was_slower[leader, straggler]:
            self.step, self.window = FINE_STEP, FINE_WINDOW
        return tuple(found)

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, in plain values."""
        pairs = {"led": self._led.tolist(), "was_slower": self._was_slower.tolist()}
        return {"step": self.step, "window": self.window, **pairs}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, of as many workers."""
        self.step, self.window = state["step"], state["window"]
        self._led = np.asarray(state["led"], dtype=np.int64)
        self._was_slower = np.asarray(state["was_slower"], dtype=np.bool_)


class PaperGpuBalancer(LineBalancer):
    """Algorithm 2, held to the limits. A look counts as one iteration; the lines are for predictions only."""

    def __init__(self, num_workers: int) -> None:
        super().__init__(num_workers)
        self._algorithm = Algorithm2(num_workers)

    def observe(self, look: Look) -> None:
        """Take in one look and update the shares."""
        super().observe(look)
        used = [0.0] * self.num_workers if look.memory is None else [1.0 - part for part in look.memory]
        self._shares = self._algorithm.update(look.shares, look.compute_s, used)

    def shares(self, batch_size: int, limits: ShareLimits) -> tuple[int, ...]:
        """Return the algorithm's shares, in proportion where the batch has changed."""
        if self._shares is None:
            return self._even(batch_size, limits)
        limits = held(batch_size, limits)
        self._count_stragglers(self.lines(), self._shares, limits)
        if sum(self._shares) == batch_size and keeps(self._shares, limits):
            return self._shares
        return proportional_shares(self._shares, batch_size, limits)

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, in plain values."""
        return {**super().state(), "algorithm": self._algorithm.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken; one of another number of workers is ignored."""
        super().restore(state)
        if state.get("num_workers") == self.num_workers:
            self._algorithm.restore(state["algorithm"])


class PaperCpuBalancer(ForecastBalancer):
    """Algorithm 1 with NARX, at every look, held to the limits."""

    def __init__(self, num_workers: int) -> None:
        super().__init__(num_workers, Narx(num_workers))

    def shares(self, batch_size: int, limits: ShareLimits) -> tuple[int, ...]:
        """Return shares in proportion to the forecast speeds."""
        lines = self.lines()
        if not lines or self._shares is None:
            return self._even(batch_size, limits)
        self._count_stragglers(lines, self._shares, limits)
        return self._proposal(lines, batch_size, limits)
