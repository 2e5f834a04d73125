"""Divided models in searches whose trials take over checkpoints: populations, clones, warm starts, the best iteration.

A buffer of the model adds up the learning rate of each of its steps, so a model says which configurations trained it.
"""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest
import torch

from rubberband.executor import TrialResult
from rubberband.executor.result.restoring import save_files
from tests.builders.command_line import CommandLine

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(600)]

STEPS = 4
"""Optimizer steps in an iteration."""
TRIAL = f"""
import torch
from torch import nn
from torch.utils.data import TensorDataset

import rubberband


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
        self.head = nn.Linear(6, 1)
        self.register_buffer("spent", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        return self.head(self.layers(x).tanh())


class Divided(rubberband.TorchTrial):
    sharding = "fsdp"
    batch_size = 8

    def build_model(self, config):
        return Network()

    def build_optimizer(self, config, model):
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
        return self.optimizer

    def train_dataset(self, config):
        inputs = torch.randn(8 * {STEPS}, 6, generator=torch.Generator().manual_seed(0))
        return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())

    def eval_dataset(self, config):
        return self.train_dataset(config)

    def loss(self, model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def on_step(self, model, step, batch_size):
        model.spent += self.optimizer.param_groups[0]["lr"]
"""
EXPERIMENT = """
version: 1
name: divided
entrypoint: divided:Divided
search:
  space: {lr: {type: loguniform, lower: 1e-4, upper: 1e-1}}
  scheduler: {type: pbt, population: 4, generations: 3, iterations: 2}
  sampler: {type: random, seed: 3}
  metric: loss
  mode: min
constraints: {deadline: 30m}
resources:
  provider: local
  gpus_per_instance: 4
  gpus_per_trial: {min: 2, max: 2}
  price_per_hour: 1
  max_instances: 1
profile: {seconds_per_iteration: {2: 0.5}}
"""


@pytest.fixture
def searches(command_line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    (command_line.folder / "divided.py").write_text(TRIAL)
    (command_line.folder / "divided.yaml").write_text(EXPERIMENT)
    monkeypatch.syspath_prepend(str(command_line.folder))
    return command_line


def spent(trial: TrialResult) -> float:
    """The sum of the learning rates of all steps that led to a trial's model."""
    steps = trial.schedule or ()
    starts = [(step.after, step.configuration["lr"]) for step in steps] or [(0, trial.configuration["lr"])]
    ends = [after for after, _ in starts[1:]] + [trial.iterations]
    return float(sum(STEPS * (end - after) * lr for (after, lr), end in zip(starts, ends, strict=True)))


def model_of(result: Any, **words: Any) -> Any:
    divided = importlib.import_module("divided")
    return result.load_best(divided.Divided, **words).model


def test_a_population_takes_over_checkpoints_in_parts_and_trains_on_with_its_own_learning_rates(
    searches: CommandLine,
) -> None:
    _, errors = searches("run", "divided.yaml", "-s", "resources.keep=best")
    assert "not repeatable" not in errors
    result = searches.result("divided")
    assert result.outcome == "done"
    assert len(result.forks) == 2
    assert all(fork.changes for fork in result.forks)
    for fork in result.forks:
        assert result.trials[fork.trial].schedule, "it has what it took over"
    best = result.best
    assert best is not None
    assert best.checkpoint is not None
    assert len(best.checkpoint.parts) == 1
    assert {trial.iterations for trial in result.trials} == {6}
    for trial in result.trials:
        assert state_of(searches, trial)["spent"].item() == pytest.approx(spent(trial), rel=1e-9)
    searches("best", "divided", "--out", "model.pt")
    state = torch.load(searches.folder / "model.pt", weights_only=True)
    assert state["spent"].item() == pytest.approx(spent(best), rel=1e-9)
    model = model_of(result)
    assert model.spent.item() == pytest.approx(spent(best), rel=1e-9)
    data = importlib.import_module("divided").Divided().train_dataset({})
    with torch.no_grad():
        loss = torch.nn.functional.mse_loss(model(data.tensors[0]), data.tensors[1]).item()
    assert loss == pytest.approx(best.metrics["loss"], rel=1e-5)
    earliest = json.loads(searches.shows("best", "divided", "--iteration", "best", "-o", "json"))
    assert earliest["metrics"]["loss"] <= best.metrics["loss"]


def test_a_clone_continues_from_parts_and_a_warm_start_and_the_best_iteration_find_their_models(
    searches: CommandLine,
) -> None:
    scheduler = "search.scheduler={type: sha, num_samples: 3, grace_period: 2, max_t: 6, reduction_factor: 3}"
    searches("run", "divided.yaml", "-s", scheduler, "-s", "resources.keep=best")
    first = searches.result("divided")
    stopped = next(trial for trial in first.trials if trial.iterations == 2)
    searches("clone", "divided", str(stopped.trial), "lr=0.05", "--from-checkpoint", "--yes")
    searches("resume", "divided")
    result = searches.result("divided")
    clone = result.trials[-1]
    assert clone.iterations == 6
    assert clone.configuration["lr"] == 0.05
    expected = STEPS * (2 * stopped.configuration["lr"] + 4 * 0.05)
    assert state_of(searches, clone)["spent"].item() == pytest.approx(expected, rel=1e-9)
    warm = ["-s", "name=warm", "-s", "search.warm_start=[divided]", "-s", scheduler, "-s", "resources.keep=best"]
    _, said = searches("run", "divided.yaml", *warm)
    assert "warm start: the best configuration of divided is trained first" in said
    result = searches.result("warm")
    assert dict(result.trials[0].configuration) in [dict(trial.configuration) for trial in first.trials]
    at_best = result.best_at("best")
    lr = at_best.configuration["lr"]
    assert model_of(result, iteration="best").spent.item() == pytest.approx(STEPS * at_best.iterations * lr, rel=1e-9)


def state_of(searches: CommandLine, trial: TrialResult) -> Any:
    file = searches.folder / f"{trial.trial}-{trial.iterations}.pt"
    return torch.load(save_files(trial, file, is_simulated=False), weights_only=True)
