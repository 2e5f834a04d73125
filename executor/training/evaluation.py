"""Evaluation of a `TorchTrial` on rank 0: the loader of its evaluation set, and the call of `evaluate`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from rubberband.executor.training.data import Collate, fetch, num_samples, to_device
from rubberband.executor.training.torch_trial import TorchTrial


class EvalLoader:
    """The evaluation set in order, as batches on the device; it can be iterated any number of times."""

    def __init__(
        self, dataset: Dataset[Any], *, batch_size: int, device: torch.device, collate: Collate | None
    ) -> None:
        self.dataset = dataset
        self._parts = [
            np.arange(start, min(start + batch_size, total))
            for total in [num_samples(dataset, "eval_dataset()")]
            for start in range(0, total, batch_size)
        ]
        self._device = device
        self._collate = collate

    @property
    def sizes(self) -> list[int]:
        """Samples in each batch."""
        return [len(part) for part in self._parts]

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[Any]:
        return (to_device(fetch(self.dataset, part, self._collate), self._device) for part in self._parts)


def evaluate(trial: TorchTrial, module: torch.nn.Module, loader: EvalLoader | None) -> Mapping[str, Any]:
    """Return the trial's own metrics of `module`, in evaluation mode; none without an evaluation set."""
    if loader is None:
        return {}
    module.eval()
    with torch.no_grad():
        metrics = trial.evaluate(module, loader)
    if not isinstance(metrics, Mapping):
        raise TypeError(f"evaluate() must return a mapping of metrics, not {type(metrics).__name__}")
    return metrics
