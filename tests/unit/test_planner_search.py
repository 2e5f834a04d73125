"""Searching: plans known by hand, and what is said when there is none."""

from __future__ import annotations

import pytest

from rubberband.errors import InfeasibleError, InputError
from rubberband.planner.search import meets
from rubberband.values.offer import Offer
from rubberband.values.plan import PlanningConstraints, Stage
from rubberband.values.profile import Profile
from tests.builders.plans import frontier, plan

STAGES = [
    Stage(trials=trials, iterations=iterations) for trials, iterations in ((32, 1), (10, 3), (3, 9), (1, 37))
]  # sha(32, 1, 50, 3)
SECONDS = {1: 110.0, 2: 57.0, 4: 30.0, 8: 18.0, 16: 13.0, 32: 11.0}
PROFILE = Profile(seconds_per_iteration=SECONDS, trial_startup_s=2.0)


def offer(**overrides):
    values = {
        "instance_type": "p3.8xlarge",
        "gpus": 4,
        "price_usd_per_hour": 12.24,
        "max_instances": 16,
        "provision_delay_s": 15.0,
        "init_delay_s": 15.0,
    }
    return Offer(**(values | overrides))


def limits(deadline_s=None, max_cost_usd=None, least=1, most=8):
    return PlanningConstraints(
        deadline_s=deadline_s, max_cost_usd=max_cost_usd, min_gpus_per_trial=least, max_gpus_per_trial=most
    )


def choices(planned):
    return [(choice.instances, choice.gpus_per_trial) for choice in planned.plan.stages]


def test_the_example_of_the_experiment_file():
    planned = plan(STAGES, PROFILE, offer(), limits(1200.0, 40.0))
    assert choices(planned) == [(16, 2), (10, 4), (3, 4), (2, 8)]
    assert planned.prediction.jct_s == pytest.approx(30 + 59 + 92 + 272 + 668)
    assert planned.prediction.cost_usd == pytest.approx((16 * 74 + 10 * 92 + 3 * 272 + 2 * 668) * 0.0034)


def test_its_static_baseline_costs_nearly_twice_as_much():
    planned = plan(STAGES, PROFILE, offer(), limits(1200.0), "static")
    assert {instances for instances, _ in choices(planned)} == {7}
    assert planned.prediction.cost_usd == pytest.approx(28.084)
    assert planned.prediction.jct_s <= 1200.0


def test_the_point_in_the_experiment_file_is_on_the_frontier():
    points = frontier(STAGES, Profile(seconds_per_iteration=SECONDS), offer(), limits())
    assert (pytest.approx(1691.0), pytest.approx(12.835)) in points


def test_a_plan_that_takes_exactly_the_deadline_is_feasible():
    assert plan(STAGES, PROFILE, offer(), limits(1121.0)).prediction.jct_s == pytest.approx(1121.0)
    assert plan(STAGES, PROFILE, offer(), limits(1120.9)).prediction.cost_usd > 14.4704


def test_without_a_deadline_the_plan_is_the_cheapest_there_is():
    planned = plan(STAGES, PROFILE, offer(), limits())
    assert planned.prediction.cost_usd == pytest.approx(frontier(STAGES, PROFILE, offer(), limits())[-1][1])


def test_min_time_spends_up_to_the_budget():
    fastest = plan(STAGES, PROFILE, offer(), limits(), objective="min_time")
    frugal = plan(STAGES, PROFILE, offer(), limits(max_cost_usd=14.0), objective="min_time")
    assert fastest.prediction.jct_s == pytest.approx(1013.0)
    assert frugal.prediction.cost_usd <= 14.0
    assert frugal.prediction.jct_s > fastest.prediction.jct_s


def test_ties_go_to_the_shorter_time_and_then_to_fewer_instances():
    gratis = plan(STAGES, PROFILE, offer(price_usd_per_hour=0.0), limits())
    assert gratis.prediction.jct_s == pytest.approx(1013.0)
    functions = plan([Stage(trials=4, iterations=1)] * 2, PROFILE, offer(billing="per_function"), limits(most=1))
    assert choices(functions) == [(1, 1), (1, 1)]


def test_instances_are_held_through_a_narrow_stage_if_starting_them_again_is_dearer():
    stages = [Stage(trials=8, iterations=1), Stage(trials=1, iterations=1), Stage(trials=8, iterations=1)]
    profile = Profile(seconds_per_iteration={1: 20.0})
    held = plan(stages, profile, offer(max_instances=2, provision_delay_s=300.0), limits(60 + 315.0, most=1))
    assert [instances for instances, _ in choices(held)] == [2, 2, 2]
    released = plan(
        [stages[0], Stage(trials=1, iterations=60), stages[2]],
        Profile(seconds_per_iteration={1: 20.0}),
        offer(max_instances=2, provision_delay_s=0.0),
        limits(15 + 20 + 1200 + 15 + 20.0, most=1),
    )
    assert [instances for instances, _ in choices(released)] == [2, 1, 2]


def test_the_deadline_that_cannot_be_met_is_named_with_the_one_that_can():
    with pytest.raises(InfeasibleError) as caught:
        plan(STAGES, PROFILE, offer(), limits(600.0))
    assert str(caught.value) == (
        "deadline 10m cannot be met: the shortest plan takes 16m53s; raise the deadline to 16m53s"
    )
    assert caught.value.shortest_jct_s == pytest.approx(1013.0)
    assert caught.value.cheapest_usd == pytest.approx(12.5936)


def test_the_budget_that_cannot_be_kept_is_named_with_the_one_that_can():
    with pytest.raises(InfeasibleError) as caught:
        plan(STAGES, PROFILE, offer(), limits(3600.0, 3.0))
    assert str(caught.value) == (
        "max_cost 3.00 USD cannot be kept: the cheapest plan costs 12.60 USD; raise max_cost to 12.60 USD"
    )


def test_limits_that_cannot_both_be_kept_are_named_with_either_remedy():
    with pytest.raises(InfeasibleError) as caught:
        plan(STAGES, PROFILE, offer(), limits(1200.0, 13.0))
    assert "cannot both be kept" in str(caught.value)
    assert "raise max_cost to 14.48 USD" in str(caught.value)
    relaxed = plan(STAGES, PROFILE, offer(), limits(1200.0, 14.48))
    assert relaxed.prediction.cost_usd == pytest.approx(14.4704)


@pytest.mark.parametrize(
    ("overrides", "constraints", "words"),
    [
        ({}, limits(least=5, most=7), ["5", "7", "raise gpus_per_trial.max to 8"]),
        ({"max_instances": 1}, limits(least=8, most=8), ["8 GPUs", "max_instances=1", "raise max_instances to 2"]),
    ],
)
def test_a_job_that_fits_nowhere_is_an_input_error(overrides, constraints, words):
    with pytest.raises(InputError) as caught:
        plan(STAGES, PROFILE, offer(**overrides), constraints)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("stages", [[], [Stage(trials=0, iterations=1)], [Stage(trials=1, iterations=0)]])
def test_a_job_without_work_is_an_input_error(stages):
    with pytest.raises(InputError, match="at least 1"):
        plan(stages, PROFILE, offer(), limits())


def test_gangs_wider_than_the_profile_are_not_used_for_nothing():
    planned = plan(STAGES, Profile(seconds_per_iteration={1: 10.0, 4: 4.0}), offer(), limits(most=64))
    assert planned.prediction.extrapolated == ()


def test_meets_shows_the_deadline_from_the_budget():
    prediction = plan(STAGES, PROFILE, offer(), limits()).prediction
    assert meets(prediction, limits()) == (True, True)
    assert meets(prediction, limits(prediction.jct_s - 1, prediction.cost_usd)) == (False, True)
    assert meets(prediction, limits(prediction.jct_s, prediction.cost_usd - 0.01)) == (True, False)


@pytest.mark.parametrize("objective", ["min_cost", "min_time"])
@pytest.mark.parametrize("deadline_s", [1100.0, 1200.0, 2500.0, None])
@pytest.mark.parametrize(("billing", "head_usd"), [("per_instance", 0.5), ("per_function", 0.0)])
def test_one_gang_throughout_is_the_best_of_all_that_may_be_one(objective, deadline_s, billing, head_usd):
    rented = offer(billing=billing, head_price_usd_per_hour=head_usd, minimum_billed_s=300.0)
    found = plan(STAGES, PROFILE, rented, limits(deadline_s, 60.0, most=16), "naive_elastic", objective)
    alone = []
    for gpus in (1, 2, 3, 4, 8, 12, 16):
        try:
            alone.append(plan(STAGES, PROFILE, rented, limits(deadline_s, 60.0, gpus, gpus), "optimal", objective))
        except InfeasibleError:
            continue

    def figures(planned):
        values = (planned.prediction.cost_usd, planned.prediction.jct_s)
        return values if objective == "min_cost" else values[::-1]

    assert figures(found) == min(map(figures, alone))
