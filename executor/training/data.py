"""From positions in a dataset to a batch on the device, a whole batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from rubberband.executor.training.sampler import GlobalBatch, GlobalBatchSampler, Indices
from rubberband.executor.training.segment import BatchReport

Collate = Callable[[list[Any]], Any]


def fetch(dataset: Dataset[Any], indices: Indices, collate: Collate | None) -> Any:
    """The samples at `indices` as one batch; `collate` None means torch's default.

    A TensorDataset (or a Subset of one) is indexed at once, which gives what `default_collate` would; a dataset with
    `__getitems__` is asked once; any other sample by sample.
    """
    if collate is None:
        if isinstance(dataset, Subset):
            return fetch(dataset.dataset, np.asarray(dataset.indices)[indices], None)
        if isinstance(dataset, TensorDataset):
            positions = torch.from_numpy(indices)
            return [tensor[positions] for tensor in dataset.tensors]
    positions = indices.tolist()
    if hasattr(dataset, "__getitems__"):
        samples = dataset.__getitems__(positions)
    else:
        samples = [dataset[position] for position in positions]
    return (collate or torch.utils.data.default_collate)(samples)


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor in its lists, tuples and mappings on `device`."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {name: to_device(value, device) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


def num_samples(dataset: Dataset[Any], what: str) -> int:
    """Samples in a map-style dataset.

    Raises TypeError for a dataset without length or positions, ValueError for an empty one.
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise TypeError(f"{what} returned {type(dataset).__name__}, which is not a map-style dataset (len and [i])")
    if len(dataset) < 1:
        raise ValueError(f"{what} returned an empty dataset")
    return len(dataset)


class EvalLoader:
    """The evaluation set in order, as batches on the device; it can be walked any number of times."""

    def __init__(
        self, dataset: Dataset[Any], *, batch_size: int, device: torch.device, collate: Collate | None
    ) -> None:
        self.dataset = dataset
        self._parts = [
            np.arange(start, min(start + batch_size, total))
            for total in [num_samples(dataset, "eval_dataset()")]
            for start in range(0, total, batch_size)
        ]
        self._device = device
        self._collate = collate

    @property
    def sizes(self) -> list[int]:
        """Samples in each batch."""
        return [len(part) for part in self._parts]

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[Any]:
        return (to_device(fetch(self.dataset, part, self._collate), self._device) for part in self._parts)


# How large the batches of a trial are, step by step: the seam between the training loop and what adapts them.
#
# `FixedBatching` keeps one size; `adaptation.AdaptiveBatching` chooses it by goodput.


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
