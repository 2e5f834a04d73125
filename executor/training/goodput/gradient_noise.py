"""Observes the gradients of optimizer steps and measures the gradient noise scale from them (Pollux §3.1).

Every few steps squared norms of gradients are taken, and stay on the device until a reading:

* several workers: of every worker's own gradient, while DDP averages them;
* one worker with several micro-batches: of their two halves;
* one worker with one micro-batch: it is asked to split the batch in halves when an estimate is due. Pollux takes two
  consecutive steps instead (§3.1). That is only done for batches too small to be divided, since it is far off in
  training (see `noise_scale`). Batches of different sizes make no pair, nor does the first step after a restore.

`noise_scale` does averages, windows and credibility.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from rubberband.executor.training.failures import is_out_of_memory
from rubberband.executor.training.goodput.noise_scale import (
    Estimator,
    NoiseEstimate,
    NoiseReading,
    NoiseScale,
    Preconditioner,
    Preconditioning,
    moments,
)

EVERY = 2
"""Steps from one estimate to the next."""
MOST_PENDING = 256
"""The most estimates that are kept on the device."""
LEAST_HALF = 2
"""Samples; a batch is not divided into smaller halves."""
_PIECE = 1 << 18
"""CPUs add squares one by one; single precision suffices for this many."""


class GradientNoise:
    """Measures phi in a training loop; all workers of a gang call it in the same order.

    Only `reading` waits for the device and the other workers (and `before_update`, after `MOST_PENDING` estimates
    without a reading). `close` must be called in the end.
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
        gradient_scale: Callable[[], Tensor | None] = lambda: None,
    ) -> None:
        """`total` sums a tensor over the workers in place; `wrapped` is a DDP if and only if there are several.

        An estimate is made `every` few steps. `initial_batch` is M0. Gradients come multiplied by `gradient_scale()`.
        """
        if every < 2:
            raise ValueError(f"every={every}: an estimate may take two steps; use 2 or more")
        self._rank, self._num_workers, self._initial_batch = rank, num_workers, initial_batch
        self._total, self._every = total, every
        self._scale = NoiseScale()
        self._preconditioner = Preconditioner(optimizer, gradient_scale)
        self._device = next(parameter.device for group in optimizer.param_groups for parameter in group["params"])
        self._step: _Step | None = None
        self._pair: _Step | None = None
        self._since = every
        self.halves_every = every
        """Steps between estimates that need a batch in halves, which costs another pass; at least `every`."""
        self._divides = False
        self._since_at_initial = 0.0
        self._pending: list[_Pending] = []
        self._missing = torch.full((), math.nan if rank == 0 else 0.0, dtype=torch.float64, device=self._device)
        self._local = _LocalSquares(wrapped)

    @property
    def held_vectors(self) -> int:
        """Vectors as long as the gradient that an estimate holds while a pass begins: P, and an earlier gradient."""
        return int(self._preconditioner.kind != "identity") + int(self._num_workers == 1)

    def wants_halves(self, share: int, steps_ahead: int = 0) -> bool:
        """Whether a worker that has the whole batch of `share` samples should split it in halves.

        That is asked of the next step, or of one that is `steps_ahead` of it.
        """
        divides = self._num_workers == 1 and share >= 2 * LEAST_HALF
        if steps_ahead == 0:
            self._divides = divides
        since_due = steps_ahead - max(0, self.halves_every - 1 - self._since)
        is_due = since_due >= 0 and since_due % self.halves_every == 0
        return divides and is_due and self._preconditioner.now() is not None

    def before_step(self, shares: Sequence[int], parts: Sequence[int]) -> None:
        """Prepare for gradients of m_i = `shares[i]` samples per worker; this worker's come in `parts` of samples."""
        batch_size = sum(shares)
        self._since += 1
        self._since_at_initial += batch_size / self._initial_batch
        kind = self._estimator(shares, parts)
        first, self._pair, self._step = self._pair, None, None
        if self._divides and kind == "differenced":
            return
        if first is not None and (kind, batch_size) == (first.kind, first.batch_size):
            preconditioning: Preconditioning | None = first.preconditioning
        else:
            first = None
            preconditioning = self._preconditioner.now() if self._since >= self._every else None
        if preconditioning is not None:
            self._since = 0 if first is None else self._since
            self._step = _Step(kind, batch_size, tuple(shares), tuple(parts), preconditioning, first)
            if kind == "workers" and len(parts) <= 1:
                self._local.begin(preconditioning)

    def _estimator(self, shares: Sequence[int], parts: Sequence[int]) -> Estimator:
        if sum(share > 0 for share in shares) > 1:
            return "workers"
        # In a gang, the others do not know how many parts the only worker with samples has.
        return "accumulation" if self._num_workers == 1 and len(parts) > 1 else "differenced"

    def weigh(self, fractions: Sequence[float | Tensor]) -> None:
        """Note what this worker's parts count, as shares w_i / W of the whole batch, in place of m_i / M.

        The variance of a part's gradient is then taken to be proportional to 1 / w_i. phi stays in samples: W / M
        cancels.
        """
        if self._step is not None:
            self._step.fractions = fractions

    def after_part(self) -> None:
        """Observe the gradient so far, after the backward pass of a micro-batch."""
        step = self._step
        if step is None:
            return
        step.num_seen += 1
        if step.kind == "accumulation" and step.num_seen == step.num_first:
            step.vector = _gradient(step.preconditioning)
        elif step.kind == "workers" and step.num_seen == len(step.parts) - 1:
            self._local.begin(step.preconditioning)

    def before_update(self) -> None:
        """Observe the gradient that the optimizer gets, averaged over the workers."""
        step, self._step = self._step, None
        if step is None:
            return
        gradient = _gradient(step.preconditioning) if self._rank == 0 else None
        if step.kind == "workers":
            share, workers = step.shares[self._rank], sum(share > 0 for share in step.shares)
            square = self._local.end()
            # DDP averages n m_i / M times the mean gradient of this worker.
            if not share:
                square = torch.zeros_like(self._missing)
            mine = None if square is None else square / (self._num_workers**2 * (step.fraction(share) if share else 1))
            self._note(step, workers, step.batch_size, mine, gradient)
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
        """Keep A, of all workers together, and rank 0's B; a missing value is NaN."""
        missing = self._missing
        self._pending.append(
            _Pending(
                estimate=partial(
                    NoiseEstimate,
                    kind=step.kind,
                    preconditioner=self._preconditioner.kind,
                    steps=self._since_at_initial,
                ),
                num_parts=num_parts,
                batch_size=batch_size,
                values=(
                    missing if mean_square is None else mean_square,
                    missing if gradient is None else _square(gradient),
                ),
            )
        )
        self._since_at_initial = 0.0
        if len(self._pending) >= MOST_PENDING:
            self._take_in()

    def _take_in(self) -> None:
        if not self._pending:
            return
        values = torch.stack([value for pending in self._pending for value in pending.values])
        rows = self._total(values).reshape(-1, 2).tolist()
        for pending, row in zip(self._pending, rows, strict=True):
            trace, squared_norm = moments(*row, num_parts=pending.num_parts, batch_size=pending.batch_size)
            self._scale.add(pending.estimate(trace=trace, squared_norm=squared_norm))
        self._pending.clear()

    def reading(self) -> NoiseReading:
        """Return phi so far, the same on all ranks. It waits for the device, and all workers must call it."""
        self._take_in()
        return self._scale.reading()

    def state_dict(self) -> dict[str, Any]:
        """Return plain values, without the estimates since the last reading."""
        return self._scale.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`, on any workers, without a pair across it."""
        self._scale.load_state_dict(state)
        self._step = self._pair = None
        self._pending.clear()

    def close(self) -> None:
        """Drop model and optimizer."""
        self._step = self._pair = None
        self._local.close()
        del self._preconditioner


@dataclass(slots=True)
class _Step:
    """A step whose gradients are observed."""

    kind: Estimator
    batch_size: int
    shares: tuple[int, ...]
    parts: tuple[int, ...]
    preconditioning: Preconditioning
    first: _Step | None
    """The step before, if the two make a pair."""
    num_seen: int = 0
    fractions: Sequence[float | Tensor] | None = None
    """w_i / W of this worker's parts, if they count otherwise than by their samples."""
    vector: Tensor | None = None
    """The gradient of the first of a pair, or the first half's contribution to this step's."""

    @property
    def num_first(self) -> int:
        return len(self.parts) // 2

    def mean_square_of_halves(self, gradient: Tensor | None) -> Tensor | None:
        """Return A of the two halves; None if they are not of the same parameters."""
        half = self.vector
        if half is None or gradient is None or half.shape != gradient.shape:
            return None
        # They are sums over their samples divided by M, so that (m_i / M) |g_i|^2 = (M / m_i) |half|^2.
        size = sum(self.parts[: self.num_first])
        first = self.fraction(size, self.num_first)
        return _square(half) / first + _square(half.sub_(gradient)) / (1.0 - first)

    def fraction(self, size: int, num_parts: int | None = None) -> float | Tensor:
        """Return m / M of this worker's first `num_parts` parts with `size` samples, or what they count instead."""
        return size / self.batch_size if self.fractions is None else sum(self.fractions[:num_parts])

    def pair_with(self, latest: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Return A and the mean of this step's and the next gradient; None if they are of different parameters."""
        gradient = self.vector
        if gradient is None or latest is None or gradient.shape != latest.shape:
            return None, None
        mean_square = 0.5 * (_square(gradient) + _square(latest))
        return mean_square, gradient.add_(latest).mul_(0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pending:
    """An estimate that is still on the device."""

    estimate: Callable[..., NoiseEstimate]
    """Makes it of trace and squared norm."""
    num_parts: int
    batch_size: int
    values: tuple[Tensor, Tensor]
    """A and B: this worker's part of A, and rank 0's B."""


class _LocalSquares:
    """|P g|^2 of this worker's own gradient, before DDP replaces it with the average.

    After the first gradient of a backward pass, a callback is queued for the end of the pass. DDP's own one, which
    writes the averages, can only be queued later. DDP's buckets are not delayed. If gradients are views of the buckets,
    each parameter's gradient is observed as soon as it is computed.
    """

    def __init__(self, wrapped: nn.Module) -> None:
        is_ddp = isinstance(wrapped, DistributedDataParallel)
        self._are_views = is_ddp and wrapped.gradient_as_bucket_view
        self._all_have_gradients = is_ddp and not (wrapped.find_unused_parameters or wrapped.static_graph)
        self._preconditioning: Preconditioning | None = None
        self._handles: list[RemovableHandle] = []
        self._squares: list[Tensor] = []

    def begin(self, preconditioning: Preconditioning) -> None:
        """Observe the next backward pass."""
        self._preconditioning = preconditioning
        parameters = list(preconditioning.parameters)
        if self._are_views:
            self._watch(parameters, lambda each: self._measure([each]))
        else:
            self._watch(parameters[-1:] if self._all_have_gradients else parameters, self._queue)

    def _watch(self, parameters: list[Tensor], hook: Callable[[Tensor], None]) -> None:
        for parameter in parameters:
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def _queue(self, _: Tensor) -> None:
        self._remove_hooks()
        Variable._execution_engine.queue_callback(self._measure)

    def _measure(self, parameters: list[Tensor] | None = None) -> None:
        assert self._preconditioning is not None
        parameters = list(self._preconditioning.parameters) if parameters is None else parameters
        try:
            vector = self._preconditioning.apply(parameters, [parameter.grad for parameter in parameters])
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            # An error in the callback would keep DDP from the end of its pass.
            self._squares.append(torch.full((), math.nan, dtype=torch.float64, device=parameters[0].device))
            return
        if vector is not None:
            self._squares.append(_square(vector))

    def end(self) -> Tensor | None:
        """Return the sum of the squares; None without any."""
        squares = self._squares
        self.close()
        return torch.stack(squares).sum() if squares else None

    def close(self) -> None:
        self._remove_hooks()
        self._squares, self._preconditioning = [], None

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _gradient(preconditioning: Preconditioning) -> Tensor | None:
    """Return P g; None if no parameter takes part, or for want of memory: the estimate is then left out."""
    parameters = list(preconditioning.parameters)
    try:
        return preconditioning.apply(parameters, [parameter.grad for parameter in parameters])
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None


def _square(vector: Tensor) -> Tensor:
    """Return |v|^2 in double precision, on its device."""
    if vector.device.type != "cpu" or len(vector) <= _PIECE:
        norm: Tensor = torch.linalg.vector_norm(vector)
        return norm.double().square()
    norms = torch._foreach_norm(list(torch.split(vector, _PIECE)))
    return torch.stack(norms).double().square().sum()
