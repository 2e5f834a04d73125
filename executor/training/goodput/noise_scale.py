"""The gradient noise scale phi = tr(P Sigma P^T) / |P G|^2 from measured squared norms (Pollux §3.1): numbers only.

G is the true gradient, Sigma the covariance of one sample's gradient, and P the optimizer's preconditioner. The module
`gradient_noise` observes the gradients.

The difficulty is |P G|^2. If phi is large it is a small difference of large numbers: one estimate from n workers
spreads by tr Sigma / M * sqrt(2n / (n-1) / d) for d equal dimensions. For d = 1,000, M = 64, n = 2 and phi = 6,400 that
is six times |G|^2, and still 14 % after the usual average (a factor of 0.999 per step).

Products of different steps' gradients would spread less, but they are no estimates of |G|^2 in training: a step moves
the weights against its own noise, so that E g_t . g_(t-1) = G_t . G_(t-1) - lr tr(H Sigma) / M, with H the curvature.
On the digits with momentum that is negative for hundreds of steps, and phi is ten times too large. So only gradients of
one step are used if there are several, and three measures help:

* Gradients change their size by orders of magnitude, and the largest would dominate a sum for long. So numerator and
  denominator are both divided by the recent tr Sigma, without the estimate itself, before they are averaged. Their
  ratio stays unbiased, since both have the same weights.
* There are averages over several windows, up to the usual one. The longest whose phi agrees with that of all shorter
  ones is used (Lepski's method), so that changes are followed at once, and noise is not.
* phi is only believed if |P G|^2 is significant. Otherwise the last significant value is kept, or the least value that
  the measurements allow: phi is never infinite, and errs on the small side.

Numerator and denominator are averaged separately and over the same window, so that a common change (Adam's P after a
change of the batch) cancels. Sums over parameter groups are averaged, which is the same as averaging each.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, Adamax, NAdam, Optimizer, RAdam, RMSprop

Estimator = Literal["workers", "accumulation", "differenced"]
"""Source of the gradients: several workers, the micro-batches of one, or two consecutive steps."""

Floats = npt.NDArray[np.float64]

WINDOWS = (30.0, 100.0, 300.0, 1000.0)
"""Windows of the averages, in steps at M0. The last one is the usual factor 0.999^(M/M0) per step."""
_WINDOWS = np.array(WINDOWS)
LEAST_ESTIMATES = 5
"""Fewer do not show their own spread."""
LEAST_FACTOR = 0.9
"""No window is shorter than about 10 estimates, at any batch size: comparing needs the spread."""
OTHER_SIZE = 1e4
"""Gradients that grow by this factor at once start over: before, a model was dead, or all samples were alike."""
SIZE_SHARE = 0.2
"""Weight of the latest tr Sigma in the size by which estimates are divided."""
AGREES = 3.0
"""Standard errors by which windows may differ."""
CREDIBLE = 2.0
"""Standard errors from which |P G|^2 is significant."""

_TINY = 1e-100
"""Less than the square of any number in single precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseReading:
    """The noise scale so far."""

    noise_scale: float | None
    """phi, in samples; None if unknown. Rather too small than too large if uncertain."""
    trace: float
    """tr(P Sigma P^T)."""
    squared_norm: float
    """|P G|^2 as measured; if negative, phi is not their ratio."""
    uncertainty: float
    """Relative standard error of phi; infinite without phi."""
    kind: Estimator
    """The latest estimator."""
    estimates: int
    """Number of estimates with this estimator and this preconditioner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseEstimate:
    """One estimate of numerator and denominator."""

    kind: Estimator
    preconditioner: str
    steps: float
    """Optimizer steps since the estimate before, in steps at M0: the sum of M / M0."""
    trace: float
    squared_norm: float


def moments(mean_square: float, square_of_mean: float, *, num_parts: int, batch_size: int) -> tuple[float, float]:
    """Return unbiased tr Sigma and |G|^2 of n parts of a batch of M samples, with any sizes m_i (Pollux §3.1).

    With A = sum (m_i / M) |g_i|^2 and B = |sum (m_i / M) g_i|^2: E A = |G|^2 + n tr Sigma / M and
    E B = |G|^2 + tr Sigma / M, so that tr Sigma = (A - B) M / (n - 1) and |G|^2 = (n B - A) / (n - 1).
    `num_parts` is n >= 2, the number of parts that have samples.
    """
    trace = (mean_square - square_of_mean) * batch_size / (num_parts - 1)
    return trace, (num_parts * square_of_mean - mean_square) / (num_parts - 1)


class NoiseScale:
    """phi from a sequence of estimates; the module's docstring says how."""

    def __init__(self) -> None:
        self._restart("workers", "")
        self._published: tuple[float, float] | None = None

    def _restart(self, kind: Estimator, preconditioner: str) -> None:
        self._kind: Estimator = kind
        self._preconditioner = preconditioner
        self._estimates = 0
        self._averages = Averages(2)
        self._size = 0.0

    def add(self, estimate: NoiseEstimate) -> None:
        """Add an estimate; one that is not finite is dropped. Another estimator or preconditioner starts over."""
        if not (math.isfinite(estimate.trace) and math.isfinite(estimate.squared_norm)):
            return
        is_other = (estimate.kind, estimate.preconditioner) != (self._kind, self._preconditioner)
        if is_other or estimate.trace > OTHER_SIZE * self._size:
            self._restart(estimate.kind, estimate.preconditioner)
        self._estimates += 1
        size = self._size or max(estimate.trace, _TINY)
        self._averages.add((estimate.trace / size, estimate.squared_norm / size), estimate.steps)
        self._size = max(size + SIZE_SHARE * (estimate.trace - size), SIZE_SHARE * size, _TINY)

    def reading(self) -> NoiseReading:
        if self._estimates < LEAST_ESTIMATES:
            trace, squared_norm = self._averages.means()[:, -1]
            return self._reading(self._kept(0.0), trace, squared_norm)
        trace, trace_error, squared_norm, error = self._longest_that_agrees()
        if squared_norm > CREDIBLE * error:
            uncertainty = math.hypot(error / squared_norm, trace_error / trace if trace > 0.0 else 0.0)
            self._published = max(trace, 0.0) / squared_norm, uncertainty
            return self._reading(self._published, trace, squared_norm)
        largest = max(squared_norm, 0.0) + CREDIBLE * error
        return self._reading(self._kept(trace / largest if largest > 0.0 else 0.0), trace, squared_norm)

    def _kept(self, least: float) -> tuple[float, float] | None:
        """Return the last credible phi, or `least` if that is more or the only one, with a wide uncertainty."""
        if self._published is None:
            return (least, 1.0) if least > 0.0 else None
        noise_scale, uncertainty = self._published
        return max(noise_scale, least), max(2.0 * uncertainty, 0.5)

    def _reading(self, published: tuple[float, float] | None, trace: float, squared_norm: float) -> NoiseReading:
        noise_scale, uncertainty = (None, math.inf) if published is None else published
        return NoiseReading(
            noise_scale=noise_scale,
            trace=float(trace) * self._size,
            squared_norm=float(squared_norm) * self._size,
            uncertainty=uncertainty,
            kind=self._kind,
            estimates=self._estimates,
        )

    def _longest_that_agrees(self) -> tuple[float, float, float, float]:
        """Return tr Sigma, its error, |G|^2 and its error, by size, over the longest window that agrees."""
        (trace, squared_norm), (trace_error, error) = self._averages.means(), self._averages.errors()
        scale = np.maximum(trace, _TINY)
        # 1 / phi, because it stays finite; the ratio is only compared, never averaged.
        inverse = squared_norm / scale
        inverse_error = np.hypot(error, inverse * trace_error) / scale
        chosen = 0
        for window in range(1, len(WINDOWS)):
            if np.any(np.abs(inverse[window] - inverse[:window]) > AGREES * inverse_error[:window]):
                break
            chosen = window
        return float(trace[chosen]), float(trace_error[chosen]), float(squared_norm[chosen]), float(error[chosen])

    def state_dict(self) -> dict[str, Any]:
        return {
            "kind": self._kind,
            "preconditioner": self._preconditioner,
            "estimates": self._estimates,
            "published": self._published,
            "size": self._size,
            "averages": self._averages.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._kind, self._preconditioner = state["kind"], state["preconditioner"]
        self._estimates, self._published = state["estimates"], state["published"]
        self._size = state["size"]
        self._averages.load_state_dict(state["averages"])


class Averages:
    """Exponential averages of quantities over all `WINDOWS`, corrected for their start, with standard errors."""

    def __init__(self, num_quantities: int) -> None:
        # Sums of weights, their squares, weighted values and weighted squares of values, by quantity and window.
        self._sums: Floats = np.zeros((4, num_quantities, len(WINDOWS)))

    def add(self, values: Sequence[float], steps: float) -> None:
        """Add values `steps` (at M0) after the last ones."""
        factor = np.maximum(np.exp(-steps / _WINDOWS), LEAST_FACTOR)
        weight = 1.0 - factor
        value = np.asarray(values)[:, None]
        one = np.ones_like(value)
        self._sums *= np.array((factor, factor * factor, factor, factor))[:, None]
        self._sums += np.array((weight, weight * weight, weight, weight))[:, None] * (one, one, value, value * value)

    def means(self) -> Floats:
        """Return the means by quantity and window; 0 without values."""
        weights, _, values, _ = self._sums
        return np.asarray(np.divide(values, weights, out=np.zeros_like(values), where=weights > 0.0))

    def errors(self) -> Floats:
        """Return the standard errors of the means, as if the values were independent."""
        weights, squares, _, second = self._sums
        mean_of_squares = np.divide(second, weights, out=np.zeros_like(second), where=weights > 0.0)
        num_independent = np.divide(weights**2, squares, out=np.zeros_like(second), where=squares > 0.0)
        variance = np.maximum(mean_of_squares - self.means() ** 2, 0.0)
        return np.asarray(np.sqrt(variance / np.maximum(num_independent - 1.0, 1.0)))

    def state_dict(self) -> list[Any]:
        state: list[Any] = self._sums.tolist()
        return state

    def load_state_dict(self, state: list[Any]) -> None:
        self._sums = np.array(state)


# P, by which an optimizer multiplies a gradient before its step, from the optimizer's own state (Pollux §3.1).
#
# It is the state before the step, without the next gradient. Only the scale of each coordinate counts, not momentum,
# weight decay or the learning rate.


State = dict[str, Any]

LEAST_STEPS = 10
"""Second moments of fewer steps are useless: 1 / v of one squared gradient has not even a mean."""

_log = logging.getLogger(__name__)


def flat(tensor: Tensor) -> Tensor:
    """Return its real coordinates in one dimension, in single precision or better; a view if possible."""
    return real(tensor).reshape(-1)


def real(tensor: Tensor) -> Tensor:
    """Return its real coordinates, in single precision or better; itself if it has no others."""
    if tensor.dtype in (torch.float32, torch.float64):
        return tensor
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor.float()


def _adam(state: State, group: State) -> Tensor:
    """Return sqrt(v_hat) + eps; amsgrad uses the largest v so far."""
    second = state["max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"]
    corrected: Tensor = flat(second) / (1.0 - group["betas"][1] ** state["step"])
    return corrected.sqrt_().add_(group["eps"])


def _radam(state: State, group: State) -> Tensor:
    """Return sqrt(v) + eps; the corrections are common factors (Liu et al. 2020), defined after `LEAST_STEPS`."""
    return flat(state["exp_avg_sq"]).sqrt().add_(group["eps"])


def _adamax(state: State, _: State) -> Tensor:
    """Return u, which includes eps."""
    return flat(state["exp_inf"]).clone()


def _rmsprop(state: State, group: State) -> Tensor:
    second = flat(state["square_avg"])
    variance = second - flat(state["grad_avg"]).square() if group["centered"] else second.clone()
    return variance.clamp_(min=0.0).sqrt_().add_(group["eps"])


def _adagrad(state: State, group: State) -> Tensor:
    return flat(state["sum"]).sqrt().add_(group["eps"])


Denominator = Callable[[State, State], Tensor]

DENOMINATORS: tuple[tuple[type[Optimizer], str, Denominator], ...] = (
    (Adam, "adam", _adam),
    (NAdam, "adam", _adam),
    (RAdam, "radam", _radam),
    (Adamax, "adamax", _adamax),
    (RMSprop, "rmsprop", _rmsprop),
    (Adagrad, "adagrad", _adagrad),
)
"""Optimizer, name and 1 / P up to a common factor (AdamW is an Adam)."""


class Preconditioning:
    """P of one step: for every parameter that takes part, the denominators 1 / P; None for P = I."""

    def __init__(self, denominators: dict[Tensor, Tensor | None], gradient_scale: Callable[[], Tensor | None]) -> None:
        self._denominators = denominators
        self._gradient_scale = gradient_scale

    @property
    def parameters(self) -> Iterable[Tensor]:
        """Parameters that take part."""
        return self._denominators

    def apply(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Tensor | None:
        """Return P g in one new vector, 0 without a gradient; None if no parameter takes part.

        The scale of the loss (fp16) is divided out.
        Parameters that the optimizer does not train, or has too little state of, and sparse gradients are left out.
        """
        values, divisors = [], []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if parameter in self._denominators and (gradient is None or gradient.layout == torch.strided):
                values.append(real(torch.zeros_like(parameter).detach() if gradient is None else gradient))
                denominator = self._denominators[parameter]
                if denominator is not None:
                    divisors.append(denominator)
        if not values:
            return None
        vector: Tensor = torch._C._nn.flatten_dense_tensors(values)
        if len(values) == 1:
            vector = vector.clone()
        scale = self._gradient_scale()
        if scale is not None:
            vector.div_(scale)
        return vector.div_(torch.cat(divisors)) if divisors else vector


class Preconditioner:
    """Scaling of gradients by an optimizer; unknown optimizers count as P = I, and the log says so."""

    def __init__(self, optimizer: Optimizer, gradient_scale: Callable[[], Tensor | None] = lambda: None) -> None:
        self._optimizer = optimizer
        self._gradient_scale = gradient_scale
        found = [(kind, function) for owner, kind, function in DENOMINATORS if isinstance(optimizer, owner)]
        self.kind: str = found[0][0] if found else "identity"
        """Name of the rule; estimates under different rules cannot be averaged."""
        self._denominator: Denominator | None = found[0][1] if found else None
        self._settled: set[Tensor] = set()
        if not found and not isinstance(optimizer, SGD):
            _log.warning(
                "the gradient noise scale is that of plain gradients: how %s scales them is not known",
                type(optimizer).__name__,
            )

    def now(self) -> Preconditioning | None:
        """Return P for the next step; None while the optimizer has no state."""
        denominators: dict[Tensor, Tensor | None] = {}
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and self._is_settled(parameter):
                    denominators[parameter] = self._denominator_of(parameter, group)
        return Preconditioning(denominators, self._gradient_scale) if denominators else None

    def _is_settled(self, parameter: Tensor) -> bool:
        if self._denominator is not None and parameter not in self._settled:
            # Read only if needed: some optimizers keep it on the device.
            if float(self._optimizer.state.get(parameter, {}).get("step", 0.0)) < LEAST_STEPS:
                return False
            self._settled.add(parameter)
        return True

    def _denominator_of(self, parameter: Tensor, group: State) -> Tensor | None:
        if self._denominator is None:
            return None
        denominator = self._denominator(self._optimizer.state[parameter], group)
        # A coordinate that never had a gradient has no state yet: its P would be 1 / eps.
        return denominator.masked_fill_(denominator <= group["eps"], math.inf)


def is_adaptive(optimizer: Optimizer) -> bool:
    """Whether the optimizer scales each coordinate by the gradients so far, as Adam does."""
    kinds = (*(owner for owner, _, _ in DENOMINATORS), torch.optim.Adadelta)
    return isinstance(optimizer, kinds)
