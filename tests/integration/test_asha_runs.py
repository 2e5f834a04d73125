"""Asha on real Ray nodes, through the command line: kill -9 while trials climb their rungs, and a resume."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from rubberband.executor import Result
from tests.builders.command_line import EXPERIMENT, CommandLine

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(420)]

TOTALS = (1, 4, 13)
"""Iterations at the end of each rung."""


@pytest.fixture
def command_line(tmp_path: Path) -> CommandLine:
    made = CommandLine(tmp_path)
    scheduler = "{type: stages, stages: [{trials: 4, iterations: 4}, {trials: 2, iterations: 10}]}"
    text = EXPERIMENT.replace(scheduler, "{type: asha, num_samples: 12, max_t: 13, reduction_factor: 3}")
    text = text.replace("deadline: 10m", "deadline: 10m, objective: min_time")
    (tmp_path / "sleepy.yaml").write_text(text)
    return made


def trained(command_line: CommandLine, trial: int) -> Counter[int]:
    lines = command_line.shows("logs", "sleepy", str(trial)).splitlines()
    texts = [line.rpartition(" | ")[2] for line in lines]
    return Counter(int(text.split()[1]) for text in texts if text.startswith("iteration "))


def in_the_middle(result: Result) -> bool:
    """Whether trials are in two rungs, and in none of the last one's is over."""
    return bool(result.rungs) and result.rungs[0].ended > 4 and result.rungs[1].trials > 1 and not result.rungs[2].ended


def test_after_kill_9_a_resume_finds_the_same_winner_and_trains_nothing_again(command_line: CommandLine) -> None:
    driver = command_line.start("run", "sleepy.yaml", "-s", "resources.lease=8s")
    command_line.wait_for(driver, in_the_middle)
    driver.kill()
    driver.communicate()
    cut = command_line.result()
    assert cut.outcome == "unfinished"
    assert command_line.nothing_left(within_s=25.0), "instances outlived their lease"
    before = {trial.trial: trained(command_line, trial.trial) for trial in cut.trials}

    command_line("resume", "sleepy")
    result = command_line.result()
    assert (result.outcome, result.resumes) == ("done", 1)
    assert tuple(rung.iterations for rung in result.rungs) == TOTALS
    assert all(after.promoted >= rung.promoted for rung, after in zip(cut.rungs, result.rungs, strict=True))
    # The score is x times the iterations: the greatest x is the best of each rung, so it wins however results come.
    assert result.best is not None
    assert result.best.trial == max(result.trials, key=lambda trial: trial.configuration["x"]).trial
    assert result.best.iterations == TOTALS[-1]
    assert {trial.iterations for trial in result.trials} <= set(TOTALS)
    for trial in cut.trials:
        again, had = trained(command_line, trial.trial), before[trial.trial]
        assert [done for done in had if again[done] > had[done] and done <= trial.iterations] == []
    assert result.actual_cost_usd == pytest.approx(sum(instance.cost_usd for instance in result.instances))
    assert command_line.nothing_left()
