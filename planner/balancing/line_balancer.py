"""The default balancer of GPUs: the shares with the least max_i t_i from a line per worker (LB-BSP §3.3, eq. 3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rubberband.planner.balancing.measured import MeasuredBalancer
from rubberband.planner.balancing.shares import Line, Look, Remembering, ShareLimits, aligned_shares, min_max_shares

Floats = npt.NDArray[np.float64]

KEPT = 32
"""Looks kept of each worker."""
DECAY = 0.93
"""Weight of a look, relative to the one after it."""
NEAR = 0.7
"""Difference of the logarithms of two shares at which a look counts for half."""
SLOPE_DOUBT = 0.5
"""Relative standard deviation of the slope's prior."""
PRIOR_RATE = 0.1
"""Part by which the prior follows the fitted slope at every look, so that it is known when its looks are forgotten."""
FIRST_NOISE = 0.07
"""Assumed relative noise of a look, until it is measured."""
FIRST_LOOKS = 2
"""Looks that the assumption is worth."""
LEAST_NOISE = 1e-3
NOISE_RATE = 0.05
OUTLIER_NOISES, OUTLIER = 4.0, 0.08
"""A look is an outlier if its distance from the line exceeds both the first number times the noise's standard deviation
and the second number times the line's value."""
KNOWN = 0.1
"""Shares within this part of a kept one are covered by the line: others may be off because the curve bends."""


class LineFit(Remembering):
    """The lines of a gang's workers.

    Each worker's last looks are weighed by their age and by how near their shares are to the present one, since a GPU's
    time is flat until a batch saturates it (LB-BSP §3.3.1): what counts is the line around the present share. As long
    as only one share was seen, the slope is taken from the line before, at first from t = b x, which moves too little
    rather than too much.

    A look that is far from its worker's line waits for the next one. If this one is off in the same direction, the
    worker has changed: its looks before are forgotten, and its line is scaled until new ones say more.
    """

    kept = ("shares", "times_s", "weights", "base_s", "slope_s", "prior_s", "doubts", "idle")

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.num_looks = 0
        self._shares: Floats = np.ones((num_workers, KEPT))
        self._times_s: Floats = np.ones((num_workers, KEPT))
        self._weights: Floats = np.zeros((num_workers, KEPT))
        """0 where nothing is kept."""
        self._base_s: Floats = np.zeros(num_workers)
        self._slope_s: Floats = np.zeros(num_workers)
        """0 for a worker that has never had samples."""
        self._prior_s: Floats = np.zeros(num_workers)
        """The slopes that looks at one share only leave as they are."""
        self._doubts: Floats = np.zeros(num_workers)
        """Logarithm of how far the last look was off, where it was an outlier."""
        self._idle: Floats = np.zeros(num_workers)
        """Looks since a worker last had samples."""
        self._variance = FIRST_NOISE**2

    @property
    def noise(self) -> float:
        """Relative standard deviation of a look, over all workers."""
        return math.sqrt(self._variance)

    def error(self) -> float:
        """Return the relative standard error of the times at the present shares, for the worker with fewest looks."""
        weights = self._weights.sum(axis=1)
        effective = weights**2 / np.maximum((self._weights**2).sum(axis=1), 1e-300)
        return self.noise / math.sqrt(max(1.0, float(effective.min(initial=np.inf, where=weights > 0.0))))

    def largest_shares(self) -> Floats:
        """Return the largest share that is kept of each worker; 0 without any."""
        return np.asarray(np.where(self._weights > 0.0, self._shares, 0.0).max(axis=1))

    def observe(self, look: Look) -> None:
        """Take in a look. Workers without samples, or without a time, stay as they are."""
        shares = np.asarray(look.shares, dtype=np.float64)
        times_s = np.asarray(look.compute_s, dtype=np.float64)
        seen = (shares > 0.0) & np.isfinite(times_s) & (times_s > 0.0)
        expected = seen & ((self._slope_s > 0.0) | (self._base_s > 0.0))
        predicted_s = self._base_s + self._slope_s * shares
        off = np.log(np.where(expected, times_s, 1.0) / np.where(expected, predicted_s, 1.0))
        near = np.abs(self._shares / np.maximum(shares, 1.0)[:, None] - 1.0) < KNOWN
        covered = (near & (self._weights > 0.0)).any(axis=1)
        far = covered & (np.abs(off) > max(OUTLIER_NOISES * self.noise, OUTLIER))
        # A worker that was idle may have changed meanwhile, and would wait long for a second look.
        changed = far & ((off * self._doubts > 0.0) | (self._idle > 0.0))
        self._idle = np.where(seen, 0.0, self._idle + 1.0)
        self._forget(changed, np.exp(off))
        self._doubts = np.where(seen, np.where(far & ~changed, off, 0.0), self._doubts)
        kept = seen & ~(far & ~changed)
        self._learn_noise(off[kept & covered & ~changed])
        self._keep(kept, shares, times_s)
        self._fit(kept, shares)
        self.num_looks += 1

    def _forget(self, changed: npt.NDArray[np.bool_], factors: Floats) -> None:
        """Begin a changed worker's line again, with its shape so far."""
        self._weights[changed] = 0.0
        self._base_s[changed] *= factors[changed]
        self._slope_s[changed] *= factors[changed]
        self._prior_s[changed] = self._slope_s[changed]

    def _learn_noise(self, off: Floats) -> None:
        if len(off):
            rate = max(NOISE_RATE, 1.0 / (FIRST_LOOKS + self.num_looks + 1.0))
            self._variance += rate * (float(np.square(off).mean()) - self._variance)
            self._variance = max(self._variance, LEAST_NOISE**2)

    def _keep(self, kept: npt.NDArray[np.bool_], shares: Floats, times_s: Floats) -> None:
        at = self.num_looks % KEPT
        self._weights[kept] *= DECAY
        self._shares[kept, at] = shares[kept]
        self._times_s[kept, at] = times_s[kept]
        self._weights[kept, at] = 1.0

    def _fit(self, kept: npt.NDArray[np.bool_], shares: Floats) -> None:
        """Weighted least squares of the relative errors, with a prior on b, and a and b at least 0."""
        x, t = self._shares[kept], self._times_s[kept]
        now = shares[kept]
        nearness = 1.0 / (1.0 + np.square(np.log(x / now[:, None]) / NEAR))
        weights = self._weights[kept] * nearness / np.square(t)
        total = weights.sum(axis=1)
        mean_x, mean_t = (weights * x).sum(axis=1) / total, (weights * t).sum(axis=1) / total
        from_mean = x - mean_x[:, None]
        spread = (weights * from_mean * from_mean).sum(axis=1)
        both = (weights * from_mean * t).sum(axis=1)
        prior = np.where(self._base_s[kept] + self._slope_s[kept] > 0.0, self._prior_s[kept], mean_t / mean_x)
        trust = self._variance / np.square(SLOPE_DOUBT * mean_t / mean_x)
        slope = np.maximum((both + trust * prior) / (spread + trust), 0.0)
        base = mean_t - slope * mean_x
        through_zero = (weights * x * t).sum(axis=1) / (weights * x * x).sum(axis=1)
        self._slope_s[kept] = np.where(base < 0.0, through_zero, slope)
        self._base_s[kept] = np.maximum(base, 0.0)
        self._prior_s[kept] = prior + PRIOR_RATE * (self._slope_s[kept] - prior)

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, in plain values."""
        arrays = list(super().state().values())
        return {"looks": self.num_looks, "variance": self._variance, "arrays": arrays}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, of as many workers."""
        self.num_looks, self._variance = state["looks"], state["variance"]
        super().restore(dict(zip(self.kept, state["arrays"], strict=True)))

    def lines(self) -> tuple[Line, ...]:
        """Return the lines; one of a worker that has never had samples is the mean of the others'. Empty at first."""
        bases, slopes = self._base_s.tolist(), self._slope_s.tolist()
        known = [rank for rank in range(self.num_workers) if bases[rank] > 0.0 or slopes[rank] > 0.0]
        if not known:
            return ()
        mean = Line(sum(bases) / len(known), sum(slopes) / len(known))
        lines = [mean] * self.num_workers
        for rank in known:
            lines[rank] = Line(bases[rank], slopes[rank])
        return tuple(lines)


GROWTH = 2
"""The most that a share grows at once, as a multiple of the largest share that was seen: the line is a guess beyond."""


class LineBalancer(MeasuredBalancer):
    """Finds shares from fitted lines by bisection, in multiples that suit GPUs where these cost little."""

    kept = (*MeasuredBalancer.kept, "fit")

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

    def _aligned(self, lines: Sequence[Line], shares: tuple[int, ...], limits: ShareLimits) -> tuple[int, ...]:
        return aligned_shares(lines, shares, limits)

    def _error(self) -> float:
        return self._fit.error()
