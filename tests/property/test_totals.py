"""What a plan takes and costs in all, sample by sample, against the walk through its stages."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rubberband.planner.noise.sampling import Draws
from rubberband.values.offer import Offer, Spot
from rubberband.values.plan import Cohort, Plan, Stage, StagePlan
from rubberband.values.profile import Profile, Spread
from tests.builders.budget import examples

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
