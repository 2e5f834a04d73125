"""Trials of one slot: a good one, one that loses its CUDA context, and one that leaves everything behind."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

import rubberband
from tests.builders.lost_context import cuda_error, lose, use_gpu


def leave_everything() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.device("cpu").__enter__()
    torch.overrides.BaseTorchFunctionMode().__enter__()
    torch.autograd.set_multithreading_enabled(False)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.benchmark = torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.enable_math_sdp(False)
    torch.set_num_threads(3)
    torch.autograd.set_detect_anomaly(True)
    torch.autocast("cpu", torch.bfloat16).__enter__()
    torch.set_grad_enabled(False)
    torch.nn.modules.module.register_module_forward_hook(lambda *_: torch.zeros(4, 1, requires_grad=True))
    sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook(lambda *_: None)  # type: ignore[attr-defined]
    multiprocessing.set_start_method("spawn")
    warnings.simplefilter("error", UserWarning)
    logging.disable(logging.CRITICAL)
    logging.root.addHandler(logging.NullHandler())
    socket.setdefaulttimeout(3.0)
    signal.setitimer(signal.ITIMER_REAL, 3600.0)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    folder = tempfile.mkdtemp()
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
    os.environ["RUBBERBAND_LEFT"] = "1"
    os.environ.pop("HOME", None)
    os.environ["PATH"] = folder
    os.chdir(folder)


def begin(role: str) -> None:
    """What a trial of that role does at its first step."""
    use_gpu()
    if role == "bad":
        lose(cuda_error("device-side assert triggered", 710))
    if role == "leaver":
        leave_everything()
    elif dist.is_initialized() or "RUBBERBAND_LEFT" in os.environ or "HOME" not in os.environ:
        raise AssertionError("another trial left something")


class Curve:
    """A regression whose losses show the dtype, the gradients and the seed with which it is trained."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(3, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)

    def step(self) -> dict[str, float]:
        self.optimizer.zero_grad()
        loss = (self.model(torch.ones(4, 3)) - 1.0).square().mean()
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.item()}


def function(config: dict[str, Any]) -> None:
    curve = Curve()
    for at in range(9):
        metrics = curve.step()
        if at == 0:
            begin(config["role"])
        rubberband.report(metrics, checkpoint=at)


class Plain(rubberband.Trial):
    def setup(self, config: Any, context: Any) -> None:
        self.role = config["role"]
        self.curve = Curve()

    def iterate(self) -> dict[str, float]:
        metrics = self.curve.step()
        role, self.role = self.role, ""
        if role:
            begin(role)
        return metrics

    def save(self) -> Any:
        return None

    def load(self, state: Any) -> None:
        pass


class Torch(rubberband.TorchTrial):
    batch_size = 4
    num_workers = 0

    def build_model(self, config: Any) -> torch.nn.Module:
        self.role = config["role"]
        return torch.nn.Linear(3, 1)

    def build_optimizer(self, config: Any, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=0.1)

    def train_dataset(self, config: Any) -> TensorDataset:
        return TensorDataset(torch.randn(8, 3), torch.ones(8, 1))

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        loss = (model(batch[0]) - batch[1]).square().mean()
        use_gpu()
        return loss

    def on_step(self, model: torch.nn.Module, step: int, size: int) -> None:
        role, self.role = self.role, ""
        if role:
            begin(role)
