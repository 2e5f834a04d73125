"""Batches: from positions in a dataset to tensors on the device, and how large they are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from rubberband.executor.training.sampler import GlobalBatch, GlobalBatchSampler, Indices
from rubberband.executor.training.segment import BatchReport

Collate = Callable[[list[Any]], Any]


def fetch(dataset: Dataset[Any], indices: Indices, collate: Collate | None) -> Any:
    """Return the samples at `indices` as one batch; `collate` None means torch's default.

    A TensorDataset (or a Subset of one) is indexed at once, which gives the same as `default_collate`. A dataset with
    `__getitems__` is called once, any other one sample by sample.
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
    """Move every tensor in the lists, tuples and mappings of a batch to `device`."""
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
    """Return the number of samples in a map-style dataset.

    Raises TypeError for a dataset without length or positions, ValueError for an empty one.
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise TypeError(f"{what} returned {type(dataset).__name__}, which is not a map-style dataset (len and [i])")
    if len(dataset) < 1:
        raise ValueError(f"{what} returned an empty dataset")
    return len(dataset)


class EvalLoader:
    """The evaluation set in order, as batches on the device; it can be iterated any number of times."""

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


class Batching(ABC):
    """Decides how large a worker's batches are, step by step; by default nothing is adapted.

    Every worker of a gang comes to the same decisions, at the same steps.
    """

    batch_size: int
    """M: samples of the next optimizer step, over the gang."""
    per_gpu: int
    """m: the most samples that go through the model at once."""

    @abstractmethod
    def begin(self, iterations: int) -> None:
        """Begin the iteration after which `iterations` are done."""

    @abstractmethod
    def is_over(self) -> bool:
        """Whether the iteration is over."""

    def wants_halves(self, share: int) -> bool:
        """Whether this worker's `share` of the next step, which goes through the model at once, should go in two."""
        return False

    def before_step(self, batch: GlobalBatch, parts: Sequence[int]) -> None:  # noqa: B027 - optional hook
        """Note that a step begins; `parts` are the sizes of this worker's micro-batches."""

    def after_part(self) -> None:  # noqa: B027 - optional hook
        """Note that the gradient of a micro-batch is computed."""

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the optimizer use the gradient of the whole gang."""
        optimizer.step()

    def after_step(self, batch: GlobalBatch) -> int:
        """Note that the step is over; return by how many batches an LR schedule that counts batches advances."""
        return 1

    def end(self) -> BatchReport:
        """End the iteration; return what to report of its batches."""
        return BatchReport()

    def state(self) -> dict[str, Any] | None:
        """Return plain values for `restore`; None if there are none."""
        return None

    def restore(self, state: dict[str, Any] | None) -> None:  # noqa: B027 - optional hook
        """Continue from the `state`, on any number of workers."""

    def close(self) -> None:  # noqa: B027 - optional hook
        """Drop model and optimizer."""


@dataclass(eq=False)
class FixedBatching(Batching):
    """The same size for every step and every gang; an iteration is a number of samples."""

    sampler: GlobalBatchSampler
    batch_size: int
    per_gpu: int
    samples_per_iteration: int
    _until_samples: int = field(default=0, init=False)

    def begin(self, iterations: int) -> None:
        self._until_samples = iterations * self.samples_per_iteration

    def is_over(self) -> bool:
        return self.sampler.samples_done >= self._until_samples
