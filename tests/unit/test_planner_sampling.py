"""Makespans of many trials."""

import heapq

import numpy as np
import pytest

from rubberband.errors import InfeasibleError
from rubberband.planner.exact.solver import Box
from rubberband.planner.noise.makespan import makespan
from rubberband.values.offer import Offer, Spot
from rubberband.values.plan import Cohort, Plan, PlanningConstraints, Stage, StagePlan
from rubberband.values.profile import Law, Profile, Spread
from tests.builders.plans import plan, sample


def scheduled(trials_s, num_slots):
    """List scheduling, one trial after another."""
    free_s = list(trials_s[:num_slots])
    heapq.heapify(free_s)
    for trial_s in trials_s[num_slots:]:
        heapq.heapreplace(free_s, free_s[0] + trial_s)
    return max(free_s)


@pytest.mark.parametrize("num_slots", [1, 2, 16, 17, 60, 200, 300])
def test_it_is_list_scheduling(num_slots: int) -> None:
    trials_s = np.random.default_rng(1).lognormal(0.0, 0.4, (200, 20))
    expected = [scheduled(trials_s[:, row], num_slots) for row in range(20)]
    assert makespan(trials_s, num_slots) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("cv", [0.0, 0.05, 0.15, 0.6])
@pytest.mark.parametrize(("trials", "num_slots"), [(64, 16), (33, 16), (90, 40), (41, 8)])
def test_trials_that_vary_little_are_scheduled_the_same(trials: int, num_slots: int, cv: float) -> None:
    trials_s = 5.0 + 10.0 * np.exp(cv * np.random.default_rng(3).standard_normal((trials, 300)))
    expected = [scheduled(trials_s[:, row], num_slots) for row in range(300)]
    assert makespan(trials_s, num_slots) == pytest.approx(expected, abs=1e-6)


def test_a_cluster_is_ready_when_its_slowest_instance_is() -> None:
    offer = Offer(
        instance_type="test",
        gpus=1,
        price_usd_per_hour=1.0,
        max_instances=8,
        init_delay_s=100.0,
        init_spread=Spread(cv=0.5),
    )
    profile = Profile(seconds_per_iteration={1: 10.0})
    ready_s = []
    for instances in (1, 2, 8):
        plan = Plan(stages=(StagePlan(instances=instances, gpus_per_trial=1),))
        ready_s.append(sample([Stage(trials=8, iterations=1)], plan, profile, offer).steps[0].provisioning_s)
    assert ready_s[0] == pytest.approx(100.0, rel=0.02)
    assert ready_s[0] * 1.2 < ready_s[1] < ready_s[2] / 1.2


def test_both_limits_are_kept_only_where_each_of_them_is() -> None:
    jct_s, cost_usd = np.array([1.0, 2.0, 3.0, 4.0]), np.array([4.0, 1.0, 3.0, 1.0])
    found = Box(time_s=2.5, cost_usd=2.0).odds(jct_s, cost_usd)
    assert (found.p_deadline, found.p_budget, found.p_both) == (0.5, 0.5, 0.25)


@pytest.mark.parametrize("law", ["lognormal", "normal"])
def test_times_that_vary_are_on_average_those_that_were_profiled_and_the_same_each_time(law: Law) -> None:
    delays = {"init_delay_s": 50.0, "init_spread": Spread(cv=0.5), "provision_spread": Spread(cv=0.5)}
    offer = Offer(
        instance_type="test", gpus=1, price_usd_per_hour=1.0, max_instances=1, provision_delay_s=50.0, **delays
    )
    profile = Profile(seconds_per_iteration={1: 100.0}, trial_cv=0.4, law=law)
    plan = Plan(stages=(StagePlan(instances=1, gpus_per_trial=1),))
    first, again = (sample([Stage(trials=1, iterations=1)], plan, profile, offer) for _ in range(2))
    assert first.jct_s.mean() == pytest.approx(200.0, rel=0.02)
    assert first.jct_s.std() > 30.0
    assert (first.jct_s == again.jct_s).all()


def test_a_plan_that_is_hardly_faster_is_not_worth_three_times_the_money():
    spot = Spot(price_usd_per_hour=1.0, interruptions_per_hour=0.05, restart_s=30.0)
    offer = Offer(instance_type="test", gpus=1, price_usd_per_hour=3.0, max_instances=2, init_delay_s=200.0, spot=spot)
    stages = [Stage(trials=4, iterations=3), Stage(trials=2, iterations=4)]
    limits = PlanningConstraints(deadline_s=300.0)
    found = plan(stages, Profile(seconds_per_iteration={1: 2.0}), offer, limits, objective="min_time")
    assert {choice.market for choice in found.plan.stages} == {"spot"}


def test_the_fastest_plan_stays_on_the_spot_market_that_was_asked_for_where_that_keeps_the_limits() -> None:
    spot = Spot(price_usd_per_hour=1.0, interruptions_per_hour=2.0, restart_s=60.0)
    offer = Offer(instance_type="test", gpus=1, price_usd_per_hour=3.0, max_instances=2, spot=spot)
    job = ([Stage(trials=4, iterations=20)], Profile(seconds_per_iteration={1: 30.0}), offer)
    found = plan(*job, PlanningConstraints(max_cost_usd=5.0), objective="min_time")
    assert {choice.market for choice in found.plan.stages} == {"spot"}
    late = plan(*job, PlanningConstraints(deadline_s=1250.0), objective="min_time")
    assert {choice.market for choice in late.plan.stages} == {"on_demand"}
    for market in ("spot", "on_demand"):
        held = [Cohort(instances=1, held_s=60.0, market=market)]
        with pytest.raises(InfeasibleError):
            plan(*job, PlanningConstraints(deadline_s=900.0), objective="min_time", held=held)


@pytest.mark.parametrize(("gpus", "instances"), [(4, 1), (1, 4)])
def test_trials_that_share_a_spot_instance_are_interrupted_together(gpus: int, instances: int) -> None:
    """So nothing is late as often as no instance is taken, however many trials are on each."""
    spot = Spot(price_usd_per_hour=1.0, interruptions_per_hour=1.0, restart_s=60.0)
    offer = Offer(instance_type="test", gpus=gpus, price_usd_per_hour=3.0, max_instances=instances, spot=spot)
    plan = Plan(stages=(StagePlan(instances=instances, gpus_per_trial=1, market="spot"),))
    profile = Profile(seconds_per_iteration={1: 90.0})
    jct_s = sample([Stage(trials=8, iterations=4)], plan, profile, offer).jct_s
    assert (jct_s <= 720.0).mean() == pytest.approx(np.exp(-instances * 720.0 / 3600.0), abs=0.01)
