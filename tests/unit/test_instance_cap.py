"""Caps that change while an experiment runs: it gives back at checkpoints, and grows within a stage."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubberband.executor import (
    AllotmentChanged,
    DriverResumed,
    Event,
    InstanceCapChanged,
    InstanceInterrupted,
    InstanceReleased,
    InstanceStatus,
    Job,
    LaunchInstance,
    LiveInstance,
    Phase,
    ReleaseInstance,
    RestPlanned,
    Started,
    StartTrial,
    StopTrial,
    Tick,
    TrialReported,
    TrialStopRequested,
    decide_within,
)
from rubberband.executor.core.forecast import later_stages
from rubberband.executor.core.instances import apportioned, cut
from rubberband.planner.exact.model import predict
from rubberband.values.plan import Plan, Stage, StagePlan
from rubberband.values.profile import Profile
from rubberband.views.live.narration import Narrator
from rubberband.views.story import instance_cap_changed
from tests.builders.jobs import JOB, OFFER
from tests.builders.stories import Story, begun, kinds

STAGES = (Stage(trials=4, iterations=3), Stage(trials=2, iterations=2))
PLAN = Plan(stages=(StagePlan(instances=2, gpus_per_trial=1), StagePlan(instances=1, gpus_per_trial=1)))


def job(plan: Plan = PLAN, **changes: object) -> Job:
    prediction = predict(STAGES, plan, JOB.profile, OFFER)
    return dataclasses.replace(JOB, stages=STAGES, plan=plan, prediction=prediction, **changes)


def set_cap(story: Story, most: int | None, request: str = "") -> list[object]:
    """Say how many instances it may hold; the driver's Tick follows, and what it decides."""
    assert story.tell(AllotmentChanged, request=request or f"r-{story.at}", max_instances=most) == []
    commands: list[object] = [*story.tell(Tick)]
    while story.state.resizing() is not None:
        event = decide_within(story.state, story.at)
        commands += story.tell(RestPlanned, **{f.name: getattr(event, f.name) for f in dataclasses.fields(event)[1:]})
    return commands


def test_where_it_shrinks_trials_stop_at_their_next_checkpoint_and_the_instance_goes() -> None:
    story = begun(job())
    assert set_cap(story, 1) == []
    leaving = [record.instance for record in story.state.fleet.leaving()]
    assert len(leaving) == 1
    struck = [t.trial for t in story.state.running() if t.gang[0].instance in leaving]
    stays = next(t.trial for t in story.state.running() if t.gang[0].instance not in leaving)
    assert story.report(stays, 0.5) == []
    first, last = struck
    assert story.report(first, 0.1) == [StopTrial(trial=first, attempt=1)]
    assert story.report(last, 0.2) == [StopTrial(trial=last, attempt=1), ReleaseInstance(instance=leaving[0])]
    assert [story.state.trials[trial].iterations for trial in struck] == [1, 1]
    story.tell(InstanceReleased, instance=leaving[0], ended_at=story.at)
    story.report(stays, 0.5)
    started = story.report(stays, 0.5)
    assert [(c.trial, c.from_iterations) for c in started if isinstance(c, StartTrial)] == [(first, 1)]


def test_no_instance_is_held_where_no_gang_fits_on_the_cap() -> None:
    """Gangs of two instances may have no other width: one instance alone would be paid, and idle."""
    wide = Plan(stages=tuple(StagePlan(instances=2, gpus_per_trial=2 * OFFER.gpus) for _ in STAGES))
    story = begun(job(wide, gpus_per_trial_sizes=(2 * OFFER.gpus,), replan=False))
    set_cap(story, 1)
    (trial,) = story.state.running()
    assert kinds(story.report(trial.trial, 0.5)) == ["StopTrial", "ReleaseInstance", "ReleaseInstance"]
    for instance in ("i-001", "i-002"):
        story.tell(InstanceReleased, instance=instance, ended_at=story.at)
    assert (story.state.lanes[0].wanted, story.state.fleet.live()) == (0, [])
    assert kinds(set_cap(story, 2)) == ["LaunchInstance"] * 2


def test_a_trial_between_two_checkpoints_goes_on_to_the_next() -> None:
    story = begun(job())
    set_cap(story, 1)
    instance = story.state.fleet.leaving()[0].instance
    trial = next(t.trial for t in story.state.running() if t.gang[0].instance == instance)
    fields = {"trial": trial, "attempt": 1, "metrics": {"score": 0.1}}
    assert story.tell(TrialReported, iterations=1, checkpoint=None, saved_iterations=0, **fields) == []
    assert "StopTrial" in kinds(story.report(trial, 0.1))


def test_where_it_grows_trials_that_wait_start_within_the_stage() -> None:
    story = Story(job())
    story.tell(AllotmentChanged, request="r", max_instances=1)
    assert kinds(story.tell(Started)) == ["LaunchInstance"]
    assert kinds(story.ready("i-001")) == ["StartTrial"] * 2
    assert set_cap(story, 4) == [LaunchInstance(instance="i-002")]
    assert kinds(story.ready("i-002")) == ["StartTrial"] * 2


def test_grown_again_before_it_gave_back_it_keeps_what_it_has() -> None:
    story = begun(job())
    set_cap(story, 1)
    assert set_cap(story, None) == []
    assert [record.status for record in story.state.fleet.live()] == [InstanceStatus.READY] * 2
    assert story.report(0, 0.5) == []
    assert story.state.instance_cap == OFFER.max_instances


def test_an_instance_that_is_not_ready_is_given_back_at_once() -> None:
    story = Story(job())
    story.tell(Started)
    story.ready("i-001")
    assert ReleaseInstance(instance="i-002") in set_cap(story, 1)
    assert len(story.state.running()) == 2


def test_with_none_it_pauses_and_goes_on_with_a_larger_cap() -> None:
    story = begun(job(deadline_s=500.0))
    set_cap(story, 0)
    for trial in range(4):
        story.report(trial, 0.1 * trial)
    story.released("i-001", "i-002")
    assert story.state.outcome is None
    assert story.state.phase in (Phase.SCALING, Phase.TRAINING)
    assert story.controller.wake_at() is None
    assert kinds(set_cap(story, 2)) == ["LaunchInstance"] * 2
    assert [c.from_iterations for c in story.ready("i-003", "i-004") if isinstance(c, StartTrial)] == [1] * 4


@pytest.mark.parametrize("before", [2, None])
def test_a_failed_run_that_is_resumed_before_its_pool_has_decided_waits_for_its_cap(before: int | None) -> None:
    story = Story(job(max_failures=0))
    if before is not None:
        story.tell(AllotmentChanged, request="first", max_instances=before)
    story.tell(Started)
    story.ready("i-001", "i-002")
    for trial in range(4):
        story.fail(trial, "died")
    story.released("i-001", "i-002")
    assert story.state.outcome == "failed"
    story.tell(AllotmentChanged, request="until the pool has decided", max_instances=0)
    assert story.tell(DriverResumed, live=(), ended=()) == []
    assert story.state.outcome is None
    assert kinds(set_cap(story, 2)) == ["LaunchInstance"] * 2


def test_the_rest_is_planned_at_once_with_wider_gangs_from_checkpoint_to_checkpoint() -> None:
    profile = Profile(seconds_per_iteration={1: 100.0, 2: 51.0})
    plan = Plan(stages=(StagePlan(instances=2, gpus_per_trial=1), StagePlan(instances=1, gpus_per_trial=2)))
    fast = job(plan, profile=profile, replan=True, objective="min_time", max_gpus_per_trial=2)
    story = Story(fast)
    story.tell(AllotmentChanged, request="r", max_instances=2)
    story.tell(Started)
    story.ready("i-001", "i-002")
    assert [len(t.gang) for t in story.state.running()] == [1] * 4
    assert kinds(set_cap(story, 4)) == ["LaunchInstance"] * 2
    assert story.state.plan.stages[0] == StagePlan(instances=4, gpus_per_trial=2)
    assert story.state.decisions[-1].reason.startswith("at most 4 instances now")
    story.ready("i-003", "i-004")
    for trial in range(4):
        stopped, started = story.report(trial, 0.1)
        assert isinstance(stopped, StopTrial)
        assert isinstance(started, StartTrial)
        assert len(started.gang) == 2
    assert story.report(0, 0.1) == []


def test_a_forecast_after_the_rest_is_planned_again_is_that_plan_for_the_trials_left() -> None:
    profile = Profile(seconds_per_iteration={1: 100.0, 2: 51.0})
    plan = Plan(stages=(StagePlan(instances=2, gpus_per_trial=1), StagePlan(instances=1, gpus_per_trial=2)))
    story = Story(job(plan, profile=profile, replan=True, objective="min_time", max_gpus_per_trial=2))
    story.tell(AllotmentChanged, request="r", max_instances=2)
    story.tell(Started)
    story.ready("i-001", "i-002")
    for trial in range(3):
        story.tell(TrialStopRequested, request=f"s-{trial}", trial=trial)
    set_cap(story, 4)
    planned = story.state.predicted[1]  # for one trial, so that nothing is left out a second time
    assert planned.duration_s == pytest.approx(102.0)
    assert later_stages(story.state.lanes[0]).cost_usd == pytest.approx(planned.cost_usd)
    assert later_stages(story.state.lanes[0]).jct_s == pytest.approx(planned.provisioning_s + planned.duration_s)


@pytest.mark.parametrize(("startup_s", "is_worth_it"), [(97.0, True), (99.0, False)])
def test_a_wider_gang_has_to_save_more_than_its_start_takes(startup_s: float, is_worth_it: bool) -> None:
    profile = Profile(seconds_per_iteration={1: 100.0, 2: 51.0}, trial_startup_s=startup_s)
    plan = Plan(stages=(StagePlan(instances=2, gpus_per_trial=1), StagePlan(instances=1, gpus_per_trial=2)))
    story = Story(job(plan, profile=profile, replan=True, objective="min_time", max_gpus_per_trial=2))
    story.tell(AllotmentChanged, request="r", max_instances=2)
    story.tell(Started)
    story.ready("i-001", "i-002")
    set_cap(story, 4)
    assert story.state.plan.stages[0] == StagePlan(instances=4, gpus_per_trial=2)
    story.ready("i-003", "i-004")
    assert kinds(story.report(0, 0.1)) == (["StopTrial", "StartTrial"] if is_worth_it else [])


def test_instances_that_another_was_promised_are_given_back_at_once() -> None:
    story = begun(job())
    set_cap(story, 1)
    (leaving,) = (record.instance for record in story.state.fleet.leaving())
    story.tell(AllotmentChanged, request="now", max_instances=1, recall="at_once")
    assert sorted(kinds(story.tell(Tick))) == ["ReleaseInstance", "StopTrial", "StopTrial"]
    assert all(slot.instance != leaving for trial in story.state.running() for slot in trial.gang)


def test_a_stage_waits_for_the_instances_that_it_is_promised() -> None:
    story = Story(job(replan=True))
    story.tell(AllotmentChanged, request="begin", max_instances=1, promised_instances=2)
    story.tell(Started)
    assert story.state.plan == PLAN, "what is promised is not cut"
    assert story.ready("i-001") == []
    story.tell(AllotmentChanged, request="more", max_instances=2, promised_instances=2)
    assert kinds(story.tell(Tick)) == ["LaunchInstance"]
    assert story.state.resizing() is None, "nor planned again"
    assert kinds(story.ready("i-002")) == ["StartTrial"] * 4


def test_without_its_promise_a_plan_is_cut_to_its_cap() -> None:
    story = Story(job(replan=True))
    story.tell(AllotmentChanged, request="begin", max_instances=1, promised_instances=2)
    story.tell(Started)
    story.tell(AllotmentChanged, request="over", max_instances=1)
    assert story.state.plan.stages[0].instances == 1
    assert story.state.resizing() is not None


def test_a_smaller_cap_makes_gangs_narrower_so_that_all_train() -> None:
    profile = Profile(seconds_per_iteration={1: 52.0, 2: 51.0})
    plan = Plan(stages=(StagePlan(instances=4, gpus_per_trial=2), StagePlan(instances=1, gpus_per_trial=2)))
    story = Story(job(plan, profile=profile, replan=True, objective="min_time"))
    story.tell(Started)
    story.ready("i-001", "i-002", "i-003", "i-004")
    set_cap(story, 2)
    assert story.state.plan.stages[0] == StagePlan(instances=2, gpus_per_trial=1)
    for trial in range(4):
        story.report(trial, 0.1)
    assert sorted(len(t.gang) for t in story.state.running()) == [1] * 4


def test_the_next_stage_keeps_the_cap_too() -> None:
    story = begun(job())
    set_cap(story, 0)
    for trial in range(4):
        story.report(trial, 0.1 * trial)
    story.released("i-001", "i-002")
    set_cap(story, 1)
    assert [choice.instances for choice in story.state.plan.stages] == [1, 1]


def test_a_plan_that_is_held_fixed_is_the_users_again_without_its_cap() -> None:
    story = begun(job())
    set_cap(story, 1)
    assert story.state.plan.stages[0].instances == 1
    set_cap(story, None)
    assert story.state.plan == PLAN


def test_a_request_that_is_repeated_or_changes_nothing_is_no_news() -> None:
    story = begun(job())
    set_cap(story, 3, "a")
    story.tell(AllotmentChanged, request="a", max_instances=1)
    story.tell(AllotmentChanged, request="b", max_instances=3)
    story.tell(AllotmentChanged, request="c", max_instances=None)
    story.tell(AllotmentChanged, request="d", max_instances=99)
    assert [one.max_instances for one in story.state.history.of(InstanceCapChanged)] == [3, 4]


def test_an_instance_that_is_taken_away_counts_until_it_is_gone() -> None:
    story = begun(job())
    story.tell(InstanceInterrupted, instance="i-001")
    assert len(story.state.fleet.current()) == 3
    set_cap(story, 2)
    struck = [t.trial for t in story.state.running() if t.gang[0].instance == "i-001"]
    assert "StopTrial" in kinds(story.report(struck[0], 0.5))


def test_a_resume_gives_back_what_was_recalled() -> None:
    story = begun(job())
    set_cap(story, 1)
    left = story.state.fleet.leaving()[0].instance
    live = tuple(LiveInstance(instance=f"i-00{n}", running_at=100.0) for n in (1, 2))
    assert ReleaseInstance(instance=left) in story.tell(DriverResumed, live=live, ended=())
    assert [record.instance for record in story.state.fleet.live()] != [left]


def test_it_says_what_an_instance_cap_costs() -> None:
    story, said = begun(job(deadline_s=60.0)), list[str]()
    narrator = Narrator(story.controller.job)
    narrator.lines(Tick(occurred_at=story.at), story.controller)
    handle = story.controller.handle

    def heard(event: Event) -> list[object]:
        commands = handle(event)
        said.extend(narrator.lines(event, story.controller))
        return [*commands]

    story.controller.handle = heard  # type: ignore[method-assign,assignment]
    set_cap(story, 1)
    assert said[0].startswith("instance cap: at most 1 instance instead of 4: as planned, it would end after 1m2")
    assert said[0].endswith("after the deadline")
    assert said[1].endswith("stop at the next checkpoint")
    set_cap(story, 0)
    assert said[2].endswith(": trials stop at their next checkpoints, and wait for a larger cap")


def test_a_cap_of_no_instances_before_the_start_stops_no_trial() -> None:
    zero = InstanceCapChanged(
        at_s=0.0,
        max_instances_before=4,
        max_instances=0,
        jct_before_s=60.0,
        jct_s=60.0,
        cost_before_usd=1.0,
        cost_usd=1.0,
    )

    found = instance_cap_changed(zero, None, is_begun=False)

    assert found == "at most 0 instances instead of 4: trials wait for a larger cap"


@given(st.integers(0, 50), st.lists(st.integers(1, 20), min_size=1, max_size=6))
def test_lanes_share_an_instance_cap_by_their_quotas(total: int, quotas: list[int]) -> None:
    shares = apportioned(total, quotas)
    assert sum(shares) == total
    assert min(shares) >= (1 if total >= len(quotas) else 0)
    if total == sum(quotas):
        assert shares == quotas or max(abs(a - b) for a, b in zip(shares, quotas, strict=True)) <= len(quotas)


@pytest.mark.parametrize(("most", "instances", "gpus"), [(4, 4, 4), (3, 3, 4), (2, 2, 4), (1, 1, 2)])
def test_a_gang_that_does_not_fit_any_more_is_as_wide_as_one_can_be(most: int, instances: int, gpus: int) -> None:
    found = cut(JOB, StagePlan(instances=4, gpus_per_trial=4), most)
    assert (found.instances, found.gpus_per_trial) == (instances, gpus)
