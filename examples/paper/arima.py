"""ARIMA, a forecast of speeds that LB-BSP (SoCC '20, §4) compares with. The product has better ones."""

from __future__ import annotations

import numpy as np

from rubberband.planner.balancing.shares import Remembering
from rubberband.planner.balancing.speed_balancer import LEAST, Floats, known


class Arima(Remembering):
    """ARIMA(p, 1, 1) of the speeds, by recursive least squares with the last error as a regressor."""

    kept = ("looks", "speeds", "errors", "weights", "inverse")
    noise_share = 1.0

    def __init__(self, num_workers: int, order: int = 2, forgetting: float = 0.995) -> None:
        self.looks = 0
        self._order, self._forgetting = order, forgetting
        self.speeds: Floats = np.full((num_workers, order + 1), np.nan)
        """(n, p + 1) The last speeds, newest first."""
        self.errors: Floats = np.zeros(num_workers)
        self.weights: Floats = np.zeros((num_workers, order + 1))
        self.inverse: Floats = np.tile(np.eye(order + 1), (num_workers, 1, 1))

    def _regressors(self) -> Floats:
        differences = self.speeds[:, :-1] - self.speeds[:, 1:]
        scale = np.maximum(self.speeds[:, :1], LEAST)
        return np.asarray(np.nan_to_num(np.column_stack([differences, self.errors]) / scale))

    def observe(self, speeds: Floats, cpu: Floats, memory: Floats) -> None:
        self.looks += 1
        seen = ~np.isnan(speeds)
        last = self.speeds[:, 0]
        ready = seen & ~np.isnan(self.speeds).any(axis=1)
        inputs = self._regressors()
        target = np.where(ready, (speeds - last) / np.where(ready, last, 1.0), 0.0)
        error = np.where(ready, target - (self.weights * inputs).sum(axis=1), 0.0)
        gained = np.einsum("nij,nj->ni", self.inverse, inputs)
        gains = gained / (self._forgetting + (inputs * gained).sum(axis=1))[:, None]
        self.weights = np.where(ready[:, None], self.weights + gains * error[:, None], self.weights)
        inverse = (self.inverse - gains[:, :, None] * gained[:, None, :]) / self._forgetting
        bounded = ready & (np.einsum("nii->n", inverse) < 1e4)
        self.inverse = np.where(bounded[:, None, None], inverse, self.inverse)
        self.errors = np.where(seen, error * np.where(ready, last, 0.0), self.errors)
        moved = np.column_stack([speeds, self.speeds[:, :-1]])
        self.speeds = np.where(seen[:, None], moved, self.speeds)

    def forecast(self) -> Floats:
        last = self.speeds[:, 0]
        change = np.clip((self.weights * self._regressors()).sum(axis=1), -0.5, 1.0)
        return known(last * (1.0 + change))
