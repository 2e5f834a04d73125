"""Hyperband's brackets as lanes: what any plan of them keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rubberband.errors import InfeasibleError
from rubberband.planner.exact.model import predict
from rubberband.planner.hyperband import sample_lanes
from rubberband.planner.problem import Lane
from rubberband.planner.reserve import Reserve
from rubberband.spec.schedulers import hyperband
from rubberband.values.offer import Offer
from rubberband.values.plan import Plan, Planned, PlanningConstraints, Stage, StagePlan
from rubberband.values.profile import Profile
from tests.builders.budget import examples
from tests.builders.plans import plan, plan_brackets

PROFILE = Profile(seconds_per_iteration={1: 30.0, 2: 16.0, 4: 9.0, 8: 6.0}, trial_startup_s=2.0)


def offer_of(max_instances: int, **prices: float | str) -> Offer:
    """Instances of four GPUs."""
    return Offer(
        instance_type="test",
        gpus=4,
        price_usd_per_hour=3.6,
        max_instances=max_instances,
        provision_delay_s=15.0,
        init_delay_s=15.0,
        **prices,  # type: ignore[arg-type]
    )


def check(job, brackets, profile, offer, constraints):
    """What every plan of several brackets keeps."""
    assert sorted(bracket for lane in job.lanes for bracket in lane.brackets) == list(range(len(brackets)))
    assert sum(lane.max_instances for lane in job.lanes) <= offer.max_instances
    for lane in job.lanes:
        chain = tuple(stage for bracket in lane.brackets for stage in brackets[bracket])
        assert lane.stages == chain
        assert max(choice.instances for choice in lane.planned.plan.stages) <= lane.max_instances
    assert len(job.plan.stages) == sum(map(len, brackets))
    stages_usd = sum(stage.cost_usd for stage in job.prediction.stages)
    assert job.prediction.cost_usd == pytest.approx(stages_usd + job.head_usd)
    if job.odds is None:
        assert job.prediction.jct_s == pytest.approx(max(lane.planned.prediction.jct_s for lane in job.lanes))
        assert constraints.deadline_s is None or job.prediction.jct_s <= constraints.deadline_s + 1e-6


chains = st.lists(st.builds(Stage, trials=st.integers(1, 6), iterations=st.integers(1, 6)), min_size=1, max_size=2)


@given(st.lists(chains.map(tuple), min_size=2, max_size=3), st.integers(2, 5), st.floats(0.0, 1.0), st.booleans())
@settings(max_examples=examples(200), deadline=None)
def test_lanes_divide_the_brackets_and_the_instances(brackets, max_instances, head, soonest) -> None:
    offer = offer_of(max_instances, head_price_usd_per_hour=head)
    limits = PlanningConstraints(max_gpus_per_trial=4)
    objective = "min_time" if soonest else "min_cost"
    check(plan_brackets(brackets, PROFILE, offer, limits, objective=objective), brackets, PROFILE, offer, limits)


@pytest.mark.by_default(2)
@pytest.mark.parametrize(("max_instances", "deadline_s"), [(12, 1100.0), (2, 7000.0), (5, 7000.0), (40, 7000.0)])
@pytest.mark.parametrize("trial_cv", [0.2, 0.0])
def test_hyperband_is_planned_within_its_limits(max_instances: int, deadline_s: float, trial_cv: float) -> None:
    brackets = hyperband(27, 3)
    profile, offer = replace(PROFILE, trial_cv=trial_cv), offer_of(max_instances, head_price_usd_per_hour=0.2)
    limits = PlanningConstraints(deadline_s=deadline_s, max_gpus_per_trial=8)
    job = plan_brackets(brackets, profile, offer, limits)
    check(job, brackets, profile, offer, limits)
    if trial_cv:
        assert job.odds is not None
        assert job.odds.p_both >= limits.confidence
        assert job.prediction.jct is not None
        assert job.prediction.jct.p95 <= deadline_s


def test_brackets_run_side_by_side_when_time_is_short_and_one_after_another_when_it_is_not() -> None:
    brackets, offer = hyperband(27, 3), offer_of(64)
    fast = plan_brackets(brackets, PROFILE, offer, PlanningConstraints(max_gpus_per_trial=8), objective="min_time")
    slow = plan_brackets(brackets, PROFILE, offer, PlanningConstraints(max_gpus_per_trial=8))
    assert len(fast.lanes) > len(slow.lanes)
    assert fast.prediction.jct_s < slow.prediction.jct_s
    assert fast.prediction.cost_usd > slow.prediction.cost_usd


@pytest.mark.parametrize("trial_cv", [0.0, pytest.param(0.2, marks=pytest.mark.long)])
def test_money_is_kept_back_to_release_all_lanes_at_once(trial_cv: float) -> None:
    brackets, offer, terms = hyperband(27, 3), offer_of(64), Reserve(margin_s=60.0)
    limits = PlanningConstraints(max_gpus_per_trial=8, max_cost_usd=1e3)
    profile = replace(PROFILE, trial_cv=trial_cv)
    job = plan_brackets(brackets, profile, offer, limits, objective="min_time", reserve=terms)
    assert len(job.lanes) > 1
    alone_usd = [
        terms.usd(offer, lane.planned.plan.stages, [stage.cost_usd for stage in lane.planned.prediction.stages])
        for lane in job.lanes
    ]
    assert job.reserve_usd == pytest.approx(sum(alone_usd))


def test_the_budget_is_the_job_s_and_not_each_lane_s() -> None:
    brackets, offer = hyperband(27, 3), offer_of(16)
    cheapest = plan_brackets(brackets, PROFILE, offer, PlanningConstraints(max_gpus_per_trial=8))
    limits = PlanningConstraints(max_gpus_per_trial=8, max_cost_usd=cheapest.prediction.cost_usd * 0.9)
    with pytest.raises(InfeasibleError, match="max_cost"):
        plan_brackets(brackets, PROFILE, offer, limits)
    limits = replace(limits, max_cost_usd=cheapest.prediction.cost_usd * 1.2)
    within = plan_brackets(brackets, PROFILE, offer, limits, objective="min_time")
    assert within.prediction.cost_usd <= cheapest.prediction.cost_usd * 1.2
    assert within.prediction.jct_s <= cheapest.prediction.jct_s


def test_one_bracket_is_planned_as_it_is_and_samples_of_lanes_are_those_of_their_plans() -> None:
    brackets, offer, limits = (
        hyperband(27, 3),
        offer_of(8),
        PlanningConstraints(deadline_s=8000.0, max_gpus_per_trial=8),
    )
    alone = plan_brackets(brackets[:1], PROFILE, offer, limits)
    assert alone.lanes[0].planned == plan(brackets[0], PROFILE, offer, limits)
    assert alone.prediction == predict(brackets[0], alone.plan, PROFILE, offer)
    job = plan_brackets(brackets, PROFILE, offer, limits)
    samples = sample_lanes(job.lanes, PROFILE, offer)
    assert samples.jct_s.max() == pytest.approx(job.prediction.jct_s)
    assert samples.cost_usd.min() == pytest.approx(job.prediction.cost_usd)


def test_lanes_share_the_error_of_the_profile_s_mean() -> None:
    """All lanes are slow together, so that the job costs twice what one costs, deviation included."""
    stages, offer = (Stage(trials=2, iterations=5),), offer_of(2)
    choice = StagePlan(instances=1, gpus_per_trial=2)
    planned = Planned(plan=Plan(stages=(choice,)), prediction=predict(stages, Plan(stages=(choice,)), PROFILE, offer))
    lanes = [Lane(brackets=(at,), stages=stages, max_instances=1, planned=planned) for at in range(2)]
    for noise, share in (({"mean_cv": 0.2}, 2.0), ({"trial_cv": 0.2}, 2.0**0.5)):
        profile = replace(PROFILE, **noise)  # type: ignore[arg-type]
        spread = [float(sample_lanes(some, profile, offer).cost_usd.std()) for some in (lanes[:1], lanes)]
        assert spread[1] == pytest.approx(share * spread[0], rel=0.05)


def test_a_lane_too_narrow_for_one_trial_is_no_error() -> None:
    """Three instances and two brackets: a lane of its own for each would leave one with a single instance."""
    offer = replace(offer_of(3), gpus=1)
    limits = PlanningConstraints(min_gpus_per_trial=2, max_gpus_per_trial=2)
    brackets = [(Stage(trials=2, iterations=1),), (Stage(trials=1, iterations=2),)]
    job = plan_brackets(brackets, PROFILE, offer, limits)
    assert {choice.gpus_per_trial for choice in job.plan.stages} == {2}
    assert len(job.lanes) == 1
