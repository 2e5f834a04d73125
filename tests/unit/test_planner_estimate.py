"""What an estimate holds and prints, and plans as plain values."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import count

import pytest

from rubberband.errors import InputError
from rubberband.planner.estimates import estimate, estimate_plan
from rubberband.planner.exact.model import predict
from rubberband.planner.problem import Problem
from rubberband.spec.loading import load_plan
from rubberband.values.offer import Offer
from rubberband.values.plan import Plan, PlanningConstraints, Stage, StagePlan
from rubberband.values.profile import Profile

STAGES = [Stage(trials=8, iterations=2), Stage(trials=2, iterations=8)]
PROFILE = Profile(seconds_per_iteration={1: 30.0, 2: 16.0, 4: 9.0})
OFFER = Offer(instance_type="p3.8xlarge", gpus=4, price_usd_per_hour=3.6, max_instances=4, provision_delay_s=15.0)
PLAN = Plan(stages=(StagePlan(instances=2, gpus_per_trial=1), StagePlan(instances=1, gpus_per_trial=2)))


def limits(deadline_s=None, max_cost_usd=None):
    return PlanningConstraints(deadline_s=deadline_s, max_cost_usd=max_cost_usd, max_gpus_per_trial=4)


def problem(constraints, **changes):
    return Problem(brackets=[STAGES], offer=replace(OFFER, **changes), profile=PROFILE, constraints=constraints)


def estimated(constraints, **options):
    clock = count(step=2).__next__
    asked = replace(problem(constraints), policy=options.pop("policy", "optimal"))
    return estimate([asked], "digits", clock=clock, **options)


def test_prints_the_documented_object():
    result = estimated(limits(300.0, 5.0))
    data = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert {
        "schema", "feasible", "experiment", "policy", "plan", "prediction", "baselines", "frontier", "planning_s",
    } <= set(data)  # fmt: skip
    assert data["schema"] == "rubberband.estimate/1"
    assert (data["feasible"], data["experiment"], data["policy"]) == (True, "digits", "optimal")
    assert data["planning_s"] == 2
    first = data["plan"]["stages"][0]
    assert {"stage", "trials", "iterations", "instances", "gpus_per_trial", "slots", "instance_type", "market",
            "duration_s", "cost_usd"} <= set(first)  # fmt: skip
    assert (first["stage"], first["trials"], first["instance_type"], first["market"]) == (
        0, 8, "p3.8xlarge", "on_demand",
    )  # fmt: skip
    assert sum(stage["cost_usd"] for stage in data["plan"]["stages"]) == pytest.approx(
        data["prediction"]["cost_usd"]["mean"]
    )


def test_without_noise_every_quantile_is_the_mean():
    prediction = estimated(limits(300.0)).to_json()["prediction"]
    for name in ("jct_s", "cost_usd"):
        assert set(prediction[name]) == {"mean", "p10", "p50", "p90", "p95"}
        assert len(set(prediction[name].values())) == 1
    assert (prediction["p_deadline"], prediction["p_budget"]) == (1.0, 1.0)


def test_baselines_that_exist_appear_with_plan_and_prediction():
    data = estimated(limits()).to_json()
    assert list(data["baselines"]) == ["static", "naive_elastic", "greedy"]
    assert set(data["baselines"]["static"]) == {"plan", "prediction"}
    assert "static" not in estimated(limits(), policy="static").baselines
    assert estimated(limits(), compare=False).baselines == {}


def test_the_frontier_holds_the_plan_and_on_request_all_of_it():
    own = estimated(limits())
    assert own.frontier == ((own.prediction.jct_s, own.prediction.cost_usd),)
    whole = estimated(limits(), with_frontier=True).frontier
    assert len(whole) > 1
    assert whole[-1] == (pytest.approx(own.frontier[0][0]), pytest.approx(own.frontier[0][1]))


def test_no_plan_is_an_answer_with_the_nearest_one():
    result = estimated(limits(10.0))
    assert (result.feasible, result.plan, result.prediction, result.baselines) == (False, None, None, {})
    assert "raise the deadline" in result.reason
    data = result.to_json()
    assert (data["feasible"], data["plan"], data["frontier"]) == (False, None, [])
    assert data["nearest"]["jct_s"] > 10.0
    assert data["nearest"]["cost_usd"] > 0.0


@pytest.mark.long
def test_a_greedy_plan_that_is_too_seldom_in_time_is_reported_as_such():
    stages = [Stage(trials=64 >> at, iterations=4 << at) for at in range(7)]
    offer = Offer(instance_type="test", gpus=4, price_usd_per_hour=12.0, max_instances=32)
    profile = Profile(seconds_per_iteration={1: 110.0, 2: 57.0, 4: 30.0}, trial_startup_s=2.0, trial_cv=0.3)
    limits = PlanningConstraints(deadline_s=36000.0, confidence=0.999, max_gpus_per_trial=4)
    asked = Problem(brackets=[stages], offer=offer, profile=profile, constraints=limits, policy="greedy", seed=3)
    answer = estimate([asked], clock=count().__next__)
    assert answer.feasible == (answer.odds.p_both >= 0.999)
    assert not answer.feasible


def test_the_plan_of_a_user_is_predicted_as_it_is():
    result = estimate_plan(problem(limits(10.0)), PLAN, "digits")
    assert result.plan == PLAN
    assert result.prediction == predict(STAGES, PLAN, PROFILE, OFFER)
    assert not result.feasible
    data = result.to_json()
    assert data["policy"] == "user"
    assert data["prediction"]["p_deadline"] == 0.0
    assert data["prediction"]["p_budget"] == 1.0
    assert estimate_plan(problem(limits()), PLAN).feasible


def test_a_plan_is_read_as_it_was_written(tmp_path):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"stages": [asdict(choice) for choice in PLAN.stages]}))
    assert load_plan(file) == PLAN


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "is not a mapping"),
        ({}, "stages: is required"),
        ({"stages": []}, "stages"),
        ({"stages": "all"}, "stages: 'all' is not a list"),
        ({"stages": [3]}, "stages.0: 3"),
        ({"stages": [{"instances": 1}]}, "stages.0.gpus_per_trial: is required"),
        ({"stages": [{"instances": 1, "gpus_per_trial": 1, "gpu": 1}]}, "stages.0.gpu: unknown"),
        ({"stages": [{"instances": 1.5, "gpus_per_trial": 1}]}, "stages.0.instances: 1.5"),
        ({"stages": [{"instances": True, "gpus_per_trial": 1}]}, "stages.0.instances: True"),
        ({"stages": [{"instances": 0, "gpus_per_trial": 1}]}, "stages.0.instances: 0"),
    ],
)
def test_a_malformed_plan_is_refused_with_the_place(data, words, tmp_path):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(data))
    with pytest.raises(InputError, match=words):
        load_plan(file)
