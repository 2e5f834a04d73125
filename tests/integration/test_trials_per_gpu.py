"""A real run in which two trials share a logical GPU: where they train, and what a resume makes of it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from rubberband.executor.result.result import Result
from tests.builders.command_line import CommandLine

pytestmark = pytest.mark.ray

TRIAL = """
import json
import os
import time

import ray

import rubberband


def train(config):
    step = rubberband.get_checkpoint() or 0
    for step in range(step + 1, 9):
        time.sleep(0.2)
        with open(os.environ["SEEN"], "a") as file:
            gpus = ray.get_runtime_context().get_accelerator_ids()["GPU"]
            file.write(json.dumps([gpus, config["number"]]) + "\\n")
        rubberband.report({"loss": 1.0 / step}, checkpoint=step)
"""

EXPERIMENT = """
name: pairs
entrypoint: pairs:train
search:
  space: {number: {type: grid, values: [0, 1, 2, 3, 4, 5]}}
  scheduler: {type: none, max_t: 8}
  metric: loss
  mode: min
resources:
  provider: local
  gpus_per_instance: 2
  trials_per_gpu: 2
  price_per_hour: 36
  minimum_billed: 0s
  max_instances: 1
  lease: 4s
  env: {SEEN: SEEN_PATH}
profile: {seconds_per_iteration: {1: 0.3}, trial_startup: 0.5}
"""


def at_once(result: Result) -> int:
    """The most trials that train at one time."""
    changes = sorted(
        [(use.training_s, 1) for use in result.busy if use.training_s is not None]
        + [(use.end_s, -1) for use in result.busy if use.training_s is not None]
    )
    return max(sum(change for at_s, change in changes if at_s <= now_s) for now_s, _ in changes)


@pytest.mark.long
def test_two_trials_train_on_each_of_two_gpus_through_a_kill_and_a_resume(
    command_line: CommandLine, tmp_path: Path
) -> None:
    seen = tmp_path / "seen.jsonl"
    (tmp_path / "pairs.py").write_text(TRIAL)
    (tmp_path / "pairs.yaml").write_text(EXPERIMENT.replace("SEEN_PATH", str(seen)))
    driver = command_line.start("run", "pairs.yaml", "--no-check")
    command_line.wait_for(driver, lambda result: sum(trial.iterations >= 2 for trial in result.trials) == 4, "pairs")
    driver.kill()
    driver.communicate()
    cut = command_line.result("pairs")
    command_line("resume", "pairs")
    result = command_line.result("pairs")
    assert (result.outcome, result.resumes) == ("done", 1)
    assert [trial.iterations for trial in result.trials] == [8] * 6
    assert all(new.curve[: old.iterations] == old.curve for old, new in zip(cut.trials, result.trials, strict=True))
    assert {use.gpu for use in result.busy} == {0, 1, 2, 3}
    assert at_once(result) == 4

    lines = [json.loads(line) for line in seen.read_text().splitlines()]
    first = {number: gpus for gpus, number in reversed(lines)}
    assert Counter(gpu for trial in range(4) for gpu in first[trial]) == {"0": 2, "1": 2}, "two to a GPU"
    assert {len(gpus) for gpus, _ in lines} == {1}
    held_s = [one.ended_s - one.running_s for one in result.instances if one.running_s is not None]
    assert result.actual_cost_usd == pytest.approx(sum(held_s) * 36 / 3600, rel=0.01)
    assert result.paid.total_gpu_s == pytest.approx(2 * sum(held_s), rel=0.01)
    assert command_line.nothing_left()
    command_line("report", "pairs", "--html", "page.html")
    assert "instance : slot" in (tmp_path / "page.html").read_text()
