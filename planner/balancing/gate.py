"""A predictor that is used only while it pays: while its forecasts would have made steps faster than the last speeds.

The predictor and the last speeds both forecast every step. What counts is max_i x_i / v_i, the time of the step with
shares in proportion to a forecast, not the error of the forecast: a step waits for its slowest worker only.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rubberband.planner.balancing.predictors import Floats, Memoryless, Predictor, Rescalable

RATE = 0.05
"""Weight of the last step in the mean times that are compared."""
FIRST_LOOKS = 10
"""Looks before the means are compared."""


class Gated:
    """A predictor, or the last speeds (memoryless) where these have been better."""

    def __init__(self, predictor: Rescalable, num_workers: int) -> None:
        self._predictor = predictor
        self._memoryless = Memoryless(num_workers)
        self._times = [0.0, 0.0]
        """Mean times of a step by the predictor and by the last speeds, over the shortest possible one."""
        self._looks = 0

    @property
    def is_open(self) -> bool:
        """Return whether the predictor is used; in the first looks it is."""
        return self._times[0] <= self._times[1] or self._looks < FIRST_LOOKS

    @property
    def _used(self) -> Predictor:
        return self._predictor if self.is_open else self._memoryless

    @property
    def noise_share(self) -> float:
        return self._used.noise_share

    def observe(self, speeds: Floats, cpu: Floats, memory: Floats) -> None:
        seen = ~np.isnan(speeds)
        if self._looks and seen.any():
            rate = max(RATE, 1.0 / self._looks)
            for at, each in enumerate((self._predictor, self._memoryless)):
                self._times[at] += rate * (relative_time(each.forecast()[seen], speeds[seen]) - self._times[at])
        self._looks += 1
        self._predictor.observe(speeds, cpu, memory)
        self._memoryless.observe(speeds, cpu, memory)

    def forecast(self) -> Floats:
        return self._used.forecast()

    def rescale(self, factors: Floats) -> None:
        """Go on as if all past speeds had been `factors` as large."""
        self._predictor.rescale(factors)
        self._memoryless.rescale(factors)

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, in plain values."""
        states = {"predictor": self._predictor.state(), "memoryless": self._memoryless.state()}
        return {**states, "times": list(self._times), "looks": self._looks}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, of as many workers."""
        self._predictor.restore(state["predictor"])
        self._memoryless.restore(state["memoryless"])
        self._times, self._looks = list(state["times"]), state["looks"]


def relative_time(forecast: Floats, speeds: Floats) -> float:
    """Return max_i x_i / v_i with x_i in proportion to a forecast, over what it is with the true speeds; at least 1."""
    return float((forecast / speeds).max() * speeds.sum() / forecast.sum())
