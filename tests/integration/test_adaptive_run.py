"""A whole run that adapts its batches, on real Ray nodes: it is measured, planned, killed, resumed and reported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.builders import trials
from tests.builders.command_line import CommandLine

pytestmark = [pytest.mark.ray, pytest.mark.timeout(420)]

EXPERIMENT = """
version: 1
name: noisy
entrypoint: adaptive_trials:Noisy
search:
  space: {lr: 0.001}
  scheduler: {type: stages, stages: [{trials: 2, iterations: 150}]}
  metric: train_loss
  mode: min
resources:
  provider: local
  gpus_per_instance: 2
  gpus_per_trial: {min: 1, max: 2}
  price_per_hour: 0
  max_instances: 1
  minimum_billed: 0s
batch: {policy: goodput, max: 512, interval: 10}
"""


@pytest.fixture
def command_line(tmp_path: Path) -> CommandLine:
    command_line = CommandLine(tmp_path)
    shutil.copy(trials.FOLDER / "adaptive_trials.py", tmp_path)
    (tmp_path / "noisy.yaml").write_text(EXPERIMENT)
    return command_line


@pytest.mark.long
def test_measured_planned_killed_and_resumed_a_run_keeps_what_its_agents_learnt(command_line, tmp_path):
    command_line("profile", "noisy.yaml", "--out", "noisy.json")
    profile = json.loads((tmp_path / "noisy.json").read_text())
    points = profile["goodput"]["points"]
    assert {point["gpus"] for point in points} == {1, 2}
    assert max(point["per_gpu"] * point["gpus"] for point in points) == 512
    assert profile["goodput"]["noise_scale"] > 16
    with (tmp_path / "noisy.yaml").open("a") as file:
        file.write("profile: noisy.json\n")
    plan = json.loads(command_line("estimate", "noisy.yaml", "-o", "json")[0])
    assert plan["feasible"]

    side_by_side = ("-s", "resources.gpus_per_trial.max=1")
    driver = command_line.start("run", "noisy.yaml", "-s", "resources.lease=4s", *side_by_side)
    command_line.wait_for(driver, lambda result: min(trial.iterations for trial in result.trials) >= 10, name="noisy")
    driver.kill()
    driver.communicate()
    cut = command_line.result("noisy")
    assert max(trial.iterations for trial in cut.trials) < 150
    command_line("resume", "noisy")
    result = command_line.result("noisy")
    assert result.outcome == "done"
    assert result.resumes == 1
    for trial, before in zip(result.trials, cut.trials, strict=True):
        acknowledged = len(before.batches)
        learnt, after = before.batches[-1].batch_size, trial.batches[acknowledged].batch_size
        assert learnt > 16
        assert after >= learnt / 4.1, "it did not begin again"
        assert trial.batches[:acknowledged] == before.batches
    assert command_line.nothing_left()
    command_line("report", "noisy", "--html", "page.html")
    assert "Batch sizes" in (tmp_path / "page.html").read_text()
