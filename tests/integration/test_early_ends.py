"""Rules of `search.stop` on real Ray nodes: a target that is reached, made harder and resumed, and patience."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.builders.command_line import EXPERIMENT, CommandLine

pytestmark = [pytest.mark.ray, pytest.mark.timeout(420)]


@pytest.fixture
def command_line(tmp_path: Path) -> CommandLine:
    made = CommandLine(tmp_path)
    scheduler = "{type: stages, stages: [{trials: 4, iterations: 4}, {trials: 2, iterations: 10}]}"
    stop = "{type: none, num_samples: 4, max_t: 12}\n  stop: {target: 2.5, patience: {iterations: 2, min_delta: 0.6}}"
    assert scheduler in EXPERIMENT
    (tmp_path / "sleepy.yaml").write_text(EXPERIMENT.replace(scheduler, stop))
    return made


def test_a_target_ends_the_search_and_a_harder_one_lets_it_go_on(command_line: CommandLine) -> None:
    """A trial's score is x times its iterations, x at most 1."""
    command_line("run", "sleepy.yaml", "--no-check")
    first = command_line.result()
    assert (first.outcome, first.ended_by is not None) == ("done", True)
    best = first.best
    assert best is not None
    assert best.checkpoint is not None
    assert 2.5 <= best.metrics["score"] < 2.5 + best.configuration["x"]
    assert first.reason.startswith(f"trial {best.trial} reached the target: score=")
    assert best.checkpoints[0].iterations == best.iterations
    assert json.loads(command_line.shows("best", "sleepy", "-o", "json"))["trial"] == best.trial
    assert command_line.nothing_left()

    command_line("extend", "sleepy", "--target", "100", "--yes")
    command_line("resume", "sleepy", "--yes")
    result = command_line.result()
    assert (result.outcome, result.ended_by, result.resumes) == ("done", None, 1)
    assert [granted.target for granted in result.extensions] == [100.0]
    ended = {trial.trial: trial.iterations for trial in result.trials if trial.ended_by == "patience"}
    assert ended == {trial.trial: 3 for trial in result.trials if trial.configuration["x"] < 0.3}
    assert len(ended) > 0
    assert {trial.iterations for trial in result.trials if trial.trial not in ended} == {12}
    assert result.best is not None
    assert result.best.metrics["score"] == pytest.approx(12 * result.best.configuration["x"])
    assert command_line.nothing_left()
