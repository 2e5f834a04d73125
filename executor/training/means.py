"""Weighted means of the loss and the metrics of a trial, over the micro-batches of all workers of its gang.

Sums stay on the device until the end of an iteration, so that no step waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from rubberband.executor.training.gang import Gang
from rubberband.executor.training.runner import to_float
from rubberband.executor.training.sampler import Indices
from rubberband.executor.training.torch_trial import TorchTrial, override_of

Weight = float | torch.Tensor
"""Weight of a batch: a number, or a scalar tensor on the device."""


def loss_and_metrics(returned: Any, method: str = "loss()") -> tuple[torch.Tensor, Mapping[str, Any]]:
    """Return the loss and the metrics, if any, that a trial's `method` returned. Raises TypeError or ValueError."""
    metrics: Any = {}
    loss = returned
    if isinstance(returned, tuple) and len(returned) == 2:
        loss, metrics = returned
    if not isinstance(loss, torch.Tensor) or not isinstance(metrics, Mapping):
        kinds = f"({type(loss).__name__}, {type(metrics).__name__})" if loss is not returned else type(loss).__name__
        raise TypeError(f"{method} returned {kinds}; return the mean loss, a tensor, or (loss, mapping of metrics)")
    if loss.dim() != 0:
        raise ValueError(f"{method} returned a loss of shape {tuple(loss.shape)}; return its mean, a scalar")
    return loss, metrics


def checked_weight(value: Any, device: torch.device) -> Weight:
    """Return what `weight(batch)` returned, on the device. Raises TypeError or ValueError.

    The value of a tensor on a GPU is not looked at, as that would wait for the GPU: see `Means.reduce`.
    """
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ValueError(f"weight() returned a tensor of shape {tuple(value.shape)}; return one number, its sum")
        if value.device.type != "cpu":
            return value.detach().reshape(()).to(device, torch.float64)
        value = value.item()
    number = to_float(value)
    if number is None:
        raise TypeError(f"weight() returned {type(value).__name__}; return the number that the batch counts")
    if not 0.0 <= number < math.inf:
        raise ValueError(_not_a_weight(number))
    return number


def _not_a_weight(value: object) -> str:
    return f"weight() returned {value}; return a finite number of at least 0, such as the tokens of the batch"


class Means:
    """Sums of one iteration on one worker."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._loss: torch.Tensor | float = 0.0
        self._weight: Weight = 0.0
        self._metrics: dict[str, torch.Tensor | float] | None = None

    def add(self, weight: Weight, loss: torch.Tensor, metrics: Mapping[str, Any]) -> None:
        """Add the means of a micro-batch that counts `weight`. Raises TypeError or ValueError for bad metrics."""
        self._loss = self._loss + _counted(loss.detach().double(), weight)
        self._weight = self._weight + weight
        sums = self._same(metrics)
        for name, total in sums.items():
            sums[name] = total + _counted(self._value(name, metrics[name]), weight)

    def join(self, found: Means) -> None:
        """Add the sums of another part of the iteration. Raises ValueError for other metrics than before."""
        self._loss = self._loss + found._loss
        self._weight = self._weight + found._weight
        sums = self._same(found._metrics or {})
        for name, total in sums.items():
            sums[name] = total + (found._metrics or {})[name]

    def _same(self, metrics: Mapping[str, Any]) -> dict[str, torch.Tensor | float]:
        """Return the sums of the metrics, which are the same in every batch."""
        if self._metrics is None:
            self._metrics = {_name(name): 0.0 for name in metrics}
        if self._metrics.keys() != metrics.keys():
            before, now = (", ".join(sorted(map(str, names))) or "none" for names in (self._metrics, metrics))
            raise ValueError(f"loss() returned other metrics than before ({now}; before: {before}); return the same")
        return self._metrics

    def reduce(self, gang: Gang) -> dict[str, float]:
        """Return the means over the gang, `loss` and the metrics by their names; every worker calls it.

        Raises ValueError if all weights are 0, or one was no weight.
        """
        total, sums = self.sums(gang)
        if not 0.0 < total < math.inf:
            none = "weight() returned 0 for every batch; return what counts in a batch, such as its tokens"
            raise ValueError(none if total == 0.0 else _not_a_weight(total))
        return {name: value / total for name, value in sums.items()}

    def sums(self, gang: Gang | None = None) -> tuple[float, dict[str, float]]:
        """Return the sum of the weights, and the weighted sums by name, of this worker or of all of a gang."""
        metrics = self._metrics or {}
        names = sorted(metrics)
        values = [self._weight, self._loss, *(metrics[name] for name in names)]
        found = torch.stack([torch.as_tensor(value, dtype=torch.float64, device=self._device) for value in values])
        total, *sums = (found if gang is None else gang.sum(found)).tolist()
        return total, dict(zip(["loss", *names], sums, strict=True))

    def _value(self, name: str, value: Any) -> torch.Tensor | float:
        if isinstance(value, torch.Tensor):
            if value.numel() != 1:
                raise ValueError(f"loss() returned the metric {name!r} of shape {tuple(value.shape)}; return its mean")
            return value.detach().reshape(()).to(self._device, torch.float64)
        number = to_float(value)
        if number is None:
            raise TypeError(f"loss() returned the metric {name!r} as {type(value).__name__}; return a number")
        return number


def _counted(value: torch.Tensor | float, weight: Weight) -> torch.Tensor | float:
    """Return value * weight; 0 for a weight of 0, even if the mean over nothing is no number."""
    if isinstance(weight, torch.Tensor):
        return torch.where(weight > 0.0, value * weight, 0.0)
    return value * weight if weight else 0.0


def _name(name: Any) -> str:
    if not isinstance(name, str) or name == "loss":
        raise ValueError(
            f"loss() returned a metric named {name!r}; use a text other than 'loss', which is the mean loss itself"
        )
    return name


# Weights of the micro-batches of a step, and the factor by which each one's loss enters the gradient of the gang.


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
