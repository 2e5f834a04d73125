"""What the search says of a partial plan is what the model says of it, however instances come and go."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubberband.planner.exact.labels import extend, start
from rubberband.planner.exact.model import predict
from rubberband.planner.exact.table import build_table
from rubberband.values.offer import Offer
from rubberband.values.plan import Cohort, Plan, PlanningConstraints, Stage, StagePlan
from rubberband.values.profile import Profile

MOST = 6
counts = st.lists(st.integers(1, MOST), min_size=1, max_size=5)
held = st.lists(st.tuples(st.integers(1, 3), st.sampled_from([0.0, 30.0, 90.0, 400.0])), max_size=2)


@given(counts, held, st.sampled_from([0.0, 60.0, 300.0, 1000.0]), st.sampled_from([1.0, 20.0, 70.0]))
def test_a_plan_costs_the_models_price_in_any_order_of_releases(
    path: list[int], ages: list[tuple[int, float]], minimum_s: float, iteration_s: float
) -> None:
    offer = Offer(
        instance_type="test",
        gpus=1,
        price_usd_per_hour=3600.0,
        max_instances=MOST,
        provision_delay_s=7.0,
        init_delay_s=11.0,
        minimum_billed_s=minimum_s,
        data_usd_per_instance=0.5,
        head_price_usd_per_hour=36.0,
    )
    stages = [Stage(trials=MOST, iterations=1 + index % 2) for index in range(len(path))]
    profile = Profile(seconds_per_iteration={1: iteration_s}, trial_startup_s=1.0)
    cohorts = [Cohort(instances=count, held_s=age_s, market="on_demand") for count, age_s in ages]
    table = build_table(stages, profile, offer, PlanningConstraints(max_gpus_per_trial=1), cohorts)
    chosen = [np.flatnonzero(table.instances == count) for count in path]
    if not all(map(len, chosen)):
        return  # a count that no cheapest plan has
    labels, first = start(table), np.array([0])
    for stage, at in enumerate(chosen):
        labels = extend(table, stage, labels, first, at[:1], first)
    plan = Plan(stages=tuple(StagePlan(instances=count, gpus_per_trial=1) for count in path))
    expected = predict(stages, plan, profile, offer, cohorts)
    assert labels.time_s[0] == pytest.approx(expected.jct_s)
    assert labels.cost_usd[0] == pytest.approx(expected.cost_usd)
