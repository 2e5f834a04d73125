"""A search on real Ray nodes that is widened by what is left, through the command line, and killed in the middle."""

from __future__ import annotations

from pathlib import Path

import pytest

from rubberband.executor.result import Result
from tests.integration.command_line import EXPERIMENT, CommandLine

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(420)]

MAX_COST_USD, DEADLINE_S = 0.6, 60.0


@pytest.fixture
def command_line(tmp_path: Path) -> CommandLine:
    made = CommandLine(tmp_path)
    stages = "{type: stages, stages: [{trials: 4, iterations: 4}, {trials: 2, iterations: 10}]}"
    text = EXPERIMENT.replace(stages, "{type: sha, num_samples: 4, max_t: 6, reduction_factor: 2}")
    limits = f"deadline: {DEADLINE_S:g}s, max_cost: {MAX_COST_USD}, spend: remaining"
    (tmp_path / "sleepy.yaml").write_text(text.replace("deadline: 10m", limits))
    return made


def added_trials_train(result: Result) -> bool:
    return any(trial.bracket == 1 and trial.iterations >= 1 for trial in result.trials)


def test_after_kill_9_a_resume_goes_on_with_the_bracket_and_keeps_both_limits(command_line: CommandLine) -> None:
    driver = command_line.start("run", "sleepy.yaml", "-s", "resources.lease=8s")
    cut = command_line.wait_for(driver, added_trials_train)
    driver.kill()
    driver.communicate()
    assert cut.widened[0].trials >= 2
    assert command_line.nothing_left(within_s=25.0), "instances outlived their lease"

    command_line("resume", "sleepy")
    result = command_line.result()
    assert (result.outcome, result.resumes) == ("done", 1)
    assert result.widened[0] == cut.widened[0]
    assert len(result.trials) == 4 + sum(one.trials for one in result.widened)
    assert result.actual_cost_usd <= MAX_COST_USD
    assert not result.late
    winners = [trial for trial in result.trials if trial.status == "completed"]
    assert {trial.bracket for trial in winners} >= {0}
    assert result.best is not None
    assert result.best.metrics["score"] == max(trial.metrics["score"] for trial in winners)
    assert len({trial.configuration["x"] for trial in result.trials}) == len(result.trials)
    assert len({trial.seed for trial in result.trials}) == len(result.trials)
    assert "bracket 1 was added" in command_line.shows("report", "sleepy")
    assert command_line.nothing_left()


def test_an_undisturbed_run_tries_more_configurations_within_both_limits(command_line: CommandLine) -> None:
    command_line("run", "sleepy.yaml")
    result = command_line.result()
    assert result.outcome == "done"
    assert len(result.trials) > 4
    assert result.actual_jct_s <= DEADLINE_S
    assert result.actual_cost_usd <= MAX_COST_USD
    assert not result.widened[-1].trials
