"""Data: from positions in a dataset to a batch on the device."""

from __future__ import annotations

import copy
import ctypes
import math
import pickle
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from rubberband.executor.training.components import Component
from rubberband.executor.training.failures import refused
from rubberband.executor.training.gpu_rows import GpuRows, Residence
from rubberband.executor.training.loading import LoaderSettings, LoaderWorkers, Part, to_device
from rubberband.executor.training.sampler import Indices, sample_keys
from rubberband.executor.training.waits import WaitClock

# Datasets that are read from front to end: an `IterableDataset`, or any object with `__iter__` alone.
#
# Every process reads the stream by itself, and leaves out what is for others: sample i of a trial is the same for every
# gang and every number of loader workers, and after a resume. That costs each of them the reading of samples that it
# does not use, so costly work belongs into `collate`, which is called for its own samples only; or the dataset says how
# it is divided, by `num_shards` and `shard(num_shards=, index=)`, as those of Hugging Face do. Then the samples of a
# batch come from some of the shards in turn, and a process reads only those whose samples it needs.
#
# A stream, or a shard, that ends begins again: there are no epochs.


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
    passes: int
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
        raise refused(
            f"train_dataset() returned {type(dataset).__name__}, which has no length; set samples_per_iteration, the "
            "training samples of one iteration"
        ) from None


class Stream:
    """A stream as numbered samples, in batches of M over the gang."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] | None, *, seed: int, batch_size: int) -> None:
        self.dataset = dataset
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
            return self.dataset
        return self.dataset.shard(num_shards=self._num_shards, index=shard)


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
                raise refused(f"train_dataset() returned {self._name()}, which is empty") from None
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


Generator = Literal["random", "numpy", "torch"]
"""Global source of random numbers, of the CPU."""


def _seed_numpy(key: int) -> None:
    np.random.seed(key & 0xFFFFFFFF)


def _seed_torch(key: int) -> None:
    torch.default_generator.manual_seed(key >> 1)


_SEED_OF: Mapping[Generator, Callable[[int], None]] = {
    "random": random.seed,
    "numpy": _seed_numpy,
    "torch": _seed_torch,
}


def seed_for(key: int) -> None:
    """Seed all generators for one sample: together about 10 us, torch's alone 1 us and as much at its first draw."""
    for seed in _SEED_OF.values():
        seed(key)


def _random_state() -> Any:
    """Return the parts by which two states of Python's generator differ: its place in its words, which each draw moves,
    and one of the words, which are new once it is through them. To compare all 624 takes longer than a cheap sample."""
    _, words, gauss = random.getstate()
    return words[1], words[-1], gauss


def _numpy_state() -> bytes:
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if type(generator) is np.random.MT19937:  # as bytes: `state` takes 30 us
        return ctypes.string_at(generator.ctypes.state_address, _NUMPY_BYTES)
    return pickle.dumps(generator.state)


_NUMPY_BYTES = 624 * 4 + 4
"""The words of a Mersenne Twister, and its place in them."""
_STATE_OF: Mapping[Generator, Callable[[], Any]] = {
    "random": _random_state,
    "numpy": _numpy_state,
    "torch": lambda: torch.default_generator.get_state().numpy().tobytes(),
}


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


Collate = Callable[[list[Any]], Any]


class DatasetBatches:
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

    def places(self, indices: Indices) -> Indices:
        """Return the positions in the dataset below the subsets."""
        return indices if self._positions is None else self._positions[indices]

    def batch(self, indices: Indices, keys: Sequence[int] | None = None) -> Any:
        """Return the samples at `indices` as one batch.

        With `keys`, one for each, random draws follow from the sample's key alone (`__getitems__`: the first one's),
        and the global random states are left anywhere.
        """
        where = self.places(indices)
        if self.in_memory:
            rows = torch.from_numpy(where)
            return [tensor[rows] for tensor in self.dataset.tensors]
        if keys is None:
            return self._fetched(where, None)
        # To seed costs as much as to load a cheap sample. A generator is left alone until something is drawn from it;
        # then the batch is loaded again. In a loader worker, nothing else draws between two batches.
        is_alone = torch.utils.data.get_worker_info() is not None
        before = self._states if is_alone and self._states else self._quiet_states()
        while True:
            batch = self._fetched(where, keys)
            self._states = self._quiet_states()
            news = {name for name, state in self._states.items() if state != before[name]}
            if not news:
                return batch
            self._drawn |= news

    def _quiet_states(self) -> Mapping[Generator, Any]:
        """Return the states of the generators from which nothing is known to be drawn, to be compared."""
        return {name: state() for name, state in _STATE_OF.items() if name not in self._drawn}

    def _fetched(self, where: Indices, keys: Sequence[int] | None) -> Any:
        positions = where.tolist()
        seeds = [] if keys is None else [_SEED_OF[name] for name in self._drawn]
        if callable(getattr(self.dataset, "__getitems__", None)):
            if keys:
                for seed in seeds:
                    seed(keys[0])
            samples = self.dataset.__getitems__(positions)
        else:
            samples = self._one_by_one(positions, seeds, keys)
        return (self._collate or torch.utils.data.default_collate)(samples)

    def _one_by_one(self, positions: list[int], seeds: list[Callable[[int], None]], keys: Sequence[int] | None) -> Any:
        dataset, samples = self.dataset, []
        try:
            for position, key in zip(positions, keys or positions, strict=True):
                for seed in seeds:
                    seed(key)
                samples.append(dataset[position])
        except Exception as error:
            error.add_note(f"while loading sample {position} of {type(dataset).__name__}")
            raise
        return samples


def num_samples(dataset: Dataset[Any], what: str) -> int:
    """Return the number of samples in a map-style dataset.

    Raises TypeError for a dataset without length or positions, ValueError for an empty one.
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise TypeError(f"{what} returned {type(dataset).__name__}, which is not a map-style dataset (len and [i])")
    if len(dataset) < 1:
        raise ValueError(f"{what} returned an empty dataset")
    return len(dataset)


class Feed(Component):
    """The training or evaluation set of one worker: batches on its device, by position.

    Where loader workers are wanted, they load what `expect` and `ahead` say that comes next; `load` takes it from them,
    and loads by itself what they were not asked for. A sample is the same in both ways: its random draws follow from
    the trial's seed, the epoch and its position.
    """

    ahead: Callable[[], Iterator[Part]]
    """Gives the parts of the batches after the present one, without end, if nothing changes."""
    _epoch = 0
    _stream: Stream | None = None
    _samples: DatasetBatches | None = None
    _workers: LoaderWorkers | None = None
    _rows: GpuRows | None = None

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
        residence: Residence | None = None,
        waiting: WaitClock | None = None,
    ) -> None:
        """Without `settings`, everything is loaded in this process; else by as many of `most_workers` as they want.

        `batch_size` is M, for streams. `residence` is there on a GPU, and takes what is in memory.
        """
        self.device = device
        self.waiting = waiting or WaitClock()
        self._seed = seed
        self._marks: dict[int, Mark] = {}
        if is_stream(dataset):
            self.num_samples = ENDLESS
            self._stream = Stream(dataset, collate, seed=seed, batch_size=batch_size)
            most_workers = self._stream.num_turns
        else:
            self.num_samples = num_samples(dataset, what)
            self._samples = DatasetBatches(dataset, collate)
            most_workers = 0 if self._samples.in_memory else most_workers
        self.num_workers = 0 if settings is None else settings.count(most_workers)
        if settings is not None and self.num_workers > 0:
            self._workers = LoaderWorkers(
                self._prepared,
                dataset,
                settings,
                num_workers=self.num_workers,
                pin=device.type == "cuda",
                are_numbered=self._stream is None,
            )
        elif residence is not None and self._samples is not None and self._samples.in_memory:
            self._rows = GpuRows(self._samples.dataset, residence)

    @property
    def dataset(self) -> Any:
        """The dataset; of subsets, the one below them."""
        return self._samples.dataset if self._samples is not None else self._stream and self._stream.dataset

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
        elif self._rows is not None:
            self._rows.expect(parts, self.ahead)

    def follow(self) -> None:
        """Load from the dataset as it is now, after hooks that may have changed it."""
        if self._workers is not None and self._workers.follow() and self._stream is not None and self._marks:
            self._stream.move_to(self._marks)
        if self._rows is not None:
            self._rows.follow()

    def leave_device(self) -> bool:
        """Give the GPU's memory back that holds the samples; return whether there was any."""
        return self._rows is not None and self._rows.leave()

    def load(self, indices: Indices) -> Any:
        """Return the samples at `indices`, in the epoch of the present batch, as one batch on the device."""
        with self.waiting:
            return self._loaded(indices)

    def _loaded(self, indices: Indices) -> Any:
        if self._rows is not None and self._samples is not None:
            return self._rows.load(indices, self._samples.places)
        part = Part(indices=indices, epoch=self._epoch)
        if self._samples is not None and self._samples.in_memory and self._workers is None:
            return to_device(self._samples.batch(indices), self.device)
        if self._workers is not None and self._workers.has(part):
            loaded = self._workers.take()
        else:
            with kept_random_states():
                loaded = self._prepared(part)
        if self._stream is not None:
            loaded, marks = loaded
            self._marks.update(marks)
        return to_device(loaded, self.device)

    def state_dict(self) -> dict[int, tuple[int, int, Any]] | None:
        """Return where the readers of a stream are, if they keep a state; by shard."""
        return {shard: (mark.index, mark.passes, mark.state) for shard, mark in self._marks.items()} or None

    def load_state_dict(self, state: dict[int, tuple[int, int, Any]] | None) -> None:
        """Begin there; without a state, a stream is read again up to the position of the sampler."""
        if self._stream is not None and state is not None:
            self._marks = {shard: Mark(*mark) for shard, mark in state.items()}
            self._stream.move_to(self._marks)

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()
        if self._rows is not None:
            self._rows.close()

    def _prepared(self, part: Part) -> Any:
        if self._stream is not None:
            return self._stream.load(part)
        assert self._samples is not None
        return self._samples.batch(part.indices, sample_keys(self._seed, part.epoch, part.indices))
