"""Replanning at SYNC: never without a reason, always in time where that is possible, and reproducible."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rubberband.executor import (
    Controller,
    Event,
    Faults,
    Job,
    Phase,
    State,
    VirtualBackend,
    bill_usd,
    forecast,
    limits,
    remaining,
)
from rubberband.executor import held_instances as held
from rubberband.planner.exact.model import predict
from rubberband.planner.planning import plan
from rubberband.planner.problem import JobPlan, Problem
from rubberband.values.offer import slots
from rubberband.values.plan import Plan, StagePlan, gang_sizes
from rubberband.values.profile import Profile
from tests.builders.budget import examples
from tests.builders.planned_jobs import planned_jobs
from tests.builders.virtual_runs import jct_s, run_virtual

MOST_PLANS = 1000
"""Up to this number of plans all are tried; beyond it, the exact search finds the cheapest."""


class FirstSync:
    """Looks at a run at its first SYNC, and finds what the best plan with the true times could still do."""

    def __init__(self, slowdown: float) -> None:
        self._slowdown = slowdown
        self.shortest_jct_s = math.inf
        """Of many plans, this is the time of the cheapest that keeps the deadline."""
        self.is_worth_it = False
        """Whether a plan keeps the deadline, and costs no more in addition than the whole run does if it is late."""

    def __call__(self, event: Event, controller: Controller) -> None:
        job, state = controller.job, controller.state
        if state.phase is not Phase.PLANNING or state.decisions:
            return
        true = slower(job.profile, self._slowdown)
        rest, now_held = remaining(state.lanes[0], job.profile)[1:], held(state.lanes[0], state.now)
        elapsed_s = state.now - state.started_at
        limit = limits(job)
        choices = [
            StagePlan(instances=instances, gpus_per_trial=gpus)
            for instances in range(1, job.offer.max_instances + 1)
            for gpus in gang_sizes(job.offer.slots, limit.min_gpus_per_trial, limit.max_gpus_per_trial)
            if slots(instances, job.offer.slots, gpus) > 0
        ]
        deadline_s = math.inf if job.deadline_s is None else job.deadline_s
        if len(choices) ** len(rest) <= MOST_PLANS:
            every = (Plan(stages=chosen) for chosen in itertools.product(choices, repeat=len(rest)))
            found = [predict(rest, chosen, true, job.offer, now_held) for chosen in every]
        else:
            bound = replace(limit, deadline_s=max(0.0, deadline_s - elapsed_s))
            cheapest = plan(Problem(brackets=(rest,), profile=true, offer=job.offer, constraints=bound, held=now_held))
            found = [cheapest.prediction] if isinstance(cheapest, JobPlan) else []
        self.shortest_jct_s = elapsed_s + min((each.jct_s for each in found), default=math.inf)
        in_time_usd = min((each.cost_usd for each in found if elapsed_s + each.jct_s <= deadline_s), default=math.inf)
        late = predict(rest, Plan(stages=state.plan.stages[1:]), true, job.offer, now_held)
        self.is_worth_it = in_time_usd - late.cost_usd <= bill_usd(state, state.now) + late.cost_usd


def slower(profile: Profile, slowdown: float) -> Profile:
    """The profile of trials that take `slowdown` times as long."""
    table = profile.seconds_per_iteration.items()
    return replace(profile, seconds_per_iteration={gpus: slowdown * seconds for gpus, seconds in table})


none = st.none()
slacks = st.one_of(none, st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0]))
rooms = st.one_of(none, st.sampled_from([1.001, 1.2, 3.0]))


def slowed(job: Job, slowdown: float, faults: Faults | None = None) -> VirtualBackend:
    return VirtualBackend(job.name, job.offer, job.profile, metric=job.metric, slowdown=slowdown, faults=faults)


@given(planned_jobs(slacks, rooms))
@settings(deadline=None, max_examples=examples(150))
def test_a_run_that_goes_as_planned_keeps_its_plan(job: Job) -> None:
    controller, _, finish = run_virtual(job)
    state = controller.state
    assert finish.outcome == "done"
    assert len(state.decisions) == len(job.stages) - 1
    assert [decision.reason for decision in state.decisions if decision.changed] == []
    assert state.plan == job.plan
    assert state.profile == job.profile
    for decision in state.decisions:
        assert decision.jct_s == pytest.approx(job.prediction.jct_s, abs=1e-3)
        assert decision.cost_usd == pytest.approx(job.prediction.cost_usd, abs=0.005)


@given(planned_jobs(slacks, none), st.sampled_from([0.5, 0.8, 1.3, 2.0]))
@settings(deadline=None, max_examples=examples(150))
def test_a_decision_expects_the_times_that_occur(job: Job, slowdown: float) -> None:
    assume(job.stages[0].trials * job.stages[0].iterations >= 3)
    controller, _, finish = run_virtual(job, backend=slowed(job, slowdown))
    state = controller.state
    assert finish.outcome == "done"
    assert state.decisions[-1].jct_s == pytest.approx(jct_s(state), abs=1e-3)
    assert state.decisions[-1].cost_usd == pytest.approx(bill_usd(state, state.now), abs=0.005)


@given(planned_jobs(st.sampled_from([0.3, 0.6, 1.0, 1.5]), none))
@settings(deadline=None, max_examples=examples(150))
def test_a_slower_run_meets_its_deadline_wherever_a_replan_can_and_is_worth_its_cost(job: Job) -> None:
    assume(job.stages[0].trials * job.stages[0].iterations >= 3)
    first = FirstSync(1.3)
    controller, _, finish = run_virtual(job, backend=slowed(job, 1.3), observers=[first])
    assert finish.outcome == "done"
    assert job.deadline_s is not None
    if first.is_worth_it:
        assert jct_s(controller.state) <= job.deadline_s + 1e-3, reasons(controller.state)


def reasons(state: State) -> list[str]:
    return [decision.reason for decision in state.decisions]


@given(planned_jobs(st.sampled_from([0.6, 1.5]), st.sampled_from([1.05, 1.5])), st.sampled_from([0.6, 1.3]))
@settings(deadline=None, max_examples=examples(100))
def test_no_plan_is_chosen_above_max_cost_unless_every_one_is(job: Job, slowdown: float) -> None:
    controller, _, _ = run_virtual(job, backend=slowed(job, slowdown))
    assert job.max_cost_usd is not None
    for decision in controller.state.decisions:
        within = decision.cost_usd <= job.max_cost_usd + 1e-9
        assert within or decision.reason.count("no plan keeps max_cost any more")


@given(planned_jobs(slacks, none))
@settings(deadline=None, max_examples=examples(100))
def test_a_faster_run_costs_no_more_than_without_replanning_and_is_in_time(job: Job) -> None:
    assume(job.stages[0].trials * job.stages[0].iterations >= 3)
    fixed_job = replace(job, replan=False)
    replanned, _, _ = run_virtual(job, backend=slowed(job, 0.6))
    fixed, _, _ = run_virtual(fixed_job, backend=slowed(fixed_job, 0.6))
    spent_usd = [bill_usd(one.state, one.state.now) for one in (replanned, fixed)]
    assert spent_usd[0] <= spent_usd[1] + 1e-6
    assert job.deadline_s is None or jct_s(replanned.state) <= job.deadline_s + 1e-3


@given(planned_jobs(st.sampled_from([0.5, 1.0, 2.0]), none), st.floats(0.0, 1.0))
@settings(deadline=None, max_examples=examples(100))
def test_an_instance_lost_before_the_sync_is_planned_for(job: Job, when: float) -> None:
    first_stage = job.prediction.stages[0]
    lost = Faults(lost_after_s={"i-001": job.offer.init_delay_s + when * first_stage.duration_s})
    first = FirstSync(1.0)
    controller, _, finish = run_virtual(job, backend=slowed(job, 1.0, lost), observers=[first])
    assert finish.outcome == "done"
    assert job.deadline_s is not None
    if first.shortest_jct_s <= job.deadline_s and len(controller.state.decisions) == 1:
        assert jct_s(controller.state) <= job.deadline_s + 1e-3, reasons(controller.state)


@given(planned_jobs(slacks, none))
@settings(deadline=None, max_examples=examples(100))
def test_the_forecast_of_a_replanned_run_is_what_its_latest_decision_expects(job: Job) -> None:
    def look(event: Event, controller: Controller) -> None:
        decisions = controller.state.decisions
        expected = decisions[-1] if decisions else job.prediction
        seen = forecast(controller.state, event.occurred_at)
        assert seen.jct_s == pytest.approx(expected.jct_s, abs=1e-3)
        assert seen.cost_usd == pytest.approx(expected.cost_usd, abs=0.005)

    run_virtual(job, observers=[look])
