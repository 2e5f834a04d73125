"""Plans where times vary, against the enumeration of every plan with the same samples."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rubberband.errors import InfeasibleError
from rubberband.planner.exact.solver import Box
from rubberband.planner.noise.sampling import Draws
from rubberband.values.offer import Offer, Spot, slots
from rubberband.values.plan import Cohort, Plan, PlanningConstraints, Stage, StagePlan, gang_sizes
from rubberband.values.profile import Profile, Spread
from tests.builders.budget import examples
from tests.builders.plans import plan, sample

MOST_PLANS = 1500
SPREADS = [Spread(), Spread(cv=0.5), Spread(samples=(0.5, 1.0, 1.5))]


@st.composite
def noisy_jobs(draw):
    """A job that varies, small enough to enumerate."""
    num_stages, gpus = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4]))
    table = {1: draw(st.floats(5.0, 60.0))}
    for count in (2, 4):
        table[count] = table[count // 2] * draw(st.sampled_from([0.5, 0.55, 0.7, 0.9]))
    profile = Profile(
        seconds_per_iteration=table,
        trial_startup_s=draw(st.sampled_from([0.0, 2.0])),
        trial_cv=draw(st.sampled_from([0.05, 0.1, 0.2, 0.4])),
        iteration_cv=draw(st.sampled_from([0.0, 0.1, 0.5])),
    )
    spot = Spot(price_usd_per_hour=1.2, interruptions_per_hour=draw(st.sampled_from([0.2, 2.0, 10.0])), restart_s=40.0)
    offer = Offer(
        instance_type="test",
        gpus=gpus,
        price_usd_per_hour=3.6,
        max_instances=draw(st.integers(1, {1: 6, 2: 5, 3: 3}[num_stages])),
        provision_delay_s=draw(st.sampled_from([0.0, 15.0, 60.0])),
        provision_spread=draw(st.sampled_from(SPREADS)),
        init_delay_s=draw(st.sampled_from([0.0, 15.0, 45.0])),
        init_spread=draw(st.sampled_from(SPREADS)),
        billing=draw(st.sampled_from(["per_instance", "per_instance", "per_function"])),
        minimum_billed_s=draw(st.sampled_from([0.0, 60.0, 300.0])),
        data_usd_per_instance=draw(st.sampled_from([0.0, 0.02])),
        head_price_usd_per_hour=draw(st.sampled_from([0.0, 0.5])),
        spot=draw(st.sampled_from([None, None, spot])),
    )
    trials = sorted((draw(st.integers(1, 14)) for _ in range(num_stages)), reverse=True)
    stages = [Stage(trials=count, iterations=draw(st.integers(1, 8))) for count in trials]
    most = max(size for size in gang_sizes(gpus, 1, 4) if size <= gpus * offer.max_instances)
    return (
        stages,
        profile,
        offer,
        PlanningConstraints(max_gpus_per_trial=draw(st.sampled_from([1, most])), confidence=0.9),
    )


def every_plan(stages, offer, constraints):
    """All plans there are."""
    gangs = gang_sizes(offer.gpus, 1, constraints.max_gpus_per_trial)
    markets = ["on_demand", "spot"] if offer.spot else ["on_demand"]
    choices = [
        StagePlan(instances=k, gpus_per_trial=g, market=market)
        for k, g, market in itertools.product(range(1, offer.max_instances + 1), gangs, markets)
        if slots(k, offer.gpus, g)
    ]
    assume(len(choices) ** len(stages) <= MOST_PLANS)
    return [Plan(stages=chosen) for chosen in itertools.product(choices, repeat=len(stages))]


def best_of_all(draws, looks, constraints):
    """The lowest mean cost of the plans that keep the constraints clearly enough, or None."""
    box = Box.of(constraints)
    for chosen, look in sorted(looks.items(), key=lambda pair: pair[1].cost_usd.mean()):
        if box.holds(look.jct_s, look.cost_usd).mean() < constraints.confidence - 0.03:
            continue
        all_of_it = draws.evaluate(chosen, draws.most_chunks)
        error = math.sqrt(constraints.confidence * (1 - constraints.confidence) / len(all_of_it.jct_s))
        if box.holds(all_of_it.jct_s, all_of_it.cost_usd).mean() >= constraints.confidence + 1.5 * error:
            return float(look.cost_usd.mean())
    return None


def check_against_all(job, where, budget):
    """`plan` keeps its word, and no other plan that does so is more than 2 % cheaper."""
    stages, profile, offer, constraints = job
    draws = Draws(stages, profile, offer, seed=0)
    looks = {chosen: draws.evaluate(chosen, 2) for chosen in every_plan(stages, offer, constraints)}
    late_s = sorted(float(np.quantile(look.jct_s, constraints.confidence)) for look in looks.values())
    dear_usd = sorted(float(np.quantile(look.cost_usd, constraints.confidence)) for look in looks.values())
    constraints = replace(
        constraints,
        deadline_s=late_s[int(where**2 * (len(late_s) - 1))] * 1.01,
        max_cost_usd=None if budget is None else dear_usd[int(budget * (len(dear_usd) - 1))] * 1.05,
    )
    best_usd = best_of_all(draws, looks, constraints)
    try:
        planned = plan(stages, profile, offer, constraints)
    except InfeasibleError:
        planned = None
    if planned is None:
        assert best_usd is None
        return
    fresh = sample(stages, planned.plan, profile, offer, seed=99)
    kept = Box.of(constraints).holds(fresh.jct_s, fresh.cost_usd).mean()
    assert kept >= constraints.confidence - 0.01
    if best_usd is not None:
        assert looks[planned.plan].cost_usd.mean() <= 1.02 * best_usd


@given(noisy_jobs(), st.floats(0.0, 1.0), st.none() | st.floats(0.1, 1.0))
@settings(max_examples=examples(125), deadline=None)
def test_a_plan_keeps_its_word_and_none_is_much_cheaper(job, where, budget) -> None:
    check_against_all(job, where, budget)


@pytest.mark.long
@given(noisy_jobs(), st.floats(0.0, 1.0), st.none() | st.floats(0.1, 1.0))
@settings(max_examples=examples(1500), deadline=None)
def test_many_plans_keep_their_word(job, where, budget) -> None:
    check_against_all(job, where, budget)


STAGES = [Stage(trials=16, iterations=4), Stage(trials=4, iterations=16)]
NOISY = Profile(seconds_per_iteration={1: 10.0, 2: 5.6, 4: 3.2}, trial_startup_s=2.0, trial_cv=0.3, iteration_cv=0.2)
OFFER = Offer(
    instance_type="test", gpus=4, price_usd_per_hour=3.6, max_instances=8, provision_delay_s=15.0, init_delay_s=15.0
)
LIMITS = PlanningConstraints(deadline_s=400.0, max_gpus_per_trial=4)


def test_the_same_seed_gives_the_same_plan_and_figures() -> None:
    assert plan(STAGES, NOISY, OFFER, LIMITS, seed=3) == plan(STAGES, NOISY, OFFER, LIMITS, seed=3)


def test_more_confidence_costs_more_and_noise_does_too() -> None:
    certain = replace(NOISY, trial_cv=0.0, iteration_cv=0.0)
    costs = [
        plan(STAGES, NOISY, OFFER, replace(LIMITS, confidence=confidence)).prediction.cost_usd
        for confidence in (0.5, 0.9, 0.99)
    ]
    assert plan(STAGES, certain, OFFER, LIMITS).prediction.cost_usd <= costs[0] <= costs[1] <= costs[2]


def test_stages_add_up_to_the_means() -> None:
    prediction = plan(STAGES, NOISY, OFFER, LIMITS).prediction
    assert prediction.jct is not None
    assert prediction.cost is not None
    assert sum(stage.cost_usd for stage in prediction.stages) == pytest.approx(prediction.cost.mean)
    assert sum(stage.provisioning_s + stage.duration_s for stage in prediction.stages) == pytest.approx(
        prediction.jct.mean
    )
    assert prediction.jct.p10 < prediction.jct.p50 < prediction.jct.p90 < prediction.jct.p95


def test_limits_that_cannot_be_kept_are_reported_with_a_remedy_that_works() -> None:
    with pytest.raises(InfeasibleError, match=r"with confidence 0\.95") as refused:
        plan(STAGES, NOISY, OFFER, replace(LIMITS, deadline_s=100.0))
    enough = replace(LIMITS, deadline_s=math.ceil(refused.value.shortest_jct_s) * 1.01)
    planned = plan(STAGES, NOISY, OFFER, enough)
    assert planned.odds is not None
    assert planned.odds.p_both >= 0.95


def test_a_tight_deadline_buys_the_reliable_market_where_spot_is_too_risky() -> None:
    spot = Spot(price_usd_per_hour=1.0, interruptions_per_hour=6.0, restart_s=120.0)
    offer = replace(OFFER, spot=spot)
    loose = plan(STAGES, NOISY, offer, replace(LIMITS, deadline_s=4000.0))
    tight = plan(STAGES, NOISY, offer, replace(LIMITS, deadline_s=260.0))
    assert {choice.market for choice in loose.plan.stages} == {"spot"}
    assert "on_demand" in {choice.market for choice in tight.plan.stages}


def test_instances_held_count_where_times_vary() -> None:
    held = [Cohort(instances=4, held_s=600.0)]
    with_held = plan(STAGES, NOISY, OFFER, LIMITS, held=held).prediction
    assert with_held.cost_usd <= plan(STAGES, NOISY, OFFER, LIMITS).prediction.cost_usd * 1.001
