"""Trials whose parameters are counted: models and optimizers that need different memory for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import rubberband


class Adam(rubberband.TorchTrial):
    """A linear layer of `width` x `width`, with AdamW."""

    def build_model(self, config: Mapping[str, Any]) -> nn.Module:
        print("a model")
        return nn.Linear(config["width"], config["width"], bias=False)

    def build_optimizer(self, config: Mapping[str, Any], model: nn.Module) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=0.1)

    def train_dataset(self, config: Mapping[str, Any]) -> Dataset[Any]:
        self.classes = 10
        return torch.utils.data.TensorDataset(torch.zeros(8, config["width"]))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return torch.as_tensor(model(batch[0]).mean())


class Divided(Adam):
    sharding = "fsdp"


class Fused(Adam):
    """An optimizer that needs a GPU."""

    def build_optimizer(self, config: Mapping[str, Any], model: nn.Module) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)


class Plain(Adam):
    def build_optimizer(self, config: Mapping[str, Any], model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.1)


class Momentum(Adam):
    def build_optimizer(self, config: Mapping[str, Any], model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Half(Adam):
    def build_model(self, config: Mapping[str, Any]) -> nn.Module:
        return super().build_model(config).bfloat16()


class Frozen(Adam):
    """Half of its parameters are not trained, and one tensor is in two layers."""

    def build_model(self, config: Mapping[str, Any]) -> nn.Module:
        one, other, again = (nn.Linear(config["width"], config["width"], bias=False) for _ in range(3))
        other.weight.requires_grad_(False)
        again.weight = one.weight
        return nn.Sequential(one, other, again)


class Looks(Adam):
    """A model that looks at its weights, and needs what the data set."""

    def build_model(self, config: Mapping[str, Any]) -> nn.Module:
        model = super().build_model(config)
        assert torch.isfinite(next(model.parameters())).all().item()
        assert self.classes == 10
        return model


class Broken(Adam):
    def build_model(self, config: Mapping[str, Any]) -> nn.Module:
        raise ValueError("no such model")


class Own(rubberband.Trial):
    """A trial whose parameters cannot be seen."""

    def setup(self, config: Mapping[str, Any], context: Any) -> None:
        pass

    def iterate(self) -> dict[str, float]:
        return {"loss": 0.0}

    def save(self, path: Any) -> None:
        pass

    def load(self, path: Any) -> None:
        pass
