"""Data: from positions in a dataset to a batch on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from rubberband.executor.training.sampler import Indices

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


class Feed:
    """The training set of one worker: batches on its device, by position."""

    def __init__(self, dataset: Dataset[Any], *, device: torch.device, collate: Collate | None) -> None:
        self.num_samples = num_samples(dataset, "train_dataset()")
        self._dataset = dataset
        self._device = device
        self._collate = collate

    def load(self, indices: Indices) -> Any:
        """Return the samples at `indices` as one batch on the device."""
        return to_device(fetch(self._dataset, indices, self._collate), self._device)
