"""A slow instance is replaced, with real gangs: on instances of this machine, and on the fake EC2."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rubberband.executor import Result
from tests.builders.command_line import CommandLine
from tests.builders.ec2_runs import each_iteration_once, ec2
from tests.ec2.principals import BUCKET

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(600)]

UNEVEN = '''
import os
import time
import ray
import torch
from torch import nn
from torch.utils.data import TensorDataset
import rubberband

class Uneven(rubberband.TorchTrial):
    """The first instance that the second worker trains on needs 0.4 s more for every step."""

    batch_size = 16
    samples_per_iteration = 25 * batch_size

    def build_model(self, config):
        self.mark = config["mark"]
        return nn.Linear(4, 2)

    def build_optimizer(self, config, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def train_dataset(self, config):
        x = torch.randn(400, 4, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, (x.sum(1) > 0).long())

    eval_dataset = train_dataset

    def loss(self, model, batch):
        x, y = batch
        if model.training:
            time.sleep(0.005 * len(y) + 0.4 * self.is_slow())  # slow is what is timed
        return nn.functional.cross_entropy(model(x), y)

    def is_slow(self):
        if not torch.distributed.is_initialized():
            return False
        node = ray.get_runtime_context().get_node_id()
        if torch.distributed.get_rank() == 1 and not os.path.exists(self.mark):
            with open(self.mark, "w") as file:
                file.write(node)
        return os.path.exists(self.mark) and open(self.mark).read() == node

    def evaluate(self, model, loader):
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in loader)
        return {"accuracy": right / 400}
'''


def experiment(folder: Path, **resources: object) -> None:
    words = {
        "version": 1,
        "name": "uneven",
        "entrypoint": "uneven:Uneven",
        "search": {
            "space": {"mark": str(folder / "slow-node")},
            "scheduler": {"type": "stages", "stages": [{"trials": 1, "iterations": 40}]},
            "metric": "accuracy",
            "mode": "max",
        },
        "constraints": {"objective": "min_time", "max_cost": 100.0},
        "resources": {"max_instances": 3, "gpus_per_trial": {"min": 2, "max": 2}, **resources},
        "profile": {"seconds_per_iteration": {2: 1.2}, "trial_startup": "2s"},
    }
    (folder / "uneven.yaml").write_text(yaml.safe_dump(words))
    (folder / "uneven.py").write_text(UNEVEN)


def check(result: Result, errors: str) -> None:
    assert result.outcome == "done", errors
    assert result.replacements, errors
    (replaced,) = result.replacements
    assert (replaced.trial, replaced.ranks, replaced.first) == (0, (1,), True)
    assert f"{replaced.instance} holds up trial 0 and is replaced once another one is ready" in errors
    assert "unequal workers: 16 / 0 samples per step" in errors
    trial = result.trials[0]
    assert (trial.iterations, trial.failures, len(result.instances)) == (40, 0, 3)
    assert each_iteration_once(result)
    last = max(result.busy, key=lambda use: use.end_s).end_s
    assert replaced.instance not in {use.instance for use in result.busy if use.end_s == last}


def test_a_slow_instance_of_this_machine_is_replaced(tmp_path: Path) -> None:
    command_line = CommandLine(tmp_path)
    experiment(tmp_path, provider="local", gpus_per_instance=1, price_per_hour=1.0)
    _, errors = command_line("run", "uneven.yaml", "--no-check")
    check(command_line.result("uneven"), errors)
    assert command_line.nothing_left()


def test_a_slow_instance_of_ec2_is_replaced(tmp_path: Path) -> None:
    with ec2(tmp_path) as command_line:
        folder = tmp_path / "code"
        place = {"instance_type": "g4dn.xlarge", "region": "us-east-1", "checkpoints": f"s3://{BUCKET}/uneven"}
        delays = {"provision_delay": "2s", "init_delay": "8s"}
        experiment(folder, provider="aws", aws={"install": "none"}, **place, **delays)
        _, errors = command_line("run", "uneven.yaml", "--no-check")
        check(command_line.result("uneven"), errors)
