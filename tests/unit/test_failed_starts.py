"""Instances that never get ready: few are bought in a row, what is ready goes on, and the cause is told first."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from rubberband.api.dashboard.experiment_texts import sentence
from rubberband.api.dashboard.listing import row
from rubberband.cli import app
from rubberband.cloud.virtual import InstanceFaults
from rubberband.executor import (
    DriverResumed,
    Faults,
    InstanceLost,
    InstanceRefused,
    InstanceReleased,
    InstanceRunning,
    LaunchInstance,
    Result,
    Started,
    Tick,
    bill_usd,
    summarise,
)
from rubberband.executor.run.follower import outcome_of
from rubberband.states import ExperimentState
from rubberband.values.submission import Submission, Summary
from rubberband.views.live.status import headline
from rubberband.views.report.page import render_html
from tests.builders.jobs import JOB, launching_job
from tests.builders.journalled_runs import recorded, words
from tests.builders.results import render
from tests.builders.stories import Story, begun, kinds
from tests.builders.virtual_runs import run_virtual

CAREFUL = dataclasses.replace(JOB, start_attempts=3, launch_attempts=10)
NEVER_READY = (
    InstanceFaults(ends_after_s=50.0),
    InstanceFaults(init_s=1e9),
    InstanceFaults(provision_s=60.0, stillborn_after_s=20.0),
)
"""It dies, its workers never become warm, it ends before it runs."""


def lose(story: Story, *instances: str) -> list[str]:
    """They run for a moment and are gone; the kinds of what is ordered."""
    ordered: list[str] = []
    for instance in instances:
        story.tell(InstanceRunning, instance=instance, running_at=story.at)
        ordered += kinds(story.tell(InstanceLost, instance=instance, ended_at=story.at, reason="raylet: no disk"))
    return ordered


def next_tick(story: Story) -> list[str]:
    wake_at = story.controller.wake_at()
    assert wake_at is not None
    story.at = wake_at - 1.0
    return [command.instance for command in story.tell(Tick) if isinstance(command, LaunchInstance)]


def test_after_three_in_a_row_none_is_bought_and_a_resume_tries_again() -> None:
    story = Story(CAREFUL)
    story.tell(Started)
    assert lose(story, "i-001", "i-002") == [], "the next one waits"
    assert next_tick(story) == ["i-003"], "one attempt is left, though two are missing"
    assert lose(story, "i-003") == ["Finish"]
    spent = f"{bill_usd(story.state, story.at):.2f}"
    assert story.state.reason == (
        f"instances fail to start: raylet: no disk (3 of 3 in a row); {spent} USD spent; fix it, then rubberband "
        "resume test"
    )
    assert (story.state.outcome, story.controller.is_over) == ("failed", False)
    assert kinds(story.tell(DriverResumed, live=(), ended=())) == ["LaunchInstance", "LaunchInstance"]


def test_each_attempt_waits_longer_than_the_one_before() -> None:
    story, waits = Story(dataclasses.replace(CAREFUL, plan=one_each(1))), []
    story.tell(Started)
    for name in ("i-001", "i-002"):
        lose(story, name)
        lost_at = story.at
        next_tick(story)
        waits.append(story.at - lost_at)
    assert waits[1] > 1.5 * waits[0]


def one_each(instances: int) -> object:
    plan = JOB.plan
    return dataclasses.replace(
        plan, stages=tuple(dataclasses.replace(stage, instances=instances) for stage in plan.stages)
    )


def test_one_that_gets_ready_makes_up_for_those_before_it() -> None:
    story = Story(CAREFUL)
    story.tell(Started)
    lose(story, "i-001")
    assert "LaunchInstance" in kinds(story.ready("i-002")), "it is replaced at once: they do start"
    lose(story, "i-003")
    assert story.state.fleet.failed_starts == 1


def test_ready_instances_start_and_one_more_is_tried_now_and_then() -> None:
    story = begun(dataclasses.replace(CAREFUL, iteration_timeout_s=1e6))
    story.tell(InstanceLost, instance="i-001", ended_at=story.at, reason="died")
    lose(story, "i-003")
    for name in ("i-004", "i-005"):
        while next_tick(story) != [name]:
            pass
        lose(story, name)
    paused_at = story.at
    assert [trial.status for trial in story.state.trials] == ["queued", "queued", "running", "running"]
    tried = []
    for _ in range(50):
        tried += next_tick(story)
        if tried:
            break
    assert tried == ["i-006"]
    assert story.at - paused_at > 300.0
    for trial in (2, 3):
        story.report(trial, 0.5)
    assert len(story.state.running()) == 2, "the others take their turn on what there is"


def test_a_stage_that_begins_meanwhile_trains_on_what_is_ready() -> None:
    story = begun(dataclasses.replace(CAREFUL, plan=one_each(2)))
    story.tell(InstanceLost, instance="i-001", ended_at=story.at, reason="died")
    for name in ("i-003", "i-004", "i-005"):
        if name != "i-003":
            while next_tick(story) != [name]:
                pass
        lose(story, name)
    commands: list[str] = []
    for trial in (2, 3, 0, 1):
        commands = kinds(story.report(trial, trial / 10))
    assert commands.count("StartTrial") == 2
    assert "LaunchInstance" not in commands


def test_want_of_capacity_and_what_the_provider_takes_away_do_not_count() -> None:
    story = Story(CAREFUL)
    story.tell(Started)
    story.tell(InstanceRefused, instance="i-001", reason="no capacity")
    story.tell(InstanceRunning, instance="i-002", running_at=story.at)
    story.tell(InstanceLost, instance="i-002", ended_at=story.at, reason="taken", preempted=True)
    assert story.state.fleet.failed_starts == 0
    story.at += 100.0
    (first, *_) = [c for c in story.tell(Tick) if isinstance(c, LaunchInstance)]
    story.tell(InstanceRefused, instance=first.instance, reason="no disk", failed_start=True)
    assert story.state.fleet.failed_starts == 1


def test_parts_of_one_machine_that_do_not_start_are_one_failed_start() -> None:
    story = Story(CAREFUL)
    story.tell(Started)
    for number, same_fault in ((1, False), (2, True)):
        name = f"i-{number:03}"
        story.tell(InstanceRunning, instance=name, running_at=story.at)
        story.tell(InstanceLost, instance=name, ended_at=story.at, reason="no workers", same_fault=same_fault)
    assert story.state.fleet.failed_starts == 1


def test_want_of_capacity_after_a_failed_start_is_reported_as_what_it_is() -> None:
    story = Story(dataclasses.replace(CAREFUL, launch_attempts=2))
    story.tell(Started)
    lose(story, "i-001")
    story.tell(InstanceRefused, instance="i-002", reason="no capacity")
    while (asked := next_tick(story)) == []:
        pass
    for name in asked:
        story.tell(InstanceRefused, instance=name, reason="no capacity")
    assert story.state.reason.startswith("no instance to train on: no capacity; ")


def test_a_cap_that_is_reached_by_such_instances_says_so_first() -> None:
    story = begun(dataclasses.replace(CAREFUL, max_cost_usd=0.5, release_margin_s=3.0, iteration_timeout_s=1e6))
    story.tell(InstanceLost, instance="i-001", ended_at=story.at, reason="died")
    for name in ("i-003", "i-004", "i-005"):
        if name != "i-003":
            while next_tick(story) != [name]:
                pass
        lose(story, name)
    while story.state.outcome is None:
        next_tick(story)
    assert story.state.outcome == "budget"
    assert story.state.reason.startswith("3 of 5 instances failed to start: raylet: no disk; max_cost=0.50 USD is")


def test_a_journal_from_before_the_rule_resumes_as_it_did() -> None:
    story = Story(dataclasses.replace(JOB, launch_attempts=20))
    story.tell(Started)
    story.tell(InstanceRunning, instance="i-001", running_at=story.at)
    assert kinds(story.tell(InstanceLost, instance="i-001", ended_at=story.at, reason="died")) == ["LaunchInstance"]
    for number in range(2, 14):
        lose(story, f"i-{number:03d}")
        story.at += 20.0
        story.tell(Tick)
    assert (story.state.outcome, story.state.fleet.failed_starts, story.state.lanes[0].relaunch_at) == (None, 0, 0.0)
    assert len(story.state.instances) > 12


@pytest.mark.by_default(1)
@pytest.mark.parametrize("faults", NEVER_READY)
@given(instances=st.integers(1, 4), max_cost_usd=st.none() | st.floats(0.3, 30.0), lucky=st.integers(0, 2))
def test_few_instances_are_bought_that_never_get_ready(
    faults: InstanceFaults, instances: int, max_cost_usd: float | None, lucky: int
) -> None:
    """At most three in a row, and those on their way; all are given back, and what was spent is told."""
    job = launching_job(max_cost_usd=max_cost_usd)
    plan = dataclasses.replace(
        job.plan, stages=tuple(dataclasses.replace(stage, instances=instances) for stage in job.plan.stages)
    )
    job = dataclasses.replace(job, start_attempts=3, launch_attempts=50, plan=plan)
    broken = {f"i-{number:03d}": faults for number in range(1 + lucky, 200)}
    short_lived = {f"i-{number:03d}": InstanceFaults(ends_after_s=150.0) for number in range(1, 1 + lucky)}
    controller, _, finish = run_virtual(job, Faults(instance_faults=broken | short_lived))
    state = controller.state
    unready = [record for record in state.instances.values() if record.ready_at is None]
    assert len(unready) <= lucky * 3 + max(3, instances)
    assert all(record.status in ("ended", "refused") for record in state.instances.values())
    assert finish.outcome in ("failed", "budget")
    if any(record.failed_start for record in state.instances.values()) and finish.outcome == "failed":
        assert finish.reason.startswith("instances fail to start: ")
        assert "spent; fix it, then rubberband resume test" in finish.reason
        assert not controller.is_over


# What is told


def ended(story: Story) -> tuple[Result, Submission]:
    """The result, and the experiment as a service has it."""
    for record in story.state.fleet.current():
        story.tell(InstanceReleased, instance=record.instance, ended_at=story.at)
    result = summarise(story.state, {"configurations": [{}] * 4}, story.at)
    outcome, reason = outcome_of(story.controller)
    submission = Submission(
        name="test",
        state=outcome or ExperimentState.RUNNING,
        created_at=0.0,
        changed_at=0.0,
        words={},
        reason=reason,
        summary=Summary(started_at=100.0, stages=2),
    )
    return result, submission


def test_the_cause_is_the_first_thing_that_every_view_shows() -> None:
    story = Story(CAREFUL)
    story.tell(Started)
    lose(story, "i-001", "i-002")
    next_tick(story)
    lose(story, "i-003")
    result, submission = ended(story)
    cause = "instances fail to start: raylet: no disk (3 of 3 in a row)"
    assert render(result).startswith(f"test: failed: {cause}")
    assert f'<p class="answer">failed: {cause}' in render_html(result)
    assert result.to_json()["reason"].startswith(cause)
    assert headline({"name": "test", "state": "failed", "reason": result.reason, "summary": {"stages": 2}}).startswith(
        f"test: failed: {cause}"
    )
    assert row(submission, story.at).reason.startswith(cause)
    assert sentence(submission, result).startswith(f"Failed: {cause}")


def test_status_and_ps_begin_with_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    never = {f"i-{number:03d}": InstanceFaults(init_s=1e9) for number in range(1, 20)}
    recorded(words(name="never"), faults=Faults(instance_faults=never)).put(tmp_path)
    monkeypatch.setenv("RUBBERBAND_HOME", str(tmp_path))
    (listed,) = json.loads(CliRunner().invoke(app, ["ps", "-o", "json"]).output)["experiments"]
    cause = "instances fail to start: lease expired (7 of 7 in a row); "
    assert listed["reason"].startswith(cause)
    assert cause[:40] in CliRunner().invoke(app, ["ps"]).output
    assert CliRunner().invoke(app, ["status", "never"]).output.startswith(f"never: failed: {cause}")


def test_obstacles_to_a_run_are_shown_while_it_runs() -> None:
    story = Story(CAREFUL)
    story.tell(Started)
    lose(story, "i-001")
    assert outcome_of(story.controller) == (
        None,
        "instances fail to start: raylet: no disk (1 in a row, 1 of 2 in all)",
    )
    result = summarise(story.state, {"configurations": [{}] * 4}, story.at)
    assert render(result).splitlines()[1] == "1 of 2 instances failed to start: raylet: no disk"
