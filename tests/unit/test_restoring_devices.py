"""Where a resumed trial's tensors are; the device "meta" stands for a GPU."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import rubberband
from rubberband.executor import Entrypoint, TorchRunner, make_runner, on_device, on_host, open_store, run_segment
from rubberband.executor.result.restoring import restore_trial
from rubberband.executor.training.checkpoint import Model, Optimizers, TrainedParameters
from rubberband.executor.training.options import build_optimizer
from tests.builders.segments import SEGMENT, reports

pytestmark = pytest.mark.filterwarnings("ignore:.*which is a no-op.*:UserWarning")  # of the stand-in
META = torch.device("meta")
ONE = replace(SEGMENT, metric="train_loss", until_iterations=1)
OPTIMIZERS = [
    "Adam",
    "AdamW",
    "NAdam",
    "RAdam",
    "Adagrad",
    "Adamax",
    "Adadelta",
    "RMSprop",
    "Rprop",
    "ASGD",
    "Adafactor",
]


class Line(rubberband.TorchTrial):
    batch_size = 4

    def build_model(self, config: Any) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))

    def build_optimizer(self, config: Any, model: torch.nn.Module) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = getattr(torch.optim, config["optimizer"])(model.parameters())
        if "lr" in config:
            optimizer.param_groups[0]["lr"] = torch.tensor(config["lr"], device=next(model.parameters()).device)
        return optimizer

    def train_dataset(self, config: Any) -> TensorDataset:
        return TensorDataset(torch.randn(8, 3), torch.randn(8, 1))

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


class Keeps(Line):
    """Keeps an average and the state of a generator beside the model."""

    def build_model(self, config: Any) -> torch.nn.Module:
        self.average, self.generator = torch.ones(3), torch.Generator().manual_seed(7)
        return super().build_model(config)

    def state_dict(self) -> Any:
        return {"average": self.average, "random": self.generator.get_state()}

    def load_state_dict(self, state: Any) -> None:
        self.generator.set_state(state["random"])
        self.average = state["average"]


def moved(trial: type, config: dict[str, Any], payload: bytes) -> TorchRunner:
    """Restore the checkpoint in a runner on the other device."""
    runner = make_runner(Entrypoint.from_object(trial), replace(ONE, config=config, from_iterations=1), [])
    assert isinstance(runner, TorchRunner)
    runner.device, runner.module = META, runner.module.to(META)
    runner.optimizers = build_optimizer(runner.trial, config, runner.module)
    runner.components |= {
        "model": Model(runner.module, META),
        "parameters": TrainedParameters(runner.module, runner.optimizers.members),
        "optimizer": Optimizers(runner.optimizers),
    }
    runner.restore(payload)
    return runner


def trained(trial: type, config: dict[str, Any], folder: Path, **content: Any) -> bytes:
    store = open_store(str(folder))
    (report,) = reports(list(run_segment(Entrypoint.from_object(trial), replace(ONE, config=config), store)))
    assert report.checkpoint is not None
    payload = store.load(report.checkpoint)
    kept = io.BytesIO()
    torch.save({**torch.load(io.BytesIO(payload), weights_only=False), **content}, kept)
    return kept.getvalue()


@pytest.mark.by_default(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_counters_of_an_optimizer_stay_in_host_memory(name: str, tmp_path: Path) -> None:
    config = {"optimizer": name}
    runner = moved(Line, config, trained(Line, config, tmp_path))
    optimizer = runner.optimizers.members[0]
    fresh: dict[str, str] = {}
    for parameter in runner.module.parameters():
        parameter.grad = torch.zeros_like(parameter)
        for key, value in optimizer.state[parameter].items():
            fresh[key] = value.device.type if isinstance(value, torch.Tensor) else ""
    assert {place for key, place in fresh.items() if key == "step"} <= {"cpu", ""}
    assert {place for key, place in fresh.items() if key != "step"} <= {"meta", ""}
    assert fresh


def test_a_trial_s_own_tensors_are_where_it_had_them(tmp_path: Path) -> None:
    config = {"optimizer": "SGD", "lr": 0.5}
    state = {"average": torch.ones(3), "random": torch.Generator().get_state()}
    runner = moved(Keeps, config, trained(Keeps, config, tmp_path, trial_on_host=[1]))
    trial: Any = runner.trial
    assert on_host(state) == [0, 1]
    assert trial.average.device == META
    assert trial.generator.get_state().device.type == "cpu"
    rate = runner.optimizers.members[0].param_groups[0]["lr"]
    assert rate.device == META, "as it was built"


def test_a_trial_that_is_loaded_for_a_gpu_keeps_its_generators_in_host_memory(tmp_path: Path) -> None:
    config = {"optimizer": "SGD"}
    checkpoint = open_store(str(tmp_path)).save(4, 1, trained(Keeps, config, tmp_path, trial_on_host=[1]))
    found: Any = SimpleNamespace(trial=4, iterations=1, configuration=config, checkpoint=checkpoint)
    trial: Any = restore_trial(found, Keeps, is_simulated=False, device="meta")
    assert trial.average.device == META
    assert trial.generator.get_state().device.type == "cpu"


class Kept:
    """An object of the user's own."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def test_objects_move_with_their_tensors() -> None:
    weight = torch.arange(6.0)
    state = {"a": [weight, weight[2:]], "object": Kept(torch.ones(2)), "seed": torch.ones(4, dtype=torch.uint8), "n": 3}
    found = on_device(state, [2], META)
    assert [each.device for each in found["a"]] == [META, META]
    assert found["object"].tensor.device == META
    assert (found["seed"].device.type, found["n"]) == ("cpu", 3)
    assert on_device(state, [], "cpu") is state


class KeepsOnGpu(Keeps):
    """Keeps its average where it trains."""

    def build_model(self, config: Any) -> torch.nn.Module:
        model = super().build_model(config)
        self.average = self.average.cuda()
        return model


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize(("trial", "place"), [(Keeps, "cpu"), (KeepsOnGpu, "cuda")])
def test_a_step_after_a_resume_does_not_wait_for_the_gpu(tmp_path: Path, trial: type, place: str) -> None:
    config = {"optimizer": "AdamW"}
    store = open_store(str(tmp_path))
    segment = replace(ONE, config=config, device="cuda")
    (report,) = reports(list(run_segment(Entrypoint.from_object(trial), segment, store)))
    assert report.checkpoint is not None
    later = replace(segment, from_iterations=1, until_iterations=2, checkpoint=report.checkpoint)
    runner: Any = make_runner(Entrypoint.from_object(trial), later, [])
    runner.restore(store.load(report.checkpoint))
    assert runner.trial.average.device.type == place
    for parameter in runner.module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch.cuda.set_sync_debug_mode("error")
    try:
        runner.optimizers.members[0].step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
