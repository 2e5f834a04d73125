"""Several brackets in lanes: instances go from one to another, and one that fails or waits does not end the others."""

from __future__ import annotations

import dataclasses

import pytest

from rubberband.executor import (
    DriverResumed,
    InstanceRefused,
    InstanceReleased,
    Job,
    Phase,
    ReleaseInstance,
    RestPlanned,
    Started,
    StartTrial,
    TrialStatus,
    best_trial,
)
from rubberband.executor import decide_replan as decide
from tests.builders.brackets import divided
from tests.builders.stories import Story, begun, kinds


def test_trials_are_numbered_by_bracket_and_stages_by_lane() -> None:
    job = divided([2, 1, 1], [1])
    assert [job.stage_name(stage) for stage in range(4)] == [
        "bracket 0 stage 0",
        "bracket 0 stage 1",
        "bracket 2 stage 0",
        "bracket 1 stage 0",
    ]
    assert [list(job.trials_of(bracket)) for bracket in job.brackets] == [[0, 1, 2, 3], [6, 7], [4, 5]]
    assert [job.iterations_by(stage) for stage in range(4)] == [1, 3, 1, 3]


def test_lanes_begin_together_and_use_only_their_own_instances() -> None:
    story = Story(divided([2, 1, 1], [1]))
    assert kinds(story.tell(Started)) == ["LaunchInstance"] * 3
    started = [c for c in story.ready("i-003") if isinstance(c, StartTrial)]
    assert [(c.trial, c.gang[0].instance) for c in started] == [(4, "i-003"), (5, "i-003")]
    started = [c for c in story.ready("i-001", "i-002") if isinstance(c, StartTrial)]
    assert {c.trial for c in started} == {0, 1, 2, 3}


def test_instances_of_one_lane_go_warm_to_another_that_waits() -> None:
    story = begun(divided([2, 1, 1], [1]))
    commands = [story.report(trial, trial / 10) for trial in range(4)][-1]
    assert ReleaseInstance(instance="i-003") in commands
    handed = [record.instance for record in story.state.instances.values() if record.lane == 1 and record.lanes_before]
    assert len(handed) == 1
    assert {(c.trial, c.gang[0].instance) for c in commands if isinstance(c, StartTrial) and c.trial in (4, 5)} == {
        (4, handed[0]),
        (5, handed[0]),
    }
    assert story.state.lanes[1].phase is Phase.TRAINING


@pytest.mark.parametrize(("quotas", "most"), [((1, 3), 1), ((1, 1), 2)])
def test_a_lane_that_is_late_is_planned_with_its_own_instances_and_its_share_of_the_spare_ones(
    quotas: tuple[int, int], most: int
) -> None:
    job = divided([1, 1, 1], [1], replan=True, deadline_s=27.0, max_gpus_per_trial=2, lane_instances=quotas)
    offer = dataclasses.replace(job.offer, max_instances=4, provision_delay_s=0.0)
    story = Story(dataclasses.replace(job, offer=offer))
    story.tell(Started)
    story.ready("i-001")
    for trial in (0, 1, 2, 3):
        story.report(trial, trial / 10)
    lane = story.state.lanes[0]
    assert lane.phase is Phase.PLANNING
    decision = decide(story.state, story.at)
    story.tell(RestPlanned, **{f.name: getattr(decision, f.name) for f in dataclasses.fields(decision)[1:]})
    assert max(choice.instances for choice in story.state.plan.stages[1 : lane.end_stage]) == most


def test_an_instance_that_would_wait_longer_than_it_saves_is_released() -> None:
    story = begun(divided([2, 1, 1], [3]))
    commands = [story.report(trial, trial / 10) for trial in range(4)][-1]
    assert [c.instance for c in commands if isinstance(c, ReleaseInstance)] == ["i-001"]
    assert story.state.fleet.reassigned == 0


def test_an_instance_that_may_run_by_now_is_kept() -> None:
    story = begun(divided([2, 1, 1], [1]))
    story.at += 60.0
    commands = [story.report(trial, trial / 10) for trial in range(4)][-1]
    assert [c.instance for c in commands if isinstance(c, ReleaseInstance)] == ["i-001"]
    assert story.state.fleet.reassigned == 0


def stranded() -> Story:
    """Lane 1 gets no instance; lane 0 trains."""
    story = Story(divided([2, 1, 1], [1], launch_attempts=1))
    story.tell(Started)
    story.ready("i-001")
    story.tell(InstanceRefused, instance="i-003", reason="sold out")
    story.ready("i-002")
    return story


def test_a_lane_without_instances_waits_for_what_others_give_back() -> None:
    story = stranded()
    assert story.state.outcome is None
    commands = [story.report(trial, trial / 10) for trial in range(4)][-1]
    assert {c.trial for c in commands if isinstance(c, StartTrial)} == {3, 4, 5}


def test_it_ends_when_none_is_left_that_could_give_any_back() -> None:
    story = Story(divided([1, 1, 1], [1], launch_attempts=1))
    story.tell(Started)
    story.tell(InstanceRefused, instance="i-001", reason="sold out")
    story.tell(InstanceRefused, instance="i-002", reason="sold out")
    assert (story.state.outcome, story.state.stranded) == ("failed", True)


def running(job: Job) -> Story:
    story = Story(job)
    story.tell(Started)
    story.ready(*story.state.instances)
    return story


def test_a_bracket_whose_trials_all_fail_does_not_end_the_others() -> None:
    story = running(divided([2, 1, 1], [1], max_failures=0))
    story.report(4, 0.5)
    for trial in range(4):
        story.fail(trial)
    assert story.state.lanes[0].stage.stage == 2
    for trial in (6, 7):
        story.report(trial, 0.9)
    assert story.state.lanes[0].phase is Phase.FINISHED
    for _ in range(2):
        story.report(4, 0.5)
    for score in (0.1, 0.2, 0.3):
        story.report(5, score)
    assert story.state.outcome == "done"
    best = best_trial(story.state)
    assert best is not None
    assert best.trial == 6
    assert [trial.trial for trial in story.state.trials if trial.status is TrialStatus.COMPLETED] == [4, 5, 6, 7]


def test_where_no_trial_has_ever_reported_the_first_bracket_that_fails_ends_it() -> None:
    story = running(divided([2, 1, 1], [1], max_failures=0))
    for trial in range(4):
        story.fail(trial)
    assert story.state.outcome == "failed"
    assert "every trial of bracket 0 stage 0 failed; the first one raised: boom" in story.state.reason


@pytest.mark.parametrize("kind", ["raised", "died"])
def test_where_every_bracket_fails_a_resume_tries_those_again_that_are_not_to_blame(kind: str) -> None:
    story = running(divided([2, 1, 1], [1], max_failures=0))
    story.report(4, 0.5)
    for trial in range(4):
        story.fail(trial)
    for trial in (6, 7):
        story.fail(trial)
    for trial in (4, 5):
        story.fail(trial, kind)
    assert story.state.outcome == "failed"
    for record in list(story.state.fleet.current()):
        story.tell(InstanceReleased, instance=record.instance, ended_at=story.at)
    assert story.controller.is_over == (kind == "raised")
    story.tell(DriverResumed, live=(), ended=())
    if kind == "died":
        assert [lane.phase for lane in story.state.lanes] == [Phase.FINISHED, Phase.SCALING]
