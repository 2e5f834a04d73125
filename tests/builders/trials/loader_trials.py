"""A trial with loader workers, which go wrong as its configuration says."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from rubberband.executor.training.torch_trial import TorchTrial


class Points(Dataset[Any]):
    """Points of y = 3x + 1, some of which cannot be loaded."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self.config.get("sleep_s", 0.0))  # its trial is ended amid an epoch
        if index == 40 and "fault" in self.config:
            print(f"sample {index} goes wrong", flush=True)
            _go_wrong(self.config["fault"])
        x = torch.tensor([index / 32 - 1.0]) + 0.01 * torch.randn(1)
        return x, 3.0 * x + 1.0


def _go_wrong(fault: str) -> None:
    if fault == "raise":
        raise ValueError("sample 40 is torn")
    if fault == "exit":
        os._exit(5)
    threading.Event().wait()


class Loaded(TorchTrial):
    """Fits a line; each loader worker leaves its pid in a folder, if the configuration names one."""

    batch_size = 16
    num_workers = 2
    loader_timeout_s = 2.0

    def build_model(self, config: Mapping[str, Any]) -> torch.nn.Module:
        return torch.nn.Linear(1, 1)

    def build_optimizer(self, config: Mapping[str, Any], model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def train_dataset(self, config: Mapping[str, Any]) -> Dataset[Any]:
        self.folder, self.pid = config.get("folder"), os.getpid()
        return Points(config)

    def eval_dataset(self, config: Mapping[str, Any]) -> Dataset[Any]:
        return Points({})

    def worker_init(self, worker: int, dataset: Any) -> None:
        if self.folder is not None:
            Path(self.folder, str(os.getpid())).touch()

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(model(x), y)

    def evaluate(self, model: torch.nn.Module, loader: Any) -> dict[str, Any]:
        return {**super().evaluate(model, loader), "pid": self.pid}
