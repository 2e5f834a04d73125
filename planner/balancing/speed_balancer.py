"""Balancers of CPU workers: shares by forecast speeds (LB-BSP §3.2, Algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rubberband.planner.balancing.balancer import Line, Look, ShareLimits
from rubberband.planner.balancing.measured import MeasuredBalancer
from rubberband.planner.balancing.predictors import Floats, Gated, NormalisedEma, Predictor
from rubberband.planner.balancing.shares import min_max_shares, proportional_shares

CANDIDATES = np.array([0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0])
"""x0 in units of an even share at the first look."""
MOVED = 0.02
"""Least change of the logarithm of a share."""
FORGETTING = 0.95
FAR_ERROR = 0.3
"""An error of the logarithm beyond this counts as this much."""
PRIOR = 1e-4
"""Error by which a candidate must be better than the one below it, before any look."""


class FixedPart:
    """Finds x0 of a gang.

    The paper has x0 = 0 (LB-BSP §3.2.1). The optimizer's step and what a framework does once per step make it more. It
    is the same for all workers: one with half of the CPUs is slower at both parts.

    Only looks between which a share changed say something: then log t changes as log(x0 + x) does. A change of the
    worker itself looks the other way round: its time changes, and its share a look later. So consecutive looks are
    compared, for every candidate of x0, and the candidate with the least errors is taken.
    """

    def __init__(self) -> None:
        self._unit = 0.0
        self._errors: Floats = PRIOR * np.arange(len(CANDIDATES), dtype=np.float64)
        self._last: tuple[Floats, Floats] | None = None

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
        if self._last is not None:
            old_shares, old_times_s = self._last
            both = ~np.isnan(times_s) & ~np.isnan(old_times_s) & (shares > 0.0) & (old_shares > 0.0)
            both[both] = np.abs(np.log(shares[both] / old_shares[both])) > MOVED
            if both.any():
                x0 = self._unit * CANDIDATES
                expected = np.log((x0 + shares[both, None]) / (x0 + old_shares[both, None]))
                found = np.log(times_s[both] / old_times_s[both]) + log_gains[both]
                errors = np.clip(expected - found[:, None], -FAR_ERROR, FAR_ERROR)
                self._errors = FORGETTING * self._errors + np.square(errors).sum(axis=0)
        self._last = shares, times_s

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, in plain values."""
        last = None if self._last is None else [array.tolist() for array in self._last]
        return {"unit": self._unit, "errors": self._errors.tolist(), "last": last}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken."""
        self._unit, self._errors = state["unit"], np.asarray(state["errors"], dtype=np.float64)
        if state["last"] is not None:
            shares, times_s = (np.asarray(array, dtype=np.float64) for array in state["last"])
            self._last = shares, times_s


FIRST_NOISE = 0.07
"""Assumed relative noise of a speed, until it is measured."""
NOISE_RATE = 0.02
FIRST_LOOKS = 2
"""Looks that the assumption is worth."""
FAR = 4.0
"""Deviations of the noise beyond which an error is a spike or a shift, and does not inform the noise."""


class ForecastBalancer(MeasuredBalancer):
    """Algorithm 1 with any predictor, with a threshold for changes."""

    def __init__(self, num_workers: int, predictor: Predictor) -> None:
        super().__init__(num_workers)
        self._predictor = predictor
        self._speeds: Floats | None = None
        """The forecast for the steps to come."""
        self._fixed_samples = 0.0
        """x0: the part of a step that is the same for every share, as samples."""
        self._variance, self._errors_seen = FIRST_NOISE**2, 0

    def lines(self) -> tuple[Line, ...]:
        """Return t = (x0 + x) / v by the forecast speeds; empty before the first look."""
        if self._speeds is None:
            return ()
        return tuple(Line(self._fixed_samples / speed, 1.0 / speed) for speed in self._speeds.tolist())

    def _learn(self, look: Look) -> None:
        speeds = speeds_of(look, self._fixed_samples)
        if self._speeds is not None:
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

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, in plain values."""
        return {
            **super().state(),
            "predictor": self._predictor.state(),
            "speeds": None if self._speeds is None else self._speeds.tolist(),
            "fixed_samples": self._fixed_samples,
            "variance": self._variance,
            "errors_seen": self._errors_seen,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken; one of another number of workers is ignored."""
        super().restore(state)
        if state.get("num_workers") == self.num_workers:
            self._predictor.restore(state["predictor"])
            self._speeds = None if state["speeds"] is None else np.asarray(state["speeds"], dtype=np.float64)
            self._fixed_samples = state["fixed_samples"]
            self._variance, self._errors_seen = state["variance"], state["errors_seen"]


class SpeedBalancer(ForecastBalancer):
    """The default: the normalised moving average while it is better than memoryless, and x0 as it is found."""

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
        found = self._fixed.samples
        if found != self._fixed_samples and self._speeds is not None and self._shares is not None:
            measured = np.asarray(self._shares, dtype=np.float64)  # the shares of the speeds that are known so far
            usual = np.where(measured > 0.0, measured, measured.mean())
            factors = (found + usual) / (self._fixed_samples + usual)
            self._gated.rescale(factors)
            self._speeds = self._speeds * factors
        self._fixed_samples = found
        super()._learn(look)

    def _log_gains(self) -> Floats:
        """Return the part of the change of speeds since the look before that follows from changed resources."""
        before, self._resources = self._resources, self._normalised.resources.copy()
        changed = self._resources - before if self._normalised.looks > 1 else np.zeros_like(before)
        return self._normalised.log_f(changed)

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, in plain values."""
        return {**super().state(), "fixed": self._fixed.state(), "resources": self._resources.tolist()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken; one of another number of workers is ignored."""
        super().restore(state)
        if state.get("num_workers") == self.num_workers:
            self._fixed.restore(state["fixed"])
            self._resources = np.asarray(state["resources"], dtype=np.float64)


def speeds_of(look: Look, fixed_samples: float = 0.0) -> Floats:
    """Return v_i = (x0 + x_i) / t_i, samples/s of each worker; nan where it had no samples or no time."""
    shares, times_s = np.asarray(look.shares, dtype=np.float64), np.asarray(look.compute_s, dtype=np.float64)
    seen = (shares > 0.0) & np.isfinite(times_s) & (times_s > 0.0)
    return np.where(seen, (shares + fixed_samples) / np.where(seen, times_s, 1.0), np.nan)
