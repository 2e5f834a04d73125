"""Marks that steps set for the timer of a GPU, whose kernels the stand-in takes longer for than the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch.utils.data import TensorDataset

import rubberband
from rubberband.executor import WorkerGang as Gang
from rubberband.executor.training import balancing, loop
from rubberband.executor.training.clocks import CudaTimer
from rubberband.executor.training.components import Division
from tests.builders.fake_cuda import FakeCuda
from tests.builders.segments import SEGMENT

FORWARD_S, BACKWARD_S, WAIT_S, UPDATE_S = 0.03, 0.06, 0.5, 0.01
HOST_S = 0.001
"""To hand over any of them."""


class Pass(torch.autograd.Function):
    """A pass that takes the GPU a while."""

    cuda: ClassVar[FakeCuda]

    @staticmethod
    def forward(context: Any, values: torch.Tensor) -> torch.Tensor:
        Pass.cuda.launch(FORWARD_S, host_s=HOST_S)
        return values.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        Pass.cuda.launch(BACKWARD_S, host_s=HOST_S)
        return gradient


class Usual(rubberband.TorchTrial):
    batch_size = 8

    def build_model(self, config: Any) -> torch.nn.Module:
        return torch.nn.Linear(2, 1)

    def build_optimizer(self, config: Any, model: torch.nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer.register_step_pre_hook(lambda *_: Pass.cuda.launch(UPDATE_S, host_s=HOST_S))
        return optimizer

    def train_dataset(self, config: Any) -> TensorDataset:
        return TensorDataset(torch.ones(32, 2))

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        (rows,) = batch
        loss: torch.Tensor = Pass.apply(model(rows)).square().mean()
        return loss


class Accumulating(Usual):
    max_batch_size_per_gpu = 4


class Only(Division):
    """Divides evenly, and times."""

    def __init__(self, timer: CudaTimer) -> None:
        super().__init__()
        self.timer: CudaTimer = timer

    def begin_step(self) -> None:
        self.timer.begin()

    def after_step(self, batch: Any, *, has_stepped: bool) -> None:
        self.timer.end(counts=True)


@pytest.mark.parametrize(("trial", "passes"), [(Usual, 1), (Accumulating, 2)])
def test_a_step_of_a_gang_is_timed_with_and_without_its_wait(monkeypatch, fake_cuda, trial, passes):
    runner = timed(monkeypatch, fake_cuda, trial)
    assert runner.division.timer.take().steps < 4, "no step waits for the GPU"
    torch.cuda.synchronize()
    times = runner.division.timer.take()
    step_s = passes * (FORWARD_S + BACKWARD_S) + UPDATE_S
    assert times.steps == 4
    assert times.own_s == pytest.approx(4 * step_s, abs=5 * HOST_S)
    assert times.step_s == pytest.approx(4 * (step_s + WAIT_S), abs=5 * HOST_S)
    assert runner.waited["peers"]() == pytest.approx(4 * WAIT_S, abs=5 * HOST_S)


def timed(monkeypatch: pytest.MonkeyPatch, fake_cuda: FakeCuda, trial: type[rubberband.TorchTrial]) -> loop.TorchRunner:
    """Train an iteration of four steps on one worker that seems to be of a gang, on the stand-in."""
    Pass.cuda = fake_cuda

    class Waiting(CudaTimer):
        """Its worker waits for others between its gradients and the gang's."""

        def computed(self) -> None:
            super().computed()
            fake_cuda.launch(WAIT_S)

    monkeypatch.setattr(balancing, "make_division", lambda _: Only(Waiting()))
    runner = loop.TorchRunner(trial(), replace(SEGMENT, metric="train_loss"), Gang(0, 1, None))
    runner.iterate(1)
    return runner
