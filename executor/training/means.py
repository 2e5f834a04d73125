"""Weighted means of the loss and the metrics of a trial, over the micro-batches of all workers of its gang.

Sums stay on the device until the end of an iteration, so that no step waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from rubberband.executor.training.gang import Gang
from rubberband.executor.training.runner import to_float

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
