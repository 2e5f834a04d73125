"""The default balancer of GPUs: the shares with the least max_i t_i from a line per worker (LB-BSP §3.3, eq. 3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rubberband.planner.balancing.balancer import Line, Look, ShareLimits
from rubberband.planner.balancing.lines import LineFit
from rubberband.planner.balancing.measured import MeasuredBalancer
from rubberband.planner.balancing.shares import min_max_shares

GROWTH = 2
"""The most that a share grows at once, as a multiple of the largest share that was seen: the line is a guess beyond."""


class LineBalancer(MeasuredBalancer):
    """Finds shares from fitted lines by bisection."""

    def __init__(self, num_workers: int, *, moves: bool = True) -> None:
        super().__init__(num_workers, moves=moves)
        self._fit = LineFit(num_workers)

    def lines(self) -> tuple[Line, ...]:
        """Return the fitted lines; empty before the first look."""
        return self._fit.lines()

    def _learn(self, look: Look) -> None:
        self._fit.observe(look)

    def _proposal(self, lines: Sequence[Line], batch_size: int, limits: ShareLimits) -> tuple[int, ...]:
        even = math.ceil(batch_size / self.num_workers)
        seen = self._fit.largest_shares().tolist()
        reach = tuple(min(cap, max(even, GROWTH * int(share))) for cap, share in zip(limits.caps, seen, strict=True))
        if sum(reach) < batch_size:  # where the caps are tight
            reach = limits.caps
        return min_max_shares(lines, batch_size, replace(limits, caps=reach))

    def _error(self) -> float:
        return self._fit.error()

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, in plain values."""
        return {**super().state(), "fit": self._fit.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken; one of another number of workers is ignored."""
        super().restore(state)
        if state.get("num_workers") == self.num_workers:
            self._fit.restore(state["fit"])
