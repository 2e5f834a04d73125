"""An experiment on a local cluster."""

from __future__ import annotations

from typing import Any

from rubberband.spec.experiment import Experiment
from rubberband.values.profile import Profile

PROFILE = Profile(seconds_per_iteration={1: 4.0, 2: 2.5}, trial_startup_s=3.0)


def experiment(constraints: dict[str, Any] | None = None, **resources: Any) -> Experiment:
    """Eight trials; an instance of two GPUs costs 1 USD per 100 s, and is there after no time."""
    return Experiment(
        name="test",
        entrypoint="nosuch:Trial",
        search={
            "space": {"x": {"type": "uniform", "lower": 0, "upper": 1}},
            "scheduler": {"type": "stages", "stages": [{"trials": 8, "iterations": 4}]},
            "metric": "loss",
            "mode": "min",
        },
        constraints=constraints or {},
        resources={
            "provider": "local",
            "gpus_per_instance": 2,
            "gpus_per_trial": {"min": 1, "max": 2},
            "price_per_hour": 36,
            "max_instances": 2,
            "minimum_billed": "0s",
            **resources,
        },
    )
