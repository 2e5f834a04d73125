"""How large the batches of a worker are, step by step: `Batching`, and batches of a fixed size."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rubberband.executor.training.gang import Gang
from rubberband.executor.training.means import Weight
from rubberband.executor.training.sampler import GlobalBatch, GlobalBatchSampler
from rubberband.executor.training.segment import BatchReport


class Batching(ABC):
    """Decides how large a worker's batches are, step by step; by default nothing is adapted.

    Every worker of a gang comes to the same decisions, at the same steps.
    """

    batch_size: int
    """M: samples of the next optimizer step, over the gang."""
    per_gpu: int
    """m: the most samples that go through the model at once."""
    most_per_worker: int | None = None
    """The most samples of a worker in a step, where they cannot be taken in several passes."""

    @abstractmethod
    def begin(self, iterations: int) -> None:
        """Begin the iteration after which `iterations` are done."""

    @abstractmethod
    def is_over(self) -> bool:
        """Whether the iteration is over."""

    def wants_halves(self, share: int, steps_ahead: int = 0) -> bool:
        """Whether this worker's `share` of the next step, which goes through the model at once, should go in two.

        Or, as far as that can be foreseen, of a step that is `steps_ahead` of it.
        """
        return False

    def before_step(self, batch: GlobalBatch, parts: Sequence[int]) -> None:  # noqa: B027 - optional hook
        """Note that a step begins; `parts` are the sizes of this worker's micro-batches."""

    def held_gradients(self) -> int:
        """Return how many times the memory of all gradients is in use while a pass begins."""
        return 0

    @abstractmethod
    def ran_out(self, per_gpu: int, parts: Sequence[int]) -> None:
        """Note that this worker ran out of memory: the step begins again, in `parts` of at most `per_gpu` samples.

        Its later passes have no more.
        """

    @abstractmethod
    def restrict(self, per_gpu: int) -> None:
        """Take at most `per_gpu` samples at once from now on, on every worker of the gang."""

    def weigh(self, fractions: Sequence[Weight]) -> None:  # noqa: B027 - optional hook
        """Note w_i / W of this worker's micro-batches, whose sum over all workers is 1; unless they count by size."""

    def after_part(self) -> None:  # noqa: B027 - optional hook
        """Note that the gradient of a micro-batch is computed."""

    def update(self, optimizer: torch.optim.Optimizer, step: Callable[[], bool]) -> bool:
        """Let the optimizer use the gradient of the whole gang by `step`, which returns False if it skips it."""
        return step()

    def after_step(self, batch: GlobalBatch, *, has_stepped: bool = True) -> int:
        """Note that the step is over; return by how many batches an LR schedule that counts batches advances."""
        return int(has_stepped)

    def before_shares_change(self) -> None:  # noqa: B027 - optional hook
        """Note that the next batches are divided otherwise among the workers; all of them call it."""

    def after_shares_change(self) -> None:  # noqa: B027 - optional hook
        """Note that they are, from now on."""

    def pause(self) -> None:  # noqa: B027 - optional hook
        """Note that the step is over, and that reports may leave."""

    def resume(self) -> None:  # noqa: B027 - optional hook
        """Note that they have left."""

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
    gang: Gang
    _until_samples: int = field(default=0, init=False)
    _wanted: int = field(init=False)

    def __post_init__(self) -> None:
        self._wanted = self.per_gpu

    def begin(self, iterations: int) -> None:
        self._until_samples = iterations * self.samples_per_iteration

    def is_over(self) -> bool:
        return self.sampler.samples_done >= self._until_samples

    def ran_out(self, per_gpu: int, parts: Sequence[int]) -> None:
        self.restrict(per_gpu)

    def restrict(self, per_gpu: int) -> None:
        self.per_gpu = min(self.per_gpu, per_gpu)

    def end(self) -> BatchReport:
        """Agree with the other workers on the samples that fit the memory of each."""
        self.per_gpu = round(self.gang.least(self.per_gpu))
        return BatchReport()

    def state(self) -> dict[str, Any] | None:
        return {"per_gpu": self.per_gpu} if self.per_gpu < self._wanted else None

    def restore(self, state: dict[str, Any] | None) -> None:
        if state is not None and "per_gpu" in state:
            self.per_gpu = min(self.per_gpu, state["per_gpu"])
