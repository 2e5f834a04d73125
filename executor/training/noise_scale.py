"""The gradient noise scale phi = tr(P Sigma P^T) / |P G|^2 from measured squared norms (Pollux §3.1): numbers only.

G is the true gradient, Sigma the covariance of one sample's gradient, P the optimizer's preconditioner. How gradients
are observed is the business of `gradient_noise`.

The trouble is |P G|^2. Where phi is large it is a small difference of large numbers: one estimate from n workers
spreads by tr Sigma / M * sqrt(2n / (n-1) / d) for d equal dimensions, which for d = 1,000, M = 64, n = 2 and
phi = 6,400 is six times |G|^2, and still 14 % after the usual average (a factor of 0.999 per step). Three things help:

* Products of different steps' gradients, P g . P h with h the mean of some earlier ones, need no such difference, and
  spread several times less. They take G to be slow, though, so that they count by their variance only as far as they
  agree with the estimates made within a step.
* Averages over several windows, up to the usual one. Of those whose phi agrees with that of all shorter ones
  (Lepski's method) the most exact is taken, so that a real change is followed at once, and noise is not.
* phi is only believed where |P G|^2 is significant. Otherwise the last value that was is kept, or what the measurements
  allow at the least is taken: phi is never infinite, and errs on the small side.

Numerator and denominator are averaged separately and over the same window, so that a change of both alike (Adam's P
after a change of the batch) cancels. Sums over parameter groups are averaged, which is the same as averaging each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Estimator = Literal["workers", "accumulation", "differenced"]
"""From which gradients: of several workers; of the micro-batches of one; or of two steps that follow each other."""

Floats = npt.NDArray[np.float64]

WINDOWS = (30.0, 100.0, 300.0, 1000.0)
"""Of the averages, in steps at M0. The last one is the usual factor 0.999^(M/M0) per step."""
_WINDOWS = np.array(WINDOWS)
LEAST_ESTIMATES = 5
"""Fewer say nothing of their own spread."""
LEAST_FACTOR = 0.9
"""No window is shorter than some 10 estimates, however large the batch is: the spread must be known to compare."""
AGREES = 4.0
"""Standard errors that windows may differ by."""
TRUSTED = 3.0
"""Standard errors that products of different steps may differ by, before they count for less."""
CREDIBLE = 2.0
"""|P G|^2 is significant from so many standard errors on."""

_TINY = 1e-100
"""Less than the square of any number in single precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseReading:
    """The noise scale as known so far."""

    noise_scale: float | None
    """phi, in samples; None as long as there is none. Too small rather than too large where it is uncertain."""
    trace: float
    """tr(P Sigma P^T)."""
    squared_norm: float
    """|P G|^2 as measured; may be negative, and then phi is not their ratio."""
    uncertainty: float
    """Relative standard error of phi; infinite where there is none."""
    kind: Estimator
    """The latest estimator."""
    estimates: int
    """Taken with this estimator and this preconditioner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseEstimate:
    """One estimate of numerator and denominator."""

    kind: Estimator
    preconditioner: str
    steps: float
    """Optimizer steps since the estimate before, each in steps at M0: the sum of M / M0."""
    trace: float
    squared_norm: float
    cross: float | None
    """|P G|^2 as the product of this gradient and earlier ones, if there is one."""


def moments(mean_square: float, square_of_mean: float, *, num_parts: int, batch_size: int) -> tuple[float, float]:
    """Unbiased tr Sigma and |G|^2 of n parts of a batch of M samples, whatever their sizes m_i (Pollux §3.1).

    With A = sum (m_i / M) |g_i|^2 and B = |sum (m_i / M) g_i|^2: E A = |G|^2 + n tr Sigma / M and
    E B = |G|^2 + tr Sigma / M, so that tr Sigma = (A - B) M / (n - 1) and |G|^2 = (n B - A) / (n - 1).
    `num_parts` is n >= 2, the number of parts that have samples.
    """
    trace = (mean_square - square_of_mean) * batch_size / (num_parts - 1)
    return trace, (num_parts * square_of_mean - mean_square) / (num_parts - 1)


class NoiseScale:
    """phi from one estimate after another; see the module for how they are put together."""

    def __init__(self) -> None:
        self._restart("workers", "")
        self._published: tuple[float, float] | None = None

    def _restart(self, kind: Estimator, preconditioner: str) -> None:
        self._kind: Estimator = kind
        self._preconditioner = preconditioner
        self._estimates = 0
        self._averages = Averages(3)

    def add(self, estimate: NoiseEstimate) -> None:
        """Take in an estimate; one that is not finite is dropped. Another estimator or preconditioner starts anew."""
        if not (math.isfinite(estimate.trace) and math.isfinite(estimate.squared_norm)):
            return
        if (estimate.kind, estimate.preconditioner) != (self._kind, self._preconditioner):
            self._restart(estimate.kind, estimate.preconditioner)
        self._estimates += 1
        cross = estimate.cross if estimate.cross is not None and math.isfinite(estimate.cross) else None
        self._averages.add((estimate.trace, estimate.squared_norm, cross), estimate.steps)

    def reading(self) -> NoiseReading:
        """phi as known now."""
        if self._estimates < LEAST_ESTIMATES:
            trace, squared_norm, _ = self._averages.means()[:, -1]
            return self._reading(self._kept(0.0), trace, squared_norm)
        trace, trace_error, squared_norm, error = self._best_that_agrees()
        if squared_norm > CREDIBLE * error:
            uncertainty = math.hypot(error / squared_norm, trace_error / trace if trace > 0.0 else 0.0)
            self._published = trace / squared_norm, uncertainty
            return self._reading(self._published, trace, squared_norm)
        largest = max(squared_norm, 0.0) + CREDIBLE * error
        return self._reading(self._kept(trace / largest if largest > 0.0 else 0.0), trace, squared_norm)

    def _kept(self, least: float) -> tuple[float, float] | None:
        """The last phi that was credible, or `least` where that is more or all there is; with a wide uncertainty."""
        if self._published is None:
            return (least, 1.0) if least > 0.0 else None
        noise_scale, uncertainty = self._published
        return max(noise_scale, least), max(2.0 * uncertainty, 0.5)

    def _reading(self, published: tuple[float, float] | None, trace: float, squared_norm: float) -> NoiseReading:
        noise_scale, uncertainty = (None, math.inf) if published is None else published
        return NoiseReading(
            noise_scale=noise_scale,
            trace=float(trace),
            squared_norm=float(squared_norm),
            uncertainty=uncertainty,
            kind=self._kind,
            estimates=self._estimates,
        )

    def _best_that_agrees(self) -> tuple[float, float, float, float]:
        """tr Sigma and |G|^2 with their errors, over the most exact of the windows that agree with all shorter ones."""
        means, errors = self._averages.means(), self._averages.errors()
        trace, trace_error = means[0], errors[0]
        squared_norm, error = self._squared_norms(means[1:], errors[1:])
        # 1 / phi, because it stays finite; the ratio is only compared, never averaged.
        scale = np.maximum(trace, _TINY)
        inverse = squared_norm / scale
        inverse_error = np.hypot(error, inverse * trace_error) / scale
        chosen = 0
        for window in range(1, len(WINDOWS)):
            agrees = np.all(np.abs(inverse[window] - inverse[:window]) <= AGREES * inverse_error[:window])
            if agrees and inverse_error[window] <= inverse_error[chosen]:
                chosen = window
        return float(trace[chosen]), float(trace_error[chosen]), float(squared_norm[chosen]), float(error[chosen])

    def _squared_norms(self, means: Floats, errors: Floats) -> tuple[Floats, Floats]:
        """|G|^2 of each window and its standard error: within steps and across them, by inverse variance."""
        if self._averages.num_added[2] < LEAST_ESTIMATES:
            return means[0], errors[0]
        (within, cross), (within_variance, cross_variance) = means, errors**2
        # As in the analysis of studies that differ by more than chance: the excess is taken for a bias of the products.
        excess = np.maximum((within - cross) ** 2 - TRUSTED**2 * (within_variance + cross_variance), 0.0)
        cross_variance = cross_variance + excess
        total = within_variance + cross_variance
        weight = np.divide(cross_variance, total, out=np.full_like(total, 0.5), where=total > 0.0)
        return cross + weight * (within - cross), np.sqrt(weight * within_variance)

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "kind": self._kind,
            "preconditioner": self._preconditioner,
            "estimates": self._estimates,
            "published": self._published,
            "averages": self._averages.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self._kind, self._preconditioner = state["kind"], state["preconditioner"]
        self._estimates, self._published = state["estimates"], state["published"]
        self._averages.load_state_dict(state["averages"])


class Averages:
    """Exponential averages of quantities over all `WINDOWS`, corrected for their start, with standard errors."""

    def __init__(self, num_quantities: int) -> None:
        self.num_added: list[int] = [0] * num_quantities
        # Sums of weights, of their squares, of weighted values and of weighted squares of values; by quantity, window.
        self._sums: Floats = np.zeros((4, num_quantities, len(WINDOWS)))

    def add(self, values: Sequence[float | None], steps: float) -> None:
        """Add values that come `steps` (at M0) after the ones before; None leaves a quantity as it is."""
        factor = np.maximum(np.exp(-steps / _WINDOWS), LEAST_FACTOR)
        weight = 1.0 - factor
        factors = np.array((factor, factor * factor, factor, factor))
        weights = np.array((weight, weight * weight, weight, weight))
        for quantity, value in enumerate(values):
            if value is not None:
                sums = self._sums[:, quantity]
                sums *= factors
                sums += weights * np.array(((1.0,), (1.0,), (value,), (value * value,)))
                self.num_added[quantity] += 1

    def means(self) -> Floats:
        """By quantity and window; 0 where nothing was added."""
        weights, _, values, _ = self._sums
        return np.asarray(np.divide(values, weights, out=np.zeros_like(values), where=weights > 0.0))

    def errors(self) -> Floats:
        """Standard errors of the means, as if the values were independent of each other."""
        weights, squares, _, second = self._sums
        mean_of_squares = np.divide(second, weights, out=np.zeros_like(second), where=weights > 0.0)
        num_independent = np.divide(weights**2, squares, out=np.zeros_like(second), where=squares > 0.0)
        variance = np.maximum(mean_of_squares - self.means() ** 2, 0.0)
        return np.asarray(np.sqrt(variance / np.maximum(num_independent - 1.0, 1.0)))

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"num_added": list(self.num_added), "sums": self._sums.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self.num_added, self._sums = list(state["num_added"]), np.array(state["sums"])
