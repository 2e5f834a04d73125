"""Goodput (Pollux, OSDI '21): the time of a step (eqs. 8-11), the worth of its samples (eq. 6), and the best batch.

The functions of step time and efficiency broadcast over their arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from rubberband.units import counted
from rubberband.values.adaptive import BatchLimits, Throughput

Floats = npt.NDArray[np.float64]
Reals = float | npt.NDArray[np.float64] | npt.NDArray[np.int64]
"""A number or an array of numbers."""


def grad_s(parameters: Throughput, per_gpu: Reals) -> Floats:
    """T_grad = alpha_grad + beta_grad m (eq. 8): seconds for one pass over m samples, forward and backward."""
    return np.asarray(parameters.alpha_grad_s + parameters.beta_grad_s * np.asarray(per_gpu), dtype=np.float64)


def sync_s(parameters: Throughput, instances: Reals, gpus: Reals) -> Floats:
    """T_sync (eq. 9): seconds to average gradients over K GPUs on N instances; 0 for a single GPU."""
    beyond = np.asarray(gpus) - 2.0
    local = parameters.alpha_local_s + parameters.beta_local_s * beyond
    node = parameters.alpha_node_s + parameters.beta_node_s * beyond
    return np.asarray(np.where(beyond < 0.0, 0.0, np.where(np.asarray(instances) > 1, node, local)))


def combined_s(compute_s: Reals, synchronise_s: Reals, gamma: float) -> Floats:
    """(T_grad^gamma + T_sync^gamma)^(1/gamma) (eq. 10), without powers of seconds, which could under- or overflow.

    Between the sum (gamma = 1) and the larger of the two (gamma -> infinity).
    """
    longer = np.maximum(compute_s, synchronise_s)
    shorter = np.minimum(compute_s, synchronise_s)
    ratio = shorter / np.where(longer > 0.0, longer, 1.0)
    return np.asarray(longer * np.exp(np.log1p(ratio**gamma) / gamma))


def step_s(parameters: Throughput, instances: Reals, gpus: Reals, per_gpu: Reals, accumulation: Reals) -> Floats:
    """T_iter (eq. 11): seconds per optimizer step of s passes without synchronisation and one with it."""
    compute_s = grad_s(parameters, per_gpu)
    last_s = combined_s(compute_s, sync_s(parameters, instances, gpus), parameters.gamma)
    return np.asarray(accumulation * compute_s + last_s)


def efficiency(noise_scale: Reals, initial: Reals, batch_size: Reals) -> Floats:
    """EFFICIENCY(M) = (phi + M0) / (phi + M) (eq. 6): progress per sample, relative to the initial batch size.

    1 at M0 and for an infinite phi; M0 / M for phi = 0. Arguments broadcast; phi >= 0, 0 < M0 <= M.
    """
    growth = np.asarray(batch_size, dtype=np.float64) - initial
    return np.asarray(1.0 - growth / (np.asarray(noise_scale) + np.asarray(batch_size)))


def gain(noise_scale: Reals, initial: Reals, batch_size: Reals) -> Floats:
    """M / M0 * EFFICIENCY(M): the number of steps at M0 that one step at M is worth, from 1 to M / M0.

    This is AdaScale's gain. With the variance sigma^2 = tr Sigma / M0 of a gradient at M0, mu^2 = |g|^2, and
    S = M / M0, it is r = (sigma^2 + mu^2) / (sigma^2 / S + mu^2) (Johnson et al. 2020, eq. 4). Divided by mu^2, with
    phi = tr Sigma / |g|^2 = M0 sigma^2 / mu^2, r = (phi / M0 + 1) / (phi / M + 1) = M / M0 * (phi + M0) / (phi + M).
    """
    return np.asarray(np.asarray(batch_size) / np.asarray(initial) * efficiency(noise_scale, initial, batch_size))


Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# The batch with the highest goodput on given GPUs (Pollux §4.1, eq. 13): M, and how workers take it in passes.
#
# The candidates are total batch sizes M, spread evenly on a log scale between M0 and the largest one allowed. The
# passes follow from M: as few as fit into memory, s + 1 = ceil(M / (K max_per_gpu)), of m = ceil(M / (K (s + 1)))
# samples. Between K (s + 1) (m - 1) and K (s + 1) m a step takes the same time and a larger M makes more progress. So
# every M but the smallest is rounded up to fill its passes, as far as the largest batch allows.

NUM_CANDIDATES = 64
"""Batch sizes that a choice considers: over a factor of 32 they are 6 % apart, and goodput is flat at its top."""
WORTHWHILE = 0.05
"""A smaller relative change of the batch is not worth making."""
KEPT = 64
"""Choices whose candidates are remembered."""
_TIE = 1e-12
"""Relative difference of goodput that is rounding only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputChoice:
    """A batch, and the model's figures for it."""

    per_gpu: int
    """m, of the worker with most samples; others may have one less."""
    accumulation: int
    """s."""
    batch_size: int
    """M, at most K m (s + 1)."""
    step_s: float
    """T_iter."""
    efficiency: float
    """EFFICIENCY(M)."""
    goodput: float
    """Samples per second, each weighed by its statistical efficiency (eq. 4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Batches that could be chosen; arrays of one shape."""

    batch_size: Ints
    per_gpu: Ints
    accumulation: Ints
    feasible: Bools


def choose(
    parameters: Throughput,
    noise_scale: float,
    limits: BatchLimits,
    instances: int,
    gpus: int,
    *,
    least_per_gpu: int = 1,
) -> GoodputChoice:
    """Return the batch with the highest goodput on `gpus` GPUs of `instances` instances; of equals the smaller one.

    M0 is always a candidate, in as many passes as it needs even without accumulation. If that leaves a worker less
    than `least_per_gpu` samples (2 for BatchNorm), K times that takes its place.

    Raises ValueError where K least_per_gpu is more than `limits.max`, where least_per_gpu is more than
    `limits.max_per_gpu`, and where the two are so close that no batch can be split into passes between them.
    """
    allocation = np.asarray([instances]), np.asarray([gpus])
    return choose_many(parameters, noise_scale, limits, *allocation, least_per_gpu=least_per_gpu)[0]


def choose_at(
    parameters: Throughput, noise_scale: float, limits: BatchLimits, instances: int, gpus: int, batch_size: int
) -> GoodputChoice:
    """Return the model's figures for a batch of `batch_size` samples, in as few passes as fit into memory."""
    fixed = _passes(limits, np.asarray([[gpus]]), np.asarray([[batch_size]]), 0)
    return _best(parameters, noise_scale, limits, np.asarray([[instances]]), np.asarray([[gpus]]), fixed)[0]


def choose_many(
    parameters: Throughput,
    noise_scale: Reals,
    limits: BatchLimits,
    instances: Ints,
    gpus: Ints,
    *,
    least_per_gpu: int = 1,
) -> list[GoodputChoice]:
    """`choose` for many allocations at once: `instances` and `gpus` are (allocations,), phi the same or one number.

    Raises ValueError as `choose` does, if any allocation is too large.
    """
    batches = considered(limits, tuple(np.asarray(gpus).tolist()), least_per_gpu)
    column = np.asarray(gpus)[:, None]
    phi = np.asarray(noise_scale)[..., None]
    return _best(parameters, phi, limits, np.asarray(instances)[:, None], column, batches)


@lru_cache(maxsize=KEPT)
def considered(limits: BatchLimits, gpus: tuple[int, ...], least_per_gpu: int) -> Candidates:
    """Return the batches of a choice, (allocations, batches): at every look of an agent they are the same."""
    _check(limits, max(gpus), least_per_gpu)
    column = np.asarray(gpus)[:, None]
    batches = _spread(limits, column, least_per_gpu, NUM_CANDIDATES)
    if limits.max_per_gpu is not None:
        fullest = np.minimum(column * limits.max_per_gpu * (batches.accumulation + 1), limits.max)
        full = _passes(limits, column, np.maximum(fullest, batches.batch_size), least_per_gpu)
        both = {name: [getattr(batches, name), getattr(full, name)] for name in Candidates.__slots__}
        batches = Candidates(**{name: np.concatenate(pair, axis=-1) for name, pair in both.items()})
    _check_split(limits, column, batches, least_per_gpu)
    return batches


def better(current: int, found: GoodputChoice) -> bool:
    """Return whether changing from a batch of `current` samples to the one found is worth it: 5 % of it, or more."""
    return abs(found.batch_size - current) >= WORTHWHILE * current


def candidates(limits: BatchLimits, gpus: int, *, least_per_gpu: int = 1, num: int = NUM_CANDIDATES) -> Candidates:
    """Return at most `num` batches for K GPUs, evenly spread on a log scale over what is allowed; M increasing.

    Raises ValueError as `choose` does.
    """
    _check(limits, gpus, least_per_gpu)
    column = np.asarray([[gpus]])
    spread = _spread(limits, column, least_per_gpu, num)
    _check_split(limits, column, spread, least_per_gpu)
    batch_size, first = np.unique(spread.batch_size[spread.feasible], return_index=True)
    return Candidates(
        batch_size=batch_size,
        per_gpu=spread.per_gpu[spread.feasible][first],
        accumulation=spread.accumulation[spread.feasible][first],
        feasible=np.ones(len(batch_size), dtype=np.bool_),
    )


def _spread(limits: BatchLimits, gpus: Ints, least: int, num: int) -> Candidates:
    """(allocations, num): log-spaced between the smallest and the largest batch, rounded up to fill their passes."""
    smallest = np.maximum(limits.initial, gpus * least)
    sizes = np.rint(np.geomspace(limits.initial, limits.max, num)).astype(np.int64)
    wanted = np.clip(sizes, smallest, limits.max)
    first = _passes(limits, gpus, wanted, least)
    filled = np.minimum(gpus * (first.accumulation + 1) * first.per_gpu, limits.max)
    return _passes(limits, gpus, np.where(wanted > smallest, filled, wanted), least)


def _passes(limits: BatchLimits, gpus: Ints, batch_size: Ints, least: int) -> Candidates:
    """The fewest passes that fit into memory, and whether they are allowed and leave every worker enough.

    A worker that needs at least two samples needs them in every pass. One that needs fewer may have none in one of
    many passes.
    """
    passes = np.ones_like(batch_size)
    if limits.max_per_gpu is not None:
        passes = -(-batch_size // (gpus * limits.max_per_gpu))
    in_a_pass = gpus * passes
    smallest = batch_size <= np.maximum(limits.initial, gpus * least)
    enough = (batch_size // in_a_pass >= least) | (least < 2)
    return Candidates(
        batch_size=batch_size,
        per_gpu=-(-batch_size // in_a_pass),
        accumulation=passes - 1,
        feasible=enough & (limits.accumulation | (passes == 1) | smallest),
    )


def _best(
    parameters: Throughput, noise_scale: Reals, limits: BatchLimits, instances: Ints, gpus: Ints, batches: Candidates
) -> list[GoodputChoice]:
    """For each allocation, the feasible candidate with the highest goodput; of equals the smallest batch.

    Goodputs that are not numbers (phi is not known yet) are all equal.
    """
    step = step_s(parameters, instances, gpus, batches.per_gpu, batches.accumulation)
    worth = efficiency(noise_scale, limits.initial, batches.batch_size)
    goodput = np.where(batches.feasible, batches.batch_size / step * worth, -np.inf)
    equal = ~(goodput < np.max(goodput, axis=-1, keepdims=True) * (1.0 - _TIE)) & batches.feasible
    best = np.argmin(np.where(equal, batches.batch_size, np.iinfo(np.int64).max), axis=-1)
    fields = batches.per_gpu, batches.accumulation, batches.batch_size, step, worth, goodput
    chosen = (np.take_along_axis(field, best[:, None], axis=-1)[:, 0].tolist() for field in fields)
    return [
        GoodputChoice(per_gpu=m, accumulation=s, batch_size=size, step_s=time_s, efficiency=share, goodput=rate)
        for m, s, size, time_s, share, rate in zip(*chosen, strict=True)
    ]


def _check(limits: BatchLimits, gpus: int, least: int) -> None:
    if gpus * least > limits.max:
        raise ValueError(
            f"{gpus} GPUs with at least {least} samples each are more than the largest batch ({limits.max}); raise "
            f"batch.max to {gpus * least}, or use at most {counted(limits.max // least, 'GPU')}"
        )
    if limits.max_per_gpu is not None and limits.max_per_gpu < least:
        raise ValueError(
            f"batch.max_per_gpu={limits.max_per_gpu} is less than the {least} samples that a GPU needs at once (two "
            f"for BatchNorm); raise it to {least}"
        )


def _check_split(limits: BatchLimits, gpus: Ints, batches: Candidates, least: int) -> None:
    lost = gpus[~batches.feasible.any(axis=1), 0].tolist()
    if lost:
        raise ValueError(
            f"no batch of {limits.initial} to {limits.max} samples can be split on {lost[0]} GPUs into passes of "
            f"{least} to {limits.max_per_gpu} samples each; set batch.initial to a multiple of {lost[0] * least}"
        )
