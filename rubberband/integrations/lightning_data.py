"""The data of a LightningModule or LightningDataModule: its DataLoaders, checked, and what they say."""

from __future__ import annotations

import fcntl
import hashlib
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rubberband.executor.training.sampler import reseed

if TYPE_CHECKING:
    from torch.utils.data import DataLoader, Dataset


@dataclass
class Loaders:
    """The loaders of a module or data module, checked."""

    train: DataLoader[Any]
    val: DataLoader[Any] | None

    @property
    def collate(self) -> Callable[[Any], Any] | None:
        """The collate function of both; None: torch's default."""
        from torch.utils.data import default_collate

        train = self.train.collate_fn
        val = train if self.val is None else self.val.collate_fn
        if train == val:
            return None if train is default_collate else train
        return lambda samples: (val if isinstance(samples, _Apart) else train)(samples)

    def eval_dataset(self) -> Dataset[Any] | None:
        """Return the evaluation set; marked, where its collate function is another one."""
        if self.val is None or self.train.collate_fn == self.val.collate_fn:
            return None if self.val is None else self.val.dataset
        return _Marked(self.val.dataset)  # type: ignore[return-value]


class _Apart(list[Any]):
    """Samples of the evaluation set."""


class _Marked:
    """Evaluation set whose samples are marked, for a collate function of their own."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, position: int) -> Any:
        return self.dataset[position]

    def __getitems__(self, positions: list[int]) -> _Apart:
        if hasattr(self.dataset, "__getitems__"):
            return _Apart(self.dataset.__getitems__(positions))
        return _Apart(self.dataset[position] for position in positions)


def overrides(made: Any, method: str) -> bool:
    """Whether a module or data module has a method of its own, and not Lightning's."""
    if made is None or method in vars(made):  # from_datasets() puts loaders into the object
        return made is not None
    found = getattr(type(made), method, None)
    own = ("lightning.pytorch.core.", "pytorch_lightning.core.")
    return found is not None and not getattr(found, "__module__", "").startswith(own)


def loader_of(source: Any, method: str) -> DataLoader[Any]:
    """Return the DataLoader of a method. Raises TypeError or ValueError for one that cannot be shared over a gang."""
    from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

    what = f"{type(source).__name__}.{method}()"
    if not overrides(source, method):
        raise ValueError(f"{type(source).__name__} has no {method}(); write it, or return a data module that has it")
    loader = getattr(source, method)()
    if isinstance(loader, (list, tuple, dict)):
        raise TypeError(f"{what} returned {len(loader)} loaders; return one, such as of a ConcatDataset")
    if not isinstance(loader, DataLoader):
        raise TypeError(f"{what} returned {type(loader).__name__}; return a torch.utils.data.DataLoader")
    if loader.batch_size is None:
        raise ValueError(f"{what} has no batch_size, so its batches cannot be shared over GPUs; give it one")
    sampler = loader.sampler
    is_whole = (isinstance(sampler, RandomSampler) and not sampler.replacement) or isinstance(
        sampler, SequentialSampler
    )
    if hasattr(loader.dataset, "__getitem__") and not is_whole:
        name = type(sampler).__name__
        raise ValueError(f"{what} draws by a {name}, and RubberBand draws by itself; use shuffle=True, or a Subset")
    return loader


@contextmanager
def seeded(data_seed: int | None, place: int) -> Iterator[None]:
    """Let data be made by the experiment's seed, and restore the random states after it; None: leave them alone.

    Each `place` has random numbers of its own, however many another one takes.
    """
    import torch

    if data_seed is None:
        yield
        return
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=()):
        reseed("data", data_seed, place)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def prepare(source: Any) -> None:
    """Call `prepare_data`, in one process of this machine at a time."""
    if overrides(source, "prepare_data"):
        with _locked(f"{type(source).__module__}:{type(source).__qualname__}"):
            source.prepare_data()


@contextmanager
def _locked(name: str) -> Iterator[None]:
    digest = hashlib.sha256(f"{os.getuid()} {name}".encode()).hexdigest()[:16]
    with (Path(tempfile.gettempdir()) / f"rubberband-prepare-{digest}").open("a") as file:
        with suppress(OSError):  # a file system without locks: two processes may prepare the same data at once
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
