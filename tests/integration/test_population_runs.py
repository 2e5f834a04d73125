"""Population based training on real Ray nodes: kill -9 amid it, and Ray Tune's words with our Tuner."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rubberband.executor import ExperimentFolder, Result
from rubberband.executor import read_journal as read
from tests.builders.command_line import CommandLine

pytestmark = [pytest.mark.ray, pytest.mark.timeout(420)]

SEARCH = """
search:
  space: {x: {type: uniform, lower: 0.1, upper: 1}}
  scheduler: {type: pbt, population: 4, generations: 3, iterations: 2}
"""


def population(command_line: CommandLine) -> None:
    """Let `sleepy.yaml` train a population."""
    file = command_line.folder / "sleepy.yaml"
    head, _, rest = file.read_text().partition("\nsearch:")
    _, _, rest = rest.partition("\n  sampler:")
    file.write_text(f"{head}{SEARCH}  sampler:{rest}")


def exchanged(result: Result) -> list[Any]:
    return [(one.trial, one.parent, one.iterations, dict(one.changes), one.reason) for one in result.forks]


@pytest.mark.long
def test_kill_9_amid_a_population_changes_none_of_its_exchanges(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    undisturbed, command_line = CommandLine(tmp_path / "one"), CommandLine(tmp_path / "two")
    for each in (undisturbed, command_line):
        population(each)
    undisturbed("run", "sleepy.yaml")
    expected = undisturbed.result()
    assert expected.outcome == "done"
    assert len(expected.forks) == 2

    driver = command_line.start("run", "sleepy.yaml", "-s", "resources.lease=120s")
    command_line.wait_for(driver, lambda result: bool(result.forks))
    driver.kill()
    driver.communicate()
    command_line("resume", "sleepy")
    result = command_line.result()
    assert (result.outcome, result.resumes) == ("done", 1)
    assert exchanged(result) == exchanged(expected)
    assert result.best is not None
    assert expected.best is not None
    assert (result.best.trial, result.best.metrics) == (expected.best.trial, expected.best.metrics)
    assert command_line.nothing_left()


CLASS = """
class Follower(tune.Trainable):
    '''Gains most where lr is near to what suits the present accuracy, as in a schedule.'''

    def setup(self, config):
        self.lr, self.accuracy = config["lr"], 0.0

    def step(self):
        best = 0.02 - 0.0001 * self.accuracy
        self.accuracy += max(0.0, 1.0 - abs(self.lr - best) / best)
        return {"mean_accuracy": self.accuracy, "lr": self.lr}

    def save_checkpoint(self, folder):
        Path(folder, "accuracy").write_text(repr(self.accuracy))

    def load_checkpoint(self, folder):
        self.accuracy = float(Path(folder, "accuracy").read_text())

trained = Follower
"""

FUNCTION = """
def follow(config):
    accuracy, begun = 0.0, 0
    if (checkpoint := tune.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            state = json.loads(Path(folder, "state.json").read_text())
        accuracy, begun = state["accuracy"], state["step"]
    for step in range(begun + 1, 1000):
        accuracy += max(0.0, 1.0 - abs(config["lr"] - 0.01) / 0.01)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "state.json").write_text(json.dumps({"accuracy": accuracy, "step": step}))
            metrics = {"mean_accuracy": accuracy, "lr": config["lr"]}
            tune.report(metrics, checkpoint=tune.Checkpoint.from_directory(folder))

trained = follow
"""

NETWORK = """
import torch

class Network(tune.Trainable):
    '''A small network whose optimizer is saved and loaded, and whose settings are set anew.'''

    def setup(self, config):
        torch.manual_seed(0)
        self.inputs = torch.randn(64, 8)
        self.targets = (self.inputs.sum(dim=1) > 0).long()
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=config["lr"], momentum=0.9)
        self.config = config

    def step(self):
        for _ in range(5):
            self.optimizer.zero_grad()
            torch.nn.functional.cross_entropy(self.model(self.inputs), self.targets).backward()
            self.optimizer.step()
        accuracy = (self.model(self.inputs).argmax(dim=1) == self.targets).float().mean().item()
        return {"mean_accuracy": accuracy, "lr": self.optimizer.param_groups[0]["lr"]}

    def save_checkpoint(self, folder):
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, Path(folder, "all"))

    def load_checkpoint(self, folder):
        state = torch.load(Path(folder, "all"))
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for group in self.optimizer.param_groups:
            group["lr"] = self.config["lr"]

trained = Network
"""

SCRIPT = """
import json, random, sys, tempfile
from pathlib import Path
from ray import tune
from ray.tune.schedulers import PopulationBasedTraining
from rubberband.integrations.ray_tune import Tuner

{trained}

scheduler = PopulationBasedTraining(
    time_attr="training_iteration",
    perturbation_interval=2,
    hyperparam_mutations={{"lr": lambda: random.uniform(0.0001, 0.02)}},
)
results = Tuner(
    trained,
    param_space={{"lr": 0.0001}},
    tune_config=tune.TuneConfig(metric="mean_accuracy", mode="max", num_samples=4, scheduler=scheduler),
    run_config=tune.RunConfig(name="population", stop={{"training_iteration": 6}}),
    constraints={{"deadline": "20m"}},
    resources={{"provider": "local", "gpus_per_instance": 2, "price_per_hour": 3.06, "max_instances": 1}},
    home="home",
).fit()
print("KEPT", json.dumps(results.get_best_result().config))
"""


@pytest.mark.long
@pytest.mark.parametrize("trained", [CLASS, FUNCTION, NETWORK], ids=["class", "function", "network"])
def test_a_search_of_ray_tune_by_population_based_training_runs(trained: str, tmp_path: Path) -> None:
    """Each trial trains with the configuration that it has, also after it took over another's checkpoint."""
    script = tmp_path / "search.py"
    script.write_text(SCRIPT.format(trained=trained))
    ran = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300, cwd=tmp_path, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    result = read(ExperimentFolder(home=tmp_path / "home", name="population"))
    assert (result.outcome, len(result.forks)) == ("done", 2)
    for trial in result.trials:
        assert trial.metrics["lr"] == pytest.approx(trial.configuration["lr"])
        assert trial.iterations == 6
    best = json.loads(next(line for line in ran.stdout.splitlines() if line.startswith("KEPT "))[5:])
    assert result.best is not None
    assert best["lr"] == pytest.approx(result.best.configuration["lr"])
