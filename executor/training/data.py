"""Data: from positions in a dataset to a batch on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from rubberband.executor.training.loading import LoaderSettings, LoaderWorkers, Part
from rubberband.executor.training.moving import to_device
from rubberband.executor.training.randomness import Generator, kept_random_states, random_states, seed_for
from rubberband.executor.training.sampler import Indices, sample_keys
from rubberband.executor.training.streams import ENDLESS, Mark, Stream, is_stream

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
        self._drawn: set[Generator] = set()
        """Generators from which the dataset, or `collate`, is known to draw."""
        self._states: Mapping[Generator, Any] | None = None
        """The random states after the latest batch."""
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
        if keys is None:
            return self._fetched(where, None)
        # To seed costs as much as to load a cheap sample. A generator is left alone until something is drawn from it;
        # then the batch is loaded again. In a loader worker, nothing else draws between two batches.
        is_alone = torch.utils.data.get_worker_info() is not None
        before = self._states if is_alone and self._states else random_states()
        while True:
            batch = self._fetched(where, keys)
            self._states = random_states()
            news = {name for name in before if self._states[name] != before[name]} - self._drawn
            if not news:
                return batch
            self._drawn |= news

    def _fetched(self, where: Indices, keys: Sequence[int] | None) -> Any:
        positions = where.tolist()
        if callable(getattr(self.dataset, "__getitems__", None)):
            if keys:
                seed_for(keys[0], self._drawn)
            samples = self.dataset.__getitems__(positions)
        else:
            samples = []
            for place, position in enumerate(positions):
                if keys is not None:
                    seed_for(keys[place], self._drawn)
                samples.append(self._one(position))
        return (self._collate or torch.utils.data.default_collate)(samples)

    def _one(self, position: int) -> Any:
        try:
            return self.dataset[position]
        except Exception as error:
            error.add_note(f"while loading sample {position} of {type(self.dataset).__name__}")
            raise


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
    """The training or evaluation set of one worker: batches on its device, by position.

    Where loader workers are wanted, they load what `expect` and `ahead` say that comes next; `load` takes it from them,
    and loads by itself what they were not asked for. A sample is the same in both ways: its random draws follow from
    the trial's seed, the epoch and its position.
    """

    ahead: Callable[[], Iterator[Part]]
    """Gives the parts of the batches after the present one, without end, if nothing changes."""

    def __init__(
        self,
        dataset: Any,
        *,
        device: torch.device,
        collate: Collate | None,
        seed: int,
        batch_size: int,
        what: str = "train_dataset()",
        settings: LoaderSettings | None = None,
        most_workers: int | None = None,
    ) -> None:
        """Without `settings`, everything is loaded in this process; else by as many of `most_workers` as they want.

        `batch_size` is M, for streams.
        """
        self._device = device
        self._seed = seed
        self._epoch = 0
        self._marks: dict[int, Mark] = {}
        self._stream: Stream | None = None
        self._samples: Samples | None = None
        most = most_workers
        if is_stream(dataset):
            self.num_samples = ENDLESS
            self._stream = Stream(dataset, collate, seed=seed, batch_size=batch_size)
            most = self._stream.num_turns
        else:
            self.num_samples = num_samples(dataset, what)
            self._samples = Samples(dataset, collate)
            most = 0 if self._samples.in_memory else most
        self._workers: LoaderWorkers | None = None
        count = 0 if settings is None else settings.count(most)
        if settings is not None and count > 0:
            self._workers = LoaderWorkers(
                self._prepared,
                dataset,
                settings,
                num_workers=count,
                pin=device.type == "cuda",
                are_numbered=self._stream is None,
            )

    @property
    def is_stream(self) -> bool:
        """Whether the samples are read from front to end, without epochs."""
        return self._stream is not None

    @property
    def has_workers(self) -> bool:
        """Whether loader workers load ahead."""
        return self._workers is not None

    @property
    def parts_ahead(self) -> int:
        """Parts that loader workers load ahead; 0 without any."""
        return 0 if self._workers is None else self._workers.parts_ahead

    def expect(self, parts: Sequence[Indices], epoch: int) -> None:
        """Note that `parts` of this epoch are loaded next, in this order."""
        self._epoch = epoch
        if self._workers is not None:
            self._workers.expect([Part(indices=part, epoch=epoch) for part in parts], self.ahead)

    def load(self, indices: Indices) -> Any:
        """Return the samples at `indices`, in the epoch of the present batch, as one batch on the device."""
        part = Part(indices=indices, epoch=self._epoch)
        if self._samples is not None and self._samples.in_memory and self._workers is None:
            return to_device(self._samples.batch(indices), self._device)
        if self._workers is not None and self._workers.has(part):
            loaded = self._workers.take()
        else:
            with kept_random_states():
                loaded = self._prepared(part)
        if self._stream is not None:
            loaded, marks = loaded
            self._marks.update(marks)
        return to_device(loaded, self._device)

    def state(self) -> dict[int, tuple[int, int, Any]] | None:
        """Return where the readers of a stream are, if they keep a state; by shard."""
        return {shard: (mark.index, mark.passes, mark.state) for shard, mark in self._marks.items()} or None

    def restore(self, state: dict[int, tuple[int, int, Any]] | None) -> None:
        """Begin there; without a state, a stream is read again up to the position of the sampler."""
        if self._stream is not None and state is not None:
            self._marks = {shard: Mark(*mark) for shard, mark in state.items()}
            self._stream.move_to(self._marks)

    def close(self) -> None:
        """End the loader workers."""
        if self._workers is not None:
            self._workers.close()

    def _prepared(self, part: Part) -> Any:
        if self._stream is not None:
            return self._stream.load(part)
        assert self._samples is not None
        return self._samples.batch(part.indices, sample_keys(self._seed, part.epoch, part.indices))
