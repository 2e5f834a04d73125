"""The examples of commands, run whole on local instances."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.builders.command_line import CommandLine

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(600)]
EXAMPLES = Path(__file__).parents[2] / "examples/commands"


@pytest.mark.parametrize(
    ("name", "gpus", "file"), [("bash", 1, "state"), ("plain", 1, "model.pickle"), ("ddp", 2, "state.pt")]
)
def test_an_example_of_a_command_runs_and_leaves_its_files(
    command_line: CommandLine, tmp_path: Path, name: str, gpus: int, file: str
) -> None:
    command_line("run", str(EXAMPLES / f"{name}.yaml"), "--no-check")
    result = command_line.result(name)
    assert result.outcome == "done"
    assert result.best is not None
    assert result.best.iterations == max(trial.iterations for trial in result.trials)
    assert result.stages[-1].gpus_per_trial == gpus
    command_line("best", name, "--out", str(tmp_path / "best"))
    assert [path.name for path in (tmp_path / "best").iterdir()] == [file]
