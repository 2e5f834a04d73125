"""Weights of the micro-batches of a step, and the factor by which each one's loss enters the gradient of the gang."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from rubberband.executor.training.gang import Gang
from rubberband.executor.training.hooks import override_of
from rubberband.executor.training.means import Weight, checked_weight
from rubberband.executor.training.sampler import Indices
from rubberband.executor.training.torch_trial import TorchTrial

_LEAST = torch.finfo(torch.float64).tiny


@dataclass(frozen=True, slots=True)
class Weighed:
    """The micro-batches of one worker in one step, each by its number."""

    load: Callable[[int], Any]
    """Returns the samples on the device; called once for each, in order."""
    weights: Sequence[Weight]
    """Weight of each, w_i."""
    factor: Callable[[int], Weight]
    """Returns n w_i / W: gradients are averaged over n workers, and W is the sum over the micro-batches of all of them,
    so that the gradient of the step is sum w_i g_i / W."""


class Weighing:
    """Weighs the micro-batches of a trial: by their samples, or as its `weight` says."""

    def __init__(self, trial: TorchTrial, gang: Gang, device: torch.device, load: Callable[[Indices], Any]) -> None:
        self._weight = override_of(trial, "weight")
        self._gang = gang
        self._device = device
        self._load = load
        self._total: Callable[[], Weight] | None = None

    def begin_step(self) -> None:
        """Begin another step, whose W is not known."""
        self._total = None

    def of(
        self,
        parts: Sequence[Indices],
        sizes: Sequence[int],
        batch_size: int,
        note: Callable[[Sequence[Weight]], None] = lambda fractions: None,
    ) -> Weighed:
        """Weigh the `parts`, of which `sizes` samples count, of a batch of M = `batch_size` samples over the gang.

        `note` gets w_i / W of the parts if the trial weighs them, with the first factor. A trial's own weights need all
        samples of the worker at once; W is added up while the first of them go through the model. If the step is done
        again in other parts, W stays.
        """
        num_workers = self._gang.num_workers
        if self._weight is None:
            return Weighed(
                load=lambda at: self._load(parts[at]),
                weights=sizes,
                factor=lambda at: num_workers * sizes[at] / batch_size,
            )
        held = [self._load(part) for part in parts]
        weights = [
            checked_weight(self._weight(samples), self._device) if size else 0.0
            for samples, size in zip(held, sizes, strict=True)
        ]
        if self._total is None:
            self._total = self._sum_later(sum(weights))
        total = self._total

        @cache
        def fractions() -> Sequence[Weight]:
            found = [weight / total() for weight in weights]
            note(found)
            return found

        return Weighed(load=lambda at: held.pop(0), weights=weights, factor=lambda at: num_workers * fractions()[at])

    def _sum_later(self, weight: Weight) -> Callable[[], Weight]:
        """Begin to add up the weights of all workers; the result is W, or the least number if W is 0."""
        if not isinstance(weight, torch.Tensor):
            if self._gang.num_workers == 1:
                return lambda: weight or _LEAST
            weight = torch.full((), weight, dtype=torch.float64, device=self._device)  # does not wait for a GPU
        summed = self._gang.sum_later(weight)
        is_cheap = self._device.type == "cpu"
        return cache(lambda: (summed().item() or _LEAST) if is_cheap else summed().clamp(min=_LEAST))
