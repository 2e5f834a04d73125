"""Measured steps as arrays, and how far parameters are from explaining them: the objective of a fit and its gradient.

Looked for are seven numbers, x = (alpha_grad, beta_grad, alpha_local, beta_local, alpha_node, beta_node, gamma), in
units of the typical step and the typical m, so that they are of one size. The search is in `fit.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rubberband.adaptive import BatchPoint, Throughput
from rubberband.planner.goodput.throughput import Floats

Bools = npt.NDArray[np.bool_]

NUM_PARAMETERS = 7
_SLOPE = 1
"""Where beta_grad is in x."""
_GAMMA = 6
_TINY = 1e-300


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Distinct configurations, each with the geometric mean of its times: equal points change nothing but weights."""

    per_gpu: Floats
    """(n,) In units of `typical_per_gpu`."""
    accumulation: Floats
    """(n,)"""
    syncs: Floats
    """(n, 4) What alpha_local, beta_local, alpha_node and beta_node are multiplied with (eq. 9)."""
    log_s: Floats
    """(n,) Logarithm of the time of a step, in units of `typical_s`."""
    weights: Floats
    """(n,) They add up to 1."""
    typical_s: float
    typical_per_gpu: float

    @classmethod
    def of(cls, points: Sequence[BatchPoint], weights: Sequence[float] | None) -> Measured:
        """Raises ValueError without points, or for a time or weight that is not a positive number."""
        table, log_s, shares = _grouped(points, weights)
        instances, gpus, per_gpu, accumulation = table.T
        typical_log_s, typical_per_gpu = float(shares @ log_s), float(np.exp(shares @ np.log(per_gpu)))
        local = ((instances == 1) & (gpus > 1)).astype(np.float64)
        node = ((instances > 1) & (gpus > 1)).astype(np.float64)
        return cls(
            per_gpu=per_gpu / typical_per_gpu,
            accumulation=accumulation,
            syncs=np.column_stack([local, local * (gpus - 2.0), node, node * (gpus - 2.0)]),
            log_s=log_s - typical_log_s,
            weights=shares,
            typical_s=math.exp(typical_log_s),
            typical_per_gpu=typical_per_gpu,
        )

    @property
    def one_size(self) -> bool:
        """Whether a single m was measured, which cannot tell alpha_grad from beta_grad."""
        return bool(np.all(self.per_gpu == self.per_gpu[0]))

    def free(self) -> Bools:
        """(7,) Which parameters the points say something of; the others keep to their priors."""
        seen = [False] * 4
        for at in (0, 2):
            sizes = self.syncs[self.syncs[:, at] > 0.0, at + 1]
            seen[at : at + 2] = [len(sizes) > 0, bool(np.any(sizes != sizes[:1]))]
        return np.asarray([True, not self.one_size, *seen, any(seen)])

    def scaled(self, parameters: Throughput) -> Floats:
        """(7,) x of these parameters."""
        seconds = np.asarray(
            [
                parameters.alpha_grad_s,
                parameters.beta_grad_s * self.typical_per_gpu,
                parameters.alpha_local_s,
                parameters.beta_local_s,
                parameters.alpha_node_s,
                parameters.beta_node_s,
            ]
        )
        return np.append(seconds / self.typical_s, parameters.gamma)

    def parameters(self, x: Floats) -> Throughput:
        """The parameters, in seconds."""
        seconds = (x[:_GAMMA] * self.typical_s).tolist()
        return Throughput(
            alpha_grad_s=seconds[0],
            beta_grad_s=seconds[1] / self.typical_per_gpu,
            alpha_local_s=seconds[2],
            beta_local_s=seconds[3],
            alpha_node_s=seconds[4],
            beta_node_s=seconds[5],
            gamma=float(x[_GAMMA]),
        )

    def linear(self) -> Floats:
        """(n, 6) The time of a step per unit of every parameter, where nothing overlaps (gamma = 1)."""
        passes = self.accumulation + 1.0
        return np.column_stack([passes, passes * self.per_gpu, self.syncs])

    def residuals(self, x: Floats) -> tuple[Floats, Floats]:
        """(n,) log predicted - log measured, and (n, 7) their derivatives."""
        parts = self._parts(x)
        return parts.log_s - self.log_s, self._jacobian(parts)

    def error(self, x: Floats) -> tuple[float, Floats]:
        """The weighted mean of the squared residuals, whose root is the RMSLE, and its (7,) gradient."""
        parts = self._parts(x)
        residuals = parts.log_s - self.log_s
        weighted = self.weights * residuals
        slope = np.empty(NUM_PARAMETERS)
        by_grad = weighted * parts.by_grad
        slope[0] = by_grad.sum()
        slope[1] = by_grad @ self.per_gpu
        slope[2:_GAMMA] = (weighted * parts.by_sync) @ self.syncs
        slope[_GAMMA] = weighted @ parts.by_gamma
        return float(weighted @ residuals), 2.0 * slope

    def _jacobian(self, parts: _Parts) -> Floats:
        by_grad, by_sync = parts.by_grad[:, None], parts.by_sync[:, None]
        columns = [by_grad, by_grad * self.per_gpu[:, None], by_sync * self.syncs, parts.by_gamma[:, None]]
        return np.concatenate(columns, axis=1)

    def _parts(self, x: Floats) -> _Parts:
        gamma = max(x[_GAMMA], 1.0)
        grad = x[0] + x[_SLOPE] * self.per_gpu
        sync = self.syncs @ x[2:_GAMMA]
        longer, shorter = np.maximum(grad, sync), np.minimum(grad, sync)
        ratio = np.maximum(shorter / longer, _TINY)
        log_ratio = np.log(ratio)
        power = np.exp(gamma * log_ratio)
        log_sum = np.log1p(power)
        last = longer * np.exp(log_sum / gamma)
        total = self.accumulation * grad + last
        by_grad = self.accumulation + (grad / last) ** (gamma - 1.0)
        by_gamma = last * (power * log_ratio / (1.0 + power) - log_sum / gamma) / gamma
        return _Parts(
            log_s=np.log(total),
            by_grad=by_grad / total,
            by_sync=(sync / last) ** (gamma - 1.0) / total,
            by_gamma=by_gamma / total,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """(n,) each: the logarithm of the predicted time, and its derivatives by T_grad, T_sync and gamma."""

    log_s: Floats
    by_grad: Floats
    by_sync: Floats
    by_gamma: Floats


def _grouped(points: Sequence[BatchPoint], weights: Sequence[float] | None) -> tuple[Floats, Floats, Floats]:
    """(n, 4) distinct (N, K, m, s), (n,) mean logarithms of their times, and (n,) weights that add up to 1."""
    if not points:
        raise ValueError("a fit needs at least one measured step")
    shares = np.ones(len(points)) if weights is None else np.asarray(weights, dtype=np.float64)
    seconds = np.asarray([point.step_s for point in points], dtype=np.float64)
    for what, values in (("step_s", seconds), ("weight", shares)):
        wrong = values[~(np.isfinite(values) & (values > 0.0))]
        if len(wrong):
            raise ValueError(f"{what}={wrong[0]:g} of a measured step is not a positive number; leave that step out")
    groups: dict[tuple[int, int, int, int], int] = {}
    keys = [(point.instances, point.gpus, point.per_gpu, point.accumulation) for point in points]
    group = np.asarray([groups.setdefault(key, len(groups)) for key in keys])
    total = np.bincount(group, shares)
    log_s = np.bincount(group, shares * np.log(seconds)) / total
    return np.asarray(list(groups), dtype=np.float64), log_s, total / total.sum()
