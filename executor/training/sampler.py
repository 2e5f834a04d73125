"""The batches of a trial: which samples each has, how many, and their shares among the workers; random states.

The order depends on (seed, epoch) and the sizes of the global batches alone, never on the number of workers or their
shares, so that a trial sees the same batches at every gang size. Random states follow from the trial's seed alone, so
that no checkpoint holds any.
"""

from __future__ import annotations

import functools
import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from rubberband.executor.training.components import Component, SharePolicy
from rubberband.values.balance import scale_shares

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from rubberband.executor.training.metrics import Weight

Stream = Literal["setup", "order", "train", "evaluate", "sample", "data"]
"""Purpose of the randomness; streams of the same seed are independent."""

_STREAMS: dict[Stream, int] = {"setup": 0, "order": 1, "train": 2, "evaluate": 3, "sample": 4, "data": 5}


def seed_sequence(stream: Stream, seed: int, *place: int) -> np.random.SeedSequence:
    """Return the seed of one stream at one place (an epoch; an iteration and a rank). `seed` may be any integer."""
    return np.random.SeedSequence([seed % 2**64, _STREAMS[stream], *place])


def reseed(stream: Stream, seed: int, *place: int) -> None:
    """Set the global random states of Python and NumPy, and torch's if torch has been imported."""
    words = seed_sequence(stream, seed, *place).generate_state(4, np.uint64)
    random.seed(int(words[0]))
    np.random.seed([int(words[1]) & 0xFFFFFFFF, int(words[1]) >> 32])
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(int(words[2]))


Indices = NDArray[np.int64]


@functools.lru_cache(maxsize=8)
def _first_key(seed: int, epoch: int) -> np.uint64:
    (base,) = seed_sequence("sample", seed, epoch).generate_state(1, np.uint64)
    return np.uint64(base)


def sample_keys(seed: int, epoch: int, indices: Indices) -> list[int]:
    """Return a seed of 64 bits for each sample of an epoch, whatever batch or worker it is in (splitmix64)."""
    keys = _first_key(seed, epoch) + indices.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    found: list[int] = (keys ^ (keys >> np.uint64(31))).tolist()
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatch:
    """The samples of one optimizer step, over the whole gang."""

    indices: Indices
    """Positions in the dataset, M of them; at least one."""
    shares: tuple[int, ...]
    """Samples per worker, m_i; they sum to M, and any may be 0."""
    epoch: int = 0

    @property
    def size(self) -> int:
        """M, the number of samples."""
        return len(self.indices)

    @property
    def first(self) -> int:
        """The first worker with a share."""
        return next(rank for rank, share in enumerate(self.shares) if share)

    def of(self, rank: int) -> Indices:
        """Return the samples of one worker: consecutive parts of the batch, in rank order."""
        start = sum(self.shares[:rank])
        return self.indices[start : start + self.shares[rank]]


@dataclass(slots=True)
class GlobalBatchSampler(Component):
    """Yields a dataset of `num_samples`, in a new permutation every epoch, one global batch at a time.

    Every sample comes exactly once per epoch; batch sizes and shares may change at any step. The last batch of an epoch
    may be smaller; or, if it `crosses`, it is filled from the next epoch. (epoch, position) is the whole state.
    """

    num_samples: int
    seed: int
    epoch: int = 0
    position: int = 0
    """Samples of this epoch that were used."""
    crosses: bool = False
    drop_last: bool = False
    """Whether the last batch of an epoch is left out if it is smaller; it counts as used."""
    in_order: bool = False
    """Whether the samples come in their own order, not in a permutation."""
    _order: tuple[int, Indices] | None = None

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ValueError("the training set is empty")
        self.move_to(self.epoch, self.position)

    def move_to(self, epoch: int, position: int) -> None:
        """Continue from there. Raises ValueError for a position outside the epoch."""
        if not 0 <= position < self.num_samples:
            raise ValueError(f"position {position} lies outside an epoch of {self.num_samples} samples")
        self.epoch, self.position = epoch, position

    def state_dict(self) -> tuple[int, int]:
        return self.epoch, self.position

    def load_state_dict(self, state: tuple[int, int]) -> None:
        self.move_to(*state)

    @property
    def samples_done(self) -> int:
        """Samples used since the first epoch began."""
        return self.epoch * self.num_samples + self.position

    @property
    def remaining(self) -> int:
        """Samples left in this epoch; at least one."""
        return self.num_samples - self.position

    def next_batch(self, shares: Sequence[int]) -> GlobalBatch:
        """Return the next sum(shares) samples, shares[i] for worker i.

        If fewer are left at the end of an epoch that is not crossed, the shares shrink in proportion.
        """
        wanted = sum(shares)
        if wanted < 1 or min(shares) < 0:
            raise ValueError(f"shares {list(shares)} must be at least 0 and sum to at least 1")
        epoch = self.epoch
        parts = [self._take(wanted)]
        while self.crosses and (left := wanted - sum(map(len, parts))) > 0:
            parts.append(self._take(left))
        indices = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return GlobalBatch(indices=indices, shares=scale_shares(shares, len(indices)), epoch=epoch)

    def next_shared(self, batch_size: int, num_workers: int, policy: SharePolicy) -> GlobalBatch:
        """Return the next batch of `batch_size` samples, or the rest of an epoch; `policy` gets its true size."""
        self._drop_less_than(batch_size)
        size = batch_size if self.crosses else min(batch_size, self.remaining)
        batch = self.next_batch(policy(size, num_workers))
        self._drop_less_than(batch_size)
        return batch

    def _drop_less_than(self, batch_size: int) -> None:
        if self.drop_last and not self.crosses and self.remaining < batch_size <= self.num_samples:
            self.epoch, self.position = self.epoch + 1, 0

    def _take(self, most: int) -> Indices:
        """Return up to `most` samples of this epoch."""
        if self.in_order:
            indices = np.arange(self.position, min(self.position + most, self.num_samples))
            self._advance(len(indices))
            return indices
        if self._order is None or self._order[0] != self.epoch:
            generator = np.random.default_rng(seed_sequence("order", self.seed, self.epoch))
            self._order = (self.epoch, generator.permutation(self.num_samples))
        indices = self._order[1][self.position : self.position + most]
        self._advance(len(indices))
        return indices

    def _advance(self, samples: int) -> None:
        self.position += samples
        if self.position == self.num_samples:
            self.epoch, self.position = self.epoch + 1, 0


# How large the batches of a worker are, step by step: `Batching`, and batches of a fixed size.


class Batching(Component, ABC):
    """Decides how large a worker's batches are, step by step; by default nothing is adapted.

    Every worker of a gang comes to the same decisions, at the same steps.
    """

    batch_size: int
    """M: samples of the next optimizer step, over the gang."""
    per_gpu: int
    """m: the most samples that go through the model at once."""
    most_per_worker: int | None = None
    """The most samples of a worker in a step, where they cannot be taken in several passes."""
    batches_due: int = 0
    """By how many batches an LR schedule that counts batches advances after the latest step."""

    @abstractmethod
    def is_over(self) -> bool:
        """Whether the iteration is over."""

    def wants_halves(self, share: int, steps_ahead: int = 0) -> bool:
        """Whether this worker's `share` of the next step, which goes through the model at once, should go in two.

        Or, as far as that can be foreseen, of a step that is `steps_ahead` of it.
        """
        return False

    def before_step(self, batch: GlobalBatch, parts: Sequence[int]) -> None:
        """Note that a step begins; `parts` are the sizes of this worker's micro-batches."""

    def held_gradients(self) -> int:
        """Return how many times the memory of all gradients is in use while a pass begins."""
        return 0

    @abstractmethod
    def restrict(self, per_gpu: int) -> None:
        """Take at most `per_gpu` samples at once, on every worker of the gang; called before the first iteration."""

    def weigh(self, fractions: Sequence[Weight]) -> None:
        """Note w_i / W of this worker's micro-batches, whose sum over all workers is 1; unless they count by size."""

    def after_part(self) -> None:
        """Note that the gradient of a micro-batch is computed."""

    def update(self, optimizer: Optimizer, step: Callable[[], bool]) -> bool:
        """Let the optimizer use the gradient of the whole gang by `step`, which returns False if it skips it."""
        return step()

    def after_step(self, batch: GlobalBatch, *, has_stepped: bool = True) -> None:
        self.batches_due = int(has_stepped)

    def before_shares_change(self) -> None:
        """Note that the next batches are divided otherwise among the workers; all of them call it."""

    def after_shares_change(self) -> None:
        """Note that they are, from now on."""


@dataclass(eq=False)
class FixedBatching(Batching):
    """The same size for every step and every gang; an iteration is a number of samples."""

    sampler: GlobalBatchSampler
    batch_size: int
    per_gpu: int
    samples_per_iteration: int
    _until_samples: int = field(default=0, init=False)
    _wanted: int = field(init=False)

    def __post_init__(self) -> None:
        self._wanted = self.per_gpu

    def begin(self, iterations: int) -> None:
        self._until_samples = iterations * self.samples_per_iteration

    def is_over(self) -> bool:
        return self.sampler.samples_done >= self._until_samples

    def restrict(self, per_gpu: int) -> None:
        self.per_gpu = min(self.per_gpu, per_gpu)

    def state_dict(self) -> dict[str, Any] | None:
        return {"per_gpu": self.per_gpu} if self.per_gpu < self._wanted else None

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        if state is not None and "per_gpu" in state:
            self.per_gpu = min(self.per_gpu, state["per_gpu"])
