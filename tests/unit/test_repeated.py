"""Functions that report without a checkpoint: what they train again is progress, counts once, and is told."""

from __future__ import annotations

from dataclasses import replace

from rubberband.executor import (
    WITHOUT_CHECKPOINT,
    Command,
    Result,
    StartTrial,
    TrialReported,
    TrialStarted,
    measured,
    paid_time,
    summarise,
)
from rubberband.executor.core.events import TrialRepeated
from rubberband.executor.core.trials import SHORTEST_HANG_S
from rubberband.views.live.narration import Narrator
from tests.builders.jobs import JOB
from tests.builders.results import render
from tests.builders.stories import Story, begun, checkpoint

SETUP = {"configurations": [{}] * 4}


def reported(story: Story, trial: int, saved_iterations: int | None = 0) -> dict[str, object]:
    state = story.state.trials[trial]
    return {
        "trial": trial,
        "attempt": state.attempt,
        "iterations": state.iterations + 1,
        "metrics": {"score": trial / 10},
        "checkpoint": checkpoint(trial, state.iterations + 1),
        "saved_iterations": saved_iterations,
    }


def report(story: Story, trial: int) -> list[Command]:
    return story.tell(TrialReported, **reported(story, trial))


def start(story: Story, trial: int) -> None:
    story.tell(TrialStarted, trial=trial, attempt=story.state.trials[trial].attempt)


def repeat(story: Story, trial: int, iterations: int, after_s: float) -> None:
    story.at += after_s - 1.0
    story.tell(TrialRepeated, trial=trial, attempt=story.state.trials[trial].attempt, iterations=iterations)


def in_stage_1() -> tuple[Story, list[Command]]:
    """Trials 2 and 3 are promoted after their first iteration, without a checkpoint."""
    story = begun()
    return story, [command for trial in range(4) for command in report(story, trial)]


def result(story: Story) -> Result:
    return summarise(story.state, SETUP, story.at)


def test_repeated_training_is_progress_and_counts_once() -> None:
    story, commands = in_stage_1()
    starts = {command.trial: command for command in commands if isinstance(command, StartTrial)}
    assert (starts[3].from_iterations, starts[3].until_iterations) == (1, 3)
    start(story, 3)
    due_at = story.state.trials[3].due_at
    repeat(story, 3, 1, after_s=SHORTEST_HANG_S - 1.0)
    assert story.state.trials[3].due_at == due_at + SHORTEST_HANG_S - 1.0
    report(story, 3)
    assert [found.iterations for found in story.state.trials[3].reports] == [1, 2]


def test_repeated_training_is_paid_for_and_the_report_says_why() -> None:
    story, _ = in_stage_1()
    start(story, 3)
    repeat(story, 3, 1, after_s=20.0)
    before = paid_time(story.state, story.at)
    report(story, 3)
    paid = paid_time(story.state, story.at)
    assert (before.repeated_gpu_s, paid.repeated_gpu_s) == (20.0, 20.0)
    assert paid.training_gpu_s - before.training_gpu_s == 1.0
    text = render(result(story))
    assert "trained again" in text
    assert f"4 trials {WITHOUT_CHECKPOINT}" in text


def test_a_replan_counts_repeated_training_and_not_as_slowness() -> None:
    job = replace(JOB, profile=replace(JOB.profile, seconds_per_iteration={1: 1.0}, trial_startup_s=1.0))
    story, _ = in_stage_1()
    for trial in (2, 3):
        start(story, trial)
    for iterations in (1, 2):
        for trial in (2, 3):
            story.tell(TrialRepeated, trial=trial, attempt=2, iterations=iterations)
    state = story.state.supposed(job=job)
    found = measured(state)
    assert found.findings.startswith("trials train 1 iteration again, without a checkpoint, an instance runs after")
    assert found.profile == replace(job.profile, resumes=False)
    state.trials[3].reports[-1].saved_iterations = 1
    assert measured(state).profile.resumes, "one of two goes on from its checkpoint"


def test_it_is_reported_once_at_the_first_report_and_never_of_trials_that_pass_checkpoints() -> None:
    for saved_iterations, warnings in ((0, 1), (None, 0)):
        story, narrator, said = begun(), Narrator(JOB), list[str]()
        for trial in range(4):
            event = TrialReported(occurred_at=story.at + 1.0, **reported(story, trial, saved_iterations))  # type: ignore[arg-type]
            story.controller.handle(event)
            said += narrator.lines(event, story.controller)
        assert sum(WITHOUT_CHECKPOINT in line for line in said) == warnings
        assert result(story).unsaved_trials == 4 * warnings


def test_a_program_that_saves_and_does_not_load_is_known_by_what_it_repeats() -> None:
    story = begun()
    for trial in range(4):
        story.tell(TrialReported, **reported(story, trial, None))
    assert measured(story.state).profile.resumes
    for trial in (2, 3):
        start(story, trial)
        repeat(story, trial, 1, after_s=20.0)
        story.tell(TrialReported, **reported(story, trial, None))
    found = measured(story.state)
    assert not found.profile.resumes
    assert "from zero" in found.findings
