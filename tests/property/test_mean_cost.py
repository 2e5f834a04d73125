"""The cost of many plans against the model that predicts one: equal to the last bit, whatever was asked before."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rubberband.errors import InputError
from rubberband.executor.core.state import Job
from rubberband.planner.exact.model import MeanCost, predict
from rubberband.values.offer import Spot
from rubberband.values.plan import Plan
from tests.builders.strategies import jobs


@given(jobs(), st.data())
@settings(max_examples=150, deadline=None)
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


@given(jobs())
@settings(max_examples=20, deadline=None)
def test_a_plan_that_does_not_fit_is_refused_as_by_the_model(job: Job) -> None:
    cost = MeanCost(job.stages, job.profile, job.offer)
    first = job.plan.stages[0]
    for plan in (
        Plan(stages=(*job.plan.stages, first)),
        Plan(stages=(replace(first, instances=job.offer.max_instances + 1), *job.plan.stages[1:])),
    ):
        with pytest.raises(InputError) as of_model:
            predict(job.stages, plan, job.profile, job.offer)
        with pytest.raises(InputError) as of_cost:
            cost(plan)
        assert str(of_cost.value) == str(of_model.value)
