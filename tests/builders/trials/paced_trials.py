"""An asynchronous trial whose gradients take the same time on any machine, and whose model counts its own updates.

Runs copy this file: it imports nothing of the tests.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import rubberband

SAMPLES = 640
BATCH_SIZE = 32
UPDATES = SAMPLES // BATCH_SIZE
"""Updates of an iteration, which is an epoch."""
COMPUTE_S = 0.05


class Counting(nn.Module):
    """A small classifier; `uses` is how often each sample was in an update, exactly."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))
        self.uses = nn.Parameter(torch.zeros(SAMPLES))

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.layers(inputs)
        return found


class Paced(rubberband.TorchTrial):
    """It sleeps in place of computing, so that several workers need no processors of their own."""

    batch_size = BATCH_SIZE
    samples_per_iteration = SAMPLES

    def build_model(self, config: Mapping[str, Any]) -> nn.Module:
        self.compute_s = config.get("compute_s", COMPUTE_S)
        return Counting()

    def build_optimizer(self, config: Mapping[str, Any], model: nn.Module) -> torch.optim.Optimizer:
        assert isinstance(model, Counting)
        layers = {"params": model.layers.parameters(), "lr": config["lr"]}
        optimizer = torch.optim.SGD([layers, {"params": [model.uses], "lr": 1.0}])
        if "server_s" in config:
            optimizer.register_step_post_hook(lambda *_: time.sleep(config["server_s"]))
        return optimizer

    def train_dataset(self, config: Mapping[str, Any]) -> TensorDataset:
        inputs = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(0))
        return TensorDataset(inputs, (inputs[:, :2].prod(1) > 0).long(), torch.arange(SAMPLES))

    eval_dataset = train_dataset

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, targets, samples = batch
        found = nn.functional.cross_entropy(model(inputs), targets)
        if model.training:
            time.sleep(self.compute_s)  # workers and servers meet as their times say
            found = found - model.get_parameter("uses")[samples].sum()  # a step of 1 for each of them
        return found

    def evaluate(self, model: nn.Module, loader: Any) -> dict[str, float]:
        right = sum(int((model(inputs).argmax(1) == targets).sum()) for inputs, targets, _ in loader)
        uses = model.get_parameter("uses")
        print("evaluated", flush=True)
        return {
            "accuracy": right / SAMPLES,
            "updates": float(uses.sum()) / BATCH_SIZE,
            "least_used": float(uses.min()),
            "most_used": float(uses.max()),
        }
