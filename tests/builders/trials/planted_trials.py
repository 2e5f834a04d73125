"""Trials with the faults that make a gang learn otherwise than one worker, for the check; and some that have none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.builders.trials.gang_trials import Calling, net, thaw
from tests.builders.trials.segment_trials import OwnStep, Regression, rank

Config = Mapping[str, Any]


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


class Freezing(Regression):
    def on_iteration(self, model: Any, iterations: int) -> None:
        thaw(model[0], iterations < 2)


class Sampled(nn.Module):
    """Scales by a mean of its samples, which is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = net()
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> Any:
        if self.training:
            self.scale = 0.9 * self.scale + 0.1 * x.detach().abs().mean()
        return self.body(x) * self.scale


class Buffered(Regression):
    """Trains a model whose buffer follows its samples."""

    def build_model(self, config: Config) -> nn.Module:
        super().build_model(config)
        return Sampled()


class Communicating(Calling):
    """Sends something in every pass."""

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        if model.training and dist.is_initialized():
            dist.broadcast(torch.zeros(3), 0)
        return super().loss(model, batch)


class Contrasting(Regression):
    """Compares its samples with those of all workers, as contrastive losses do: each has as many."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        found = model(inputs)
        every = [found] * world_size()
        if model.training and dist.is_initialized():
            every = [torch.zeros_like(found) for _ in every]
            dist.all_gather(every, found.detach())
            every[rank()] = found
        return nn.functional.mse_loss(found, targets) + torch.cat(every).var(correction=0)


class Synchronised(Regression):
    """Has a layer that a gang trains on GPUs alone."""

    def build_model(self, config: Config) -> nn.Module:
        super().build_model(config)
        return nn.Sequential(nn.Linear(5, 2), nn.SyncBatchNorm(2), nn.Linear(2, 1)).double()


class Dropped(Regression):
    """Drops weights after a step, others on each worker."""

    def on_step(self, model: Any, step: int, batch_size: int) -> None:
        model[0].weight.mul_(torch.rand_like(model[0].weight) > 0.1)


class Scaled(Regression):
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return super().loss(model, batch) * world_size()


class Momentum(torch.optim.SGD):
    """Remembers on the first worker alone."""

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        if rank() > 0:
            self.state.clear()
        return found


class Remembering(Regression):
    """Trains with an optimizer whose state is on the first worker."""

    def build_optimizer(self, config: Config, model: nn.Module) -> torch.optim.Optimizer:
        return Momentum(model.parameters(), lr=0.05, momentum=0.9)


class Summed(Regression):
    """Reports a sum over the workers."""

    def evaluate(self, model: nn.Module, loader: Any) -> dict[str, Any]:
        return {"loss": super().evaluate(model, loader)["loss"] * world_size()}


class Unseeded(Regression):
    """Draws its first weights from a generator of its own."""

    def build_model(self, config: Config) -> nn.Module:
        model = super().build_model(config)
        generator = torch.Generator()
        generator.seed()
        for parameter in model.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        return model


class Forgetting(Regression):
    """Warms up by a count that no checkpoint has."""

    def build_model(self, config: Config) -> nn.Module:
        self.count = 0
        return super().build_model(config)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return super().loss(model, batch) * min(1.0, self.count / 6)

    def on_step(self, model: nn.Module, step: int, batch_size: int) -> None:
        self.count += 1


class Leaving(Regression):
    """Has a layer that no loss uses."""

    def build_model(self, config: Config) -> nn.Module:
        super().build_model(config)
        return nn.ModuleDict({"body": net(), "other": nn.Linear(2, 2)}).double()

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(model["body"](inputs), targets)


class Usual(Regression):
    """Has BatchNorm, dropout, mixtures in the loss, attention and Adam, in single precision."""

    def build_model(self, config: Config) -> nn.Module:
        super().build_model({**config, "dtype": "float32"})
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        return nn.ModuleDict(
            {"first": nn.Linear(1, 8), "norm": nn.BatchNorm1d(5), "layer": layer, "last": nn.Linear(8, 1)}
        )

    def build_optimizer(self, config: Config, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        inputs, targets = (each.float() for each in batch)
        if model.training:
            share = torch.rand(())
            inputs, targets = (share * each + (1 - share) * each.flip(0) for each in (inputs, targets))
        hidden = model["norm"](model["first"](inputs.unsqueeze(2)))
        return nn.functional.mse_loss(model["last"](model["layer"](hidden)).mean(1), targets)


class OwnUsual(OwnStep, Usual):
    """The same in a step of its own, without BatchNorm."""


class Overflowing(Usual):
    """Scales its loss for fp16, in which a step is left out where the gradient of a share overflows."""

    precision = "fp16"

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        return 3.0 * super().loss(model, batch)


class Unused(Leaving):
    """Has a layer that no loss uses, and says so."""

    find_unused_parameters = True
