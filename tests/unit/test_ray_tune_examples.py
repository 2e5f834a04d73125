"""Ray Tune's own examples, found in the installed wheel, with our `Tuner` in place of Ray Tune's."""

from __future__ import annotations

import importlib
import json
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
from ray import tune

from rubberband.executor import ExperimentFolder, read_journal
from rubberband.integrations import ray_tune
from rubberband.spec.experiment import Experiment

EXAMPLES = {
    "tune_basic_example": ("easy_objective", 10, 5),
    "async_hyperband_example": ("easy_objective", 20, 1),
    "custom_func_checkpointing": ("train_func", 5, 1),
    "custom_checkpointing_with_callback": ("OptimizationTrainable", 3, 1),
    "hyperband_example": ("MyTrainableClass", 20, 1),
    "hyperband_function_example": ("train_func", 20, 10),
    "logging_example": ("easy_objective", 5, 1),
    "optuna_example": ("easy_objective", 10, 100),
    "optuna_define_by_run_example": ("easy_objective", 10, 100),
    "optuna_multiobjective_example": ("easy_objective", 10, 100),
}
"""Example -> what it trains, its trials and the most iterations of one; all with --smoke-test, as Ray Tune trains."""
POPULATIONS: dict[str, tuple[int, int, tuple[str, str]]] = {
    "pbt_function": (8, 10, ("", "")),
    "pbt_example": (8, 10, ("", "")),
    "pb2_example": (8, 30, ("", "")),
    "pbt_convnet_example": (4, 10, ("stop=stopper,", 'stop={"training_iteration": 10},')),
    "pbt_convnet_function_example": (4, 10, ("stop=stopper,", 'stop={"training_iteration": 10},')),
}
"""Example of population based training -> its trials and their iterations, and the line that changes beside Tuner's."""
TORCHVISION = """
import random
import torch
from types import SimpleNamespace

class MNIST(torch.utils.data.Dataset):
    def __init__(self, root, train=True, download=False, transform=None):
        maker = torch.Generator().manual_seed(7)
        shapes = torch.rand(10, 1, 28, 28, generator=maker)
        self.labels = torch.randint(10, (1024,), generator=maker)
        self.images = (shapes[self.labels] + 0.7 * torch.randn(1024, 1, 28, 28, generator=maker)).float()

    def __len__(self):
        return 1024

    def __getitem__(self, at):
        return self.images[at], int(self.labels[at])

datasets = SimpleNamespace(MNIST=MNIST)
transforms = SimpleNamespace(Compose=list, ToTensor=object, Normalize=lambda mean, std: None)
"""
"""In the place of a package whose data would be downloaded: ten noisy shapes."""
LOCAL = {"provider": "local", "gpus_per_instance": 1, "price_per_hour": 3.06, "max_instances": 2}
LIMITS = {"deadline": "20m", "max_cost": 20}


def path_of(example: str) -> str:
    """The file of an example, or a skip where this Ray Tune does not ship it."""
    found = find_spec(f"ray.tune.examples.{example}")
    if found is None or found.origin is None:
        pytest.skip(f"this Ray Tune ships no {example}")
    return found.origin


class Accepted(Exception):
    """A Tuner would tune now."""


class Checked(ray_tune.Tuner):
    """A Tuner that ends where the run would begin."""

    def fit(self) -> Any:
        words = {key: value for key, value in self._words.items() if key not in ("verbose", "callbacks")}
        found = Experiment(**words)
        raise Accepted(found.probed().search.num_trials)


def run_accepted(example: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run an example up to its run; return its number of trials."""
    monkeypatch.setattr(tune, "Tuner", partial(Checked, constraints=LIMITS, resources=LOCAL))
    monkeypatch.setattr("ray.init", lambda **words: None)
    monkeypatch.setattr(sys, "argv", [example, "--smoke-test"])
    with pytest.raises(Accepted) as accepted:
        runpy.run_path(path_of(example), run_name="__main__")
    (trials,) = accepted.value.args
    return int(trials)


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_of_ray_tune_is_accepted(example, monkeypatch):
    assert run_accepted(example, monkeypatch) == EXAMPLES[example][1]


@pytest.mark.parametrize("example", [name for name, (_, _, (line, _)) in POPULATIONS.items() if not line])
def test_an_example_of_population_based_training_is_accepted_as_it_is(example, monkeypatch):
    assert run_accepted(example, monkeypatch) == POPULATIONS[example][0]


REPLACED = """
import functools, json, runpy, sys
import ray.tune
from rubberband.integrations import ray_tune

class Kept(ray_tune.Tuner):
    def fit(self):
        found = super().fit()
        result = found.result
        trials = [(dict(each.config), each.iterations, dict(each.metrics), each.status) for each in result.trials]
        best = (dict(result.best.config), result.best.metrics[result.metric])
        print("KEPT " + json.dumps({"trials": trials, "best": best, "metric": result.metric, "mode": result.mode}))
        return found

limits, resources, path = json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
ray.tune.Tuner = functools.partial(Kept, constraints=limits, resources=resources)
sys.argv = [path, "--smoke-test"]
runpy.run_path(path, run_name="__main__")
"""


def curve(trained: Any, config: Mapping[str, Any], iterations: int, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the example itself reports for a configuration, without any tuner; at most that many reports."""
    if isinstance(trained, type):
        made = trained(config=dict(config))
        return [made.step() for _ in range(iterations)]
    reports: list[Any] = []
    monkeypatch.setattr(tune, "report", lambda metrics, checkpoint=None: reports.append(metrics))
    monkeypatch.setattr(tune, "get_checkpoint", lambda: None)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    trained(dict(config))
    return reports[:iterations]


@pytest.mark.long
@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_of_ray_tune_runs_to_its_end_with_its_own_answer(example, tmp_path, monkeypatch):
    """Each trial has what its function reports for its configuration, and the best is the best of them."""
    name, num_trials, most = EXAMPLES[example]
    script = tmp_path / "replaced.py"
    script.write_text(REPLACED)
    command = [sys.executable, str(script), json.dumps(LIMITS), json.dumps(LOCAL), path_of(example)]
    environment = {**os.environ, "HOME": str(tmp_path), "RUBBERBAND_HOME": str(tmp_path / "home")}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "est hyperparameters" in ran.stdout, "the example's own last line"
    kept = json.loads(next(line for line in ran.stdout.splitlines() if line.startswith("KEPT "))[5:])
    trained: Callable[[Any], Any] = getattr(importlib.import_module(f"ray.tune.examples.{example}"), name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("ray.tune.trainable.trainable.DEFAULT_STORAGE_PATH", str(tmp_path))
    metric, sign = kept["metric"], 1 if kept["mode"] == "min" else -1
    assert len(kept["trials"]) == num_trials
    for config, iterations, metrics, status in kept["trials"]:
        own = curve(trained, config, iterations, monkeypatch)
        assert (status, len(own)) == ("completed" if iterations == most else "stopped", iterations)
        assert metrics[metric] == pytest.approx(own[-1][metric])
    assert max(iterations for _, iterations, *_ in kept["trials"]) == most
    best, value = kept["best"]
    full = [(sign * metrics[metric], config) for config, iterations, metrics, _ in kept["trials"] if iterations == most]
    assert (sign * value, best) == min(full, key=lambda each: each[0])


CHANGED = """
import functools, json, pathlib, sys, types
import ray.tune
from rubberband.integrations import ray_tune

class Kept(ray_tune.Tuner):
    def fit(self):
        found = super().fit()
        best = found.get_best_result().checkpoint
        print("FILES " + json.dumps(sorted(path.name for path in pathlib.Path(best.path).rglob("*"))))
        return found

limits, resources, path, before, after = json.loads(sys.argv[1])
ray.tune.Tuner = functools.partial(Kept, constraints=limits, resources=resources, name="population", home="home")
sys.argv = [path, "--smoke-test"]
source = pathlib.Path(path).read_text()
assert before in source
exec(compile(source.replace(before, after), path, "exec"), {"__name__": "__main__"})
"""


@pytest.mark.long
@pytest.mark.parametrize("example", POPULATIONS)
def test_an_example_of_population_based_training_runs_until_its_winner_is_handed_over(example, tmp_path):
    num_trials, iterations, (before, after) = POPULATIONS[example]
    exchanges = iterations // 5 - 1
    (tmp_path / "changed.py").write_text(CHANGED)
    (tmp_path / "torchvision.py").write_text(TORCHVISION)
    given = json.dumps([LIMITS, LOCAL, path_of(example), before, after])
    search = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": search}
    ran = subprocess.run(
        [sys.executable, "changed.py", given],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
        cwd=tmp_path,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    result = read_journal(ExperimentFolder(home=tmp_path / "home", name="population"))
    assert (result.outcome, len(result.trials), len(result.forks)) == ("done", num_trials, exchanges * num_trials // 4)
    for trial in result.trials:
        assert trial.iterations == iterations
        assert trial.metrics.get("cur_lr", trial.configuration["lr"]) == pytest.approx(trial.configuration["lr"])
    files = json.loads(next(line for line in ran.stdout.splitlines() if line.startswith("FILES "))[6:])
    assert files, "the winner's checkpoint"
    if example == "pbt_convnet_function_example":
        assert float(ran.stdout.rpartition("best model accuracy: ")[2]) > 0.1, "better than a guess among ten"
