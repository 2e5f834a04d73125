"""A warm start on real Ray nodes: trials train what an earlier search has found best, also after kill -9."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rubberband.executor import Result
from rubberband.executor.journal.folder import ExperimentFolder
from rubberband.executor.run.follower import JournalFollower
from tests.builders.command_line import CommandLine

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(300)]

SMALL = ["-s", "search.scheduler={type: stages, stages: [{trials: 3, iterations: 2}]}"]


def search_of(command_line: CommandLine, name: str) -> dict[str, Any]:
    with closing(JournalFollower(ExperimentFolder(home=command_line.home, name=name))) as follower:
        return dict(follower.header.setup["experiment"]["search"])


def test_a_search_begins_with_the_results_of_another_also_after_kill_9(tmp_path: Path) -> None:
    command_line = CommandLine(tmp_path)
    command_line("run", "sleepy.yaml", *SMALL)
    earlier = command_line.result("sleepy")
    assert earlier.best is not None

    warm = [*SMALL, "-s", "search.warm_start=[sleepy]", "-s", "search.sampler.seed=9"]
    _, said = command_line("run", "sleepy.yaml", "-s", "name=best", *warm)
    assert "warm start: the best configuration of sleepy is trained first" in said
    first = command_line.result("best").trials[0]
    assert first.configuration == earlier.best.configuration
    assert first.metrics == {"score": 2 * first.configuration["x"]}, "that is what was trained"

    command_line.hold(after=1)
    tpe = ["-s", "search.sampler={type: optuna, seed: 9}", "-s", "resources.lease=8s"]
    driver = command_line.start("run", "sleepy.yaml", "-s", "name=learns", *warm[:4], *tpe)
    command_line.wait_for(driver, lambda found: any(trial.iterations for trial in found.trials), "learns")
    driver.kill()
    driver.communicate()
    command_line.go()
    assert command_line.nothing_left(within_s=25.0)
    before: Result = command_line.result("learns")
    command_line("rm", "sleepy", "--yes")  # the journal keeps what it began with
    command_line("resume", "learns")
    after = command_line.result("learns")
    assert after.outcome == "done"
    assert [one.configuration for one in after.trials] == [one.configuration for one in before.trials]
    search = search_of(command_line, "learns")
    assert search["evaluated_rewards"] == [one.metrics["score"] for one in earlier.trials]
    assert search["points_to_evaluate"] == [dict(one.configuration) for one in earlier.trials]
    assert command_line.nothing_left()
