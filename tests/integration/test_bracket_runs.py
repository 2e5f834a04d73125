"""Hyperband on real Ray nodes, through the command line: brackets side by side, and kill -9 in the middle of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from rubberband.executor import Result
from tests.builders.command_line import EXPERIMENT, CommandLine

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(420)]

BRACKETS = {0: range(9), 1: range(9, 14), 2: range(14, 17)}
"""Bracket -> its trials, with max_t 9 and a reduction factor of 3."""


@pytest.fixture
def command_line(tmp_path: Path) -> CommandLine:
    made = CommandLine(tmp_path)
    scheduler = "{type: stages, stages: [{trials: 4, iterations: 4}, {trials: 2, iterations: 10}]}"
    text = EXPERIMENT.replace(scheduler, "{type: hyperband, max_t: 9, reduction_factor: 3}")
    text = text.replace("deadline: 10m", "deadline: 10m, objective: min_time").replace("instances: 2", "instances: 3")
    (tmp_path / "sleepy.yaml").write_text(text)
    return made


def trained(command_line: CommandLine, trial: int) -> Counter[int]:
    lines = command_line.shows("logs", "sleepy", str(trial)).splitlines()
    texts = [line.rpartition(" | ")[2] for line in lines]
    return Counter(int(text.split()[1]) for text in texts if text.startswith("iteration "))


def in_the_middle(result: Result) -> bool:
    """Whether every bracket has trained, and none is over."""
    every = [[trial for trial in result.trials if trial.bracket == bracket] for bracket in BRACKETS]
    begun = all(any(trial.iterations for trial in trials) for trials in every)
    return begun and not any(trial.status == "completed" for trials in every for trial in trials)


def test_after_kill_9_amid_three_brackets_a_resume_finishes_and_trains_nothing_again(command_line: CommandLine) -> None:
    driver = command_line.start("run", "sleepy.yaml", "-s", "resources.lease=8s")
    cut = command_line.wait_for(driver, in_the_middle)
    driver.kill()
    driver.communicate()
    cut = command_line.result()
    assert (cut.outcome, len({stage.lane for stage in cut.stages})) == ("unfinished", 3)
    assert command_line.nothing_left(within_s=25.0), "instances outlived their lease"
    before = {trial.trial: trained(command_line, trial.trial) for trial in cut.trials}

    command_line("resume", "sleepy")
    result = command_line.result()
    assert (result.outcome, result.resumes) == ("done", 1)
    completed = [trial.trial for trial in result.trials if trial.status == "completed"]
    x = {trial.trial: trial.configuration["x"] for trial in result.trials}
    winners = [max(BRACKETS[bracket], key=lambda trial: x[trial]) for bracket in (0, 1)]
    assert completed == sorted([*winners, *BRACKETS[2]])
    assert result.best is not None
    assert result.best.trial == max(completed, key=lambda trial: x[trial])
    for trial in cut.trials:
        again = trained(command_line, trial.trial)
        had = before[trial.trial]
        assert [done for done in had if again[done] > had[done] and done <= trial.iterations] == []
    assert result.actual_cost_usd == pytest.approx(sum(instance.cost_usd for instance in result.instances))
    assert command_line.nothing_left()
