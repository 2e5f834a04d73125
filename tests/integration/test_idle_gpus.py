"""Real runs in which the last trial of a stage takes the GPU that another one has left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rubberband
from rubberband.executor import Result
from tests.builders.trials.segment_trials import Regression

pytestmark = [pytest.mark.ray, pytest.mark.timeout(420)]


def run(home: Path, **constraints: Any) -> Result:
    """Run three trials on two logical GPUs: the last one is alone."""
    return rubberband.tune(
        Regression,
        name="idle",
        home=home,
        check=False,
        verbose=0,
        search={
            "space": {"lr": {"type": "grid", "values": [0.01, 0.02, 0.03]}},
            "scheduler": {"type": "stages", "stages": [{"trials": 3, "iterations": 8}]},
            "metric": "loss",
            "mode": "min",
        },
        constraints=constraints,
        resources={
            "provider": "local",
            "gpus_per_instance": 2,
            "price_per_hour": 36,
            "max_instances": 1,
            "minimum_billed": 0,
            "gpus_per_trial": {"min": 1, "max": 2},
        },
        profile={"seconds_per_iteration": {1: 2.0, 2: 1.4}, "trial_startup": 1},
    )


@pytest.mark.long
def test_a_gang_widens_within_a_stage_and_learns_what_it_learns_without(tmp_path: Path) -> None:
    result, usual = run(tmp_path / "with"), run(tmp_path / "without", resize_in_stage=False)
    assert [(one.trial, one.gpus_before, one.gpus) for one in result.regrouped] == [(2, 1, 2)]
    assert not usual.regrouped
    assert {use.gpu for use in result.busy if use.trial == 2} == {0, 1}
    for one, other in zip(result.trials, usual.trials, strict=True):
        assert [iterations for _, iterations, _ in one.curve] == list(range(1, 9))
        straight = [metrics["loss"] for _, _, metrics in other.curve]
        assert [metrics["loss"] for _, _, metrics in one.curve] == pytest.approx(straight, rel=1e-8)
