"""Data: from positions in a dataset to a batch on the device."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from rubberband.executor.training.loading import LoaderSettings, LoaderWorkers, Part
from rubberband.executor.training.moving import to_device
from rubberband.executor.training.sampler import GlobalBatch, Indices, sample_keys

Collate = Callable[[list[Any]], Any]


class Samples:
    """A dataset by position, as batches; `collate` None means torch's default.

    Subsets are opened. A TensorDataset below is indexed at once, which gives the same as `default_collate`. A dataset
    with `__getitems__` is called once for a batch, any other one sample by sample.
    """

    def __init__(self, dataset: Dataset[Any], collate: Collate | None) -> None:
        self._positions: Indices | None = None
        while type(dataset) is Subset:  # a subclass may change its samples
            positions = np.asarray(dataset.indices, dtype=np.int64)
            self._positions = positions if self._positions is None else positions[self._positions]
            dataset = dataset.dataset
        self.dataset: Any = dataset
        self._collate = collate
        is_tensors = isinstance(dataset, TensorDataset) and type(dataset).__getitem__ is TensorDataset.__getitem__
        self.in_memory = is_tensors and collate is None
        """Whether a batch is some tensors' rows: nothing is drawn at random, and no loader worker is faster."""

    def batch(self, indices: Indices, keys: Sequence[int] | None = None) -> Any:
        """Return the samples at `indices` as one batch.

        With `keys`, one for each, random draws follow from the sample's key alone (`__getitems__`: the first one's),
        and the global random states are left anywhere.
        """
        where = indices if self._positions is None else self._positions[indices]
        if self.in_memory:
            rows = torch.from_numpy(where)
            return [tensor[rows] for tensor in self.dataset.tensors]
        positions = where.tolist()
        if callable(getattr(self.dataset, "__getitems__", None)):
            if keys:
                seed_for(keys[0])
            samples = self.dataset.__getitems__(positions)
        else:
            samples = []
            for place, position in enumerate(positions):
                if keys is not None:
                    seed_for(keys[place])
                samples.append(self._one(position))
        return (self._collate or torch.utils.data.default_collate)(samples)

    def _one(self, position: int) -> Any:
        try:
            return self.dataset[position]
        except Exception as error:
            error.add_note(f"while loading sample {position} of {type(self.dataset).__name__}")
            raise


def seed_for(key: int) -> None:
    """Set the random states of the CPU for one sample; about 10 us, so a GPU's are left alone."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key >> 1)


@contextmanager
def kept_random_states() -> Iterator[None]:
    """Restore the random states of the CPU after the block."""
    states = random.getstate(), np.random.get_state(legacy=False), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])


def fetch(dataset: Dataset[Any], indices: Indices, collate: Collate | None) -> Any:
    """Return the samples at `indices` as one batch; see `Samples`."""
    return Samples(dataset, collate).batch(indices)


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
    """The training set of one worker: batches on its device, by position.

    Where loader workers are wanted, they load what `expect` and `ahead` say that comes next; `load` takes it from them,
    and loads by itself what they were not asked for. A sample is the same in both ways: its random draws follow from
    the trial's seed, the epoch and its position.
    """

    ahead: Callable[[], Iterator[Part]]
    """Gives the parts of the batches after the present one, without end, if nothing changes."""

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        device: torch.device,
        collate: Collate | None,
        seed: int,
        settings: LoaderSettings | None = None,
    ) -> None:
        """Without `settings`, everything is loaded in this process."""
        self.num_samples = num_samples(dataset, "train_dataset()")
        self._samples = Samples(dataset, collate)
        self._device = device
        self._seed = seed
        self._epoch = 0
        self._workers: LoaderWorkers | None = None
        if settings is not None and (count := settings.count(in_memory=self._samples.in_memory)) > 0:
            pin = device.type == "cuda"
            self._workers = LoaderWorkers(self._prepared, dataset, settings, num_workers=count, pin=pin)

    def expect(self, batch: GlobalBatch, parts: Sequence[Indices]) -> None:
        """Note that `parts` of this batch are loaded next, in this order."""
        self._epoch = batch.epoch
        if self._workers is not None:
            self._workers.expect([Part(indices=part, epoch=batch.epoch) for part in parts], self.ahead)

    def load(self, indices: Indices) -> Any:
        """Return the samples at `indices`, in the epoch of the present batch, as one batch on the device."""
        part = Part(indices=indices, epoch=self._epoch)
        if self._workers is not None and self._workers.has(part):
            return to_device(self._workers.take(), self._device)
        if self._samples.in_memory:
            return to_device(self._samples.batch(indices), self._device)
        with kept_random_states():
            return to_device(self._prepared(part), self._device)

    def close(self) -> None:
        """End the loader workers."""
        if self._workers is not None:
            self._workers.close()

    def _prepared(self, part: Part) -> Any:
        return self._samples.batch(part.indices, sample_keys(self._seed, part.epoch, part.indices))
