"""Trials whose batch is adapted, small enough to train in a second."""

from __future__ import annotations

import time
from collections.abc import Mapping
from multiprocessing import parent_process
from typing import Any

import torch
from torch.utils.data import TensorDataset

import rubberband
from rubberband.executor.training.goodput import agent

if parent_process() is not None:  # in a gang's worker, and not in the process of the tests
    # Looks may take all the time: one that a busy machine delays would be the last of so short a training.
    agent.CHOICE_SHARE = 1.0


def not_a_number(initial: int, batch_size: int, noise_scale: float) -> float:
    """A rule for the learning rate that does not work."""
    return float("nan")


class Noisy(rubberband.TorchTrial):
    """A linear regression with so much noise that large batches pay off. `memory`: of one pass, in samples.

    A pass takes 4 ms, whatever its size, so that they pay off by the clock of any machine.
    """

    batch_size = 16
    samples_per_iteration = 1024

    def build_model(self, config: Mapping[str, Any]) -> torch.nn.Module:
        self.memory = config.get("memory", 10**9)
        self.rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        layers: list[torch.nn.Module] = [torch.nn.Linear(200, 1)]
        if config.get("batch_norm"):
            layers.insert(0, torch.nn.BatchNorm1d(200))
        return torch.nn.Sequential(*layers).double()

    def build_optimizer(self, config: Mapping[str, Any], model: torch.nn.Module) -> torch.optim.Optimizer:
        if config.get("optimizer") == "adam":
            return torch.optim.AdamW(model.parameters(), lr=1e-3)
        return torch.optim.SGD(model.parameters(), lr=1e-3)

    def train_dataset(self, config: Mapping[str, Any]) -> TensorDataset:
        inputs = torch.randn(config.get("samples", 2048), 200, dtype=torch.float64)
        return TensorDataset(inputs, inputs.sum(1, keepdim=True) / 14 + 5 * torch.randn(len(inputs), 1).double())

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        time.sleep(0.004)  # adaptation goes by the time of steps
        inputs, targets = batch
        if len(inputs) > self.memory and self.rank == torch.distributed.is_initialized():
            raise torch.OutOfMemoryError("pretended")
        return torch.nn.functional.mse_loss(model(inputs), targets)
