"""The controller where the rest is planned again after every SYNC, one story a test."""

from __future__ import annotations

import dataclasses

from rubberband.executor.events import (
    CancelRequested,
    Command,
    DriverResumed,
    InstanceLost,
    InstanceReleased,
    LaunchInstance,
    RestPlanned,
    StartTrial,
    Tick,
    TrialStarted,
)
from rubberband.executor.replanning import decide
from rubberband.executor.state import Job, Phase
from rubberband.plan import Plan, StagePlan
from rubberband.profile import Profile
from tests.unit.stories import Story, begun, kinds
from tests.unit.test_journal import JOB

REPLANNED = dataclasses.replace(JOB, replan=True, max_gpus_per_trial=1)


def synced(job: Job = REPLANNED) -> Story:
    story = begun(job)
    for trial, score in enumerate([0.1, 0.9, 0.3]):
        story.report(trial, score)
    assert story.report(3, 0.8) == []
    return story


def planned(story: Story, *instances: int) -> list[Command]:
    """Tell the controller that the rest is to run on so many instances."""
    decision = decide(story.controller.job, story.state, story.at)
    chosen = tuple(StagePlan(instances=count, gpus_per_trial=1) for count in instances)
    plan = Plan(stages=(*story.state.plan.stages[: decision.stage], *chosen))
    return story.tell(RestPlanned, **{**told_of(decision), "plan": plan, "changed": True})


def told_of(decision: RestPlanned) -> dict[str, object]:
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
    story.tell(InstanceReleased, instance="i-001", ended_at=story.at)
    assert kinds(story.tell(InstanceReleased, instance="i-002", ended_at=story.at)) == ["Finish"]
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
    decision = decide(story.controller.job, story.state, story.at)
    assert decision.predicted[0].duration_s == 20.0
    assert kinds(story.tell(RestPlanned, **told_of(decision)))[-1] == "StartTrial"


def test_a_trial_may_take_longer_before_it_hangs_once_it_is_known_to_be_slower() -> None:
    story = synced()
    decision = decide(story.controller.job, story.state, story.at)
    slower = dataclasses.replace(decision, profile=Profile(seconds_per_iteration={1: 100.0, 2: 60.0}))
    story.tell(RestPlanned, **told_of(slower))
    for trial in story.state.running():
        story.tell(TrialStarted, trial=trial.trial, attempt=trial.attempt)
    first = min(trial.progress_at for trial in story.state.running())
    assert story.controller.wake_at() == first + 1000.0
