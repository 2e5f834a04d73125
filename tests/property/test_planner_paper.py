"""The paper's algorithms against ours: Algorithm 1 is the oracle of the model, Algorithm 2 never beats the search."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from rubberband.errors import InfeasibleError
from rubberband.planner.dag import simulate, simulate_job
from rubberband.planner.exact.model import predict
from rubberband.planner.search import greedy
from rubberband.spec.schedulers import hyperband, sha
from rubberband.values.offer import Offer
from rubberband.values.plan import PlanningConstraints
from rubberband.values.profile import Profile
from tests.builders import strategies
from tests.builders.budget import examples
from tests.builders.enumeration import limited_jobs
from tests.builders.plans import plan, plan_brackets
from tests.builders.strategies import carried_out


def check_against_algorithm_1(stages, chosen, profile, offer):
    sampled = simulate(stages, chosen, profile, offer, num_samples=2)
    predicted = predict(stages, chosen, profile, offer)
    assert sampled.jct_s.tolist() == pytest.approx([predicted.jct_s] * 2, rel=1e-9, abs=1e-9)
    assert sampled.cost_usd.tolist() == pytest.approx([predicted.cost_usd] * 2, rel=1e-9, abs=1e-9)


@settings(max_examples=examples(100), deadline=None)
@given(carried_out())
def test_the_model_is_algorithm_1_where_nothing_varies(case):
    check_against_algorithm_1(*case)


@st.composite
def halving_jobs(draw):
    """Successive halving with a deadline between the shortest time and three times that: where elasticity pays."""
    gpus = draw(st.sampled_from([1, 2, 4]))
    single_s, efficiency = draw(st.floats(5.0, 100.0)), draw(st.floats(0.4, 1.0))
    profile = Profile(
        seconds_per_iteration={count: single_s / count**efficiency for count in (1, 2, 4, 8)},
        trial_startup_s=draw(st.sampled_from([0.0, 2.0])),
    )
    offer = Offer(
        instance_type="test",
        gpus=gpus,
        price_usd_per_hour=3.6,
        max_instances=draw(st.integers(4, 24)),
        provision_delay_s=draw(st.sampled_from([0.0, 15.0])),
        init_delay_s=draw(st.sampled_from([0.0, 15.0])),
        billing=draw(st.sampled_from(["per_instance", "per_instance", "per_function"])),
        minimum_billed_s=draw(st.sampled_from([0.0, 60.0])),
        data_usd_per_instance=draw(st.sampled_from([0.0, 0.05])),
    )
    stages = sha(draw(st.integers(4, 32)), draw(st.integers(1, 4)), draw(st.sampled_from([16, 50])), 2)
    limits = PlanningConstraints(
        min_gpus_per_trial=draw(st.sampled_from([1, 1, 2])), max_gpus_per_trial=draw(st.sampled_from([4, 8]))
    )
    shortest_s = plan(stages, profile, offer, limits, objective="min_time").prediction.jct_s
    return stages, profile, offer, replace(limits, deadline_s=draw(st.floats(1.0, 3.0)) * shortest_s)


def deterministic(stages, profile, offer):
    def evaluate(candidate):
        predicted = predict(stages, candidate, profile, offer)
        return predicted.jct_s, predicted.cost_usd

    return evaluate


def found_by_greedy(case, warm_starts):
    stages, profile, offer, constraints, *_ = case
    evaluate = deterministic(stages, profile, offer)
    return greedy(stages, profile, offer, constraints, evaluate=evaluate, warm_starts=warm_starts)


@settings(max_examples=examples(100), deadline=None)
@given(limited_jobs() | halving_jobs())
def test_greedy_keeps_the_limits_and_is_never_cheaper_than_the_search(case):
    stages, profile, offer, constraints, *_ = case
    found = found_by_greedy(case, (1, 2, 3))
    if found is None:
        return
    predicted = predict(stages, found, profile, offer)
    assert predicted.jct_s <= (math.inf if constraints.deadline_s is None else constraints.deadline_s) + 1e-6
    assert predicted.cost_usd <= (math.inf if constraints.max_cost_usd is None else constraints.max_cost_usd) + 1e-9
    assert predicted.cost_usd >= plan(stages, profile, offer, constraints).prediction.cost_usd - 1e-8


@settings(max_examples=examples(40), deadline=None)
@given(strategies.offers(), strategies.profiles(), st.sampled_from([3, 4, 9]), st.integers(2, 8))
def test_a_job_of_several_brackets_is_a_dag_for_each_lane(offer, profile, max_t, instances):
    """Lanes run side by side: the longest is the time, and the head node is paid once."""
    offer = replace(offer, max_instances=instances)
    limits = PlanningConstraints(min_gpus_per_trial=profile.smallest_gpus, max_gpus_per_trial=8)
    try:
        found = plan_brackets(hyperband(max_t, 3), profile, offer, limits)
    except InfeasibleError:
        reject()
    seen, predicted = simulate_job(found, profile, offer, num_samples=2), found.prediction
    assert seen.sampled.jct_s.tolist() == pytest.approx([predicted.jct_s] * 2, rel=1e-9, abs=1e-9)
    assert seen.sampled.cost_usd.tolist() == pytest.approx([predicted.cost_usd] * 2, rel=1e-9, abs=1e-9)
    assert sum(task.share for task in seen.critical) == pytest.approx(1.0)
    lane = found.lanes[seen.critical[0].lane]
    assert lane.planned.prediction.jct_s == pytest.approx(predicted.jct_s)
