"""Real runs in which trials share logical GPUs: through a resume, on a shared pool, at a service and on EC2."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rubberband import Client
from rubberband.executor import Result
from tests.builders.command_line import CommandLine
from tests.builders.pool_team import PRICE_USD, Team, ended

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


def first_gpus(seen: Path, *, trials: int) -> Counter[str]:
    """GPU -> the number of the first trials that began on it; each saw one GPU, and none in a check."""
    lines = [(gpus, number) for gpus, number in map(json.loads, seen.read_text().splitlines()) if gpus]
    assert {len(gpus) for gpus, _ in lines} == {1}
    first = {number: gpus for gpus, number in reversed(lines)}
    return Counter(first[trial][0] for trial in range(trials))


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
    assert first_gpus(seen, trials=4) == {"0": 2, "1": 2}
    held_s = [one.ended_s - one.running_s for one in result.instances if one.running_s is not None]
    assert result.actual_cost_usd == pytest.approx(sum(held_s) * 36 / 3600, rel=0.01)
    assert result.paid.total_gpu_s == pytest.approx(2 * sum(held_s), rel=0.01)
    assert command_line.nothing_left()
    command_line("report", "pairs", "--html", "page.html")
    assert "instance : slot" in (tmp_path / "page.html").read_text()


def of_the_team(name: str, seen: Path, **resources: Any) -> dict[str, Any]:
    """The experiment, on instances whose price and number the pool sets."""
    content: dict[str, Any] = yaml.safe_load(EXPERIMENT.replace("SEEN_PATH", str(seen)))
    own = {key: content["resources"][key] for key in ("provider", "trials_per_gpu", "lease", "env")}
    return content | {"name": name, "entrypoint": "trials:train", "resources": own | resources}


@pytest.fixture
def team(tmp_path: Path) -> Iterator[Team]:
    found = Team(tmp_path, instances=1, gpus_per_instance=2, trials=TRIAL)
    yield found
    found.end()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_experiments_share_an_instance_of_a_pool_each_with_its_own_number_of_trials_on_a_gpu(team: Team) -> None:
    each = {"halves": 2, "thirds": 3}
    for name, trials in each.items():
        own = {"pool": "team", "gpus_per_instance": 1, "trials_per_gpu": trials}
        content = of_the_team(name, team.folder / f"{name}.jsonl", **own)
        (team.folder / f"{name}.yaml").write_text(json.dumps(content))
    team.command("pool", "up", "team.yaml")
    drivers = [team.start("run", f"{name}.yaml", "--no-check") for name in each]
    for driver in drivers:
        _, errors = driver.communicate(timeout=400)
        assert driver.returncode == 0, errors
    for name, trials in each.items():
        result = team.result(name)
        assert [trial.iterations for trial in result.trials] == [8] * 6
        assert at_once(result) == result.stages[0].trials_per_gpu == trials
        [(_, number)] = first_gpus(team.folder / f"{name}.jsonl", trials=trials).items()
        assert number == trials
        [held] = result.instances
        assert held.price_usd_per_hour == PRICE_USD / 2
    assert len(team.instance_records) == 1
    team.check(*each)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_service_on_a_pool_runs_two_trials_on_each_gpu(team: Team) -> None:
    content = of_the_team("pairs", team.folder / "seen.jsonl")
    content["constraints"] = {"deadline": "10m"}
    with team.serve("--env", "SEEN") as server, Client(server.address) as client:
        client.submit(content)
        row = ended(client, ["pairs"])["pairs"]
        report = client.report("pairs")
    assert row["state"] == "done"
    assert report["stages"][0]["trials_per_gpu"] == 2
    result = team.result("pairs")
    assert [trial.iterations for trial in result.trials] == [8] * 6
    assert at_once(result) == 4
    assert first_gpus(team.folder / "seen.jsonl", trials=4) == {"0": 2, "1": 2}
    team.check("pairs")
