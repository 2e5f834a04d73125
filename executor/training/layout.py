"""How a model lies on the workers of its gang, and what follows for its gradients, evaluation and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from rubberband.errors import CheckpointError
from rubberband.executor.checkpoints import Payload
from rubberband.executor.training.checkpoint import HostCopy, read, write
from rubberband.executor.training.wrapping import Exchange, GradientExchange

if TYPE_CHECKING:
    from rubberband.executor.core.events import CheckpointRef
    from rubberband.executor.training.loop import TorchRunner

    Save = Callable[[int, Payload], CheckpointRef]

T = TypeVar("T")


class Layout:
    """The whole model is on every worker. A feature joins layouts that divide it."""

    in_step = False
    """Whether workers pass through the model together: then all take as many passes, also in an evaluation."""

    def __init__(self, loop: TorchRunner) -> None:
        self._loop = loop
        self._host_copy = HostCopy(loop.device)

    def build(self) -> nn.Module:
        """Return the trial's model, on the device."""
        return self._loop.trial.build_model(self._loop.segment.config).to(self._loop.device)

    def exchange(self, optimizer: Optimizer, *, is_one_pass: bool) -> Exchange:
        """Return what averages the gradients of the gang; `is_one_pass` as in `GradientExchange`."""
        loop = self._loop
        return GradientExchange(
            loop.trial,
            loop.gang,
            loop.module,
            optimizer,
            is_adaptive=loop.segment.batch is not None,
            is_one_pass=is_one_pass,
        )

    def within(self, compute: Callable[[], T]) -> T:
        """Return what `compute` returns, which passes through the model without gradients."""
        return compute()

    def in_hook(self) -> AbstractContextManager[Any]:
        """Return what is around a hook that may change weights."""
        return nullcontext()

    def own(self, weights: Tensor) -> Tensor:
        """Return what this worker has of a parameter."""
        return weights

    def read(self, payload: bytes | Path) -> Any:
        """Return the content of a checkpoint. Raises CheckpointError."""
        return read(payload, self._loop.parts_held)

    def placed(self, content: dict[str, Any]) -> dict[str, Any]:
        """Return the content of a checkpoint with its tensors as the model has them."""
        return content

    def saved(self, content: Mapping[str, Any], *, is_last: bool) -> Payload:
        """Return the checkpoint with the content, which is copied unless it `is_last`. Raises CheckpointError."""
        return partial(write, self._copied(content, is_last=is_last), self._host_copy)

    def save_part(self, iterations: int, save: Save, *, is_last: bool) -> None:
        """Save what this worker has and rank 0 has not, while training goes on; `save` puts it into the store."""

    def parts(self) -> tuple[CheckpointRef, ...]:
        """Return what the other workers saved of the latest checkpoint, once they have; called on rank 0.

        Raises CheckpointError, and GangBroken if one of them is lost.
        """
        return ()

    def _copied(self, content: T, *, is_last: bool) -> T:
        try:
            copied: T = content if is_last else self._host_copy.take(content)
        except Exception as error:
            raise CheckpointError(f"the checkpoint cannot be copied: {type(error).__name__}: {error}") from error
        return copied

    def close(self) -> None:
        """Release what is not memory of the model."""
        self._host_copy.close()
