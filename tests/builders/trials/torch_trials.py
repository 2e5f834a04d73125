"""One real torch trial for the tests of backends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from rubberband.executor.training.torch_trial import TorchTrial


class Line(TorchTrial):
    batch_size = 16

    def build_model(self, config: Mapping[str, Any]) -> nn.Module:
        return nn.Linear(1, 1)

    def build_optimizer(self, config: Mapping[str, Any], model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=config["lr"])

    def train_dataset(self, config: Mapping[str, Any]) -> Dataset[Any]:
        x = torch.linspace(-1.0, 1.0, 64).unsqueeze(1)
        return TensorDataset(x, 3.0 * x + 1.0)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(model(x), y)


class Twice(nn.Module):
    """Two layers with one weight, and a buffer that is a view of another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("turned", torch.arange(6.0).view(2, 3).T[1:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.first(x) + self.second(x)
        return found


class Tied(Line):
    def build_model(self, config: Mapping[str, Any]) -> nn.Module:
        return Twice()
