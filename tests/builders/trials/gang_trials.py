"""Trials that do in hooks, losses and optimizers what people do; each must learn on a gang what it learns alone."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import update_bn

from rubberband.executor import gang
from tests.builders.trials.segment_trials import OwnStep, Regression

Config = Mapping[str, Any]


def thaw(part: nn.Module, is_trained: bool = True) -> None:
    for parameter in part.parameters():
        parameter.requires_grad_(is_trained)


def net(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*(layers or (nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)))).double()


class Thawing(Regression):
    """Thaws its first layer in iteration 2, and freezes its last one in iteration 5."""

    def build_model(self, config: Config) -> nn.Module:
        model = super().build_model(config)
        thaw(model[0], False)  # type: ignore[index]
        return model

    def on_iteration(self, model: Any, iterations: int) -> None:
        if iterations == 2:
            thaw(model[0])
        if iterations == 5:
            thaw(model[2], False)


class ThawingByStep(Thawing):
    """Thaws it in the middle of an iteration of the gang."""

    def on_iteration(self, model: Any, iterations: int) -> None:
        pass

    def on_step(self, model: Any, step: int, batch_size: int) -> None:
        if step == 10:
            thaw(model[0])


class ByLayer(Regression):
    """Learns at another rate in each layer, by groups that it adds as it thaws them."""

    def build_model(self, config: Config) -> nn.Module:
        model = super().build_model(config)
        thaw(model[0], False)  # type: ignore[index]
        return model

    def build_optimizer(self, config: Config, model: Any) -> torch.optim.Optimizer:
        self.optimizer = torch.optim.AdamW(model[2].parameters(), lr=0.01)
        return self.optimizer

    def build_scheduler(self, config: Config, optimizer: Any) -> None:
        return None

    def on_iteration(self, model: Any, iterations: int) -> None:
        if iterations == 4:
            thaw(model[0])
            self.optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.002})


class Recalibrating(Regression):
    """Trains with frozen statistics of its BatchNorm, and takes them from all samples before each iteration."""

    def build_model(self, config: Config) -> nn.Module:
        super().build_model(config)
        return net(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))

    def train_mode(self, model: Any) -> None:
        model[1].eval()

    def on_iteration(self, model: Any, iterations: int) -> None:
        inputs, _ = self.train_dataset({}).tensors
        update_bn([inputs[start : start + 8] for start in range(0, len(inputs), 8)], model)
        self.train_mode(model)


class ByHand(Regression):
    """Accumulates two batches in a step of its own."""

    def step(self, model: nn.Module, optimizers: Any, batch: Any) -> Any:
        loss = self.loss(model, batch)
        (loss / 2).backward()
        self.passes = getattr(self, "passes", 0) + 1
        if self.passes % 2 == 0:
            optimizers.step()
            optimizers.zero_grad()
        return loss


class OneCycle(Regression):
    """Steps a schedule over the whole trial after every batch."""

    scheduler_step = "batch"

    def build_scheduler(self, config: Config, optimizer: Any, *, total_steps: int) -> Any:  # type: ignore[override]
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=total_steps)


class Patient(Regression):
    """Freezes all but its head once the loss improves by little, as rank 0 sees it in `evaluate`."""

    def build_model(self, config: Config) -> nn.Module:
        self.best, self.bad = float("inf"), 0
        return super().build_model(config)

    def evaluate(self, model: nn.Module, loader: Any) -> dict[str, Any]:
        found = super().evaluate(model, loader)
        self.bad = 0 if found["loss"] < 0.97 * self.best else self.bad + 1
        self.best = min(self.best, float(found["loss"]))
        self.ended = self.bad >= 2
        return found

    def state_dict(self) -> Any:
        return {"best": self.best, "bad": self.bad}

    def load_state_dict(self, state: Any) -> None:
        self.best, self.bad = state["best"], state["bad"]


# Beyond the idioms.


class Parts(nn.Module):
    """Has methods and parts that a loss calls, and no `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = net(nn.Linear(5, 8), nn.Tanh()), net(nn.Linear(8, 1))

    def penalty(self) -> torch.Tensor:
        return sum((each.square().sum() for each in self.parameters()), torch.zeros((), dtype=torch.float64))


class Calling(Regression):
    """Calls methods and parts of its model."""

    def build_model(self, config: Config) -> nn.Module:
        super().build_model(config)
        return Parts()

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(model.head(model.encoder(inputs)), targets) + 0.001 * model.penalty()


class Counted(nn.Module):
    """Scales by a buffer that every call replaces by another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.body = net()
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> Any:
        if self.training:
            self.scale = self.scale * 1.01
        return self.body(x) * self.scale


class Twice(Regression):
    """Calls a model with a buffer twice in a loss."""

    def build_model(self, config: Config) -> nn.Module:
        super().build_model(config)
        return Counted()

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(model(inputs) + model(-inputs), targets)


class Lazily(Regression):
    """Leaves the widths of its layers to the first sample."""

    def build_model(self, config: Config) -> nn.Module:
        super().build_model(config)
        return net(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(1))


class Beside(Regression):
    """Trains a number of its own beside the model."""

    def build_optimizer(self, config: Config, model: nn.Module) -> torch.optim.Optimizer:
        self.shift = nn.Parameter(torch.zeros((), dtype=torch.float64))
        return torch.optim.SGD([*model.parameters(), self.shift], lr=0.05, momentum=0.9)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(model(inputs) + self.shift, targets)

    def state_dict(self) -> Any:
        return self.shift.detach()

    def load_state_dict(self, state: Any) -> None:
        self.shift.data.copy_(state)


class Resetting(Regression):
    def on_iteration(self, model: Any, iterations: int) -> None:
        if iterations == 3:
            model[2].reset_parameters()


class OwnThawing(OwnStep, Thawing):
    """Takes its own steps, and thaws a layer and replaces another one."""


class Sparse(Regression):
    def build_model(self, config: Config) -> nn.Module:
        super().build_model(config)
        return nn.ModuleDict({"table": nn.Embedding(4, 1, sparse=True), "body": net()}).double()

    def build_optimizer(self, config: Config, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05)

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        items = model["table"]((inputs[:, 0] > 0).long())
        return nn.functional.mse_loss(model["body"](inputs) + items, targets)


class ByRank(Thawing):
    """Thaws a layer on the first worker alone."""

    def build_model(self, config: Config) -> nn.Module:
        gang.EXCHANGE_TIMEOUT = timedelta(seconds=1)
        return super().build_model(config)

    def on_iteration(self, model: Any, iterations: int) -> None:
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            super().on_iteration(model, iterations)


class Drifting(Regression):
    """Adds other noise to its weights on each worker."""

    def on_step(self, model: Any, step: int, batch_size: int) -> None:
        model[0].weight.add_(1e-4 * torch.randn_like(model[0].weight))
