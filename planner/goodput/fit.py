"""The parameters of the time of a step, fitted to measured steps (Pollux §4.1).

Minimises the root mean squared logarithmic error (RMSLE) of eq. 11 with L-BFGS-B and a gradient that is written out.
scipy is imported when something is fitted, and not before.

Few points do not tell all seven parameters. The priors of §4.1 settle some: what synchronising costs stays 0 until it
was seen (where the paper's text says local twice, the second pair is meant to be that across instances). Where a single
m was measured, half of a pass is taken not to depend on m, so that a larger batch looks worth a try and yet not free.
What is open beyond that is decided by where the search starts: at little synchronisation and a large constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from rubberband.adaptive import BatchPoint, Throughput
from rubberband.planner.goodput.measured import Measured
from rubberband.planner.goodput.throughput import Floats, step_s

CONSTANT_SHARE = 0.5
"""Of a pass over the only m that was measured: the part that is taken not to depend on m."""
MAX_GAMMA = 10.0
_OPEN = 1e-4
"""Weight of the hopeful explanation at the start: decides what the points leave open, and nothing beside them."""
_LEAST = 1e-9
"""Least constant of a pass, in typical steps: keeps logarithms finite."""


def fit(
    points: Sequence[BatchPoint], start: Throughput | None = None, weights: Sequence[float] | None = None
) -> Throughput:
    """theta_sys with the least RMSLE over `points`: all alpha and beta at least 0, gamma in [1, 10].

    `start` is an earlier fit, from which the search begins where it explains the points better than a fresh start;
    `weights` say how much every point counts (all alike if not given).

    Raises ValueError without points, or for a time or weight that is not a positive number.
    """
    measured = Measured.of(points, weights)
    free = measured.free()
    begin = _start(measured, free)
    if start is not None:
        known = measured.scaled(_unsloped(start, points) if measured.one_size else start)
        earlier = np.clip(np.where(free & (known > 0.0), known, begin), *_bounds(free))
        begin = min(begin, earlier, key=lambda x: measured.error(x)[0])
    found = measured.parameters(_search(measured, begin, free))
    return _sloped(found, points[0].per_gpu) if measured.one_size else found


def prepare() -> None:
    """Import what a fit needs, half a second's worth, so that the first one takes no longer than the others."""
    import scipy.optimize  # noqa: F401

    _blas()


def relative_errors(parameters: Throughput, points: Sequence[BatchPoint]) -> Floats:
    """(points,) |predicted - measured| / measured seconds per step."""
    rows = [(point.instances, point.gpus, point.per_gpu, point.accumulation, point.step_s) for point in points]
    instances, gpus, per_gpu, accumulation, seconds = np.asarray(rows, dtype=np.float64).reshape(-1, 5).T
    return np.asarray(np.abs(step_s(parameters, instances, gpus, per_gpu, accumulation) / seconds - 1.0))


def extrapolates(points: Sequence[BatchPoint], instances: int, gpus: int, per_gpu: int) -> bool:
    """Whether a step there is outside of what was measured, so that a fit of `points` may be far off.

    Inside are the values of m between the smallest and the largest measured one, with numbers of GPUs between the
    smallest and the largest measured one of the same kind: alone, on one instance, or across instances.
    """
    alike = [point.gpus for point in points if _kind(point.instances, point.gpus) == _kind(instances, gpus)]
    sizes = [point.per_gpu for point in points]
    return not alike or not min(alike) <= gpus <= max(alike) or not min(sizes) <= per_gpu <= max(sizes)


def _kind(instances: int, gpus: int) -> str:
    return "alone" if gpus == 1 else "across" if instances > 1 else "local"


def _start(measured: Measured, free: npt.NDArray[np.bool_]) -> Floats:
    """(7,) The least squares of relative errors as if nothing overlapped, hopeful where the points leave it open.

    From gamma = 1 the search finds its way up. Where it starts at a larger one, the gradient by a small T_sync vanishes
    and it is caught more often, far from the best fit.
    """
    from scipy.optimize import nnls

    relative = np.sqrt(measured.weights)
    rows = measured.linear() * (relative / np.exp(measured.log_s))[:, None]
    less = np.sqrt(_OPEN) * np.eye(6)[1:]
    used = free[:6]
    solution, _ = nnls(np.concatenate([rows, less])[:, used], np.concatenate([relative, np.zeros(5)]))
    x = np.zeros(7)
    x[:6][used] = solution
    x[6] = 1.0
    return np.clip(x, *_bounds(free))


def _bounds(free: npt.NDArray[np.bool_]) -> tuple[Floats, Floats]:
    lowest = np.asarray([_LEAST, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0])
    highest = np.where(free, np.asarray([np.inf] * 6 + [MAX_GAMMA]), lowest)
    return lowest, highest


def _search(measured: Measured, begin: Floats, free: npt.NDArray[np.bool_]) -> Floats:
    """L-BFGS-B over the free parameters, in units that change the prediction alike."""
    from scipy.optimize import minimize

    _, slopes = measured.residuals(begin)
    size = np.sqrt(measured.weights @ slopes**2)
    unit = 1.0 / np.clip(size, 0.1, 10.0)
    lowest, highest = _bounds(free)

    def error(y: Floats) -> tuple[float, Floats]:
        value, slope = measured.error(y * unit)
        return value, slope * unit

    bounds = list(zip(lowest / unit, highest / unit, strict=True))
    options = {"maxiter": 200, "ftol": 1e-10, "gtol": 1e-7}
    # Its matrices are 10 x 10; threads that wait for each other on busy cores make a fit 70 times slower.
    with _blas().limit(limits=1):
        found = minimize(error, begin / unit, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    return np.asarray(np.clip(found.x * unit, lowest, highest))


@cache
def _blas() -> Any:
    """The threads of scipy's linear algebra."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(user_api="blas")


def _sloped(flat: Throughput, per_gpu: int) -> Throughput:
    """A pass of the only measured m shared out between constant and slope."""
    pass_s = flat.alpha_grad_s
    slope_s = (1.0 - CONSTANT_SHARE) * pass_s / per_gpu
    return replace(flat, alpha_grad_s=CONSTANT_SHARE * pass_s, beta_grad_s=slope_s)


def _unsloped(parameters: Throughput, points: Sequence[BatchPoint]) -> Throughput:
    pass_s = parameters.alpha_grad_s + parameters.beta_grad_s * points[0].per_gpu
    return replace(parameters, alpha_grad_s=pass_s, beta_grad_s=0.0)
