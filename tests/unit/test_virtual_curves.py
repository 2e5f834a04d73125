"""The invented metrics of a run on virtual instances look like those of training."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest

import rubberband
from rubberband.executor.result.result import Result

SCHEDULERS = [
    {"type": "sha", "num_samples": 9, "grace_period": 1, "max_t": 9, "reduction_factor": 3},
    {"type": "hyperband", "max_t": 9, "reduction_factor": 3},
    {"type": "asha", "num_samples": 9, "grace_period": 1, "max_t": 9, "reduction_factor": 3},
]


def ran(home: Path, scheduler: dict[str, Any], mode: str) -> Result:
    return rubberband.tune(
        name="virtual",
        home=home,
        verbose=0,
        search={"space": {"x": 1}, "scheduler": scheduler, "metric": "score", "mode": mode},
        constraints={"deadline": "2h"},
        resources={"provider": "virtual", "instance_type": "p3.2xlarge", "max_instances": 4},
        profile={"seconds_per_iteration": {1: 10}, "trial_startup": "1s"},
    )


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=lambda words: words["type"])
@pytest.mark.parametrize("mode", ["max", "min"])
def test_metrics_improve_in_the_direction_of_the_mode_and_the_winner_is_the_best(
    tmp_path: Path, scheduler: dict[str, Any], mode: Literal["max", "min"]
) -> None:
    result = ran(tmp_path / "one", scheduler, mode)
    sign = 1.0 if mode == "max" else -1.0
    best = {trial.trial: sign * trial.metrics["score"] for trial in result.trials}
    assert result.best is not None
    assert best[result.best.trial] == max(best.values())
    for trial in result.trials:
        scores = [sign * metrics["score"] for _, _, metrics in trial.curve]
        assert all(before < after for before, after in pairwise(scores)), f"trial {trial.trial}"
    again = ran(tmp_path / "two", scheduler, mode)
    assert [trial.metrics for trial in again.trials] == [trial.metrics for trial in result.trials]
