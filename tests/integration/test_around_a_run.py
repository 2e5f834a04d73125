"""Trackers around a real run on local instances: over kill -9 and a resume."""

from __future__ import annotations

import csv
from collections import Counter

import pytest

from tests.builders.command_line import CommandLine

pytestmark = [pytest.mark.ray, pytest.mark.timeout(420)]


@pytest.mark.long
def test_trackers_have_each_report_once_after_kill_9_and_a_resume(command_line: CommandLine) -> None:
    driver = command_line.start("run", "sleepy.yaml", "-s", "resources.lease=8s", "-s", "track=[csv, tensorboard]")
    command_line.wait_for(driver, lambda result: sum(trial.iterations for trial in result.trials) >= 12)
    driver.kill()
    driver.communicate()
    command_line("resume", "sleepy")
    result = command_line.result()
    reports = Counter((trial.trial, done) for trial in result.trials for _, done, _ in trial.curve)
    folder = command_line.home / "experiments" / "sleepy"
    with open(folder / "csv" / "reports.csv", newline="") as file:
        assert Counter((int(row["trial"]), int(row["iterations"])) for row in csv.DictReader(file)) == reports
    assert {path.name for path in (folder / "tensorboard").iterdir()} == {f"trial-{n:04d}" for n in range(4)}
