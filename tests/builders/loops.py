"""Trials of torch for the loop: all that is random, and nothing of it."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

import rubberband
from rubberband.executor import CheckpointRef, CheckpointStore


class Noisy(rubberband.TorchTrial):
    """Dropout, noise from NumPy and Python's own dropout: everything random there is."""

    batch_size = 8

    def build_model(self, config):
        return torch.nn.Sequential(
            torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Dropout(0.2), torch.nn.Linear(6, 1)
        )

    def build_optimizer(self, config, model):
        if config.get("optimizer") == "adam":
            return torch.optim.Adam(model.parameters(), lr=0.01)
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)

    def build_scheduler(self, config, optimizer):
        if config.get("scheduler") == "plateau":
            return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=100)

    def train_dataset(self, config):
        inputs = torch.randn(20, 4)
        return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))

    def eval_dataset(self, config):
        return self.train_dataset(config)

    def loss(self, model, batch):
        inputs, targets = batch
        noise = torch.from_numpy(np.random.normal(size=inputs.shape)).float()
        return torch.nn.functional.mse_loss(model(inputs + 0.1 * noise), targets)


class Exact(Noisy):
    """Nothing random and nothing that depends on the micro-batch, in float64."""

    def build_model(self, config):
        return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1)).double()

    def loss(self, model, batch):
        inputs, targets = batch
        return torch.nn.functional.mse_loss(model(inputs.double()), targets.double())


def content(store: CheckpointStore, ref: CheckpointRef) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(io.BytesIO(store.load(ref)), weights_only=False)
    return loaded


def assert_identical(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for name in one:
            assert_identical(one[name], other[name])
    elif isinstance(one, (list, tuple)):
        for left, right in zip(one, other, strict=True):
            assert_identical(left, right)
    else:
        assert one == other
