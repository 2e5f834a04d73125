"""NARX, the paper's forecast of speeds (LB-BSP §3.2.2, eq. 4): a network of one hidden layer, look-back 2.

v^k = F(v^(k-1), v^(k-2), c^k, c^(k-1), c^(k-2), m^k, m^(k-1), m^(k-2)). The paper trains one F per worker. Here one F
is trained for all workers, on logarithms relative to each worker's own means: one network per worker has too few looks
to beat the last speed.

Training is spread: a look adds one sample per worker and does `UPDATES` steps of Adam on samples of the past, so no
look takes long. Until there are `ENOUGH` samples the forecast is the exponential moving average, as in §4.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rubberband.planner.balancing.predictors import LEAST, Ema, Floats, Remembering, averaged, known

HIDDEN = 10
LOOK_BACK = 2
INPUTS = LOOK_BACK + 2 * (LOOK_BACK + 1)
ENOUGH = 500
"""Samples before the network is used (§4: the first 500 iterations)."""
KEPT = 2048
"""Samples to train on."""
UPDATES, BATCH = 2, 64
RATE = 0.005
CLIP = 0.5
"""The largest error that training sees, so that spikes do not rule it."""
SLOW = 0.02
"""Rate of each worker's means."""


class Narx(Remembering):
    """A pooled NARX network."""

    arrays = ("parameters", "first_moments", "second_moments", "history", "means")
    numbers = ("looks", "samples", "updates")

    def __init__(self, num_workers: int, seed: int = 0) -> None:
        super().__init__(num_workers)
        self._random = np.random.default_rng(seed)
        self.samples = self.updates = 0
        size = HIDDEN * (INPUTS + 2) + INPUTS + 1
        self.parameters: Floats = self._random.normal(scale=0.3, size=size)
        self.parameters[-INPUTS - 1 :] = 0.0
        """The hidden layer's weights and biases, the output's weights, and what goes straight to the output."""
        self.first_moments: Floats = np.zeros(size)
        self.second_moments: Floats = np.zeros(size)
        self.history: Floats = np.full((num_workers, LOOK_BACK + 1, 3), np.nan)
        """(n, 3, 3) log v, log c and log m of the last steps, newest first; v of the steps to come is nan."""
        self.means: Floats = np.zeros((num_workers, 3))
        self._inputs: Floats = np.zeros((KEPT, INPUTS))
        self._targets: Floats = np.zeros(KEPT)
        self._ema = Ema(num_workers)

    @property
    def noise_share(self) -> float:
        return averaged(0.2, self.looks)

    def observe(self, speeds: Floats, cpu: Floats, memory: Floats) -> None:
        self.looks += 1
        self._ema.observe(speeds, cpu, memory)
        seen = ~np.isnan(speeds)
        resources = np.log(np.maximum(np.column_stack([cpu, memory]), LEAST))
        if self.looks == 1:
            self.history[:, :, 1:] = resources[:, None, :]
            self.means[:, 1:] = resources
        log_speeds = np.log(np.where(seen, speeds, 1.0))
        speed_now = np.where(seen, log_speeds, self.history[:, 1, 0])
        if self.looks == 1:
            self.means[:, 0] = speed_now
            self.history[:, :, 0] = speed_now[:, None]
        self._learn(seen, log_speeds)
        self.history[:, 0, 0] = speed_now
        rate = max(SLOW, 1.0 / self.looks)
        self.means += rate * (np.nan_to_num(self.history[:, 0, :], nan=0.0) - self.means)
        self.history = np.roll(self.history, 1, axis=1)
        self.history[:, 0, 0] = np.nan
        self.history[:, 0, 1:] = resources

    def _rows(self) -> Floats:
        """(n, INPUTS) The inputs for the steps to come."""
        relative = self.history - self.means[:, None, :]
        return np.asarray(np.nan_to_num(np.column_stack([relative[:, 1:, 0], relative[:, :, 1], relative[:, :, 2]])))

    def _learn(self, seen: npt.NDArray[np.bool_], log_speeds: Floats) -> None:
        if self.looks > LOOK_BACK:
            rows, targets = self._rows()[seen], (log_speeds - self.means[:, 0])[seen]
            at = (self.samples + np.arange(len(rows))) % KEPT
            self._inputs[at], self._targets[at] = rows, targets
            self.samples += len(rows)
        filled = min(self.samples, KEPT)
        if filled < BATCH:
            return
        for _ in range(UPDATES):
            chosen = self._random.integers(0, filled, BATCH)
            self._adam(self._gradient(self._inputs[chosen], self._targets[chosen]))

    def _layers(self) -> tuple[Floats, Floats, Floats, Floats, float]:
        at = HIDDEN * INPUTS
        hidden, straight = self.parameters[:at].reshape(INPUTS, HIDDEN), self.parameters[-INPUTS - 1 : -1]
        biases, output = self.parameters[at : at + HIDDEN], self.parameters[at + HIDDEN : at + 2 * HIDDEN]
        return hidden, biases, output, straight, float(self.parameters[-1])

    def _gradient(self, inputs: Floats, targets: Floats) -> Floats:
        hidden, biases, output, straight, bias = self._layers()
        active = np.tanh(inputs @ hidden + biases)
        error = np.clip(active @ output + inputs @ straight + bias - targets, -CLIP, CLIP) / len(targets)
        behind = error[:, None] * output * (1.0 - active * active)
        parts = ((inputs.T @ behind).ravel(), behind.sum(axis=0), error @ active, error @ inputs, [error.sum()])
        return np.concatenate(parts)

    def _adam(self, gradient: Floats) -> None:
        self.updates += 1
        self.first_moments += 0.1 * (gradient - self.first_moments)
        self.second_moments += 0.001 * (gradient * gradient - self.second_moments)
        first = self.first_moments / (1.0 - 0.9**self.updates)
        second = self.second_moments / (1.0 - 0.999**self.updates)
        self.parameters -= RATE * first / (np.sqrt(second) + 1e-8)

    def forecast(self) -> Floats:
        if self.samples < ENOUGH:
            return self._ema.forecast()
        hidden, biases, output, straight, bias = self._layers()
        rows = self._rows()
        found = np.tanh(rows @ hidden + biases) @ output + rows @ straight + bias
        return known(np.exp(self.means[:, 0] + np.clip(found, -3.0, 3.0)))

    def state(self) -> dict[str, Any]:
        """Return the network without the samples that it was trained on."""
        return {**super().state(), "ema": self._ema.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken; training begins again with new samples."""
        super().restore(state)
        self._ema.restore(state["ema"])
