"""The components of a training loop: what every one may do. Features join theirs in `rubberband.features`.

The loop calls its components at the same points of an iteration, in the order of its list (`loop.py`). A checkpoint has
the state of each under its name. A component that is added takes None from checkpoints that are older.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rubberband.values.balance import even_shares

if TYPE_CHECKING:
    from rubberband.executor.training.clocks import ComputeTimer
    from rubberband.executor.training.sampler import GlobalBatch

SharePolicy = Callable[[int, int], Sequence[int]]
"""(samples in the global batch, workers) -> samples per worker, which sum to the first."""


class Component:
    """A part of the loop on one worker; every method may be left out.

    Every worker of a gang calls each method at the same point, so that it may use the gang's collectives.
    """

    def begin(self, iterations: int) -> None:
        """Begin the iteration after which `iterations` are done, after `on_iteration`."""

    def begin_step(self) -> None:
        """Note that a step begins, before its batch is known."""

    def after_step(self, batch: GlobalBatch, *, has_stepped: bool) -> None:
        """Note that the optimizer has used the batch; or skipped the step, as its gradients overflowed."""

    def pause(self) -> None:
        """Note that the step is over, also for the other components, and that reports may leave."""

    def resume(self) -> None:
        """Note that they have left."""

    def end(self) -> Mapping[str, Any]:
        """End the iteration's training; return fields of its `BatchReport`.

        The evaluation comes next: the model may be changed for it until `after_evaluation`.
        """
        return {}

    def after_evaluation(self, iterations: int, metrics: Mapping[str, float]) -> None:
        """Take in the metrics of the iteration; empty on ranks other than 0."""

    def state_dict(self) -> Any:
        """Return plain values and tensors, which may be the component's own; None: it has no state."""
        return None

    def load_state_dict(self, state: Any, /) -> Any:
        """Continue from the state, on any number of workers; None: the checkpoint has none of this component."""

    def close(self) -> None:
        """Release what is not memory, and what refers to the model."""


class Division(Component):
    """Divides each global batch among the workers: evenly, or as a policy says."""

    is_fixed = True

    timer: ComputeTimer | None = None
    """Times the worker's own part of each step, if anything depends on that."""

    def __init__(self, policy: SharePolicy = even_shares) -> None:
        self._policy = policy

    def shares(self, batch_size: int, num_workers: int) -> Sequence[int]:
        """Return the samples of each worker in a batch of that size."""
        return self._policy(batch_size, num_workers)

    def largest_share(self, batch_size: int, num_workers: int) -> int:
        """Return the most samples that a worker may ever get of such a batch."""
        return max(self.shares(batch_size, num_workers))

    def pace(self) -> float:
        """Return, on rank 0, how much longer unequal workers take now than at first."""
        return 1.0
