"""Checkpoints that are lost, and stores that are away: trials go back, and nobody failed."""

from __future__ import annotations

from dataclasses import replace

from rubberband.executor import (
    CheckpointLost,
    Command,
    DiscardCheckpoint,
    DriverResumed,
    DriverStopped,
    Setback,
    StartTrial,
    TrialReported,
    TrialStatus,
    summarise,
)
from rubberband.values.plan import Stage
from rubberband.views.live.narration import Narrator
from rubberband.views.report.page import render_html
from rubberband.views.story import story as story_of
from tests.builders.jobs import JOB
from tests.builders.results import render
from tests.builders.stories import Story, begun, checkpoint, kinds

SETUP = {"configurations": [{}] * 4}


def lose(story: Story, trial: int) -> list[Command]:
    attempt = story.state.trials[trial].attempt
    return story.tell(CheckpointLost, trial=trial, attempt=attempt, message=f"the checkpoint of trial {trial} is gone")


def start_of(commands: list[Command]) -> StartTrial:
    (start,) = [command for command in commands if isinstance(command, StartTrial)]
    return start


def in_stage_1() -> Story:
    """Trials 2 and 3 are promoted after their first iteration."""
    story = begun()
    for trial in range(4):
        story.report(trial, trial / 10)
    return story


def test_the_last_two_checkpoints_are_kept() -> None:
    story = begun(replace(JOB, stages=(Stage(trials=4, iterations=3), Stage(trials=2, iterations=2))))
    assert [kinds(story.report(3, 0.9)) for _ in range(2)] == [[], []]
    assert DiscardCheckpoint(checkpoint=checkpoint(3, 1)) in story.report(3, 0.9)


def report_without(story: Story, trial: int) -> list[Command]:
    """Report an iteration after which no checkpoint was written."""
    state = story.state.trials[trial]
    facts = {"trial": trial, "attempt": state.attempt, "iterations": state.iterations + 1, "metrics": {"score": 0.9}}
    saved = state.checkpoint_iterations
    return story.tell(TrialReported, checkpoint=None, saved_iterations=saved, **facts)


def test_reports_between_checkpoints_keep_the_last_two_and_a_trial_goes_back_to_the_one_before() -> None:
    story = begun(replace(JOB, stages=(Stage(trials=4, iterations=9), Stage(trials=2, iterations=2))))
    assert [kinds(report_without(story, 3)) for _ in range(2)] == [[], []]
    assert story.state.trials[3].checkpoint is None
    for _ in range(2):
        assert kinds(story.report(3, 0.9)) == []
        assert kinds(report_without(story, 3)) == []
    state = story.state.trials[3]
    assert (state.iterations, state.checkpoint, state.before) == (6, checkpoint(3, 5), checkpoint(3, 3))
    story.tell(DriverResumed, live=(), ended=())
    commands = story.ready("i-003", "i-004")
    start = next(command for command in commands if isinstance(command, StartTrial) and command.trial == 3)
    assert (start.from_iterations, start.checkpoint) == (6, checkpoint(3, 5))
    again = start_of(lose(story, 3))
    assert (again.from_iterations, again.checkpoint) == (3, checkpoint(3, 3))
    assert [report.iterations for report in state.reports] == [1, 2, 3]
    from_zero = start_of(lose(story, 3))
    assert (from_zero.from_iterations, from_zero.checkpoint, state.reports) == (0, None, [])


def test_a_trial_without_a_checkpoint_yet_resumes_by_repeating() -> None:
    story = begun(replace(JOB, stages=(Stage(trials=4, iterations=9), Stage(trials=2, iterations=2))))
    report_without(story, 3)
    assert "function" not in render(summarise(story.state, SETUP, story.at))
    story.tell(DriverResumed, live=(), ended=())
    commands = story.ready("i-003", "i-004")
    start = next(command for command in commands if isinstance(command, StartTrial) and command.trial == 3)
    assert (start.from_iterations, start.checkpoint) == (1, None)


def test_one_of_the_stopped_instances_is_kept() -> None:
    story = begun(replace(JOB, stages=(Stage(trials=4, iterations=2), Stage(trials=2, iterations=2))))
    commands = [command for _ in range(2) for trial in range(4) for command in story.report(trial, trial / 10)]
    discarded = [command.checkpoint for command in commands if isinstance(command, DiscardCheckpoint)]
    assert discarded == [checkpoint(0, 1), checkpoint(1, 1)]


def test_a_trial_goes_back_to_the_checkpoint_before_and_then_to_its_beginning_and_has_not_failed() -> None:
    story = in_stage_1()
    story.report(3, 0.9)
    story.tell(DriverResumed, live=(), ended=())
    story.ready("i-003")
    again = start_of(lose(story, 3))
    assert (again.trial, again.from_iterations, again.until_iterations) == (3, 1, 3)
    assert again.checkpoint == checkpoint(3, 1)
    assert [report.iterations for report in story.state.trials[3].reports] == [1]
    from_zero = start_of(lose(story, 3))
    assert (from_zero.trial, from_zero.from_iterations, from_zero.checkpoint) == (3, 0, None)
    assert story.state.trials[3].failures == 0
    assert [(s.from_iterations, s.to_iterations) for s in story.state.history.of(Setback)] == [(2, 1), (1, 0)]
    for _ in range(3):
        story.report(3, 0.9)
    assert story.state.trials[3].status is TrialStatus.PAUSED
    text = summarise(story.state, SETUP, story.at).setbacks
    assert [(s.trial, s.from_iterations, s.to_iterations) for s in text] == [(3, 2, 1), (3, 1, 0)]


def test_after_it_went_back_the_checkpoint_that_it_went_back_to_is_kept() -> None:
    story = in_stage_1()
    story.report(3, 0.9)
    story.tell(DriverResumed, live=(), ended=())
    story.ready("i-003")
    lose(story, 3)
    assert story.report(3, 0.9) == []
    assert story.state.trials[3].before == checkpoint(3, 1)


def test_a_report_of_an_ended_attempt_does_not_count() -> None:
    story = in_stage_1()
    assert story.tell(CheckpointLost, trial=3, attempt=1, message="late") == []
    assert story.state.trials[3].iterations == 1


def all_fail(*failures: str) -> Story:
    """Both attempts of every trial fail, and everything is given back."""
    story = begun()
    for trial, kind in enumerate(failures):
        story.fail(trial, kind)
        story.fail(trial, kind)
    story.released("i-001", "i-002")
    assert story.state.outcome == "failed"
    return story


def test_failures_of_stores_and_machines_are_retried_by_a_resume() -> None:
    story = all_fail("checkpoint", "died", "raised", "hung")
    assert not story.controller.is_over
    assert "`rubberband resume test` tries again" in story.state.reason
    assert kinds(story.tell(DriverResumed, live=(), ended=())) == ["LaunchInstance"] * 2
    assert [trial.status for trial in story.state.trials] == ["queued", "queued", "failed", "queued"]
    starts = [command for command in story.ready("i-003", "i-004") if isinstance(command, StartTrial)]
    assert [start.trial for start in starts] == [0, 1, 3]
    for trial in (0, 1, 3):
        story.report(trial, 0.5)
    assert story.state.stages[0].ranking == (0, 1, 3)


def test_a_failure_of_the_users_code_stays_failed() -> None:
    story = all_fail("raised", "raised", "raised", "not_a_number")
    assert story.controller.is_over
    assert kinds(story.tell(DriverResumed, live=(), ended=())) == ["Finish"]


def test_a_driver_that_stopped_says_why_until_another_one_resumes() -> None:
    story = in_stage_1()
    assert story.tell(DriverStopped, reason="the store is away") == []
    found = summarise(story.state, SETUP, story.at)
    assert (found.outcome, found.reason) == ("unfinished", "the store is away")
    story.tell(DriverResumed, live=(), ended=())
    assert summarise(story.state, SETUP, story.at).reason == ""


def test_the_report_and_the_narration_mention_a_trial_that_went_back() -> None:
    story, narrator = in_stage_1(), Narrator(JOB)
    story.controller.handle(DriverResumed(occurred_at=story.at, live=(), ended=()))
    story.ready("i-003")
    lose(story, 3)
    event = CheckpointLost(occurred_at=story.at, trial=3, attempt=2, message="")
    line = "trial 3 went back from iteration 1 to its beginning: the checkpoint of trial 3 is gone"
    assert line in narrator.lines(event, story.controller)
    result = summarise(story.state, SETUP, story.at)
    assert f"{line}." in render(result)
    assert f"{line}." in render_html(result)
    assert result.to_json()["setbacks"][0]["from_iterations"] == 1
    assert line.partition(": ")[0] in " ".join(entry.text for entry in story_of(result))
