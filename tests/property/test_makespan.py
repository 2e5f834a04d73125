"""When the last of many trials ends, taken many trials at a time, against list scheduling one by one."""

from __future__ import annotations

import heapq
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rubberband.executor import Job
from rubberband.planner.exact.model import MeanCost, predict
from rubberband.planner.noise.makespan import makespan
from rubberband.planner.noise.sampling import Draws
from rubberband.values.offer import Offer, Spot
from rubberband.values.plan import Cohort, Plan, Stage, StagePlan
from rubberband.values.profile import Profile, Spread
from tests.builders.budget import examples
from tests.builders.strategies import jobs

ROWS = 24


def scheduled(trials_s, num_slots):
    """One trial after another, each row by itself."""
    latest = []
    for row in trials_s.T.astype(float).tolist():
        free_s = row[:num_slots]
        heapq.heapify(free_s)
        for trial_s in row[num_slots:]:
            heapq.heapreplace(free_s, free_s[0] + trial_s)
        latest.append(max(free_s))
    return np.array(latest)


def trials_of(seed, num_trials, cv, startup_s=0.0):
    """Of a mean of 10 seconds."""
    variance = np.log1p(cv * cv)
    normals = np.random.default_rng(seed).standard_normal((num_trials, ROWS))
    return (startup_s + 10.0 * np.exp(np.sqrt(variance) * normals - variance / 2.0)).astype(np.float32)


@given(st.integers(0, 10**6), st.integers(1, 160), st.integers(1, 31), st.floats(0.0, 2.0), st.sampled_from([0.0, 5.0]))
@settings(max_examples=examples(750), deadline=None)
def test_few_trials_are_scheduled_exactly(seed, num_trials, num_slots, cv, startup_s) -> None:
    trials_s = trials_of(seed, num_trials, cv, startup_s)
    assert makespan(trials_s, num_slots) == pytest.approx(scheduled(trials_s, num_slots), rel=2e-5)


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0]), min_size=1, max_size=60), st.integers(1, 60))
@settings(max_examples=examples(750), deadline=None)
def test_trials_that_end_at_once_are_too(times_s, num_slots) -> None:
    trials_s = np.array(times_s, np.float32)[:, None]
    assert makespan(trials_s, num_slots) == pytest.approx(scheduled(trials_s, num_slots))


@given(st.integers(0, 10**6), st.integers(600, 3000), st.integers(1, 1200), st.floats(0.0, 0.5))
@settings(max_examples=examples(200), deadline=None)
def test_many_trials_are_scheduled_nearly(seed, num_trials, num_slots, cv) -> None:
    """Within 0.2 % on average, and each row within a part of one trial."""
    trials_s = trials_of(seed, num_trials, cv)
    expected, found = scheduled(trials_s, num_slots), makespan(trials_s, num_slots)
    assert found.mean() == pytest.approx(expected.mean(), rel=0.002)
    assert np.abs(found - expected).max() <= 0.5 * trials_s.max()


@given(st.integers(0, 10**6), st.integers(600, 3000), st.integers(1, 600), st.floats(0.5, 1.5))
@settings(max_examples=examples(100), deadline=None)
def test_trials_that_vary_very_much_are_not_taken_to_be_faster(seed, num_trials, num_slots, cv) -> None:
    trials_s = trials_of(seed, num_trials, cv)
    expected, found = scheduled(trials_s, num_slots), makespan(trials_s, num_slots)
    assert 0.995 * expected.mean() <= found.mean() <= 1.03 * expected.mean()


@given(jobs(), st.data())
@settings(max_examples=examples(750), deadline=None)
def test_plans_cost_what_the_model_predicts(job: Job, data: st.DataObject) -> None:
    spot = Spot(price_usd_per_hour=0.3, interruptions_per_hour=0.05, checkpoint_iterations=2, restart_s=30.0)
    offer = replace(job.offer, spot=spot)
    cost = MeanCost(job.stages, job.profile, offer)
    stages = list(job.plan.stages)
    for _ in range(3):
        at = data.draw(st.integers(0, len(stages) - 1))
        stages[at] = replace(
            stages[at],
            instances=data.draw(st.integers(stages[at].instances, offer.max_instances)),
            market=data.draw(st.sampled_from(["on_demand", "spot"])),
        )
        plan = Plan(stages=tuple(stages))
        predicted = predict(job.stages, plan, job.profile, offer)
        assert cost(plan) == (predicted.jct_s, predicted.cost_usd)


markets = st.sampled_from(["on_demand", "on_demand", "spot"])
spreads = st.sampled_from([Spread(), Spread(cv=0.3), Spread(samples=(0.5, 1.0, 1.5))])


@st.composite
def asked(draw):
    """A job, a plan of it and what is held before."""
    trials = sorted(draw(st.lists(st.integers(1, 14), min_size=1, max_size=4)), reverse=True)
    offer = Offer(
        instance_type="test",
        gpus=draw(st.sampled_from([1, 2, 4])),
        price_usd_per_hour=3.6,
        max_instances=6,
        provision_delay_s=draw(st.sampled_from([0.0, 15.0])),
        provision_spread=draw(spreads),
        init_delay_s=draw(st.sampled_from([0.0, 15.0])),
        init_spread=draw(spreads),
        billing=draw(st.sampled_from(["per_instance", "per_instance", "per_function"])),
        minimum_billed_s=draw(st.sampled_from([0.0, 60.0, 300.0])),
        data_usd_per_instance=draw(st.sampled_from([0.0, 0.02])),
        head_price_usd_per_hour=draw(st.sampled_from([0.0, 0.5])),
        spot=Spot(price_usd_per_hour=1.2, interruptions_per_hour=draw(st.sampled_from([0.0, 2.0])), restart_s=40.0),
    )
    profile = Profile(
        seconds_per_iteration={1: draw(st.floats(0.5, 60.0))},
        trial_startup_s=2.0,
        trial_cv=draw(st.sampled_from([0.0, 0.2])),
        iteration_cv=draw(st.sampled_from([0.0, 0.2])),
        startup_cv=draw(st.sampled_from([0.0, 0.3])),
    )
    choices = st.builds(StagePlan, instances=st.integers(1, 6), gpus_per_trial=st.just(1), market=markets)
    plan = Plan(stages=tuple(draw(choices) for _ in trials))
    market = draw(markets)
    ages = draw(st.lists(st.sampled_from([0.0, 10.0, 100.0, 400.0]), max_size=2))
    held = [Cohort(instances=draw(st.integers(1, 4)), held_s=held_s, market=market) for held_s in ages]
    stages = [Stage(trials=count, iterations=draw(st.integers(1, 4))) for count in trials]
    return stages, profile, offer, plan, held


@given(asked())
@settings(max_examples=examples(80), deadline=None)
def test_they_are_the_sums_of_the_stages(job) -> None:
    stages, profile, offer, plan, held = job
    draws = Draws(stages, profile, offer, seed=1)
    walked = draws.evaluate(plan, 1, held)
    jct_s, cost_usd = draws.totals(plan, range(1), held)
    assert jct_s == pytest.approx(walked.jct_s)
    assert cost_usd == pytest.approx(walked.cost_usd, abs=1e-9)


@given(asked())
@settings(max_examples=examples(80))
def test_mean_times_bound_the_mean_cost_from_below(job) -> None:
    stages, profile, offer, plan, held = job
    draws = Draws(stages, profile, offer, seed=1)
    jct_s, cost_usd = draws.totals(plan, range(1), held)
    mean_s, least_usd = draws.least(plan, held)
    assert mean_s == pytest.approx(jct_s.mean())
    assert least_usd <= cost_usd.mean() + 1e-9
