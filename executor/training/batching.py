"""How large the batches of a trial are, step by step: the seam between the training loop and what adapts them.

`FixedBatching` keeps one size; `adaptation.AdaptiveBatching` chooses it by goodput.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from rubberband.executor.training.sampler import GlobalBatch, GlobalBatchSampler
from rubberband.executor.training.segment import BatchReport


class Batching(Protocol):
    """Decides the batches of one worker; every worker of a gang comes to the same decisions, at the same steps."""

    @property
    def batch_size(self) -> int:
        """M: samples of the next optimizer step, over the gang."""
        ...

    @property
    def per_gpu(self) -> int:
        """m: the most samples that go through the model at once."""
        ...

    def begin(self, iterations: int) -> None:
        """The iteration begins after which `iterations` are done."""
        ...

    def is_over(self) -> bool:
        """Whether the iteration is over."""
        ...

    def wants_halves(self, share: int) -> bool:
        """Whether this worker's `share` of the next step, which goes through the model at once, should go in two."""
        ...

    def before_step(self, batch: GlobalBatch, parts: Sequence[int]) -> None:
        """The step begins; `parts` are the sizes of this worker's micro-batches."""
        ...

    def after_part(self) -> None:
        """The gradient of a micro-batch is there."""
        ...

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the optimizer use the gradient, which is the whole gang's."""
        ...

    def after_step(self, batch: GlobalBatch) -> int:
        """The step is over; by how many batches the LR schedule goes on, if it goes by batches."""
        ...

    def end(self) -> BatchReport:
        """The iteration is over; what is to be told of it."""
        ...

    def state(self) -> dict[str, Any] | None:
        """What `restore` needs, as plain values; None if there is nothing."""
        ...

    def restore(self, state: dict[str, Any] | None) -> None:
        """Go on from what `state` gave, on any number of workers."""
        ...

    def close(self) -> None:
        """Let go of model and optimizer."""
        ...


class FixedBatching:
    """The same size for every step and every gang; an iteration is a number of samples."""

    def __init__(self, sampler: GlobalBatchSampler, batch_size: int, per_gpu: int, samples_per_iteration: int) -> None:
        self._sampler = sampler
        self._samples_per_iteration = samples_per_iteration
        self._until_samples = 0
        self.batch_size = batch_size
        self.per_gpu = per_gpu

    def begin(self, iterations: int) -> None:
        """An iteration ends with the batch that reaches its samples."""
        self._until_samples = iterations * self._samples_per_iteration

    def is_over(self) -> bool:
        """By samples since the first epoch began."""
        return self._sampler.samples_done >= self._until_samples

    def wants_halves(self, share: int) -> bool:
        """Never."""
        return False

    def before_step(self, batch: GlobalBatch, parts: Sequence[int]) -> None:
        """Nothing."""

    def after_part(self) -> None:
        """Nothing."""

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """As it is."""
        optimizer.step()

    def after_step(self, batch: GlobalBatch) -> int:
        """One batch is one batch."""
        return 1

    def end(self) -> BatchReport:
        """Nothing to tell."""
        return BatchReport()

    def state(self) -> dict[str, Any] | None:
        """The sampler has it all."""
        return None

    def restore(self, state: dict[str, Any] | None) -> None:
        """The sampler has it all."""

    def close(self) -> None:
        """Nothing."""
