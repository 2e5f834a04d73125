"""The controller where the rest is planned again after every SYNC, one story a test."""

from __future__ import annotations

import dataclasses

import pytest

from rubberband.executor import (
    CancelRequested,
    Command,
    DriverResumed,
    InstanceLost,
    Job,
    LaunchInstance,
    Phase,
    RestPlanned,
    StartTrial,
    Tick,
    TrialStarted,
    bill_usd,
    forecast,
    measured,
)
from rubberband.executor import decide_replan as decide
from rubberband.executor import held_instances as held
from rubberband.executor.core.own_speeds import OwnSpeed
from rubberband.planner.exact.model import predict
from rubberband.values.plan import Plan, StagePlan
from rubberband.values.profile import Profile
from tests.builders.jobs import JOB
from tests.builders.stories import Story, begun, kinds

REPLANNED = dataclasses.replace(JOB, replan=True, max_gpus_per_trial=1)


def synced(job: Job = REPLANNED) -> Story:
    story = begun(job)
    for trial, score in enumerate([0.1, 0.9, 0.3]):
        story.report(trial, score)
    assert story.report(3, 0.8) == []
    return story


def planned(story: Story, *instances: int) -> list[Command]:
    """Plan the rest on these numbers of instances, one for each stage, and give the controller the decision."""
    decision = decide(story.state, story.at)
    chosen = tuple(StagePlan(instances=count, gpus_per_trial=1) for count in instances)
    plan = Plan(stages=(*story.state.plan.stages[: decision.stage], *chosen))
    return story.tell(RestPlanned, **{**fields_of(decision), "plan": plan, "changed": True})


def fields_of(decision: RestPlanned) -> dict[str, object]:
    return {field.name: getattr(decision, field.name) for field in dataclasses.fields(decision)[1:]}


def test_after_sync_it_waits_for_the_plan_of_the_rest_and_follows_it() -> None:
    story = synced()
    assert story.state.phase is Phase.PLANNING
    assert [trial.status for trial in story.state.trials] == ["stopped", "paused", "stopped", "paused"]
    commands = planned(story, 2)
    assert kinds(commands) == ["StartTrial", "StartTrial"]
    assert story.state.plan.stages[1].instances == 2
    assert story.controller.job.plan.stages[1].instances == 1
    assert len(story.state.decisions) == 1


def test_the_plan_of_the_rest_may_ask_for_more_instances() -> None:
    story = synced()
    assert planned(story, 3) == [LaunchInstance(instance="i-003")]


def test_an_instance_that_is_lost_while_the_rest_is_planned_is_not_counted_on() -> None:
    story = synced()
    story.tell(InstanceLost, instance="i-001", ended_at=story.at, reason="died")
    assert kinds(planned(story, 2)) == ["LaunchInstance"]


def test_cancelled_while_the_rest_is_planned_it_plans_after_its_resume() -> None:
    story = synced()
    assert kinds(story.tell(CancelRequested)) == ["ReleaseInstance"] * 2
    assert planned(story, 1) == []
    assert kinds(story.released("i-001", "i-002")) == ["Finish"]
    assert story.tell(DriverResumed, live=(), ended=()) == []
    assert story.state.phase is Phase.PLANNING
    assert kinds(planned(story, 1)) == ["LaunchInstance"]
    assert [c.trial for c in story.ready("i-003") if isinstance(c, StartTrial)] == [1, 3]


def test_the_cap_is_kept_while_the_rest_is_planned() -> None:
    story = synced(dataclasses.replace(REPLANNED, max_cost_usd=0.13))
    wake_at = story.controller.wake_at()
    assert wake_at is not None
    story.at = wake_at - 1.0
    assert kinds(story.tell(Tick)) == ["ReleaseInstance"] * 2
    assert story.state.outcome == "budget"


def test_the_rest_is_planned_for_the_trials_that_are_left() -> None:
    story = begun(dataclasses.replace(REPLANNED, max_failures=0))
    for trial in (0, 1, 2):
        story.fail(trial)
    story.report(3, 0.8)
    decision = decide(story.state, story.at)
    assert decision.predicted[0].duration_s == 20.0
    assert kinds(story.tell(RestPlanned, **fields_of(decision)))[-1] == "StartTrial"


def test_a_trial_may_take_longer_before_it_hangs_once_it_is_known_to_be_slower() -> None:
    story = synced()
    decision = decide(story.state, story.at)
    slower = dataclasses.replace(decision, profile=Profile(seconds_per_iteration={1: 100.0, 2: 60.0}))
    story.tell(RestPlanned, **fields_of(slower))
    for trial in story.state.running():
        story.tell(TrialStarted, trial=trial.trial, attempt=trial.attempt)
    first = min(trial.progress_at for trial in story.state.running())
    assert story.controller.wake_at() == first + 1000.0


UNBOUND = dataclasses.replace(
    JOB,
    replan=True,
    max_gpus_per_trial=2,
    offer=dataclasses.replace(JOB.offer, minimum_billed_s=0.0, provision_delay_s=30.0),
)
"""The rest: 2 trials of 2 iterations, on one instance in 20 s for 0.02 USD, on two in 12 s for 0.024 USD."""


@pytest.mark.parametrize(("left_s", "chosen"), [(30.0, StagePlan(instances=1, gpus_per_trial=1)), (15.0, None)])
def test_the_time_that_was_spent_counts_against_the_deadline(left_s: float, chosen: StagePlan | None) -> None:
    spent_s = synced(UNBOUND).at - 101.0
    story = synced(dataclasses.replace(UNBOUND, deadline_s=spent_s + left_s))
    decision = decide(story.state, story.at)
    assert decision.plan.stages[1] == (chosen or StagePlan(instances=2, gpus_per_trial=2))
    assert decision.jct_s == pytest.approx(spent_s + (20.0 if chosen else 12.0)), "what is held need not be waited for"


@pytest.mark.parametrize(("left_usd", "rest_usd"), [(0.03, 0.024), (0.022, 0.02)])
def test_the_money_that_was_spent_counts_against_the_budget(left_usd: float, rest_usd: float) -> None:
    hasty = dataclasses.replace(UNBOUND, objective="min_time", release_margin_s=0.0)
    story = synced(hasty)
    spent_usd = bill_usd(story.state, story.at)
    job = dataclasses.replace(hasty, max_cost_usd=spent_usd + left_usd)
    capped = story.state.supposed(job=job)
    assert decide(capped, story.at).cost_usd == pytest.approx(spent_usd + rest_usd)


def test_a_forecast_notes_that_instances_start_sooner_than_declared() -> None:
    slow = dataclasses.replace(JOB.offer, init_delay_s=200.0)
    job = dataclasses.replace(JOB, replan=True, max_gpus_per_trial=1, offer=slow, deadline_s=1000.0)
    story = synced(job)
    decision = decide(story.state, story.at)
    grown = Plan(stages=(job.plan.stages[0], StagePlan(instances=3, gpus_per_trial=1)))
    seen_offer = measured(story.state).offer
    assert seen_offer.provision_delay_s + seen_offer.init_delay_s < 20.0
    now_held = held(story.state.lanes[0], story.at)
    rest = predict(job.stages[1:], Plan(stages=grown.stages[1:]), job.profile, seen_offer, now_held)
    fields = fields_of(decision) | {"plan": grown, "predicted": rest.stages, "profile": job.profile}
    assert kinds(story.tell(RestPlanned, **fields)) == ["LaunchInstance"]
    assert forecast(story.state, story.at).jct_s == pytest.approx(story.at - 101.0 + rest.jct_s)


def test_the_forecast_of_a_stage_knows_how_fast_its_trials_are() -> None:
    story = synced()
    job = story.controller.job
    decision = decide(story.state, story.at)
    fields = fields_of(decision) | {"plan": job.plan, "changed": False, "own": {}}
    story.tell(RestPlanned, **fields)
    average_s = forecast(story.state, story.at).jct_s
    again = synced()
    own = {1: OwnSpeed(factor=1.5, error=0.0), 3: OwnSpeed(factor=1.2, error=0.0)}
    again.tell(RestPlanned, **fields | {"own": own})
    run_s = 2 * job.profile.iteration_s(1)
    assert forecast(again.state, again.at).jct_s == pytest.approx(average_s + 0.5 * run_s)


def test_the_forecast_learns_how_fast_a_trial_is_while_it_runs() -> None:
    job = dataclasses.replace(REPLANNED, profile=dataclasses.replace(JOB.profile, trial_cv=0.3))
    story = synced(job)
    decision = decide(story.state, story.at)
    slow = {1: OwnSpeed(factor=1.0, error=0.3), 3: OwnSpeed(factor=1.0, error=0.0)}
    story.tell(RestPlanned, **fields_of(decision) | {"plan": job.plan, "own": slow})
    story.tell(TrialStarted, trial=1, attempt=story.state.trials[1].attempt)
    before_s = forecast(story.state, story.at).jct_s
    story.at += 2.0 * job.profile.iteration_s(1)
    story.report(1, 0.9)
    assert forecast(story.state, story.at).jct_s > before_s + 1.5 * job.profile.iteration_s(1)
