"""The search with a spot market, and from instances that are held, against the enumeration of every plan."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rubberband.errors import InfeasibleError
from rubberband.planner.exact.model import predict
from rubberband.planner.exact.solver import Box, solve
from rubberband.planner.exact.table import build_table
from rubberband.values.offer import Offer, Spot, slots
from rubberband.values.plan import Cohort, Plan, PlanningConstraints, Stage, StagePlan, gang_sizes
from rubberband.values.profile import Profile
from tests.builders.budget import examples
from tests.builders.enumeration import jobs
from tests.builders.plans import plan


@st.composite
def held_jobs(draw):
    """A small job on an offer that may have a spot market, with instances held or none, and perhaps limits."""
    stages, profile, offer, constraints = draw(jobs(most_stages=3))
    offer = replace(offer, max_instances=min(offer.max_instances, {1: 5, 2: 4, 3: 2}[len(stages)]))
    room = offer.gpus * offer.max_instances
    constraints = replace(constraints, max_gpus_per_trial=min(constraints.max_gpus_per_trial, max(room, 1)))
    if constraints.min_gpus_per_trial > room:
        constraints = replace(constraints, min_gpus_per_trial=1)
    if draw(st.booleans()):
        price = offer.price_usd_per_hour * draw(st.sampled_from([0.3, 0.6, 1.0]))
        rate = draw(st.sampled_from([0.0, 1.0, 20.0]))
        offer = replace(offer, spot=Spot(price_usd_per_hour=price, interruptions_per_hour=rate, restart_s=30.0))
    market = draw(st.sampled_from(["on_demand", "spot"])) if offer.spot else "on_demand"
    held, left = [], offer.max_instances
    for count in draw(st.lists(st.integers(1, 2), max_size=2)):
        if count <= left:
            age_s = draw(st.sampled_from([0.0, 20.0, 50.0, 90.0, 400.0]))
            held.append(Cohort(instances=count, held_s=age_s, market=market))
            left -= count
    return stages, profile, offer, constraints, held


def every(stages, profile, offer, constraints, held):
    """(jct_s, cost_usd) of every plan, as the model predicts it."""
    gangs = gang_sizes(offer.gpus, constraints.min_gpus_per_trial, constraints.max_gpus_per_trial)
    markets = ["on_demand", "spot"] if offer.spot else ["on_demand"]
    choices = [
        StagePlan(instances=k, gpus_per_trial=g, market=market)
        for k in range(1, offer.max_instances + 1)
        for g in gangs
        for market in markets
        if slots(k, offer.gpus, g)
    ]
    for chosen in itertools.product(choices, repeat=len(stages)):
        prediction = predict(stages, Plan(stages=chosen), profile, offer, held)
        yield prediction.jct_s, prediction.cost_usd


@given(held_jobs(), st.floats(0.0, 1.0), st.sampled_from(["deadline", "max_cost", "neither"]))
@settings(max_examples=examples(750), deadline=None)
def test_no_plan_is_cheaper_or_faster(job, share, limit) -> None:
    stages, profile, offer, constraints, held = job
    plans = list(every(*job))
    near_s, near_usd = plans[int(share * (len(plans) - 1))]
    if limit == "deadline":
        constraints = replace(constraints, deadline_s=near_s)
    elif limit == "max_cost":
        constraints = replace(constraints, max_cost_usd=near_usd)
    table = build_table(stages, profile, offer, constraints, held)
    box = Box.of(constraints)
    inside = [(time_s, usd) for time_s, usd in plans if time_s <= box.time_s + 1e-6 and usd <= box.cost_usd + 1e-9]
    for objective, value in (("min_cost", min(usd for _, usd in inside)), ("min_time", min(t for t, _ in inside))):
        found = solve(table, box, objective)
        assert found is not None
        predicted = predict(stages, table.plan(found.path), profile, offer, held)
        assert (predicted.jct_s, predicted.cost_usd) == pytest.approx((found.time_s, found.cost_usd), abs=1e-6)
        reached = found.cost_usd if objective == "min_cost" else found.time_s
        assert math.isclose(reached, value, rel_tol=1e-9, abs_tol=1e-6)


@given(held_jobs())
@settings(max_examples=examples(300), deadline=None)
def test_held_instances_never_make_the_rest_dearer_or_later(job) -> None:
    stages, profile, offer, constraints, held = job
    if offer.spot is not None:
        return
    for objective in ("min_cost", "min_time"):
        with_held = plan(stages, profile, offer, constraints, "optimal", objective, held=held).prediction
        anew = plan(stages, profile, offer, constraints, "optimal", objective).prediction
        if objective == "min_cost":
            assert with_held.cost_usd <= anew.cost_usd + 1e-9
        else:
            assert with_held.jct_s <= anew.jct_s + 1e-6


def test_a_deadline_that_only_the_held_instances_can_meet() -> None:
    stages = [Stage(trials=4, iterations=2), Stage(trials=2, iterations=4)]
    profile = Profile(seconds_per_iteration={1: 10.0, 2: 6.0})
    offer = Offer(
        instance_type="test", gpus=2, price_usd_per_hour=3.6, max_instances=2, provision_delay_s=90.0, init_delay_s=10.0
    )
    limits = PlanningConstraints(deadline_s=44.0, max_gpus_per_trial=2)
    held = [Cohort(instances=2, held_s=500.0)]
    assert plan(stages, profile, offer, limits, held=held).prediction.jct_s == pytest.approx(44.0)
    with pytest.raises(InfeasibleError):
        plan(stages, profile, offer, limits)
