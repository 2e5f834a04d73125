"""The default balancer of CPUs: shares in proportion to forecast speeds (LB-BSP §3.2, Algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rubberband.planner.balancing.balancer import Line, Look, ShareLimits
from rubberband.planner.balancing.gate import Gated
from rubberband.planner.balancing.measured import MeasuredBalancer
from rubberband.planner.balancing.predictors import Floats, NormalisedEma, Predictor
from rubberband.planner.balancing.shares import proportional_shares

FIRST_NOISE = 0.05
"""Assumed relative noise of a speed, until it is measured."""
NOISE_RATE = 0.02
FAR = 4.0
"""Deviations of the noise beyond which an error is a spike or a shift, and does not inform the noise."""


class SpeedBalancer(MeasuredBalancer):
    """Finds shares from forecast speeds."""

    def __init__(self, num_workers: int, predictor: Predictor | None = None) -> None:
        """Use a predictor, as it is; by default the normalised moving average, while it is better than memoryless."""
        super().__init__(num_workers)
        self._predictor = predictor or Gated(NormalisedEma(num_workers), num_workers)
        self._speeds: Floats | None = None
        """The forecast for the steps to come."""
        self._variance = FIRST_NOISE**2

    def lines(self) -> tuple[Line, ...]:
        """Return t = x / v by the forecast speeds; empty before the first look."""
        if self._speeds is None:
            return ()
        return tuple(Line(0.0, 1.0 / speed) for speed in self._speeds.tolist())

    def _learn(self, look: Look) -> None:
        speeds = speeds_of(look)
        if self._speeds is not None:
            self._learn_noise(np.log(speeds / self._speeds))
        ones = np.ones(self.num_workers)
        cpu = ones if look.cpu is None else np.asarray(look.cpu, dtype=np.float64)
        memory = ones if look.memory is None else np.asarray(look.memory, dtype=np.float64)
        self._predictor.observe(speeds, cpu, memory)
        self._speeds = self._predictor.forecast()

    def _learn_noise(self, errors: Floats) -> None:
        """An error has the noise of the speed and what is left of it in the forecast."""
        squares = np.square(errors[~np.isnan(errors)]) / (1.0 + self._predictor.noise_share**2)
        squares = np.minimum(squares, FAR**2 * self._variance)
        if len(squares):
            self._variance += NOISE_RATE * (float(squares.mean()) - self._variance)

    def _proposal(self, lines: Sequence[Line], batch_size: int, limits: ShareLimits) -> tuple[int, ...]:
        return proportional_shares([1.0 / line.per_sample_s for line in lines], batch_size, limits)

    def _error(self) -> float:
        return math.sqrt(self._variance) * self._predictor.noise_share

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, in plain values."""
        speeds = None if self._speeds is None else self._speeds.tolist()
        return {
            **super().state(),
            "predictor": self._predictor.state(),
            "speeds": speeds,
            "variance": self._variance,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken; one of another number of workers is ignored."""
        super().restore(state)
        if state.get("num_workers") == self.num_workers:
            self._predictor.restore(state["predictor"])
            self._speeds = None if state["speeds"] is None else np.asarray(state["speeds"], dtype=np.float64)
            self._variance = state["variance"]


def speeds_of(look: Look) -> Floats:
    """Return v_i = x_i / t_i, samples/s of each worker; nan where it had no samples or no time."""
    shares, times_s = np.asarray(look.shares, dtype=np.float64), np.asarray(look.compute_s, dtype=np.float64)
    seen = (shares > 0.0) & np.isfinite(times_s) & (times_s > 0.0)
    return np.where(seen, shares / np.where(seen, times_s, 1.0), np.nan)
