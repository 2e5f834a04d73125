"""Forecasts of how fast CPU workers will be in the next step (LB-BSP §3.2.2), behind one protocol.

v is a worker's speed in samples/s, c the CPUs and m the fraction of memory that are available to it. Arrays are by
rank, (n,). All forecasts are of positive numbers; a worker that has not been seen yet is as fast as the others are on
average.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

LEAST = 1e-9
"""Resources below this count as this much, as their logarithms are used."""


class Predictor(Protocol):
    """Forecasts speeds from those of the past, and from resources at present."""

    @property
    def noise_share(self) -> float:
        """Part of the noise of one look that is left in a forecast; 1 where it is that of the last look."""

    def observe(self, speeds: Floats, cpu: Floats, memory: Floats) -> None:
        """Take in v of the steps that have passed (nan where unknown), and c and m of the steps to come."""

    def forecast(self) -> Floats:
        """Return v of the steps to come."""

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, in plain values."""

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, of as many workers."""


class Rescalable(Predictor, Protocol):
    """A predictor that can change the units of speeds."""

    def rescale(self, factors: Floats) -> None:
        """Go on as if all past speeds had been `factors` as large."""


class Remembering:
    """Arrays that `state` and `restore` carry; a base of predictors."""

    arrays: tuple[str, ...] = ()
    """Attributes that are arrays."""
    numbers: tuple[str, ...] = ("looks",)
    """Attributes that are numbers."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.looks = 0

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, in plain values."""
        arrays = {name: getattr(self, name).tolist() for name in self.arrays}
        return {**arrays, **{name: getattr(self, name) for name in self.numbers}}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, of as many workers."""
        for name in self.arrays:
            setattr(self, name, np.asarray(state[name], dtype=np.float64))
        for name in self.numbers:
            setattr(self, name, state[name])


def known(values: Floats) -> Floats:
    """Replace nan by the mean of the others, or by 1 without any."""
    missing = np.isnan(values)
    if not missing.any():
        return values
    return np.where(missing, 1.0 if missing.all() else values[~missing].mean(), values)


class Memoryless(Remembering):
    """The speed of the last look."""

    arrays = ("last",)
    noise_share = 1.0

    def __init__(self, num_workers: int) -> None:
        super().__init__(num_workers)
        self.last: Floats = np.full(num_workers, np.nan)

    def observe(self, speeds: Floats, cpu: Floats, memory: Floats) -> None:
        self.looks += 1
        self.last = np.where(np.isnan(speeds), self.last, speeds)

    def forecast(self) -> Floats:
        return known(self.last)

    def rescale(self, factors: Floats) -> None:
        self.last = self.last * factors


class Ema(Remembering):
    """The exponential moving average of the speeds; the paper's smoothing factor is 0.2 (Table 3)."""

    arrays = ("mean",)

    def __init__(self, num_workers: int, alpha: float = 0.2) -> None:
        super().__init__(num_workers)
        self._alpha = alpha
        self.mean: Floats = np.full(num_workers, np.nan)

    @property
    def noise_share(self) -> float:
        return averaged(self._alpha, self.looks)

    def observe(self, speeds: Floats, cpu: Floats, memory: Floats) -> None:
        self.looks += 1
        rate = max(self._alpha, 1.0 / self.looks)
        mean = np.where(np.isnan(self.mean), speeds, self.mean)
        self.mean = np.where(np.isnan(speeds), mean, mean + rate * (speeds - mean))

    def forecast(self) -> Floats:
        return known(self.mean)


def averaged(alpha: float, looks: int) -> float:
    """Return the part of the noise that is left in an exponential moving average."""
    return max(math.sqrt(alpha / (2.0 - alpha)), 1.0 / math.sqrt(max(looks, 1)))


class NormalisedEma(Remembering):
    """v = u f(c, m), the default: a clipped moving average of u = v / f(c, m), with f fitted online.

    f(c, m) = c^p m^q is the same function for all workers, so each one's changes inform it: p and q are those of a
    regression of log v on log c and log m, all relative to the worker's own means. So a change of the resources is in
    the forecast at once, and noise is averaged. A speed that is far off is clipped, as a spike; one that stays off is a
    shift for which f has no reason, and u begins again from there.
    """

    arrays = ("level", "resources", "means", "moments", "off", "recent", "seen")
    numbers = ("looks", "variance")

    alpha = 0.1
    clip = 2.5
    """Standard deviations of the noise that one look may be off; more is clipped."""
    shift_looks = 3
    """Looks in a row on one side, beyond the clip, that make a shift."""
    slow = 0.02
    """Rate of the means that the regression is relative to."""
    forgetting = 0.9995
    doubt = 0.5
    """Standard deviation of the prior of p and q: a speed is proportional to the CPUs, and memory does not matter."""
    most = 2.0

    def __init__(self, num_workers: int) -> None:
        super().__init__(num_workers)
        self.level: Floats = np.full(num_workers, np.nan)
        """log u."""
        self.resources: Floats = np.zeros((num_workers, 2))
        """log c and log m of the steps to come."""
        self.means: Floats = np.zeros((num_workers, 3))
        """Slow means of log v, log c and log m."""
        self.moments: Floats = np.zeros((2, 3))
        """Sums over all workers of (c, m) times (c, m, v), relative to the means."""
        self.off: Floats = np.zeros(num_workers)
        """Looks in a row that were beyond the clip; below 0 where they were too low."""
        self.recent: Floats = np.zeros(num_workers)
        """Sum of log u over these looks."""
        self.seen: Floats = np.zeros(num_workers)
        self.variance = 0.05**2

    @property
    def noise_share(self) -> float:
        return averaged(self.alpha, self.looks)

    def exponents(self) -> tuple[float, float]:
        """Return p and q of f, from 0 to `most`."""
        trust = self.variance / self.doubt**2
        (cc, cm, cv), (_, mm, mv) = self.moments.tolist()
        cc, mm, cv = cc + trust, mm + trust, cv + trust  # the prior: p = 1, q = 0
        divisor = cc * mm - cm * cm
        found = (cv * mm - mv * cm) / divisor, (mv * cc - cv * cm) / divisor
        return min(max(found[0], 0.0), self.most), min(max(found[1], 0.0), self.most)

    def log_f(self, resources: Floats) -> Floats:
        """(n,) log f(c, m) of log c and log m, (n, 2)."""
        p, q = self.exponents()
        return p * resources[:, 0] + q * resources[:, 1]

    def observe(self, speeds: Floats, cpu: Floats, memory: Floats) -> None:
        self.looks += 1
        seen = ~np.isnan(speeds)
        log_speeds = np.log(np.where(seen, speeds, 1.0))
        if self.looks > 1:
            self._fit(seen, log_speeds)
            self._follow(seen, log_speeds)
        self.resources = np.log(np.maximum(np.column_stack([cpu, memory]), LEAST))
        if self.looks == 1:  # the resources of the first steps are those of the present, as far as is known
            self._fit(seen, log_speeds)
            self._follow(seen, log_speeds)

    def _fit(self, seen: npt.NDArray[np.bool_], log_speeds: Floats) -> None:
        values = np.column_stack([log_speeds, self.resources])
        rate = np.maximum(self.slow, 1.0 / (self.seen + 1.0))[:, None]
        from_mean = np.where(seen[:, None], values - self.means, 0.0)
        from_mean[self.seen == 0.0] = 0.0
        self.means = np.where(seen[:, None], self.means + rate * (values - self.means), self.means)
        self.seen = self.seen + seen
        limit = 4.0 * math.sqrt(self.variance) + np.abs(from_mean[:, 1:]).sum(axis=1)
        from_mean[:, 0] = np.clip(from_mean[:, 0], -limit, limit)
        inputs = from_mean[:, 1:]
        self.moments = self.forgetting * self.moments + inputs.T @ np.column_stack([inputs, from_mean[:, 0]])

    def _follow(self, seen: npt.NDArray[np.bool_], log_speeds: Floats) -> None:
        levels = log_speeds - self.log_f(self.resources)
        fresh = seen & np.isnan(self.level)
        self.level = np.where(fresh, levels, self.level)
        off = np.where(seen, levels - self.level, 0.0)
        limit = self.clip * math.sqrt(self.variance)
        side = np.where(off > limit, 1.0, np.where(off < -limit, -1.0, 0.0))
        same = side * np.sign(self.off) > 0.0
        self.off = np.where(seen, np.where(same, self.off + side, side), self.off)
        begun = np.where(side != 0.0, levels, 0.0)
        self.recent = np.where(seen, np.where(same, self.recent + levels, begun), self.recent)
        shifted = np.abs(self.off) >= self.shift_looks
        clipped = np.clip(off, -limit, limit)
        counted = seen & ~fresh & ~shifted
        if self.looks > 1 and counted.any():
            square = 1.2 * float(np.square(clipped[counted]).mean())  # 1.2: for what the clip takes off
            self.variance += max(0.05, 0.5 / self.looks) * (square - self.variance)
            self.variance = max(self.variance, 1e-6)
        rate = max(self.alpha, 1.0 / self.looks)
        followed = self.level + rate * np.where(seen, clipped, 0.0)
        self.level = np.where(shifted, self.recent / np.maximum(np.abs(self.off), 1.0), followed)
        self.off = np.where(shifted, 0.0, self.off)

    def forecast(self) -> Floats:
        return known(np.exp(self.level + self.log_f(self.resources)))

    def rescale(self, factors: Floats) -> None:
        logs = np.log(factors)
        self.level = self.level + logs
        self.recent = self.recent + np.abs(self.off) * logs
        self.means[:, 0] += logs


HIDDEN = 10
LOOK_BACK = 2
INPUTS = LOOK_BACK + 2 * (LOOK_BACK + 1)
ENOUGH = 500
"""Samples of all workers together before the network is used (§4 has the first 500 iterations of each)."""
KEPT = 2048
"""Samples to train on."""
UPDATES, BATCH = 2, 64
LEARNING_RATE = 0.005
CLIP = 0.5
"""The largest error that training sees, so that spikes do not rule it."""
SLOW = 0.02
"""Rate of each worker's means."""


class Narx(Remembering):
    """A pooled NARX network.

    v^k = F(v^(k-1), v^(k-2), c^k, c^(k-1), c^(k-2), m^k, m^(k-1), m^(k-2)). The paper trains one F per worker. Here one
    F is trained for all workers, on logarithms relative to each worker's own means: one network per worker has too few
    looks to beat the last speed.

    Training is spread: a look adds one sample per worker and does `UPDATES` steps of Adam on samples of the past, so no
    look takes long. Until there are `ENOUGH` samples the forecast is the exponential moving average, as in §4; eight
    workers have them after 65 looks.
    """

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
        self.parameters -= LEARNING_RATE * first / (np.sqrt(second) + 1e-8)

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


GATE_RATE = 0.05
"""Weight of the last step in the mean times that are compared."""
GATE_LOOKS = 10
"""Looks before the means are compared."""


class Gated:
    """A predictor, or the last speeds (memoryless) where these have been better.

    The predictor and the last speeds both forecast every step. They are compared by
    max_i x_i / v_i, the time of the step with shares in proportion to a forecast, not by the error of the forecast: a
    step waits for its slowest worker only.
    """

    def __init__(self, predictor: Rescalable, num_workers: int) -> None:
        self._predictor = predictor
        self._memoryless = Memoryless(num_workers)
        self._times = [0.0, 0.0]
        """Mean times of a step by the predictor and by the last speeds, over the shortest possible one."""
        self._looks = 0

    @property
    def is_open(self) -> bool:
        """Return whether the predictor is used; in the first looks it is."""
        return self._times[0] <= self._times[1] or self._looks < GATE_LOOKS

    @property
    def _used(self) -> Predictor:
        return self._predictor if self.is_open else self._memoryless

    @property
    def noise_share(self) -> float:
        return self._used.noise_share

    def observe(self, speeds: Floats, cpu: Floats, memory: Floats) -> None:
        seen = ~np.isnan(speeds)
        if self._looks and seen.any():
            rate = max(GATE_RATE, 1.0 / self._looks)
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
