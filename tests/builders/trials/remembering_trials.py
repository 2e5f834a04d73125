"""Trials that keep something in plain attributes while they train."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import rubberband


class Counting(nn.Module):
    def __init__(self, *, counts: str = "attribute") -> None:
        super().__init__()
        self.layer, self.counts, self.mask = nn.Linear(4, 1), counts, None
        if counts == "buffer":
            self.register_buffer("passes", torch.tensor(0.0))
        else:
            self.passes = 0.0
        self.beta = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mask is None:
            self.mask = torch.ones(4)
        if self.training and self.counts != "nothing":
            self.passes = self.passes + 1.0
        self.beta = min(1.0, float(self.passes) / 40.0)
        return self.layer(x * self.mask)


class Base(rubberband.TorchTrial):
    batch_size = 16
    counts = "nothing"

    def build_model(self, config: Any) -> nn.Module:
        return Counting(counts=self.counts)

    def build_optimizer(self, config: Any, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05)

    def train_dataset(self, config: Any) -> Any:
        x = torch.randn(64, 4)
        return TensorDataset(x, x.sum(1, keepdim=True))

    def eval_dataset(self, config: Any) -> Any:
        return self.train_dataset(config)

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        out = model(batch[0])
        return nn.functional.mse_loss(out, batch[1]) + model.beta * out.pow(2).mean()


class Annealed(Base):
    counts = "attribute"


class Buffered(Base):
    counts = "buffer"


class Best(Base):
    best = 1e9

    def evaluate(self, model: Any, loader: Any) -> Any:
        found = dict(super().evaluate(model, loader))
        self.best = min(self.best, found["loss"])
        return {**found, "best": self.best}


class Kept(Best):
    def state_dict(self) -> Any:
        return {"best": self.best}

    def load_state_dict(self, state: Any) -> None:
        self.best = state["best"]


class Derived(Base):
    """What each iteration sets anew."""

    def on_iteration(self, model: Any, iterations: int) -> None:
        self.iterations, self.temperature = iterations, 1.0 / (1 + iterations)

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        self.latest = super().loss(model, batch)
        self.rounded = round(float(self.latest.detach()) * self.temperature, 3)
        return self.latest
