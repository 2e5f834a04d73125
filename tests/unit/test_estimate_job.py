"""The job that a run is planned as: on the best of several instance types, and replanned only where that is meant."""

from __future__ import annotations

from typing import Any

import pytest

from rubberband.errors import InputError
from rubberband.executor import ExperimentFolder
from rubberband.running.run import run_experiment
from rubberband.spec.experiment import Experiment
from tests.builders.experiment_words import MINIMAL
from tests.builders.plans import plan_job

PROFILES = {
    "p3.2xlarge": {"seconds_per_iteration": {1: 60.0}},
    "p3.8xlarge": {"seconds_per_iteration": {1: 60.0, 4: 16}},
}


def experiment(constraints: dict[str, Any] | None = None, **resources: Any) -> Experiment:
    words = {
        **MINIMAL,
        "constraints": constraints or {"deadline": "9h"},
        "resources": {"provider": "virtual", "instance_types": list(PROFILES), **resources},
        "profile": {"by_instance_type": PROFILES},
    }
    return Experiment(**words)


def planned(asked: Experiment, policy: Any = "optimal") -> Any:
    profiles = asked.loaded_profiles()
    assert profiles is not None
    return plan_job(asked, profiles, policy)


def test_the_cheapest_type_that_is_in_time_is_chosen() -> None:
    assert planned(experiment()).offer.instance_type == "p3.2xlarge"
    fast = planned(experiment({"deadline": "4m"}))
    assert fast.offer.instance_type == "p3.8xlarge"
    assert dict(fast.profile.seconds_per_iteration) == {1: 60.0, 4: 16.0}
    assert fast.prediction.jct_s <= 240


def test_the_job_knows_what_a_replan_must_keep() -> None:
    job = planned(experiment({"deadline": "9h", "confidence": 0.8, "objective": "min_time", "max_cost": 50}))
    assert (job.confidence, job.objective, job.max_cost_usd) == (0.8, "min_time", 50)
    assert job.min_gpus_per_trial == 1
    assert job.max_gpus_per_trial == job.offer.gpus


def test_a_deadline_is_met_with_more_gpus_per_trial_than_an_instance_has_where_the_profile_knows_them() -> None:
    asked = experiment({"deadline": "20m"}).to_words()
    asked["search"]["scheduler"] = {"type": "sha", "num_samples": 32, "max_t": 50, "reduction_factor": 3}
    asked["resources"] = {"provider": "virtual", "instance_type": "p3.8xlarge"}
    asked["profile"] = {"seconds_per_iteration": {1: 110, 2: 57, 4: 30, 8: 18, 16: 13, 32: 11}}
    job = planned(Experiment(**asked))
    assert max(choice.gpus_per_trial for choice in job.plan.stages) == 8
    assert (job.max_gpus_per_trial, job.prediction.jct_s <= 1200) == (32, True)


@pytest.mark.parametrize("policy", ["optimal", "static", "naive_elastic", "greedy"])
def test_only_the_optimal_plan_is_replanned(policy: str) -> None:
    job = planned(experiment(), policy)
    assert job.replan == (policy == "optimal")


def test_an_experiment_that_cannot_run_is_refused_before_anything_is_made(tmp_path: Any) -> None:
    folder = ExperimentFolder(home=tmp_path, name="small")
    with pytest.raises(InputError, match="which makes a bucket, or name one"):
        run_experiment(experiment(provider="aws"), folder)
    assert list(tmp_path.iterdir()) == []
