"""Forecasts of speeds that LB-BSP (SoCC '20, §5.4) compares with: ARIMA, a plain recurrent network, and an LSTM.

The product has better ones.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from rubberband.planner.balancing.shares import Remembering
from rubberband.planner.balancing.speed_balancer import LEAST, Ema, Floats, known


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


LOOK_BACK, HIDDEN, KEPT, BATCH, UPDATES = 2, 10, 2048, 64, 2
SLOW = 0.02
"""Rate of each worker's mean."""
ENOUGH = 500
"""Samples of all workers together before the network is used; until then the forecast is the moving average."""


class Recurrent:
    """SimpleRNN or LSTM over the last two speeds, one network for all workers, trained as they come.

    Speeds are logarithms relative to each worker's own mean, as for the product's NARX; resources are not seen.
    """

    noise_share = 1.0

    def __init__(self, num_workers: int, kind: Literal["RNN", "LSTM"]) -> None:
        import torch  # only here: the other forecasts need none

        self._torch, self._generator = torch, np.random.default_rng(0)
        torch.set_num_threads(1)  # the network is too small for more
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            self._layer = getattr(torch.nn, kind)(1, HIDDEN, batch_first=True)
            self._out = torch.nn.Linear(HIDDEN, 1)
        parameters = [*self._layer.parameters(), *self._out.parameters()]
        self._optimizer = torch.optim.Adam(parameters, lr=0.005)
        self._history: Floats = np.full((num_workers, LOOK_BACK), np.nan)
        self._means: Floats = np.zeros(num_workers)
        self._inputs: Floats = np.zeros((KEPT, LOOK_BACK))
        self._targets: Floats = np.zeros(KEPT)
        self._looks = self._samples = 0
        self._ema = Ema(num_workers)

    def _network(self, rows: Floats) -> Any:
        inputs = self._torch.as_tensor(rows, dtype=self._torch.float32)[:, :, None]
        return self._out(self._layer(inputs)[0][:, -1])[:, 0]

    def observe(self, speeds: Floats, cpu: Floats, memory: Floats) -> None:
        """Take in speeds, and train a little."""
        self._looks += 1
        self._ema.observe(speeds, cpu, memory)
        logs = np.log(speeds)
        if self._looks > LOOK_BACK:
            at = (self._samples + np.arange(len(logs))) % KEPT
            self._inputs[at] = self._history - self._means[:, None]
            self._targets[at] = logs - self._means
            self._samples += len(logs)
        self._means += max(SLOW, 1.0 / self._looks) * (logs - self._means)
        self._history = np.column_stack([self._history[:, 1:], logs])
        filled = min(self._samples, KEPT)
        for _ in range(UPDATES if filled >= BATCH else 0):
            chosen = self._generator.integers(0, filled, BATCH)
            targets = self._torch.as_tensor(self._targets[chosen], dtype=self._torch.float32)
            loss = self._torch.nn.functional.mse_loss(self._network(self._inputs[chosen]), targets)
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()

    def forecast(self) -> Floats:
        """Return the speeds of the steps to come."""
        if self._samples < ENOUGH:
            return self._ema.forecast()
        with self._torch.no_grad():
            found = self._network(self._history - self._means[:, None]).numpy().astype(np.float64)
        return known(np.exp(self._means + found))
