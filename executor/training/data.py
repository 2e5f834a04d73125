"""From positions in a dataset to a batch on the device, a whole batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from rubberband.executor.training.sampler import Indices

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
