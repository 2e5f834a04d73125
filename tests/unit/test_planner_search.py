"""Searching: plans known by hand, also where times vary, and what is said when there is none."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from rubberband.errors import InfeasibleError, InputError
from rubberband.planner.reserve import Reserve
from rubberband.planner.search import meets
from rubberband.values.offer import Offer, Spot
from rubberband.values.plan import Cohort, PlanningConstraints, Stage, StagePlan
from rubberband.values.profile import Profile
from tests.builders.plans import plan

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


def test_a_plan_that_takes_exactly_the_deadline_is_feasible():
    assert plan(STAGES, PROFILE, offer(), limits(1121.0)).prediction.jct_s == pytest.approx(1121.0)
    assert plan(STAGES, PROFILE, offer(), limits(1120.9)).prediction.cost_usd > 14.4704


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


def test_a_deadline_that_only_the_held_instances_can_meet() -> None:
    stages = [Stage(trials=4, iterations=2), Stage(trials=2, iterations=4)]
    profile = Profile(seconds_per_iteration={1: 10.0, 2: 6.0})
    rented = Offer(
        instance_type="test", gpus=2, price_usd_per_hour=3.6, max_instances=2, provision_delay_s=90.0, init_delay_s=10.0
    )
    held_limits = PlanningConstraints(deadline_s=44.0, max_gpus_per_trial=2)
    held = [Cohort(instances=2, held_s=500.0)]
    assert plan(stages, profile, rented, held_limits, held=held).prediction.jct_s == pytest.approx(44.0)
    with pytest.raises(InfeasibleError):
        plan(stages, profile, rented, held_limits)


WAVES = [Stage(trials=16, iterations=4), Stage(trials=4, iterations=16)]
NOISY = Profile(seconds_per_iteration={1: 10.0, 2: 5.6, 4: 3.2}, trial_startup_s=2.0, trial_cv=0.3, iteration_cv=0.2)
RENTED = Offer(
    instance_type="test", gpus=4, price_usd_per_hour=3.6, max_instances=8, provision_delay_s=15.0, init_delay_s=15.0
)
IN_TIME = PlanningConstraints(deadline_s=400.0, max_gpus_per_trial=4)


def test_the_same_seed_gives_the_same_plan_and_figures() -> None:
    assert plan(WAVES, NOISY, RENTED, IN_TIME, seed=3) == plan(WAVES, NOISY, RENTED, IN_TIME, seed=3)


def test_more_confidence_costs_more_and_noise_does_too() -> None:
    certain = replace(NOISY, trial_cv=0.0, iteration_cv=0.0)
    costs = [
        plan(WAVES, NOISY, RENTED, replace(IN_TIME, confidence=confidence)).prediction.cost_usd
        for confidence in (0.5, 0.9, 0.99)
    ]
    assert plan(WAVES, certain, RENTED, IN_TIME).prediction.cost_usd <= costs[0] <= costs[1] <= costs[2]


def test_stages_add_up_to_the_means() -> None:
    prediction = plan(WAVES, NOISY, RENTED, IN_TIME).prediction
    assert prediction.jct is not None
    assert prediction.cost is not None
    assert sum(stage.cost_usd for stage in prediction.stages) == pytest.approx(prediction.cost.mean)
    assert sum(stage.provisioning_s + stage.duration_s for stage in prediction.stages) == pytest.approx(
        prediction.jct.mean
    )
    assert prediction.jct.p10 < prediction.jct.p50 < prediction.jct.p90 < prediction.jct.p95


def test_limits_that_cannot_be_kept_are_reported_with_a_remedy_that_works() -> None:
    with pytest.raises(InfeasibleError, match=r"with confidence 0\.95") as refused:
        plan(WAVES, NOISY, RENTED, replace(IN_TIME, deadline_s=100.0))
    enough = replace(IN_TIME, deadline_s=math.ceil(refused.value.shortest_jct_s) * 1.01)
    planned = plan(WAVES, NOISY, RENTED, enough)
    assert planned.odds is not None
    assert planned.odds.p_both >= 0.95


def test_a_run_keeps_back_the_price_of_its_instances_until_they_are_released() -> None:
    few, more = (StagePlan(instances=each, gpus_per_trial=1, market="on_demand") for each in (1, 3))
    kept_usd = [Reserve(margin_s=600.0).release_usd(offer(), each) for each in (few, more)]
    assert kept_usd[1] - kept_usd[0] == pytest.approx(2 * 12.24 / 6, rel=0.01)


def test_a_tight_deadline_buys_the_reliable_market_where_spot_is_too_risky() -> None:
    spot = Spot(price_usd_per_hour=1.0, interruptions_per_hour=6.0, restart_s=120.0)
    rented = replace(RENTED, spot=spot)
    loose = plan(WAVES, NOISY, rented, replace(IN_TIME, deadline_s=4000.0))
    tight = plan(WAVES, NOISY, rented, replace(IN_TIME, deadline_s=260.0))
    assert {choice.market for choice in loose.plan.stages} == {"spot"}
    assert "on_demand" in {choice.market for choice in tight.plan.stages}


def test_instances_held_count_where_times_vary() -> None:
    held = [Cohort(instances=4, held_s=600.0)]
    with_held = plan(WAVES, NOISY, RENTED, IN_TIME, held=held).prediction
    assert with_held.cost_usd <= plan(WAVES, NOISY, RENTED, IN_TIME).prediction.cost_usd * 1.001
