"""The example of single fits on CPUs, run whole on a local instance."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.builders.command_line import CommandLine

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(600)]
FILE = Path(__file__).parents[2] / "examples/fits.yaml"


@pytest.mark.parametrize("sampler", ["random", "optuna"])
def test_each_fit_trains_once_and_the_best_has_the_lowest_loss(command_line: CommandLine, sampler: str) -> None:
    fewer = ["-s", "search.scheduler.num_samples=12", "-s", f"search.sampler.type={sampler}"]
    command_line("run", str(FILE), "--no-check", *fewer)
    result = command_line.result("fits")
    assert result.outcome == "done"
    assert [trial.iterations for trial in result.trials] == [1] * 12
    assert result.best is not None
    losses = [trial.metrics["loss"] for trial in result.trials]
    assert result.best.metrics["loss"] == min(losses)
