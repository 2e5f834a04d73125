"""The parameters of the time of a step, fitted to measured steps (Pollux §4.1).

Minimises the root mean squared logarithmic error (RMSLE) of eq. 11 by Levenberg-Marquardt, with derivatives that are
written out.

Few points do not determine all seven parameters. The priors of §4.1 settle some: the cost of synchronising stays 0
until it is measured (where the paper's text says local twice, we read the second pair as across instances). If only
one m was measured, half of a pass is assumed not to depend on m: a larger batch looks worth a try, but not free. The
start of the search decides the rest: little synchronisation and a large constant.

A fit looks for x = (alpha_grad, beta_grad, alpha_local, beta_local, alpha_node, beta_node, gamma), in units of the
typical step and the typical m, so that all seven are of one size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from rubberband.planner.goodput import Floats, step_s
from rubberband.values.adaptive import BatchPoint, Throughput

Bools = npt.NDArray[np.bool_]

NUM_PARAMETERS = 7
_SLOPE = 1
"""Index of beta_grad in x."""
_GAMMA = 6
_TINY = 1e-300


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanPoints:
    """Distinct configurations, each with the geometric mean of its times: equal points change the weights only."""

    per_gpu: Floats
    """(n,) In units of `typical_per_gpu`."""
    accumulation: Floats
    """(n,) Passes without synchronisation before the last one of a step (s)."""
    syncs: Floats
    """(n, 4) Factors of alpha_local, beta_local, alpha_node and beta_node (eq. 9)."""
    log_s: Floats
    """(n,) Logarithm of the time of a step, in units of `typical_s`."""
    weights: Floats
    """(n,) They add up to 1."""
    typical_s: float
    typical_per_gpu: float

    @classmethod
    def of(cls, points: Sequence[BatchPoint], weights: Sequence[float] | None) -> MeanPoints:
        """Group the points. Raises ValueError without points, or for a time or weight that is not a positive number."""
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
        """Return whether a single m was measured, which does not separate alpha_grad from beta_grad."""
        return bool(np.all(self.per_gpu == self.per_gpu[0]))

    def free(self) -> Bools:
        """(7,) Parameters that the points inform; the others keep their priors."""
        seen = [False] * 4
        for alpha in (0, 2):
            sizes = self.syncs[self.syncs[:, alpha] > 0.0, alpha + 1]
            seen[alpha : alpha + 2] = [len(sizes) > 0, bool(np.any(sizes != sizes[:1]))]
        return np.asarray([True, not self.one_size, *seen, any(seen)])

    def scaled(self, parameters: Throughput) -> Floats:
        """(7,) x of these parameters."""
        x = np.asarray(astuple(parameters))
        x[_SLOPE] *= self.typical_per_gpu
        x[:_GAMMA] /= self.typical_s
        return x

    def parameters(self, x: Floats) -> Throughput:
        """The parameters, in seconds."""
        values = np.append(x[:_GAMMA] * self.typical_s, x[_GAMMA])
        values[_SLOPE] /= self.typical_per_gpu
        return Throughput(**dict(zip(Throughput.__slots__, values.tolist(), strict=True)))

    def linear(self) -> Floats:
        """(n, 6) The time of a step per unit of every parameter, where nothing overlaps (gamma = 1)."""
        passes = self.accumulation + 1.0
        return np.column_stack([passes, passes * self.per_gpu, self.syncs])

    def residuals(self, x: Floats) -> tuple[Floats, Floats]:
        """(n,) log predicted - log measured, and (n, 7) their derivatives."""
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
        by_grad = (self.accumulation + (grad / last) ** (gamma - 1.0)) / total
        by_sync = (sync / last) ** (gamma - 1.0) / total
        slopes = np.empty((len(total), NUM_PARAMETERS))
        slopes[:, 0] = by_grad
        slopes[:, _SLOPE] = by_grad * self.per_gpu
        slopes[:, 2:_GAMMA] = by_sync[:, None] * self.syncs
        slopes[:, _GAMMA] = last * (power * log_ratio / (1.0 + power) - log_sum / gamma) / gamma / total
        return np.log(total) - self.log_s, slopes

    def error(self, x: Floats) -> tuple[float, Floats]:
        """The weighted mean of the squared residuals, whose root is the RMSLE, and its (7,) gradient."""
        residuals, slopes = self.residuals(x)
        weighted = self.weights * residuals
        return float(weighted @ residuals), 2.0 * (weighted @ slopes)


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


CONSTANT_SHARE = 0.5
"""Share of a pass over the only measured m that is assumed not to depend on m."""
MAX_GAMMA = 10.0
MOST_EVALUATIONS = 200
_LEAST_DAMPING = 1e-9
"""Damping that makes a singular system regular again."""
_OPEN = 1e-4
"""Weight of the optimistic start: decides only what the points leave open."""
_LEAST = 1e-9
"""Least constant of a pass, in typical steps: keeps logarithms finite."""


def fit(
    points: Sequence[BatchPoint], start: Throughput | None = None, weights: Sequence[float] | None = None
) -> Throughput:
    """Return theta_sys with the least RMSLE over `points`: all alpha and beta at least 0, gamma in [1, 10].

    `start` is an earlier fit; the search begins there if it explains the points better than a fresh start. `weights`
    are those of the points (equal if not given).

    Raises ValueError without points, or for a time or weight that is not a positive number.
    """
    measured = MeanPoints.of(points, weights)
    free = measured.free()
    begin = _start(measured, free)
    if start is not None:
        known = measured.scaled(_unsloped(start, points) if measured.one_size else start)
        earlier = np.clip(np.where(free & (known > 0.0), known, begin), *_bounds(free))
        begin = min(begin, earlier, key=lambda x: measured.error(x)[0])
    fitted = measured.parameters(_search(measured, begin, free))
    return _sloped(fitted, points[0].per_gpu) if measured.one_size else fitted


def relative_errors(parameters: Throughput, points: Sequence[BatchPoint]) -> Floats:
    """(points,) |predicted - measured| / measured seconds per step."""
    rows = [(point.instances, point.gpus, point.per_gpu, point.accumulation, point.step_s) for point in points]
    instances, gpus, per_gpu, accumulation, seconds = np.asarray(rows, dtype=np.float64).reshape(-1, 5).T
    return np.asarray(np.abs(step_s(parameters, instances, gpus, per_gpu, accumulation) / seconds - 1.0))


def fitted(points: Sequence[BatchPoint]) -> tuple[Throughput, float]:
    """Return the fit of points, and its mean relative error at them."""
    throughput = fit(points)
    return throughput, float(relative_errors(throughput, points).mean())


FAR_OFF = 0.2
"""Relative error of a fit at a measured step from which it is not trusted nearby."""


def extrapolates(points: Sequence[BatchPoint], instances: int, gpus: int, per_gpu: int) -> bool:
    """Return whether a fit of `points` may be far off for such a step.

    It may outside of the measured range: inside, m is between the smallest and the largest measured one, and the number
    of GPUs between those measured of the same kind: alone, on one instance, or across instances. It also may inside, if
    it misses a measured step next to it by more than `FAR_OFF`.
    """
    alike = [point for point in points if _kind(point.instances, point.gpus) == _kind(instances, gpus)]
    sizes = [point.per_gpu for point in points]
    if not _within([point.gpus for point in alike], gpus) or not _within(sizes, per_gpu):
        return True
    near = [point for point in alike if point.gpus in _next_to([other.gpus for other in alike], gpus)]
    near = [
        point
        for point in near
        if point.per_gpu in _next_to([other.per_gpu for other in near if other.gpus == point.gpus], per_gpu)
    ]
    return bool(np.any(relative_errors(_fitted(tuple(points)), near) > FAR_OFF))


def _within(values: Sequence[int], value: int) -> bool:
    return bool(values) and min(values) <= value <= max(values)


def _next_to(values: Sequence[int], value: int) -> set[int]:
    """Return the nearest of `values` on either side of `value`, or `value` itself if it is one of them."""
    below = [other for other in values if other <= value]
    above = [other for other in values if other >= value]
    return {*([max(below)] if below else []), *([min(above)] if above else [])}


_fitted = lru_cache(maxsize=16)(fit)
"""A plan asks for many gangs of the same points."""


def _kind(instances: int, gpus: int) -> str:
    return "alone" if gpus == 1 else "across" if instances > 1 else "local"


def _start(measured: MeanPoints, free: Bools) -> Floats:
    """(7,) Least squares of relative errors as if nothing overlapped; optimistic where the points leave it open.

    The search starts at gamma = 1. From a larger gamma, the gradient by a small T_sync vanishes, and the search more
    often ends far from the best fit.
    """
    relative = np.sqrt(measured.weights)
    rows = measured.linear() * (relative / np.exp(measured.log_s))[:, None]
    less = np.sqrt(_OPEN) * np.eye(6)[1:]
    used = free[:6]
    x = np.zeros(7)
    x[:6][used] = _nnls(np.concatenate([rows, less])[:, used], np.concatenate([relative, np.zeros(5)]))
    x[6] = 1.0
    return np.clip(x, *_bounds(free))


def _bounds(free: Bools) -> tuple[Floats, Floats]:
    lowest = np.asarray([_LEAST, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0])
    highest = np.where(free, np.asarray([np.inf] * 6 + [MAX_GAMMA]), lowest)
    return lowest, highest


def _nnls(rows: Floats, values: Floats) -> Floats:
    """Return x >= 0 with the least |rows x - values| (Lawson and Hanson 1974, chapter 23)."""
    x = np.zeros(rows.shape[1])
    passive = np.zeros(len(x), dtype=np.bool_)
    tiny = 1e-12 * float(np.abs(rows.T @ values).max())
    for _ in range(3 * len(x)):
        slopes = np.where(passive, -np.inf, rows.T @ (values - rows @ x))
        if slopes.max() <= tiny:
            break
        passive[slopes.argmax()] = True
        while True:
            solved = np.zeros(len(x))
            solved[passive] = np.linalg.lstsq(rows[:, passive], values, rcond=None)[0]
            negative = passive & (solved <= 0.0)
            if not negative.any():
                break
            x += np.min(x[negative] / (x[negative] - solved[negative])) * (solved - x)
            passive &= (x > 0.0) & ~(negative & (x <= 1e-15))
        x = solved
    return x


def _search(measured: MeanPoints, begin: Floats, free: Bools) -> Floats:
    """Run Levenberg-Marquardt within the bounds, in units that change the prediction equally.

    Written out, as importing scipy.optimize takes longer than a hundred fits.
    """
    _, slopes = measured.residuals(begin)
    unit = 1.0 / np.clip(np.sqrt(measured.weights @ slopes**2), 0.1, 10.0)
    lowest, highest = (bound / unit for bound in _bounds(free))
    roots = np.sqrt(measured.weights)

    def evaluate(y: Floats) -> tuple[float, Floats, Floats]:
        residuals, slopes = measured.residuals(y * unit)
        rows, values = (roots * slopes.T).T * unit, roots * residuals
        return float(values @ values), rows.T @ values, rows.T @ rows

    y, damping = np.clip(begin / unit, lowest, highest), 1e-3
    error, gradient, hessian = evaluate(y)
    for _ in range(MOST_EVALUATIONS):
        moves = ~((y <= lowest) & (gradient >= 0.0) | (y >= highest) & (gradient <= 0.0))
        if np.max(np.abs(gradient), where=moves, initial=0.0) < 1e-8:
            break
        part = hessian[np.ix_(moves, moves)]
        damped = part + np.diag(damping * (part.diagonal() + 1e-6))
        step = np.zeros(len(y))
        try:
            step[moves] = np.linalg.solve(damped, -gradient[moves])
        except np.linalg.LinAlgError:  # without noise, good steps follow until the damping is below rounding
            damping = max(_LEAST_DAMPING, 5.0 * damping)
            continue
        tried = np.clip(y + step, lowest, highest)
        outcome = evaluate(tried)
        if outcome[0] < error:
            is_done = error - outcome[0] <= 1e-10 * max(error, 1e-12) and damping <= 1e-3
            y, (error, gradient, hessian), damping = tried, outcome, damping / 5.0
            if is_done:
                break
        elif damping > 1e8:
            break
        else:
            damping *= 5.0
    return np.asarray(np.clip(y * unit, *_bounds(free)))


def _sloped(flat: Throughput, per_gpu: int) -> Throughput:
    """Split the pass over the only measured m into constant and slope."""
    pass_s = flat.alpha_grad_s
    slope_s = (1.0 - CONSTANT_SHARE) * pass_s / per_gpu
    return replace(flat, alpha_grad_s=CONSTANT_SHARE * pass_s, beta_grad_s=slope_s)


def _unsloped(parameters: Throughput, points: Sequence[BatchPoint]) -> Throughput:
    pass_s = parameters.alpha_grad_s + parameters.beta_grad_s * points[0].per_gpu
    return replace(parameters, alpha_grad_s=pass_s, beta_grad_s=0.0)
