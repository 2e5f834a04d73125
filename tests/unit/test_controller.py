"""The controller, one story a test: an event in, commands out; no backend."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from rubberband.executor import (
    CancelRequested,
    Command,
    DriverResumed,
    Finish,
    InstanceLost,
    InstanceRefused,
    InstanceReleased,
    InstanceRunning,
    InstanceStatus,
    LaunchInstance,
    LiveInstance,
    ReleaseInstance,
    Started,
    StartTrial,
    StopTrial,
    Tick,
    TrialReported,
    TrialStarted,
    TrialStatus,
    bill_usd,
)
from rubberband.executor.run.driver import marked_if_late
from rubberband.values.plan import Plan, StagePlan
from rubberband.values.profile import Profile
from tests.builders.jobs import JOB
from tests.builders.stories import Story, begun, checkpoint, kinds


def test_it_launches_what_the_plan_asks_and_starts_trials_only_when_all_is_ready() -> None:
    story = Story()
    assert story.tell(Started) == [LaunchInstance(instance="i-001"), LaunchInstance(instance="i-002")]
    assert story.ready("i-001") == []
    started = story.ready("i-002")
    assert [(c.trial, c.until_iterations) for c in started if isinstance(c, StartTrial)] == [
        (0, 1),
        (1, 1),
        (2, 1),
        (3, 1),
    ]
    assert len({slot for c in started if isinstance(c, StartTrial) for slot in c.gang}) == 4


def test_at_sync_the_best_continue_and_the_longest_billed_instance_is_released() -> None:
    story = begun()
    for trial, score in enumerate([0.1, 0.9, 0.3]):
        assert story.report(trial, score) == []
    commands = story.report(3, 0.8)
    assert kinds(commands) == ["ReleaseInstance", "StartTrial", "StartTrial"]
    assert commands[0] == ReleaseInstance(instance="i-001")
    starts = [c for c in commands if isinstance(c, StartTrial)]
    assert [(c.trial, c.from_iterations, c.until_iterations, c.checkpoint) for c in starts] == [
        (1, 1, 3, checkpoint(1, 1)),
        (3, 1, 3, checkpoint(3, 1)),
    ]
    assert {slot.instance for c in starts for slot in c.gang} == {"i-002"}
    assert [t.status for t in story.state.trials] == ["stopped", "running", "stopped", "running"]


def test_it_ends_when_the_last_stage_is_done_and_everything_is_back() -> None:
    story = begun()
    for trial in range(4):
        story.report(trial, trial / 10)
    story.tell(InstanceReleased, instance="i-001", ended_at=story.at)
    commands = [command for trial in (2, 3, 2, 3) for command in story.report(trial, 0.5)]
    assert kinds(commands) == ["DiscardCheckpoint"] * 2 + ["ReleaseInstance"]
    assert story.tell(InstanceReleased, instance="i-002", ended_at=story.at) == [Finish(outcome="done", reason="")]


def test_a_failed_trial_is_tried_once_more_then_leaves_the_ranking_and_harms_no_other() -> None:
    story = begun()
    again = story.fail(1)
    assert [(c.trial, c.attempt) for c in again if isinstance(c, StartTrial)] == [(1, 2)]
    assert story.fail(1) == []
    for trial in (0, 2, 3):
        story.report(trial, 0.5)
    assert story.state.trials[1].status is TrialStatus.FAILED
    assert story.state.stages[0].ranking == (0, 2, 3)


def test_nan_is_not_tried_again() -> None:
    story = begun()
    assert story.fail(1, "not_a_number") == []
    assert story.state.trials[1].status is TrialStatus.FAILED


def test_a_metric_that_no_trial_reports_ends_the_experiment_at_once() -> None:
    story = begun()
    assert "ReleaseInstance" in kinds(story.fail(0, "no_metric"))
    assert story.state.outcome == "failed"


def test_reports_of_an_attempt_that_was_given_up_do_not_count() -> None:
    story = begun()
    story.fail(1)
    late = {"iterations": 1, "metrics": {"score": 1.0}, "checkpoint": checkpoint(1, 1)}
    assert story.tell(TrialReported, trial=1, attempt=1, **late) == []
    assert story.state.trials[1].iterations == 0


def test_a_silent_trial_is_stopped_and_started_again() -> None:
    story = begun()
    for trial in (0, 2, 3):
        story.report(trial, 0.5)
    wake_at = story.controller.wake_at()
    assert wake_at is not None
    story.at = wake_at
    assert kinds(story.tell(Tick)) == ["StopTrial", "StartTrial"]
    failure = story.state.trials[1].failure
    assert failure is not None
    assert failure[0] == "hung"


def test_a_machine_that_slept_takes_no_trial_to_hang() -> None:
    story = begun()
    story.at += 8 * 3600.0
    assert story.tell(Tick) == []
    assert [trial.status for trial in story.state.trials] == ["running"] * 4
    assert story.state.woke_at == [story.at]


def test_a_lost_instance_costs_its_trials_no_failure_and_is_replaced() -> None:
    story = begun()
    commands = story.tell(InstanceLost, instance="i-001", ended_at=story.at, reason="died")
    assert [c.trial for c in commands if isinstance(c, StopTrial)] == [0, 1]
    assert LaunchInstance(instance="i-003") in commands
    assert [t.failures for t in story.state.trials] == [0, 0, 0, 0]
    restarted = story.ready("i-003")
    assert [c.trial for c in restarted if isinstance(c, StartTrial)] == [0, 1]


def test_an_instance_that_ran_before_it_is_reported_as_refused_is_lost_and_paid_until_then() -> None:
    story = begun(dataclasses.replace(JOB, max_cost_usd=5.0))
    story.tell(InstanceRefused, instance="i-001", reason="no answer")
    record = story.state.instances["i-001"]
    assert (record.status, record.ended_at) == (InstanceStatus.ENDED, story.at)
    assert story.state.outcome is None
    assert math.isfinite(bill_usd(story.state, story.at))


def test_refused_instances_are_asked_for_again_later_and_then_done_without() -> None:
    story = Story()
    story.tell(Started)
    story.ready("i-001")
    assert story.tell(InstanceRefused, instance="i-002", reason="no capacity") == []
    for name in ("i-003", "i-004"):
        wake_at = story.controller.wake_at()
        assert wake_at is not None
        story.at = wake_at
        assert story.tell(Tick) == [LaunchInstance(instance=name)]
        commands = story.tell(InstanceRefused, instance=name, reason="no capacity")
    assert [c.trial for c in commands if isinstance(c, StartTrial)] == [0, 1]


def test_cancelling_stops_releases_and_can_be_resumed() -> None:
    story = begun()
    story.report(2, 0.4)
    commands = story.tell(CancelRequested)
    assert kinds(commands) == ["StopTrial"] * 3 + ["ReleaseInstance"] * 2
    assert kinds(story.released("i-001", "i-002")) == ["Finish"]
    again = story.tell(DriverResumed, live=(), ended=())
    assert kinds(again) == ["LaunchInstance", "LaunchInstance"]
    restarted = story.ready("i-003", "i-004")
    assert [c.trial for c in restarted if isinstance(c, StartTrial)] == [0, 1, 3]


@pytest.mark.parametrize(("late", "queued"), [(True, [1, 2]), (False, [0, 1, 2])])
def test_a_report_that_was_under_way_at_a_cancel_counts_where_its_driver_marked_it(
    late: bool, queued: list[int]
) -> None:
    """Journals of earlier versions have none that is marked, and replay as before."""
    story = begun()
    story.report(3, 0.4)
    story.tell(CancelRequested)
    report = TrialReported(
        occurred_at=story.at, trial=0, attempt=1, iterations=1, metrics={"score": 0.9}, checkpoint=checkpoint(0, 1)
    )
    state = story.controller.state
    marked = marked_if_late(report, state)
    assert isinstance(marked, TrialReported)
    assert marked.late
    story.controller.handle(dataclasses.replace(marked, iterations=3))  # one after a report that is missing
    for _ in range(2):  # the second time it is no news
        story.controller.handle(marked if late else report)
    assert [trial.trial for trial in state.trials if trial.status is TrialStatus.QUEUED] == queued
    assert len(state.trials[0].reports) == late
    story.released("i-001", "i-002")
    story.tell(DriverResumed, live=(), ended=())
    assert [c.trial for c in story.ready("i-003", "i-004") if isinstance(c, StartTrial)] == queued


def test_a_report_of_a_running_attempt_is_not_late() -> None:
    report = TrialReported(occurred_at=1.0, trial=0, attempt=1, iterations=1, metrics={"score": 0.9}, checkpoint=None)
    assert marked_if_late(report, begun().controller.state) is report


def test_a_new_driver_adopts_what_lives_and_asks_again_for_what_is_not_seen() -> None:
    story = Story()
    story.tell(Started)
    story.tell(InstanceRunning, instance="i-001", running_at=story.at)
    live = (LiveInstance(instance="i-001", running_at=101.5),)
    assert story.tell(DriverResumed, live=live, ended=()) == [LaunchInstance(instance="i-002")]
    assert "StartTrial" in kinds(story.ready("i-001", "i-002"))


def test_an_instance_given_up_before_it_ran_is_not_asked_for_again() -> None:
    story = Story()
    story.tell(Started)
    assert kinds(story.tell(CancelRequested)) == ["ReleaseInstance"] * 2
    commands = story.tell(DriverResumed, live=(), ended=())
    assert commands == [LaunchInstance(instance="i-003"), LaunchInstance(instance="i-004")]


@pytest.mark.parametrize(("timeout_s", "start_s"), [(5.0, 300.0), (600.0, 600.0)])
def test_before_its_first_step_a_trial_has_its_timeout_and_at_least_five_minutes(
    timeout_s: float, start_s: float
) -> None:
    story = begun(dataclasses.replace(JOB, iteration_timeout_s=timeout_s))
    began_at = story.at
    assert story.controller.wake_at() == began_at + start_s
    for trial in range(4):
        story.tell(TrialStarted, trial=trial, attempt=1)
    assert story.controller.wake_at() == began_at + 1.0 + timeout_s


def wide(**words: Any) -> Story:
    """A gang of four instances that train."""
    profile = Profile(seconds_per_iteration={2: 6.0, 4: 4.0})
    offer = dataclasses.replace(JOB.offer, gpus=1, max_instances=4)
    plan = Plan(stages=(StagePlan(instances=4, gpus_per_trial=4), StagePlan(instances=2, gpus_per_trial=2)))
    story = Story(dataclasses.replace(JOB, profile=profile, plan=plan, offer=offer, **words))
    story.tell(Started)
    story.ready("i-001", "i-002", "i-003", "i-004")
    return story


def widths(commands: list[Command]) -> list[int]:
    return [len(command.gang) for command in commands if isinstance(command, StartTrial)]


def test_a_gang_waits_for_the_instance_that_replaces_a_lost_one() -> None:
    story = wide()
    commands = story.tell(InstanceLost, instance="i-002", ended_at=story.at, reason="taken", preempted=True)
    assert LaunchInstance(instance="i-005") in commands
    assert widths(commands) == []
    assert widths(story.ready("i-005")) == [4]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({}, [[3], [2], []]),  # one GPU was not profiled
        ({"min_gpus_per_trial": 3}, [[3], [], []]),
        ({"gpus_per_trial_sizes": (2, 4)}, [[2], [2], []]),
    ],
)
def test_a_gang_gets_narrower_without_a_replacement_but_never_below_its_limits(
    words: dict[str, Any], expected: list[list[int]]
) -> None:
    story = wide(**words)
    assert widths(story.tell(InstanceLost, instance="i-001", ended_at=story.at, reason="died")) == []
    starts = [widths(story.tell(InstanceRefused, instance="i-005", reason="no capacity"))]
    for instance in ("i-002", "i-003"):
        starts.append(widths(story.tell(InstanceLost, instance=instance, ended_at=story.at, reason="died")))
    assert starts == expected


def test_an_instance_that_does_not_run_yet_is_given_back_before_one_that_does() -> None:
    story = begun()
    for trial in range(3):
        story.report(trial, trial / 10)
    assert LaunchInstance(instance="i-003") in story.tell(
        InstanceLost, instance="i-001", ended_at=story.at, reason="died"
    )
    commands = story.report(3, 0.9)
    assert [command for command in commands if isinstance(command, ReleaseInstance)] == [
        ReleaseInstance(instance="i-003")
    ]
    assert len([command for command in commands if isinstance(command, StartTrial)]) == 2


def test_the_cap_does_not_wait_for_a_quiet_moment() -> None:
    story = begun(dataclasses.replace(JOB, max_cost_usd=0.121))
    story.report(0, 0.1)
    late = {"iterations": 1, "metrics": {"score": 0.1}, "checkpoint": checkpoint(1, 1)}
    commands = story.controller.handle(TrialReported(occurred_at=story.at + 700.0, trial=1, attempt=1, **late))  # type: ignore[arg-type]
    assert "ReleaseInstance" in kinds(commands)
    assert story.state.outcome == "budget"


def test_too_little_for_a_single_gang_ends_the_run_instead_of_waiting() -> None:
    profile = Profile(seconds_per_iteration={2: 6.0})
    plan = Plan(stages=(StagePlan(instances=2, gpus_per_trial=2), StagePlan(instances=2, gpus_per_trial=2)))
    offer = dataclasses.replace(JOB.offer, gpus=1, max_instances=4)
    story = Story(dataclasses.replace(JOB, profile=profile, plan=plan, offer=offer))
    story.tell(Started)
    story.ready("i-001")
    commands = story.tell(InstanceRefused, instance="i-002", reason="no capacity")
    for name in ("i-003", "i-004"):
        story.at += 100.0
        story.tell(Tick)
        commands = story.tell(InstanceRefused, instance=name, reason="no capacity")
    assert commands == [ReleaseInstance(instance="i-001")]
    assert story.state.reason.startswith("no instance to train on: no capacity; run `rubberband resume")


def test_an_instance_that_ran_after_it_was_given_up_is_on_the_bill() -> None:
    story = Story()
    story.tell(Started)
    story.tell(CancelRequested)
    story.tell(InstanceReleased, instance="i-001", running_at=story.at, ended_at=story.at + 1.0)
    story.tell(InstanceReleased, instance="i-002", ended_at=story.at)
    assert bill_usd(story.state, story.at) == JOB.offer.instance_cost_usd(1.0)
