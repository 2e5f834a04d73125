"""Random jobs that change between markets: what is predicted is what they take and cost, and caps hold."""

from __future__ import annotations

import dataclasses
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from rubberband.executor import Controller, Event, Job, bill_usd
from rubberband.planner.exact.model import predict
from rubberband.values.offer import Spot
from rubberband.values.plan import Plan
from tests.builders.budget import examples
from tests.builders.strategies import jobs
from tests.builders.virtual_runs import run_virtual

CENT, MILLISECOND = 0.005, 0.0005


@st.composite
def jobs_on_markets(draw: st.DrawFn) -> Job:
    job = draw(jobs())
    share = draw(st.sampled_from([0.2, 0.5, 1.0]))
    spot = Spot(price_usd_per_hour=share * job.offer.price_usd_per_hour, interruptions_per_hour=0.0)
    offer = dataclasses.replace(job.offer, spot=spot)
    plan = Plan(
        stages=tuple(
            dataclasses.replace(choice, market=draw(st.sampled_from(["spot", "on_demand"])))
            for choice in job.plan.stages
        )
    )
    return dataclasses.replace(
        job,
        offer=offer,
        plan=plan,
        prediction=predict(job.stages, plan, job.profile, offer),
        replan=draw(st.booleans()),
    )


@given(jobs_on_markets())
@settings(deadline=None, max_examples=examples(50))
def test_a_run_over_markets_takes_and_costs_what_was_predicted(job: Job) -> None:
    job = dataclasses.replace(job, replan=False)
    controller, _, finish = run_virtual(job)
    state = controller.state
    assert finish.outcome == "done"
    assert abs(state.now - state.started_at - job.prediction.jct_s) < MILLISECOND
    assert abs(bill_usd(state, state.now) - job.prediction.cost_usd) < CENT
    bought = {record.market for record in state.instances.values()}
    assert bought == {choice.market for choice in job.plan.stages}


@given(
    jobs_on_markets(),
    st.floats(0.05, 1.5),
    st.sampled_from([0.0, 3.0, 30.0]),
    st.one_of(st.none(), st.sampled_from([60.0, 600.0])),
)
@settings(deadline=None, max_examples=examples(100))
def test_at_every_moment_the_bill_stays_within_the_cap_even_if_the_driver_dies_there(
    job: Job, share: float, margin_s: float, lease_s: float | None
) -> None:
    cap_usd = share * job.prediction.cost_usd
    job = dataclasses.replace(job, max_cost_usd=cap_usd, release_margin_s=margin_s, lease_s=lease_s)

    def held_to_the_last(_event: Event, controller: Controller) -> None:
        """All that runs is held as long as its lease may be; what is billed already only grows by that."""
        state, until = controller.state, controller.hold_until()
        if state.fleet.live() and until < math.inf:
            assert bill_usd(state, until) <= cap_usd + 1e-6

    controller, backend, finish = run_virtual(job, observers=[held_to_the_last])
    assert finish.outcome in ("done", "budget") or "lease expired" in finish.reason
    assert bill_usd(controller.state, controller.state.now) <= cap_usd + 1e-6
    assert all(status.state == "terminated" for status in backend.provider.describe())
