"""Balancers of CPU workers: shares by forecasts of their speeds (LB-BSP §3.2, Algorithm 1).

v is a worker's speed in samples/s, c the CPUs and m the fraction of memory that are available to it. Arrays are by
rank, (n,). All forecasts are of positive numbers; a worker that has not been seen yet is as fast as the others are on
average.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rubberband.planner.balancing.measured import FIRST_LOOKS, FIRST_NOISE, MeasuredBalancer
from rubberband.planner.balancing.shares import (
    Line,
    Look,
    Remembering,
    ShareLimits,
    min_max_shares,
    proportional_shares,
)

Floats = npt.NDArray[np.float64]

LEAST_RESOURCE = 1e-9
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


class Rescalable(Predictor, Protocol):
    """A predictor that can change the units of speeds."""

    def rescale(self, factors: Floats) -> None:
        """Go on as if all past speeds had been `factors` as large."""


def known(values: Floats) -> Floats:
    """Replace nan by the mean of the others, or by 1 without any."""
    missing = np.isnan(values)
    if not missing.any():
        return values
    return np.where(missing, 1.0 if missing.all() else values[~missing].mean(), values)


class Memoryless(Remembering):
    """The speed of the last look."""

    kept = ("looks", "last")
    noise_share = 1.0

    def __init__(self, num_workers: int) -> None:
        self.looks = 0
        self.last: Floats = np.full(num_workers, np.nan)

    def observe(self, speeds: Floats, cpu: Floats, memory: Floats) -> None:
        self.looks += 1
        self.last = np.where(np.isnan(speeds), self.last, speeds)

    def forecast(self) -> Floats:
        return known(self.last)

    def rescale(self, factors: Floats) -> None:
        self.last = self.last * factors


_SMOOTHING = 0.2
"""The paper's factor of exponential smoothing (Table 3)."""


class Ema(Remembering):
    """The exponential moving average of the speeds."""

    kept = ("looks", "mean")

    def __init__(self, num_workers: int) -> None:
        self.looks = 0
        self.mean: Floats = np.full(num_workers, np.nan)

    @property
    def noise_share(self) -> float:
        return averaged(_SMOOTHING, self.looks)

    def observe(self, speeds: Floats, cpu: Floats, memory: Floats) -> None:
        self.looks += 1
        rate = max(_SMOOTHING, 1.0 / self.looks)
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

    kept = ("looks", "variance", "level", "resources", "means", "moments", "off", "recent", "seen")

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
    largest_exponent = 2.0

    def __init__(self, num_workers: int) -> None:
        self.looks = 0
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
        """Return p and q of f, from 0 to `largest_exponent`."""
        trust = self.variance / self.doubt**2
        (cc, cm, cv), (_, mm, mv) = self.moments.tolist()
        cc, mm, cv = cc + trust, mm + trust, cv + trust  # the prior: p = 1, q = 0
        divisor = cc * mm - cm * cm
        p, q = (cv * mm - mv * cm) / divisor, (mv * cc - cv * cm) / divisor
        return min(max(p, 0.0), self.largest_exponent), min(max(q, 0.0), self.largest_exponent)

    def log_f(self, resources: Floats) -> Floats:
        """(n,) log f(c, m) of log c and log m, (n, 2)."""
        p, q = self.exponents()
        return p * resources[:, 0] + q * resources[:, 1]

    def observe(self, speeds: Floats, cpu: Floats, memory: Floats) -> None:
        self.looks += 1
        seen = ~np.isnan(speeds)
        log_speeds = np.log(np.where(seen, speeds, 1.0))
        resources = np.log(np.maximum(np.column_stack([cpu, memory]), LEAST_RESOURCE))
        if self.looks == 1:  # the resources of the first steps are those of the present, as far as is known
            self.resources = resources
        self._fit(seen, log_speeds)
        self._follow(seen, log_speeds)
        self.resources = resources

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


GATE_RATE = 0.05
"""Weight of the last step in the mean times that are compared."""
GATE_LOOKS = 10
"""Looks before the means are compared."""


class Gated(Remembering):
    """A predictor, or the last speeds (memoryless) where these have been better.

    The predictor and the last speeds both forecast every step. They are compared by
    max_i x_i / v_i, the time of the step with shares in proportion to a forecast, not by the error of the forecast: a
    step waits for its slowest worker only.
    """

    kept = ("predictor", "memoryless", "times", "looks")

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
            for index, predictor in enumerate((self._predictor, self._memoryless)):
                step = relative_time(predictor.forecast()[seen], speeds[seen])
                self._times[index] += rate * (step - self._times[index])
        self._looks += 1
        self._predictor.observe(speeds, cpu, memory)
        self._memoryless.observe(speeds, cpu, memory)

    def forecast(self) -> Floats:
        return self._used.forecast()

    def rescale(self, factors: Floats) -> None:
        """Go on as if all past speeds had been `factors` as large."""
        self._predictor.rescale(factors)
        self._memoryless.rescale(factors)


def relative_time(forecast: Floats, speeds: Floats) -> float:
    """Return max_i x_i / v_i with x_i in proportion to a forecast, over what it is with the true speeds; at least 1."""
    return float((forecast / speeds).max() * speeds.sum() / forecast.sum())


CANDIDATES = np.array([0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0])
"""x0 in units of an even share at the first look."""
MOVED = 0.02
"""Least change of the logarithm of a share."""
FORGETTING = 0.95
FAR_ERROR = 0.3
"""An error of the logarithm beyond this counts as this much."""
PRIOR = 1e-4
"""Error by which a candidate must be better than the one below it, before any look."""


class FixedPart(Remembering):
    """Finds x0 of a gang.

    The paper has x0 = 0 (LB-BSP §3.2.1). The optimizer's step and what a framework does once per step make it more. It
    is the same for all workers: one with half of the CPUs is slower at both parts.

    Only looks between which a share changed say something: then log t changes as log(x0 + x) does. A change of the
    worker itself looks the other way round: its time changes, and its share a look later. So consecutive looks are
    compared, for every candidate of x0, and the candidate with the least errors is taken.
    """

    kept = ("unit", "errors", "last")

    def __init__(self) -> None:
        self._unit = 0.0
        self._errors: Floats = PRIOR * np.arange(len(CANDIDATES), dtype=np.float64)
        self._last: Floats = np.zeros((2, 0))
        """(2, n) Shares and times of the last look; empty before the first one."""

    @property
    def samples(self) -> float:
        """Return x0; 0 until looks say otherwise."""
        return self._unit * float(CANDIDATES[int(self._errors.argmin())])

    def observe(self, shares: Floats, times_s: Floats, log_gains: Floats) -> None:
        """Take in a look; times may be nan.

        `log_gains` are the logarithms of the speeds over those of the look before, as far as resources explain them.
        """
        if self._unit == 0.0:
            self._unit = float(shares.mean())
        if self._last.size:
            old_shares, old_times_s = self._last
            both = ~np.isnan(times_s) & ~np.isnan(old_times_s) & (shares > 0.0) & (old_shares > 0.0)
            both[both] = np.abs(np.log(shares[both] / old_shares[both])) > MOVED
            if both.any():
                x0 = self._unit * CANDIDATES
                expected = np.log((x0 + shares[both, None]) / (x0 + old_shares[both, None]))
                measured = np.log(times_s[both] / old_times_s[both]) + log_gains[both]
                errors = np.clip(expected - measured[:, None], -FAR_ERROR, FAR_ERROR)
                self._errors = FORGETTING * self._errors + np.square(errors).sum(axis=0)
        self._last = np.stack([shares, times_s])


NOISE_RATE = 0.02
FAR = 4.0
"""Deviations of the noise beyond which an error is a spike or a shift, and does not inform the noise."""


class ForecastBalancer(MeasuredBalancer):
    """Algorithm 1 with any predictor, with a threshold for changes."""

    kept = (*MeasuredBalancer.kept, "predictor", "speeds", "fixed_samples", "variance", "errors_seen")

    def __init__(self, num_workers: int, predictor: Predictor) -> None:
        super().__init__(num_workers)
        self._predictor = predictor
        self._speeds: Floats = np.zeros(0)
        """The forecast for the steps to come; empty before the first look."""
        self._fixed_samples = 0.0
        """x0: the part of a step that is the same for every share, as samples."""
        self._variance, self._errors_seen = FIRST_NOISE**2, 0

    def lines(self) -> tuple[Line, ...]:
        """Return t = (x0 + x) / v by the forecast speeds; empty before the first look."""
        return tuple(Line(self._fixed_samples / speed, 1.0 / speed) for speed in self._speeds.tolist())

    def _learn(self, look: Look) -> None:
        speeds = speeds_of(look, self._fixed_samples)
        if len(self._speeds):
            self._learn_noise(np.log(speeds / self._speeds))
        ones = np.ones(self.num_workers)
        cpu = ones if look.cpu is None else np.asarray(look.cpu, dtype=np.float64)
        memory = ones if look.memory is None else np.asarray(look.memory, dtype=np.float64)
        self._predictor.observe(speeds, cpu, memory)
        self._speeds = self._predictor.forecast()

    def _learn_noise(self, errors: Floats) -> None:
        """An error has the noise of the speed and what is left of it in the forecast.

        A change that all workers have in common, as when others use their machine for a while, changes no share.
        """
        errors = errors[~np.isnan(errors)]
        apart = np.square(errors - errors.mean()) * len(errors) / (len(errors) - 1) if len(errors) > 1 else errors[:0]
        squares = apart / (1.0 + self._predictor.noise_share**2)
        squares = np.minimum(squares, FAR**2 * self._variance)
        if len(squares):
            self._errors_seen += 1
            rate = max(NOISE_RATE, 1.0 / (FIRST_LOOKS + self._errors_seen))
            self._variance += rate * (float(squares.mean()) - self._variance)

    def _proposal(self, lines: Sequence[Line], batch_size: int, limits: ShareLimits) -> tuple[int, ...]:
        if self._fixed_samples > 0.0:
            return min_max_shares(lines, batch_size, limits)
        return proportional_shares([1.0 / line.per_sample_s for line in lines], batch_size, limits)

    def _error(self) -> float:
        return math.sqrt(self._variance) * self._predictor.noise_share


class SpeedBalancer(ForecastBalancer):
    """The default: the normalised moving average while it is better than memoryless, and x0 as it is found."""

    kept = (*ForecastBalancer.kept, "fixed", "resources")

    def __init__(self, num_workers: int) -> None:
        self._normalised = NormalisedEma(num_workers)
        self._gated = Gated(self._normalised, num_workers)
        super().__init__(num_workers, self._gated)
        self._fixed = FixedPart()
        self._resources = self._normalised.resources
        """Logarithms of the resources of the steps of the look before."""

    def _learn(self, look: Look) -> None:
        """Restate what is known of speeds where another x0 is found, and take in the look."""
        shares = np.asarray(look.shares, dtype=np.float64)
        self._fixed.observe(shares, shares / speeds_of(look), self._log_gains())
        fixed_samples = self._fixed.samples
        if fixed_samples != self._fixed_samples and len(self._speeds) and self._shares:
            measured = np.asarray(self._shares, dtype=np.float64)  # the shares of the speeds that are known so far
            usual = np.where(measured > 0.0, measured, measured.mean())
            factors = (fixed_samples + usual) / (self._fixed_samples + usual)
            self._gated.rescale(factors)
            self._speeds = self._speeds * factors
        self._fixed_samples = fixed_samples
        super()._learn(look)

    def _log_gains(self) -> Floats:
        """Return the part of the change of speeds since the look before that follows from changed resources."""
        before, self._resources = self._resources, self._normalised.resources.copy()
        changed = self._resources - before if self._normalised.looks > 1 else np.zeros_like(before)
        return self._normalised.log_f(changed)


def speeds_of(look: Look, fixed_samples: float = 0.0) -> Floats:
    """Return v_i = (x0 + x_i) / t_i, samples/s of each worker; nan where it had no samples or no time."""
    shares, times_s = np.asarray(look.shares, dtype=np.float64), np.asarray(look.compute_s, dtype=np.float64)
    seen = (shares > 0.0) & np.isfinite(times_s) & (times_s > 0.0)
    return np.where(seen, (shares + fixed_samples) / np.where(seen, times_s, 1.0), np.nan)
