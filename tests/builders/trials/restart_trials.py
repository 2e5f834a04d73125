"""Trials that keep something while they train that a checkpoint may lack, and some whose checkpoint has it all."""

from __future__ import annotations

import time
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


class Derived(Base):
    """What each iteration sets anew."""

    def on_iteration(self, model: Any, iterations: int) -> None:
        self.iterations, self.temperature = iterations, 1.0 / (1 + iterations)

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        self.latest = super().loss(model, batch)
        self.rounded = round(float(self.latest.detach()) * self.temperature, 3)
        return self.latest


class InAttribute(Base):
    """Keeps an object with a state that no checkpoint has."""

    def build_optimizer(self, config: Any, model: nn.Module) -> torch.optim.Optimizer:
        self.made = optimizer = super().build_optimizer(config, model)  # what the runner restores is no finding
        self.kept = self.keep(model, optimizer)
        return optimizer

    def keep(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        return None

    def on_step(self, model: nn.Module, step: int, batch_size: int) -> None:
        if hasattr(self.kept, "step"):
            self.kept.step()


class Schedule(InAttribute):
    def keep(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 0.9**done)


class Generating(InAttribute):
    def keep(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        return torch.Generator().manual_seed(0)

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        noise = torch.rand(batch[0].shape, generator=self.kept)
        return super().loss(model, [batch[0] + 0.01 * noise, batch[1]])


class KeptSchedule(Schedule):
    def state_dict(self) -> Any:
        return self.kept.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.kept.load_state_dict(state)


class Forgotten(Schedule):
    """Has a state_dict(), which lacks the schedule."""

    def state_dict(self) -> Any:
        return {"other": 1}

    def load_state_dict(self, state: Any) -> None:
        assert state["other"] == 1


class Noise:
    def __init__(self, *, reseeds: bool) -> None:
        self.generator, self.reseeds = torch.Generator().manual_seed(1), reseeds

    def __call__(self, x: torch.Tensor, at: int) -> torch.Tensor:
        if self.reseeds:
            self.generator.manual_seed(at)
        return x + 0.01 * torch.randn(x.shape, generator=self.generator)


class NoisySet(torch.utils.data.Dataset[Any]):
    def __init__(self, *, reseeds: bool) -> None:
        self.x, self.transforms = torch.ones(64, 4), [Noise(reseeds=reseeds)]

    def __len__(self) -> int:
        return 64

    def __getitem__(self, at: int) -> Any:
        return self.transforms[0](self.x[at], at), torch.ones(1)


class Augmented(Base):
    reseeds, num_workers = False, 1

    def train_dataset(self, config: Any) -> Any:
        return NoisySet(reseeds=self.reseeds)


class Reseeded(Augmented):
    reseeds = True


class Ordered(Base):
    """Numbers its words in the order of a set."""

    def train_dataset(self, config: Any) -> Any:
        numbers = {word: number for number, word in enumerate({f"word {number}" for number in range(64)})}
        x = torch.tensor([[float(numbers[f"word {number}"])] * 4 for number in range(64)]) / 64
        return TensorDataset(x, x.sum(1, keepdim=True) * torch.linspace(0, 1, 64)[:, None])


class Clocked(Base):
    """Scales its loss by the clock."""

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        return super().loss(model, batch) * (1 + time.perf_counter() % 1)
