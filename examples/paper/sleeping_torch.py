"""Trial that really trains a small network, and sleeps in each pass as long as a GPU would compute (Pollux, Table 3).

Its gradients and their noise are real. Two CPUs could not show that a larger batch keeps a GPU busy.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import rubberband

PASS_S, SAMPLE_S = 0.040, 0.0002
"""Seconds of a pass, and of each of its samples: a GPU with few samples is idle most of the time."""
CLASSES, FEATURES = 10, 64


def samples(number: int, seed: int) -> TensorDataset:
    """Return points around ten centres, with noise of three times their distance from the middle."""
    centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (number,), generator=generator)
    return TensorDataset(centres[labels] + 3.0 * torch.randn(number, FEATURES, generator=generator), labels)


class SleepingTrial(rubberband.TorchTrial):
    """Configuration: `lr`, `momentum`, `weight_decay` and `width`."""

    batch_size = 64
    samples_per_iteration = 2048

    def build_model(self, config: Mapping[str, Any]) -> nn.Module:
        width = config["width"]
        return nn.Sequential(nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, CLASSES))

    def build_optimizer(self, config: Mapping[str, Any], model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            model.parameters(), lr=config["lr"], momentum=config["momentum"], weight_decay=config["weight_decay"]
        )

    def train_dataset(self, config: Mapping[str, Any]) -> TensorDataset:
        return samples(2048, seed=0)

    def eval_dataset(self, config: Mapping[str, Any]) -> TensorDataset:
        return samples(2048, seed=1)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        points, labels = batch
        time.sleep(PASS_S + SAMPLE_S * len(labels))
        return nn.functional.cross_entropy(model(points), labels)

    def evaluate(self, model: nn.Module, loader: Any) -> dict[str, float]:
        correct = sum((model(points).argmax(1) == labels).sum().item() for points, labels in loader)
        return {"accuracy": correct / sum(loader.sizes)}
