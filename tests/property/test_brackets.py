"""Jobs of several brackets on a virtual clock: they take and cost what their lanes were planned to, or less."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import assume, event, given, reject, settings
from hypothesis import strategies as st

from rubberband.errors import InfeasibleError
from rubberband.executor import Job, TrialStatus, bill_usd, brackets_of, jct_s, lane_bill_usd
from rubberband.planner.exact.model import predict
from rubberband.spec.schedulers import hyperband
from rubberband.values.offer import slots
from rubberband.values.plan import Plan, PlanningConstraints, Prediction, StagePlan, gang_sizes
from tests.builders.budget import examples
from tests.builders.plans import plan_brackets
from tests.builders.strategies import offers, profiles, stage_lists
from tests.builders.virtual_runs import run_virtual

CENT, MILLISECOND = 0.005, 0.0005


@st.composite
def divided_jobs(draw: st.DrawFn, most_lanes: int = 3) -> Job:
    """Some brackets, divided among lanes, each with a plan for the instances that it has."""
    offer, profile = draw(offers()), draw(profiles())
    brackets = [draw(stage_lists(6)) for _ in range(draw(st.integers(2, 4)))]
    count = draw(st.integers(1, min(most_lanes, len(brackets))))
    lanes = [tuple(range(first, len(brackets), count)) for first in range(count)]
    quotas = [draw(st.integers(1, 4)) for _ in lanes]
    offer = dataclasses.replace(offer, max_instances=sum(quotas) + draw(st.integers(0, 2)))
    alone = dataclasses.replace(offer, head_price_usd_per_hour=0.0)
    stages, chosen, predictions = [], list[StagePlan](), list[Prediction]()
    for lane, quota in zip(lanes, quotas, strict=True):
        own = [stage for bracket in lane for stage in brackets[bracket]]
        plan = Plan(stages=tuple(draw(_choices(offer.gpus, profile.smallest_gpus, quota)) for _ in own))
        stages += own
        chosen += plan.stages
        predictions.append(predict(own, plan, profile, alone))
    jct = max(prediction.jct_s for prediction in predictions)
    return Job(
        name="random",
        stages=tuple(stages),
        plan=Plan(stages=tuple(chosen)),
        prediction=Prediction(
            jct_s=jct,
            cost_usd=sum(prediction.cost_usd for prediction in predictions) + offer.head_cost_usd(jct),
            stages=tuple(stage for prediction in predictions for stage in prediction.stages),
        ),
        offer=offer,
        profile=profile,
        metric="score",
        mode="max",
        replan=False,
        brackets=brackets_of(brackets, lanes),
        lane_instances=tuple(quotas),
    )


@st.composite
def _choices(draw: st.DrawFn, gpus: int, smallest: int, quota: int) -> StagePlan:
    instances = draw(st.integers(1, quota))
    sizes = [size for size in gang_sizes(gpus, smallest, 16) if slots(instances, gpus, size) > 0]
    assume(sizes)
    return StagePlan(instances=instances, gpus_per_trial=draw(st.sampled_from(sizes)))


@given(divided_jobs())
@settings(deadline=None, max_examples=examples(120))
def test_a_run_of_brackets_takes_and_costs_what_was_predicted_or_less_where_instances_are_handed_on(job: Job) -> None:
    controller, _, finish = run_virtual(job)
    state, predicted = controller.state, job.prediction
    assert finish.outcome == "done"
    taken_s, billed_usd = jct_s(state, state.now), bill_usd(state, state.now)
    assert taken_s < predicted.jct_s + MILLISECOND
    assert billed_usd < predicted.cost_usd + CENT
    lanes_usd = sum(lane_bill_usd(lane, state.now) for lane in state.lanes)
    assert lanes_usd + job.offer.head_cost_usd(taken_s) == pytest.approx(billed_usd)
    event("handed on" if state.fleet.reassigned else "none handed on")
    if not state.fleet.reassigned:
        assert taken_s > predicted.jct_s - MILLISECOND
        assert billed_usd > predicted.cost_usd - CENT
        for record in state.stages:
            expected = predicted.stages[record.stage]
            assert abs(record.started_at - state.started_at - expected.start_s) < MILLISECOND


@given(divided_jobs())
@settings(deadline=None, max_examples=examples(50))
def test_every_bracket_trains_its_own_trials_to_its_end(job: Job) -> None:
    controller, _, _ = run_virtual(job)
    trials = controller.state.trials
    for bracket in job.brackets:
        ours, last = job.trials_of(bracket), bracket.end_stage - 1
        winners = ours[: job.stages[last].trials]
        assert [t for t in ours if trials[t].status is TrialStatus.COMPLETED] == list(winners)
        assert {trials[trial].iterations for trial in winners} == {job.iterations_by(last)}


@st.composite
def planned_jobs(draw: st.DrawFn) -> Job:
    """Hyperband as it is planned, which is planned again at every SYNC."""
    offer = dataclasses.replace(draw(offers()), max_instances=draw(st.integers(3, 12)), billing="per_instance")
    profile = draw(profiles())
    brackets = hyperband(draw(st.sampled_from([3, 4, 9])), draw(st.sampled_from([2, 3])))
    limits = PlanningConstraints(
        deadline_s=draw(st.floats(200.0, 8000.0)), min_gpus_per_trial=profile.smallest_gpus, max_gpus_per_trial=8
    )
    objective = draw(st.sampled_from(["min_cost", "min_time"]))
    try:
        planned = plan_brackets(brackets, profile, offer, limits, objective=objective)
    except InfeasibleError:
        reject()
    return Job(
        name="hyperband",
        stages=tuple(stage for lane in planned.lanes for stage in lane.stages),
        plan=planned.plan,
        prediction=planned.prediction,
        offer=offer,
        profile=profile,
        metric="score",
        mode="max",
        deadline_s=limits.deadline_s,
        objective=objective,
        min_gpus_per_trial=limits.min_gpus_per_trial,
        max_gpus_per_trial=limits.max_gpus_per_trial,
        brackets=brackets_of(brackets, [lane.brackets for lane in planned.lanes]),
        lane_instances=tuple(lane.max_instances for lane in planned.lanes),
    )


@given(planned_jobs())
@settings(deadline=None, max_examples=examples(25))
def test_hyperband_that_goes_as_planned_is_no_dearer_or_later_by_its_replans(job: Job) -> None:
    controller, _, finish = run_virtual(job)
    state, predicted = controller.state, job.prediction
    assert finish.outcome == "done"
    taken_s, billed_usd = jct_s(state, state.now), bill_usd(state, state.now)
    assert job.deadline_s is not None
    assert taken_s <= job.deadline_s + MILLISECOND
    if job.objective == "min_cost":
        assert billed_usd < predicted.cost_usd + CENT
    else:
        assert taken_s < predicted.jct_s + MILLISECOND
