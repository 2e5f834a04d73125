"""Datasets that are read from front to end: an `IterableDataset`, or any object with `__iter__` alone.

Every process reads the stream by itself, and leaves out what is for others: sample i of a trial is the same for every
gang and every number of loader workers, and after a resume. That costs each of them the reading of samples that it does
not use, so costly work belongs into `collate`, which is called for its own samples only; or the dataset says how it is
divided, by `num_shards` and `shard(num_shards=, index=)`, as those of Hugging Face do. Then the samples of a batch come
from some of the shards in turn, and a process reads only those whose samples it needs.

A stream, or a shard, that ends begins again: there are no epochs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rubberband.executor.training.loading import Part
from rubberband.executor.training.randomness import seed_for
from rubberband.executor.training.runner import TrialFailure
from rubberband.executor.training.sampler import sample_keys

ENDLESS = 1 << 62
"""Samples of a stream, as far as the sampler is concerned."""
_OPENING = 1 << 32
"""Difference between the seed of `iter` and that of the sample after it."""
_KEYS = 1024
"""Seeds that are computed at once."""


@dataclass(frozen=True, slots=True)
class Mark:
    """The place of a reader that keeps its own state."""

    index: int
    """Samples that it has read."""
    passes: int
    """How often it has begun again."""
    state: Any


Marks = Mapping[int, Mark]
"""By shard."""


def is_stream(dataset: Any) -> bool:
    """Whether a dataset can only be iterated over, and that more than once."""
    if isinstance(dataset, torch.utils.data.IterableDataset):
        return True
    has_positions = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    return hasattr(dataset, "__iter__") and not has_positions and not hasattr(dataset, "__next__")


def iteration_of(dataset: Any) -> int:
    """Return the samples of an iteration that the trial does not set: the length. Raises TrialFailure without one."""
    try:
        return len(dataset)
    except TypeError:
        raise TrialFailure(
            "raised",
            f"train_dataset() returned {type(dataset).__name__}, which has no length; set samples_per_iteration, the "
            "training samples of one iteration",
        ) from None


class Stream:
    """A stream as numbered samples, in batches of M over the gang."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] | None, *, seed: int, batch_size: int) -> None:
        self._dataset = dataset
        self._collate = collate or torch.utils.data.default_collate
        self._seed = seed
        self._batch_size = batch_size
        shards = getattr(dataset, "num_shards", None) or getattr(dataset, "n_shards", None) or 1
        self._num_shards = shards if callable(getattr(dataset, "shard", None)) else 1
        self._in_batch = 1 << int(math.log2(self._num_shards)) // 2
        """Shards from which a batch comes; the next batch comes from others."""
        self.num_turns = self._num_shards // self._in_batch
        """Batches after which the same shards have their turn again; more loader workers would read them twice."""
        self._marks: Marks = {}
        self._readers: dict[int, _Reader] = {}

    def move_to(self, marks: Marks) -> None:
        """Begin to read at the marks."""
        self._marks, self._readers = dict(marks), {}

    def load(self, part: Part) -> tuple[Any, Marks]:
        """Return the samples of those numbers as one batch, and the marks of its readers after them."""
        samples, used = [], {}
        for number in part.indices.tolist():
            shard, index = self.place(number)
            reader = self._readers.get(shard)
            if reader is None:
                reader = self._readers[shard] = _Reader(self._opened(shard), shard, self._seed, self._marks.get(shard))
            used[shard] = reader
            samples.append(reader.sample(index))
        marks = {shard: mark for shard, reader in used.items() if (mark := reader.mark()) is not None}
        return self._collate(samples), marks

    def place(self, number: int) -> tuple[int, int]:
        """Return the shard from which a sample comes, and its index there."""
        step, offset = divmod(number, self._batch_size)
        turn, in_batch = step % self.num_turns, offset * self._in_batch // self._batch_size
        first = -(-in_batch * self._batch_size // self._in_batch)
        until = -(-(in_batch + 1) * self._batch_size // self._in_batch)
        return turn * self._in_batch + in_batch, step // self.num_turns * (until - first) + offset - first

    def _opened(self, shard: int) -> Any:
        if self._num_shards == 1:
            return self._dataset
        return self._dataset.shard(num_shards=self._num_shards, index=shard)


class _Reader:
    """Reads one shard, from front to end and again."""

    def __init__(self, dataset: Any, shard: int, seed: int, mark: Mark | None) -> None:
        self._dataset, self._shard, self._seed, self._mark = dataset, shard, seed, mark
        self._iterator: Iterator[Any] | None = None
        self._index = self._passes = 0
        self._is_empty = True
        self._keys: list[int] = []
        self._first_key = 0

    def sample(self, index: int) -> Any:
        """Return that sample, past those before it; to go back, it is read from the beginning, or its mark, again."""
        if self._iterator is None or index < self._index:
            self._begin(self._mark if self._mark is not None and self._mark.index <= index else None)
        while True:
            sample = self._next()
            if self._index > index:
                return sample

    def mark(self) -> Mark | None:
        """Return where it is, if the dataset or its iterator has a state."""
        owner = self._owner("state_dict")
        return None if owner is None else Mark(self._index, self._passes, copy.deepcopy(owner.state_dict()))

    def _owner(self, method: str) -> Any:
        owners = (self._dataset, self._iterator)
        return next((owner for owner in owners if callable(getattr(owner, method, None))), None)

    def _begin(self, mark: Mark | None) -> None:
        self._index, self._passes = (0, 0) if mark is None else (mark.index, mark.passes)
        self._is_empty = mark is None
        if mark is None:
            self._open()
            return
        if callable(getattr(self._dataset, "load_state_dict", None)):
            self._dataset.load_state_dict(mark.state)
            self._open()
        else:
            self._open()
            self._owner("load_state_dict").load_state_dict(mark.state)

    def _open(self) -> None:
        if callable(getattr(self._dataset, "set_epoch", None)):
            self._dataset.set_epoch(self._passes)
        seed_for(self._key() ^ _OPENING)
        self._iterator = iter(self._dataset)

    def _next(self) -> Any:
        seed_for(self._key())
        assert self._iterator is not None
        try:
            sample = next(self._iterator)
        except StopIteration:
            if self._is_empty:
                raise TrialFailure("raised", f"train_dataset() returned {self._name()}, which is empty") from None
            self._is_empty, self._passes = True, self._passes + 1
            self._open()
            return self._next()
        except Exception as error:
            error.add_note(f"while reading sample {self._index} of {self._name()}")
            raise
        self._is_empty = False
        self._index += 1
        return sample

    def _name(self) -> str:
        return type(self._dataset).__name__

    def _key(self) -> int:
        place = self._index - self._first_key
        if not 0 <= place < len(self._keys):
            self._first_key, place = self._index, 0
            self._keys = sample_keys(self._seed, self._shard, np.arange(self._index, self._index + _KEYS))
        return self._keys[place]
