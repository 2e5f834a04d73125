"""Asynchronous trials in a search: planned and actual, and workers and servers that are killed with SIGKILL."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from rubberband.executor import Result, TrialResult
from tests.builders import trials
from tests.builders.command_line import CommandLine
from tests.builders.ec2_runs import Ec2CommandLine, each_iteration_once, ec2
from tests.builders.trials.paced_trials import UPDATES
from tests.builders.waiting import eventually
from tests.ec2.principals import BUCKET

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(600)]

LOCAL = {"provider": "local", "price_per_hour": 1.0, "gpus_per_instance": 2, "max_instances": 1}
ON_EC2 = {
    "provider": "aws",
    "instance_type": "g4dn.xlarge",
    "region": "us-east-1",
    "checkpoints": f"s3://{BUCKET}/paced",
    "aws": {"install": "none"},
    "max_instances": 2,
}
SHA = {"type": "sha", "num_samples": 4, "grace_period": 6, "max_t": 24, "reduction_factor": 2}
ONE = {"type": "stages", "stages": [{"trials": 1, "iterations": 60}]}
PROFILE = {"seconds_per_iteration": {1: 1.0, 2: 0.5}, "trial_startup": "1s"}
IN_HAND = 3
"""Most iterations that are evaluated again after a loss: one to be reported, and those that workers may be ahead."""


def write(folder: Path, resources: Mapping[str, Any], scheduler: Mapping[str, Any], **more: object) -> None:
    words = {
        "version": 1,
        "name": "paced",
        "entrypoint": "paced_trials:Paced",
        "search": {
            "space": {"lr": {"type": "loguniform", "lower": 0.01, "upper": 0.5}},
            "scheduler": dict(scheduler),
            "sampler": {"type": "random", "seed": 7},
            "metric": "accuracy",
            "mode": "max",
        },
        "constraints": {"deadline": "20m", "objective": "min_time", "max_cost": 5.0},
        "training": {"mode": "async", "servers": 2},
        "resources": {"gpus_per_trial": {"min": 1, "max": 2}, **resources},
        **more,
    }
    (folder / "paced.yaml").write_text(yaml.safe_dump(words))
    shutil.copy(trials.FOLDER / "paced_trials.py", folder)


def check_updates(trial: TrialResult) -> None:
    """Every update of every iteration is in its parameters, but those that were lost with their worker."""
    lost = 0
    for (_, iteration, metrics), use in zip(trial.curve, trial.updates, strict=True):
        lost += use.lost
        assert use.updates + use.lost == UPDATES
        assert metrics["updates"] == iteration * UPDATES - lost
        # Each sample once in an epoch; batches that are in hand at its end come later.
        assert iteration - 1 <= metrics["least_used"] <= metrics["most_used"] <= iteration + 1


def check_search(command_line: CommandLine, errors: str) -> None:
    """The search ended as it should; print what was planned, and what came of it."""
    result = command_line.result("paced")
    assert result.outcome == "done", errors
    assert "async: a trial with" in errors
    assert [trial.failures for trial in result.trials] == [0] * 4
    assert each_iteration_once(result)
    for trial in result.trials:
        check_updates(trial)
    time_off = result.actual_jct_s / result.planned_jct_s - 1.0
    cost_off = result.actual_cost_usd / result.planned_cost_usd - 1.0
    print(f"\ntime: planned {result.planned_jct_s:.1f} s, actual {result.actual_jct_s:.1f} s ({time_off:+.1%})")
    print(f"cost: planned {result.planned_cost_usd:.5f} USD, actual {result.actual_cost_usd:.5f} USD ({cost_off:+.1%})")
    for stage in result.stages:
        gpus = f"{stage.gpus_per_trial} GPU per trial"
        print(f"  stage {stage.stage}, {gpus}: planned {stage.planned_s:.1f} s, actual {stage.actual_s:.1f} s")


def test_a_search_on_this_machine_goes_as_planned_with_a_queueing_profile(tmp_path: Path) -> None:
    command_line = CommandLine(tmp_path)
    write(tmp_path, {**LOCAL, "minimum_billed": "0s"}, SHA)
    output, _ = command_line("profile", "paced.yaml")
    assert "an update of one worker: 5" in output
    assert "the knee is at" in command_line.shows("estimate", "paced.yaml").lower()
    _, errors = command_line("run", "paced.yaml")
    check_search(command_line, errors)
    assert command_line.nothing_left()


def processes(command_line: CommandLine, actor: str) -> list[psutil.Process]:
    """Processes of the instances in which an actor of Ray runs a segment."""
    machines = command_line.aws.machines if isinstance(command_line, Ec2CommandLine) else command_line
    found = []
    for pid in machines.processes():
        with contextlib.suppress(psutil.Error):  # it has ended
            process = psutil.Process(pid)
            if process.cmdline()[:1] == [f"ray::{actor}.run"]:
                found.append(process)
    return found


def kill(command_line: CommandLine, actor: str) -> psutil.Process:
    """Kill one of two such processes; return the other one."""
    first, other = processes(command_line, actor)
    first.kill()
    return other


def iterations(result: Result) -> int:
    return sum(trial.iterations for trial in result.trials)


def check_kills(command_line: CommandLine) -> None:
    """Both workers and a server of the trial are killed in turn, and it goes on."""
    driver = command_line.start("run", "paced.yaml", "--no-check")

    def passed(count: int) -> Result:
        return command_line.wait_for(driver, lambda result: iterations(result) >= count, "paced")

    passed(3)
    other = kill(command_line, "SlotWorker")
    before = iterations(passed(iterations(command_line.result("paced")) + 3))
    eventually(lambda: len(processes(command_line, "SlotWorker")) == 2, "a worker in place of the first one")
    other.kill()
    passed(before + 3)
    eventually(lambda: len(processes(command_line, "SlotWorker")) == 2, "a worker in place of the second one")
    passed(before + 5)
    kill(command_line, "ServerProcess")
    output, errors = driver.communicate(timeout=300)
    assert driver.returncode == 0, output + errors
    result = command_line.result("paced")
    (trial,) = result.trials
    assert (result.outcome, trial.failures, trial.iterations) == ("done", 0, 60), errors
    assert each_iteration_once(result)
    check_updates(trial)
    assert sum(use.lost for use in trial.updates) <= 2
    assert trial.metrics["accuracy"] > 0.9
    lines = [line.rpartition(" | ")[2] for line in command_line.shows("logs", "paced", "0").splitlines()]
    assert 60 <= lines.count("evaluated") <= 60 + 2 * IN_HAND  # by rank 0, which was killed once, as was a server


def test_a_trial_of_this_machine_outlives_its_workers_and_a_server(tmp_path: Path) -> None:
    command_line = CommandLine(tmp_path)
    write(tmp_path, LOCAL, ONE, profile=PROFILE)
    check_kills(command_line)
    assert command_line.nothing_left()


def test_a_trial_over_instances_of_ec2_outlives_its_workers_and_a_server(tmp_path: Path) -> None:
    with ec2(tmp_path) as command_line:
        write(tmp_path / "code", ON_EC2, ONE, profile=PROFILE)
        check_kills(command_line)


def test_a_search_outlives_a_worker_and_a_server_in_each_of_its_stages(tmp_path: Path) -> None:
    command_line = CommandLine(tmp_path)
    write(tmp_path, LOCAL, SHA, profile=PROFILE)
    driver = command_line.start("run", "paced.yaml", "--no-check")
    for worker_at, server_at in ((4, 14), (26, 38), (49, 51)):  # of 24, 24 and 6 iterations
        for count, actor in ((worker_at, "SlotWorker"), (server_at, "ServerProcess")):
            command_line.wait_for(driver, lambda result, count=count: iterations(result) >= count, "paced")
            eventually(lambda actor=actor: processes(command_line, actor) != [], f"a {actor}")
            processes(command_line, actor)[0].kill()
    output, errors = driver.communicate(timeout=300)
    assert driver.returncode == 0, output + errors
    result = command_line.result("paced")
    assert (result.outcome, [trial.failures for trial in result.trials]) == ("done", [0] * 4), errors
    assert sorted(trial.iterations for trial in result.trials) == [6, 6, 18, 24]
    assert each_iteration_once(result)
    for trial in result.trials:
        check_updates(trial)
    assert sum(use.lost for trial in result.trials for use in trial.updates) <= 3
    assert command_line.nothing_left()
