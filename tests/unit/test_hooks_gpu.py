"""Weights, metrics and an own step on a real GPU: no step waits for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import rubberband
from rubberband.executor import Entrypoint, SegmentReport, open_store, run_segment
from tests.builders.segments import SEGMENT

pytestmark = pytest.mark.gpu

STEPS = 5


class Silent(rubberband.TorchTrial):
    """Raises where a step after the first of an iteration waits for the GPU."""

    batch_size = 16
    max_batch_size_per_gpu = 8

    def build_model(self, config: Any) -> torch.nn.Module:
        return torch.nn.Linear(4, 3)

    def build_optimizer(self, config: Any, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train_dataset(self, config: Any) -> TensorDataset:
        return TensorDataset(torch.randn(16 * STEPS, 4), torch.randint(-1, 3, (16 * STEPS,)))

    def loss(self, model: torch.nn.Module, batch: Any) -> Any:
        scores, labels = model(batch[0]), batch[1]
        right = ((scores.argmax(1) == labels) & (labels >= 0)).sum() / (labels >= 0).sum()
        return torch.nn.functional.cross_entropy(scores, labels, ignore_index=-1), {"accuracy": right, "one": 1.0}

    def weight(self, batch: Any) -> torch.Tensor:
        labels: torch.Tensor = batch[1]
        return (labels >= 0).sum()

    def on_step(self, model: torch.nn.Module, step: int, batch_size: int) -> None:
        torch.cuda.set_sync_debug_mode("error" if step % STEPS else "default")


class Own(Silent):
    """The same by a step of its own."""

    max_batch_size_per_gpu = None

    def step(self, model: torch.nn.Module, optimizers: Any, batch: Any) -> Any:
        optimizers.zero_grad()
        loss, metrics = self.loss(model, batch)
        loss.backward()
        optimizers.step()
        return loss, metrics


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("trial", [Silent, Own])
def test_no_step_waits_for_the_gpu(tmp_path: Path, trial: type) -> None:
    segment = replace(SEGMENT, device="cuda", metric="train_loss")
    try:
        items = list(run_segment(Entrypoint.from_object(trial), segment, open_store(str(tmp_path))))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(isinstance(item, SegmentReport) for item in items[1:]), items
    assert items[-1].metrics["train_loss"] < items[1].metrics["train_loss"]
    assert items[-1].metrics["train_one"] == pytest.approx(1.0)
