"""Observes the gradients of optimizer steps and measures the gradient noise scale from them (Pollux §3.1).

Every few steps squared norms are taken of what is there anyway, and stay on the device until a reading is asked for:

* several workers: of every worker's own gradient in DDP's flat buckets, before they are averaged;
* one worker with several micro-batches: of the two halves that they fall into;
* one worker with one micro-batch: of two steps of the same batch size that follow each other. Batches of different
  sizes make no pair, nor does the first step after a restore.

Averages, windows and credibility are the business of `noise_scale`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from rubberband.executor.training.noise_scale import Estimator, NoiseEstimate, NoiseReading, NoiseScale, moments
from rubberband.executor.training.preconditioner import Preconditioner, Preconditioning

__all__ = ["GradientNoise", "NoiseReading"]

EVERY = 4
"""Estimates are that many steps apart."""
MOST_PENDING = 256
"""So many estimates are kept on the device at most."""
_MEMORY = 0.2
"""The part of the latest gradient in the average of earlier ones."""
_PIECE = 1 << 18
"""CPUs add up squares one after another; single precision does for so many at once."""


class GradientNoise:
    """Measures phi in a training loop; all workers of a gang call it in the same order.

    Only `reading` waits for the device and for the other workers (and `before_update`, where none was asked for in
    1,000 steps). `close` must be called in the end.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        wrapped: nn.Module,
        *,
        rank: int,
        num_workers: int,
        initial_batch: int,
        total: Callable[[Tensor], Tensor],
        every: int = EVERY,
    ) -> None:
        """`total` sums a tensor over the workers in place; `wrapped` is a DDP exactly where there are several.

        An estimate is made every so many steps. `initial_batch` is M0.
        """
        if every < 2:
            raise ValueError(f"every={every}: an estimate may take two steps; use 2 or more")
        self._rank, self._num_workers, self._initial_batch = rank, num_workers, initial_batch
        self._total, self._every = total, every
        self._scale = NoiseScale()
        self._preconditioner = Preconditioner(optimizer)
        self._device = optimizer.param_groups[0]["params"][0].device
        self._trail = _Trail()
        self._step: _Step | None = None
        self._pair: _Step | None = None
        self._since = every
        self._since_at_initial = 0.0
        self._pending: list[_Pending] = []
        self._local = _LocalSquares()
        if isinstance(wrapped, DistributedDataParallel):
            # The hook must not lead to the module: through DDP's reducer that is a circle which nothing collects.
            wrapped.register_comm_hook(self._local, _measure_and_average)

    def before_step(self, shares: Sequence[int], parts: Sequence[int]) -> None:
        """Prepare for gradients of m_i = `shares[i]` samples per worker; this worker's come in `parts` of samples."""
        batch_size = sum(shares)
        self._since += 1
        self._since_at_initial += batch_size / self._initial_batch
        kind = self._estimator(shares, parts)
        first, self._pair = self._pair, None
        if first is not None and (kind, batch_size) == (first.kind, first.batch_size):
            preconditioning: Preconditioning | None = first.preconditioning
        else:
            first = None
            preconditioning = self._preconditioner.now() if self._since >= self._every else None
        self._step = None
        if preconditioning is not None:
            self._since = 0 if first is None else self._since
            self._step = _Step(kind, batch_size, tuple(shares), tuple(parts), preconditioning, first)
            if kind == "workers":
                self._local.begin(preconditioning)

    def _estimator(self, shares: Sequence[int], parts: Sequence[int]) -> Estimator:
        if sum(share > 0 for share in shares) > 1:
            return "workers"
        # In a gang the others cannot know how many parts the only worker with samples has.
        return "accumulation" if self._num_workers == 1 and len(parts) > 1 else "differenced"

    def after_part(self) -> None:
        """Look at the gradient so far, after the backward pass of a micro-batch."""
        step = self._step
        if step is not None and step.kind == "accumulation":
            step.num_seen += 1
            if step.num_seen == step.num_first:
                step.vector = _gradient(step.preconditioning)

    def before_update(self) -> None:
        """Look at the gradient as the optimizer gets it, averaged over the workers."""
        step, self._step = self._step, None
        if step is None:
            return
        gradient = _gradient(step.preconditioning) if self._rank == 0 else None
        if step.kind == "workers":
            share, workers = step.shares[self._rank], sum(share > 0 for share in step.shares)
            # DDP gets n m_i / M times the mean gradient of this worker.
            factor = step.batch_size / (self._num_workers**2 * share) if share else 0.0
            self._note(step, workers, step.batch_size, self._local.end() * factor, gradient)
        elif step.kind == "accumulation":
            self._note(step, 2, step.batch_size, step.mean_square_of_halves(gradient), gradient)
        elif step.first is None:
            step.vector = gradient
            self._pair = step
        else:
            mean_square, mean = step.first.pair_with(gradient)
            self._note(step, 2, 2 * step.batch_size, mean_square, mean)

    def _note(
        self, step: _Step, num_parts: int, batch_size: int, mean_square: Tensor | None, gradient: Tensor | None
    ) -> None:
        """Keep A, of all workers together, and rank 0's B and g . h; what is missing is not a number."""
        missing = torch.full((), math.nan if self._rank == 0 else 0.0, dtype=torch.float64, device=self._device)
        values = torch.stack(
            [
                missing if mean_square is None else mean_square.to(self._device),
                missing if gradient is None else _square(gradient),
                missing if gradient is None else self._trail.product(gradient, missing),
            ]
        )
        self._pending.append(
            _Pending(
                kind=step.kind,
                num_parts=num_parts,
                batch_size=batch_size,
                steps=self._since_at_initial,
                preconditioner=self._preconditioner.kind,
                values=values,
            )
        )
        self._since_at_initial = 0.0
        if len(self._pending) >= MOST_PENDING:
            self._take_in()

    def _take_in(self) -> None:
        if not self._pending:
            return
        rows = self._total(torch.stack([pending.values for pending in self._pending])).tolist()
        for pending, row in zip(self._pending, rows, strict=True):
            self._scale.add(pending.estimate(*row))
        self._pending.clear()

    def reading(self) -> NoiseReading:
        """phi as known so far, the same on all ranks; waits for the device, and all workers must call it."""
        self._take_in()
        return self._scale.reading()

    def state_dict(self) -> dict[str, Any]:
        """Plain values; estimates since the last reading are not in them."""
        return self._scale.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave, on whatever workers; no pair reaches across."""
        self._scale.load_state_dict(state)
        self._step = self._pair = None
        self._trail = _Trail()
        self._pending.clear()

    def close(self) -> None:
        """Let go of model and optimizer; DDP's hook stays, and only averages."""
        self._step = self._pair = None
        self._local.close()
        del self._preconditioner


@dataclass(slots=True)
class _Step:
    """A step whose gradients are looked at."""

    kind: Estimator
    batch_size: int
    shares: tuple[int, ...]
    parts: tuple[int, ...]
    preconditioning: Preconditioning
    first: _Step | None
    """The step before, where the two make a pair."""
    num_seen: int = 0
    vector: Tensor | None = None
    """The gradient of the first of a pair, or the first half's contribution to that of this step."""

    @property
    def num_first(self) -> int:
        """Parts in the first half."""
        return len(self.parts) // 2

    def mean_square_of_halves(self, gradient: Tensor | None) -> Tensor | None:
        """A of the two halves; None where they are not of the same parameters."""
        half = self.vector
        if half is None or gradient is None or half.shape != gradient.shape:
            return None
        # They come as sums over their samples divided by M, so that (m_i / M) |g_i|^2 = (M / m_i) |half|^2.
        size = sum(self.parts[: self.num_first])
        first = _square(half) * (self.batch_size / size)
        return first + _square(half.sub_(gradient)) * (self.batch_size / (self.batch_size - size))

    def pair_with(self, latest: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """A and the mean of this step's gradient and that of the next; None where they are of different parameters."""
        gradient = self.vector
        if gradient is None or latest is None or gradient.shape != latest.shape:
            return None, None
        mean_square = 0.5 * (_square(gradient) + _square(latest))
        return mean_square, gradient.add_(latest).mul_(0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pending:
    """An estimate that is still on the device."""

    kind: Estimator
    num_parts: int
    batch_size: int
    steps: float
    preconditioner: str
    values: Tensor
    """A, B and g . h; the first is this worker's part, the others are rank 0's alone."""

    def estimate(self, mean_square: float, square_of_mean: float, cross: float) -> NoiseEstimate:
        trace, squared_norm = moments(mean_square, square_of_mean, num_parts=self.num_parts, batch_size=self.batch_size)
        return NoiseEstimate(
            kind=self.kind,
            preconditioner=self.preconditioner,
            steps=self.steps,
            trace=trace,
            squared_norm=squared_norm,
            cross=None if math.isnan(cross) else cross,
        )


@dataclass(slots=True)
class _Trail:
    """h, the mean of the gradients of some earlier estimates."""

    mean: Tensor | None = None
    num_added: int = 0

    def product(self, gradient: Tensor, missing: Tensor) -> Tensor:
        """g . h, or `missing` where there is no h; `gradient` becomes a part of it afterwards, and may become it."""
        if self.mean is None or self.mean.shape != gradient.shape:
            self.mean, self.num_added = gradient, 1
            return missing
        product = _dot(gradient, self.mean)
        self.num_added += 1
        self.mean.lerp_(gradient, max(_MEMORY, 1.0 / self.num_added))
        return product


class _LocalSquares:
    """What DDP's hook adds up in steps that are looked at: |P b|^2 over the buckets b of this worker's gradient."""

    def __init__(self) -> None:
        self._preconditioning: Preconditioning | None = None
        self._squares: list[Tensor] = []

    def begin(self, preconditioning: Preconditioning) -> None:
        self._preconditioning = preconditioning
        self._squares.clear()

    def add(self, bucket: GradBucket) -> None:
        if self._preconditioning is not None:
            vector = self._preconditioning.apply(bucket.parameters(), bucket.gradients())
            if vector is not None:
                self._squares.append(_square(vector))

    def end(self) -> Tensor:
        """The sum."""
        squares, self._squares, self._preconditioning = self._squares, [], None
        return torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)

    def close(self) -> None:
        self._squares, self._preconditioning = [], None


def _measure_and_average(local: _LocalSquares, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    local.add(bucket)
    average: torch.futures.Future[Tensor] = allreduce_hook(None, bucket)  # type: ignore[arg-type]
    return average


# DDP compares annotations with the classes themselves, and refuses their names.
_measure_and_average.__annotations__.update({"bucket": GradBucket, "return": torch.futures.Future[Tensor]})


def _gradient(preconditioning: Preconditioning) -> Tensor | None:
    parameters = list(preconditioning.parameters)
    return preconditioning.apply(parameters, [parameter.grad for parameter in parameters])


def _square(vector: Tensor) -> Tensor:
    """|v|^2 in double precision, on its device."""
    if vector.device.type != "cpu" or len(vector) <= _PIECE:
        norm: Tensor = torch.linalg.vector_norm(vector)
        return norm.double().square()
    norms = torch._foreach_norm(list(torch.split(vector, _PIECE)))
    return torch.stack(norms).double().square().sum()


def _dot(left: Tensor, right: Tensor) -> Tensor:
    if left.device.type != "cpu" or len(left) <= _PIECE:
        return torch.dot(left, right).double()
    pieces = zip(torch.split(left, _PIECE), torch.split(right, _PIECE), strict=True)
    return torch.stack([torch.dot(mine, other) for mine, other in pieces]).double().sum()
