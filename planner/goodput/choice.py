"""The batch of most goodput on given GPUs (Pollux §4.1, eq. 13): M, and how workers take it in passes.

It chooses among total batch sizes M that are spread evenly on a log scale between M0 and the largest one allowed. The
passes follow from M: as few as fit into memory, s + 1 = ceil(M / (K max_per_gpu)), of m = ceil(M / (K (s + 1)))
samples. Between K (s + 1) (m - 1) and K (s + 1) m a step takes the same time and a larger M makes more progress, so
that every M but the smallest is rounded up to fill its passes, as far as the largest one allows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from rubberband.planner.goodput.model import Floats, Reals, efficiency, step_s
from rubberband.values.adaptive import BatchLimits, Throughput

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

NUM_CANDIDATES = 64
"""Batch sizes that a choice considers: over a factor of 32 they are 6 % apart, and goodput is flat at its top."""
WORTHWHILE = 0.05
"""A smaller relative change of the batch is not worth making."""
_TIE = 1e-12
"""Relative difference of goodput that is rounding and nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputChoice:
    """A batch and what the model says of it."""

    per_gpu: int
    """m, of the worker that has most; others may have one sample less."""
    accumulation: int
    """s."""
    batch_size: int
    """M, at most K m (s + 1)."""
    step_s: float
    """T_iter."""
    efficiency: float
    """EFFICIENCY(M)."""
    goodput: float
    """Samples per second, each counted for what it is worth (eq. 4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputChoices:
    """The choices for many allocations; every array has their shape, and the fields are those of `GoodputChoice`."""

    per_gpu: Ints
    accumulation: Ints
    batch_size: Ints
    step_s: Floats
    efficiency: Floats
    goodput: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Batches that could be chosen; arrays of one shape."""

    batch_size: Ints
    per_gpu: Ints
    accumulation: Ints
    feasible: Bools

    def only_feasible(self) -> Candidates:
        """One row of them without repetitions, M increasing."""
        batch_size, first = np.unique(self.batch_size[self.feasible], return_index=True)
        return Candidates(
            batch_size=batch_size,
            per_gpu=self.per_gpu[self.feasible][first],
            accumulation=self.accumulation[self.feasible][first],
            feasible=np.ones(len(batch_size), dtype=np.bool_),
        )


def choose(
    parameters: Throughput,
    noise_scale: float,
    limits: BatchLimits,
    instances: int,
    gpus: int,
    *,
    least_per_gpu: int = 1,
    num_candidates: int = NUM_CANDIDATES,
) -> GoodputChoice:
    """The batch of most goodput on `gpus` GPUs of `instances` instances; the smaller one of equals.

    M0 is always among the candidates, in as many passes as it needs even where accumulation is not wanted; if that
    leaves a worker less than `least_per_gpu` samples (2 for BatchNorm), K times that takes its place.

    Raises ValueError where K least_per_gpu is more than `limits.max`, where least_per_gpu is more than
    `limits.max_per_gpu`, and where the two are so close that no batch can be split into passes between them.
    """
    found = candidates(limits, gpus, least_per_gpu=least_per_gpu, num=num_candidates, full=True)
    return _choice(*_rated(parameters, noise_scale, limits, instances, gpus, found), found)


def choose_at(
    parameters: Throughput,
    noise_scale: float,
    limits: BatchLimits,
    instances: int,
    gpus: int,
    batch_size: int,
) -> GoodputChoice:
    """What the model says of a batch of `batch_size` samples, taken in as few passes as fit into memory."""
    fixed = _passes(limits, np.asarray([gpus]), np.asarray([batch_size]), 0)
    return _choice(*_rated(parameters, noise_scale, limits, instances, gpus, fixed), fixed)


def choose_many(
    parameters: Throughput,
    noise_scale: Reals,
    limits: BatchLimits,
    instances: Ints,
    gpus: Ints,
    *,
    least_per_gpu: int = 1,
    num_candidates: int = NUM_CANDIDATES,
) -> GoodputChoices:
    """`choose` for many allocations in one go: `instances` and `gpus` of one shape (allocations,), phi that or one.

    Raises ValueError as `choose` does, if any allocation is too large.
    """
    _check(limits, int(np.max(gpus)), least_per_gpu)
    column = np.asarray(gpus)[:, None]
    found = _all_candidates(limits, column, least_per_gpu, num_candidates)
    lost = column[~found.feasible.any(axis=1), 0]
    if len(lost):
        raise _unsplittable(limits, int(lost[0]), least_per_gpu)
    phi = np.asarray(noise_scale)[..., None]
    step, worth, goodput = _rated(parameters, phi, limits, np.asarray(instances)[:, None], column, found)
    rows, at = np.arange(len(column)), _best(found.batch_size, np.where(found.feasible, goodput, -np.inf))
    return GoodputChoices(
        per_gpu=found.per_gpu[rows, at],
        accumulation=found.accumulation[rows, at],
        batch_size=found.batch_size[rows, at],
        step_s=step[rows, at],
        efficiency=worth[rows, at],
        goodput=goodput[rows, at],
    )


def better(current: int, found: GoodputChoice) -> bool:
    """Whether going from a batch of `current` samples to the one found is worth the change: 5 % of it, or more."""
    return abs(found.batch_size - current) >= WORTHWHILE * current


@lru_cache(maxsize=256)
def candidates(
    limits: BatchLimits, gpus: int, *, least_per_gpu: int = 1, num: int = NUM_CANDIDATES, full: bool = False
) -> Candidates:
    """At most `num` batches for K GPUs, evenly spread on a log scale from the smallest to the largest; M increasing.

    `full` adds, for each, the largest one that takes as many passes.

    Raises ValueError as `choose` does.
    """
    _check(limits, gpus, least_per_gpu)
    column = np.asarray([[gpus]])
    found = _all_candidates(limits, column, least_per_gpu, num) if full else _spread(limits, column, least_per_gpu, num)
    if not found.feasible.any():
        raise _unsplittable(limits, gpus, least_per_gpu)
    return found.only_feasible()


def _all_candidates(limits: BatchLimits, gpus: Ints, least: int, num: int) -> Candidates:
    """(allocations, candidates): the spread ones, and those that fill the passes of each."""
    spread = _spread(limits, gpus, least, num)
    if limits.max_per_gpu is None:
        return spread
    fullest = np.minimum(gpus * limits.max_per_gpu * (spread.accumulation + 1), limits.max)
    return _joined(spread, _passes(limits, gpus, np.maximum(fullest, spread.batch_size), least))


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

    A worker may go without samples in one of many passes, but not with less than it needs where it needs more than one.
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


def _joined(one: Candidates, other: Candidates) -> Candidates:
    return Candidates(
        batch_size=np.concatenate([one.batch_size, other.batch_size], axis=-1),
        per_gpu=np.concatenate([one.per_gpu, other.per_gpu], axis=-1),
        accumulation=np.concatenate([one.accumulation, other.accumulation], axis=-1),
        feasible=np.concatenate([one.feasible, other.feasible], axis=-1),
    )


def _rated(
    parameters: Throughput, noise_scale: Reals, limits: BatchLimits, instances: Reals, gpus: Reals, found: Candidates
) -> tuple[Floats, Floats, Floats]:
    """T_iter, EFFICIENCY and GOODPUT of the candidates."""
    step = step_s(parameters, instances, gpus, found.per_gpu, found.accumulation)
    worth = efficiency(noise_scale, limits.initial, found.batch_size)
    return step, worth, np.asarray(found.batch_size / step * worth)


def _best(batch_size: Ints, goodput: Floats) -> Ints:
    """Along the last axis: where goodput is highest, of equals the smallest batch."""
    equal = goodput >= np.max(goodput, axis=-1, keepdims=True) * (1.0 - _TIE)
    return np.asarray(np.argmin(np.where(equal, batch_size, np.iinfo(np.int64).max), axis=-1))


def _choice(step: Floats, worth: Floats, goodput: Floats, found: Candidates) -> GoodputChoice:
    at = int(_best(found.batch_size, goodput))
    return GoodputChoice(
        per_gpu=int(found.per_gpu[at]),
        accumulation=int(found.accumulation[at]),
        batch_size=int(found.batch_size[at]),
        step_s=float(step[at]),
        efficiency=float(worth[at]),
        goodput=float(goodput[at]),
    )


def _check(limits: BatchLimits, gpus: int, least: int) -> None:
    if gpus * least > limits.max:
        raise ValueError(
            f"{gpus} GPUs with at least {least} samples each are more than the largest batch ({limits.max}); raise "
            f"batch.max to {gpus * least}, or use at most {limits.max // least} GPUs"
        )
    if limits.max_per_gpu is not None and limits.max_per_gpu < least:
        raise ValueError(
            f"batch.max_per_gpu={limits.max_per_gpu} is less than the {least} samples that a GPU needs at once (two "
            f"for BatchNorm); raise it to {least}"
        )


def _unsplittable(limits: BatchLimits, gpus: int, least: int) -> ValueError:
    return ValueError(
        f"no batch of {limits.initial} to {limits.max} samples can be split on {gpus} GPUs into passes of {least} to "
        f"{limits.max_per_gpu} samples each; set batch.initial to a multiple of {gpus * least}"
    )
