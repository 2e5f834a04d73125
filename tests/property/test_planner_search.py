"""The search against the enumeration of every plan there is, on small jobs of all kinds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rubberband.errors import InfeasibleError
from rubberband.planner import search
from rubberband.planner.exact import solver
from rubberband.planner.exact.model import predict
from rubberband.spec.schedulers import asha, sha
from rubberband.values.offer import Offer
from rubberband.values.plan import PlanningConstraints, Stage
from rubberband.values.profile import Profile
from tests.builders.budget import examples
from tests.builders.enumeration import best, every_plan, jobs, limited_jobs
from tests.builders.plans import frontier, plan


def check(case, objective="min_cost", policy="optimal"):
    stages, profile, offer, constraints, plans = case
    if policy == "static":
        plans = [candidate for candidate in plans if len(set(candidate[2])) == 1]
    expected = best(plans, constraints, objective)
    if expected is None:
        with pytest.raises(InfeasibleError) as caught:
            plan(stages, profile, offer, constraints, policy, objective)
        assert caught.value.shortest_jct_s == pytest.approx(min(time_s for time_s, _, _ in plans))
        assert caught.value.cheapest_usd == pytest.approx(min(usd for _, usd, _ in plans), abs=1e-8)
        return
    planned = plan(stages, profile, offer, constraints, policy, objective)
    assert planned.prediction.cost_usd == pytest.approx(expected[1], rel=1e-9, abs=1e-8)
    assert planned.prediction.jct_s == pytest.approx(expected[0], rel=1e-9, abs=1e-5)
    assert planned.prediction == predict(stages, planned.plan, profile, offer)


@settings(max_examples=examples(100), deadline=None)
@given(limited_jobs(), st.sampled_from(["optimal", "greedy", "static", "naive_elastic"]))
def test_no_plan_has_a_size_that_is_not_listed(case, policy):
    stages, profile, offer, constraints, _ = case
    try:
        planned = plan(stages, profile, offer, constraints, policy)
    except InfeasibleError:
        return
    assert {choice.gpus_per_trial for choice in planned.plan.stages} <= set(constraints.gang_sizes(offer.gpus))


@settings(max_examples=examples(1500), deadline=None)
@given(
    limited_jobs(), st.sampled_from(["min_cost", "min_cost", "min_time"]), st.sampled_from(["optimal"] * 3 + ["static"])
)
def test_no_plan_is_better(case, objective, policy):
    check(case, objective, policy)


@settings(max_examples=examples(200), deadline=None)
@given(limited_jobs(most_stages=3), st.sampled_from(["min_cost", "min_time"]))
def test_naive_elastic_has_the_best_plan_of_one_size_of_gangs(case, objective):
    stages, profile, offer, limits, _ = case
    points = []
    for gpus in limits.gang_sizes(offer.slots):
        try:
            one_size = replace(limits, min_gpus_per_trial=gpus, max_gpus_per_trial=gpus)
            found = plan(stages, profile, offer, one_size, "optimal", objective).prediction
        except InfeasibleError:
            continue
        points.append((found.cost_usd, found.jct_s) if objective == "min_cost" else (found.jct_s, found.cost_usd))
    if not points:
        with pytest.raises(InfeasibleError):
            plan(stages, profile, offer, limits, "naive_elastic", objective)
        return
    found = plan(stages, profile, offer, limits, "naive_elastic", objective).prediction
    value = found.cost_usd if objective == "min_cost" else found.jct_s
    assert value == pytest.approx(min(points)[0], rel=1e-9, abs=1e-5)


@settings(max_examples=examples(1000), deadline=None)
@given(
    st.lists(st.builds(Stage, trials=st.integers(1, 4), iterations=st.integers(1, 8)), min_size=1, max_size=3),
    st.sampled_from([0.5, 0.55, 0.8, 1.1]),
    st.sampled_from([0.0, 15.0]),
    st.sampled_from([0.0, 0.5, 12.0]),
    st.sampled_from([1, 2, 4]),
)
def test_greedy_leaves_out_no_cluster_that_it_would_start_from(stages, scaling, init_s, head_usd, gpus):
    profile = Profile(seconds_per_iteration={2**power: 60.0 * scaling**power for power in range(4)})
    offer = Offer(
        instance_type="test",
        gpus=gpus,
        price_usd_per_hour=3.6,
        max_instances=16,
        init_delay_s=init_s,
        head_price_usd_per_hour=head_usd,
    )
    job = stages, profile, offer, PlanningConstraints(max_gpus_per_trial=8), "greedy"
    found = plan(*job)
    with mock.patch.object(search, "_least_usd_throughout", return_value=0.0):
        assert found == plan(*job)


@st.composite
def prepaid_jobs(draw):
    """A job whose instances are still paid for when a stage is done: what is left of that decides what is next."""
    num_stages = draw(st.integers(2, 3))
    stages = [Stage(trials=draw(st.integers(1, 9)), iterations=draw(st.integers(1, 4))) for _ in range(num_stages)]
    offer = Offer(
        instance_type="test",
        gpus=1,
        price_usd_per_hour=3.6,
        max_instances=draw(st.integers(2, {2: 5, 3: 4}[num_stages])),
        init_delay_s=draw(st.sampled_from([0.0, 10.0])),
        minimum_billed_s=draw(st.sampled_from([60.0, 120.0, 300.0])),
    )
    profile = Profile(seconds_per_iteration={1: draw(st.sampled_from([10.0, 15.0, 20.0, 30.0]))})
    plans = every_plan(stages, profile, offer, PlanningConstraints())
    deadline_s = plans[draw(st.integers(0, len(plans) - 1))][0]
    return stages, profile, offer, PlanningConstraints(deadline_s=deadline_s), plans


@settings(max_examples=examples(100), deadline=None)
@given(prepaid_jobs())
def test_prepaid_time_is_worth_its_later_use(case):
    check(case)


PREPAID = [
    ([(6, 1), (5, 3), (5, 2)], 20.0, 2, 0.0, 300.0, 500.0, 0.68),
    ([(9, 2), (6, 4), (7, 4)], 10.0, 3, 10.0, 300.0, 630.0, 0.73),
    ([(1, 1), (2, 3), (3, 3)], 10.0, 4, 10.0, 60.0, 150.0, 0.19),
]


@pytest.mark.parametrize(("written", "iteration_s", "most", "init_s", "minimum_s", "deadline_s", "cost_usd"), PREPAID)
def test_a_plan_with_less_prepaid_is_not_taken_for_a_cheaper_one(
    written, iteration_s, most, init_s, minimum_s, deadline_s, cost_usd
):
    """Two plans of the first stages that are as late: the dearer one goes on for less, on what it has paid for."""
    stages = [Stage(trials=trials, iterations=iterations) for trials, iterations in written]
    profile = Profile(seconds_per_iteration={1: iteration_s})
    offer = Offer(
        instance_type="test",
        gpus=1,
        price_usd_per_hour=3.6,
        max_instances=most,
        init_delay_s=init_s,
        minimum_billed_s=minimum_s,
    )
    limits = PlanningConstraints(deadline_s=deadline_s)
    assert best(every_plan(stages, profile, offer, limits), limits)[1] == pytest.approx(cost_usd)
    assert plan(stages, profile, offer, limits).prediction.cost_usd == pytest.approx(cost_usd)


@settings(max_examples=examples(300), deadline=None)
@given(limited_jobs(most_stages=3), st.sampled_from(["min_cost", "min_time"]))
def test_a_search_that_widens_step_by_step_finds_the_same(case, objective):
    """Only jobs far too large to enumerate are searched so; here every one is."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(solver, "_FEW_STATES", 0)
        check(case, objective)


def test_a_wide_job_whose_best_plan_is_far_from_its_bound_is_feasible():
    """No plan of the relaxations is near it: only the last step of the widening search reaches it."""
    stages = [Stage(trials=trials, iterations=iterations) for trials, iterations in WIDE]
    profile = Profile(seconds_per_iteration={1: 20.0, 2: 16.0, 4: 8.0}, trial_startup_s=2.0)
    offer = Offer(
        instance_type="test",
        gpus=4,
        price_usd_per_hour=3.6,
        max_instances=200,
        provision_delay_s=15.0,
        init_delay_s=15.0,
    )
    limits = PlanningConstraints(deadline_s=198.0, max_gpus_per_trial=4)
    planned = plan(stages, profile, offer, limits)
    assert planned.prediction.jct_s <= 198.0
    assert planned.prediction.cost_usd == pytest.approx(13.172)


WIDE = ((200, 2), (64, 4), (128, 3), (100, 3))


@settings(max_examples=examples(500), deadline=None)
@given(jobs(most_stages=3))
def test_the_frontier_is_every_plan_that_no_other_beats(job):
    points = frontier(*job)
    cheapest_usd, expected = math.inf, []
    for time_s, usd, _ in sorted(every_plan(*job), key=lambda point: (round(point[0], 6), point[1])):
        if usd < cheapest_usd - 1e-8:
            cheapest_usd = usd
            expected.append((time_s, usd))
    assert len(points) == len(expected)
    for point, wanted in zip(points, expected, strict=True):
        assert point == (pytest.approx(wanted[0], abs=1e-5), pytest.approx(wanted[1], abs=1e-7))


CHAIN = sha(27, 1, 40, 3)
NOISY = Profile(seconds_per_iteration={1: 40.0, 2: 22.0, 4: 13.0}, trial_startup_s=5.0, trial_cv=0.3, iteration_cv=0.1)


@pytest.mark.parametrize("stages", [CHAIN, (asha(CHAIN, 3),)], ids=["sha", "asha"])
@pytest.mark.parametrize("profile", [NOISY, replace(NOISY, trial_cv=0.0, iteration_cv=0.0)], ids=["noisy", "certain"])
def test_each_deadline_on_the_frontier_is_kept_for_about_its_cost(stages: Sequence[Stage], profile: Profile) -> None:
    rented = Offer(instance_type="test", gpus=4, price_usd_per_hour=12.24, max_instances=8, provision_delay_s=30.0)
    limits = PlanningConstraints(max_gpus_per_trial=4)
    points = frontier(stages, profile, rented, limits)
    for jct_s, cost_usd in {points[0], points[len(points) // 2], points[-1]}:
        found = plan(stages, profile, rented, replace(limits, deadline_s=1.02 * jct_s))
        assert found.odds is None or found.odds.p_both >= limits.confidence
        assert found.prediction.cost_usd <= 1.05 * cost_usd
