"""A small network with repeated layers, whole or divided among the workers of a gang; `config` says what is odd."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.utils.data import TensorDataset

import rubberband
from tests.builders.trials.segment_trials import rank


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(7), nn.Linear(7, 9), nn.Linear(9, 7)
        self.is_in_place = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs = inputs.tanh_() if self.is_in_place else inputs
        return inputs + self.down(torch.tanh(self.up(self.norm(inputs))))


class Experts(Block):
    """Few samples go to the second expert, and none to the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(7, 7) for _ in range(3)])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found, route = super().forward(inputs), (inputs.sum(1) > 2).long()
        for number in route.unique().tolist():
            (rows,) = (route == number).nonzero(as_tuple=True)
            found = found.index_add(0, rows, self.experts[number](inputs[rows]))
        return found


WRITES: Mapping[str, Any] = {
    "a row": lambda weight: weight[0].zero_(),
    "a row of data": lambda weight: weight.data[0].mul_(2.0),
    "init": lambda weight: nn.init.zeros_(weight[0]),
    "narrow": lambda weight: weight.narrow(0, 0, 1).fill_(1.0),
    "data": lambda weight: setattr(weight, "data", weight * 0.5),
    "in place": lambda weight: weight.mul_(1.0).clamp_(-9.0, 9.0).masked_fill_(weight > 9.0, 0.0),
    "a copy": lambda weight: weight[0].clone().zero_(),
    "init of all": lambda weight: nn.init.constant_(weight, 0.5),
}
"""Writes of a hook to a weight; those after "data" are allowed."""


class Network(nn.Module):
    """Widths that no gang divides; two layers with one weight; a parameter, a buffer and an attribute of its own."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.calls = config.get("calls")
        self.first = nn.Linear(5, 7, bias=False)
        self.blocks = nn.ModuleList([Experts() if config.get("experts") else Block() for _ in range(3)])
        self.last = nn.Linear(5, 7, bias=False)
        if config.get("reads"):
            assert self.first.weight.std().item() > 0
        self.scale = nn.Parameter(torch.randn(7))
        self.tied = nn.Linear(5, 7, bias=False)
        self.tied.weight = self.first.weight
        self.register_buffer("shift", torch.randn(7), persistent=not config.get("forgets"))
        self.fixed = torch.full((7,), 0.5, dtype=torch.float64) if config.get("forgets") else 0.5
        self.head = nn.Linear(7, 1)
        if config.get("shares"):
            self.blocks[2].up.weight = self.blocks[0].up.weight
        if config.get("wraps"):
            apply_activation_checkpointing(self, check_fn=lambda each: isinstance(each, Block))

    def features(self, inputs: torch.Tensor) -> torch.Tensor:
        features = self.first(inputs) + self.tied(inputs).tanh() + self.last(inputs)
        for block in self.blocks:
            features = block.forward(features) if self.calls == "forward" else block(features)
        return features * self.scale + self.shift * self.fixed

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(inputs))


class Summing(torch.optim.SGD):
    """Keeps a sum over all of a parameter's gradient, which no worker has alone."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    self.state[each]["sum"] = each.grad.sum()
        return super().step(closure)


class Whole(rubberband.TorchTrial):
    batch_size = 16
    max_batch_size_per_gpu = 3
    gradient_clip_norm = 0.2

    def build_model(self, config: Mapping[str, Any]) -> nn.Module:
        self.config = config
        for word, value in config.get("words", {}).items():
            setattr(self, word, value)
        network = Network(config)
        if "layer" in config:
            network.layer = getattr(nn, config["layer"][0])(*config["layer"][1:])
        for each in network.blocks:
            each.is_in_place = config.get("calls") == "in place"
        dtype = getattr(torch, config.get("dtype", "float64"))
        self.batches = 0
        network.to(dtype)
        if "counts" in config:
            network.count = nn.Parameter(
                torch.ones(config["counts"], dtype=getattr(torch, config.get("type", "float32")))
            )
        return network

    def build_optimizer(self, config: Mapping[str, Any], model: nn.Module) -> torch.optim.Optimizer:
        parameters = [*model.parameters()]
        if config.get("beside"):
            parameters.append(nn.Parameter(torch.ones(3)))
        if config.get("optimizer") == "sgd":
            return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
        if config.get("optimizer") == "summing":
            return Summing(parameters, lr=0.01)
        if "optimizer" in config:
            matrices = [each for each in parameters if each.dim() == 2] if config["optimizer"] == "Muon" else parameters
            return getattr(torch.optim, config["optimizer"])(matrices, lr=0.01)
        return torch.optim.AdamW(parameters, lr=config.get("lr", 0.01))

    def build_scheduler(self, config: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)

    def train_dataset(self, config: Mapping[str, Any]) -> TensorDataset:
        dtype = getattr(torch, config.get("dtype", "float64"))
        inputs = torch.randn(40, 5, dtype=torch.float64)
        return TensorDataset(inputs.to(dtype), inputs.sum(1, keepdim=True).sin().to(dtype))

    def eval_dataset(self, config: Mapping[str, Any]) -> TensorDataset:
        return self.train_dataset(config)

    def on_iteration(self, model: nn.Module, iterations: int) -> None:
        if self.config.get("thaws"):
            model.blocks[0].requires_grad_(iterations > 2)
        if writes := self.config.get("writes"):
            weight = model.last.weight
            with torch.no_grad():
                WRITES[writes](weight)
        if self.config.get("adds") and iterations == 2:
            model.more = nn.Linear(7, 1).double()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        inputs, targets = batch
        self.batches += 1
        if self.batches == 5 and self.config.get("raise_on_rank") == rank():
            raise ArithmeticError("no more")
        if self.batches == self.config.get("killed_at", 5) and self.config.get("killed_rank") == rank():
            os.kill(os.getpid(), signal.SIGKILL)
        if self.config.get("fits") is not None and rank() == self.config["at"] and len(inputs) > self.config["fits"]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        if self.config.get("calls") == "gradients" and torch.is_grad_enabled():
            inputs = inputs - torch.autograd.grad(model(inputs.requires_grad_()).sum(), inputs)[0]
        found = model.head(model.features(inputs))
        if self.config.get("leaves"):  # few samples count, and in most passes none
            kept = inputs[:, 0] > 1.5
            if not kept.any():
                return torch.zeros((), dtype=found.dtype, requires_grad=True)
            return (found - targets)[kept].square().sum() / len(inputs)
        return nn.functional.mse_loss(found, targets), {"gap": (model(inputs) - targets).abs().mean()}


class Divided(Whole):
    sharding = "fsdp"


class Apart(Divided):
    """Each worker calls a part of its own."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        inputs, targets = batch
        found = model.blocks[rank()](model.first(inputs))
        return nn.functional.mse_loss(model.head(found), targets)


class ByHand(Divided):
    """Divided by itself, and evaluated by itself; it keeps a state of its own."""

    def shard(self, model: Any, mesh: Any) -> None:
        from torch.distributed.fsdp import fully_shard

        for part in (model.blocks[0], model.blocks[1].up, model.head):
            fully_shard(part, mesh=mesh)

    def evaluate(self, model: Any, loader: Any) -> dict[str, float]:
        assert not model.training
        gaps = [(model(inputs) - targets).abs() for inputs, targets in loader]
        return {"loss": torch.cat(gaps).mean().item()}

    def state_dict(self) -> Any:
        if self.config.get("keeps") == "divided":
            return {"kept": [*self.model_of.parameters()]}
        norm = self.model_of.head.weight.full_tensor().norm() if self.is_gang else None
        return {"batches": self.batches, "norm": norm}

    def load_state_dict(self, state: Any) -> None:
        assert state["batches"] > 0

    def on_step(self, model: Any, step: int, batch_size: int) -> None:
        self.model_of = model
        self.is_gang = hasattr(model.head.weight, "full_tensor")


class OwnStep(Divided):
    def step(self, model: Any, optimizers: Any, batch: Any) -> Any:
        raise AssertionError


class Rounded(Divided):
    precision = "bf16"

    def build_model(self, config: Mapping[str, Any]) -> nn.Module:
        return super().build_model({"dtype": "float32", **config})

    def train_dataset(self, config: Mapping[str, Any]) -> TensorDataset:
        return super().train_dataset({"dtype": "float32", **config})
