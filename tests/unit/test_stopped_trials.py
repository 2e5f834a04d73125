"""A trial that the user stops trains no more, is not promoted, and may still be the best one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from rubberband.executor import (
    CancelRequested,
    Command,
    Controller,
    DiscardCheckpoint,
    DriverRequest,
    DriverResumed,
    Event,
    Forecast,
    Inbox,
    Job,
    LaunchInstance,
    LiveInstance,
    ReleaseInstance,
    Started,
    StartTrial,
    StopTrial,
    TrialReported,
    TrialStatus,
    TrialStopRequested,
    VirtualBackend,
    best_trial,
    decode_event,
    drive,
    expected_iterations,
    forecast,
    rows,
    summarise,
)
from rubberband.executor.core.forecast import later_stages
from rubberband.planner.exact.model import predict
from rubberband.values.offer import Billing
from rubberband.values.plan import Plan, Stage, StagePlan
from rubberband.views.live.narration import Narrator
from rubberband.views.story import story as story_of
from tests.builders.jobs import JOB, OFFER
from tests.builders.memory import MemoryJournal
from tests.builders.stories import Story, begun, checkpoint, kinds
from tests.builders.virtual_runs import jct_s
from tests.property.test_stopped_trials import Stop, Stops

STAGES = (Stage(trials=4, iterations=3), Stage(trials=2, iterations=2))
PLAN = Plan(stages=(StagePlan(instances=2, gpus_per_trial=1), StagePlan(instances=1, gpus_per_trial=1)))


def job(stages: tuple[Stage, ...] = STAGES, plan: Plan = PLAN) -> Job:
    return dataclasses.replace(JOB, stages=stages, plan=plan, prediction=predict(stages, plan, JOB.profile, OFFER))


def stop(story: Story, trial: int, request: str = "") -> list[Command]:
    return story.tell(TrialStopRequested, request=request or f"s-{story.at}", trial=trial)


def sync(story: Story, *trials: int) -> list[Command]:
    """Let trials do the three iterations of the first stage; the higher the number, the better."""
    commands: list[Command] = []
    for trial in trials:
        for _ in range(3):
            commands = story.report(trial, trial / 10)
    return commands


def test_a_running_trial_ends_at_once_and_its_latest_checkpoint_is_kept() -> None:
    story = begun(job())
    story.report(0, 0.5)
    story.report(0, 0.6)
    assert stop(story, 0) == [StopTrial(trial=0, attempt=1), DiscardCheckpoint(checkpoint=checkpoint(0, 1))]
    trial = story.state.trials[0]
    assert (trial.status, trial.stopped_at, trial.iterations) == (TrialStatus.STOPPED, story.at, 2)
    late = {"trial": 0, "attempt": 1, "iterations": 3, "metrics": {"score": 0.7}, "checkpoint": checkpoint(0, 3)}
    assert story.tell(TrialReported, **late) == []
    assert (trial.iterations, trial.checkpoint) == (2, checkpoint(0, 2))


def test_instances_that_no_trial_needs_go_back() -> None:
    story = begun(job())
    on = {trial.trial: trial.gang[0].instance for trial in story.state.running()}
    first, second = (trial for trial, instance in on.items() if instance == "i-001")
    assert kinds(stop(story, first)) == ["StopTrial"]
    assert stop(story, second) == [StopTrial(trial=second, attempt=1), ReleaseInstance(instance="i-001")]


def test_it_is_not_promoted_and_others_are_in_its_place() -> None:
    story = begun(job())
    sync(story, 3)
    stop(story, 3)
    commands = sync(story, 0, 1, 2)
    assert [command.trial for command in commands if isinstance(command, StartTrial)] == [1, 2]
    assert story.state.stages[0].ranking == (2, 1, 0)


@pytest.mark.parametrize("metric", [0.05, 0.95])
def test_it_is_the_best_if_its_metric_is(metric: float) -> None:
    story = begun(job())
    story.report(0, metric)
    stop(story, 0)
    sync(story, 1, 2, 3)
    for _ in range(2):
        story.report(2, 0.5)
        story.report(3, 0.6)
    assert story.state.outcome == "done"
    best = best_trial(story.state)
    assert best is story.state.trials[0 if metric > 0.6 else 3]


def test_a_waiting_trial_never_starts_and_its_instance_is_given_up() -> None:
    story = Story(job())
    assert len(story.tell(Started)) == 2
    assert stop(story, 3) == []
    assert kinds(stop(story, 2)) == ["ReleaseInstance"]
    commands = story.ready("i-002")
    assert [command.trial for command in commands if isinstance(command, StartTrial)] == [0, 1]


def test_without_any_trial_left_it_is_done_if_one_reported_and_else_failed() -> None:
    story = begun(job())
    story.report(2, 0.5)
    for trial in range(4):
        stop(story, trial)
    assert story.state.outcome == "done"
    assert best_trial(story.state) is story.state.trials[2]

    story = Story(job())
    story.tell(Started)
    for trial in range(4):
        commands = stop(story, trial)
    assert kinds(commands) == ["ReleaseInstance"]
    assert story.state.outcome == "failed"
    assert story.state.reason == "every trial of stage 0 was stopped before its first report"
    story.released("i-001", "i-002")
    assert story.controller.is_over


def test_the_same_request_counts_once_and_one_for_a_trial_that_is_over_not_at_all() -> None:
    story = begun(job())
    sync(story, 0)
    assert stop(story, 0, "s") == [DiscardCheckpoint(checkpoint=checkpoint(0, 2))]
    stopped_at = story.state.trials[0].stopped_at
    for request, trial in (("s", 1), ("t", 0), ("u", 99)):
        assert stop(story, trial, request) == []
    assert story.state.trials[0].stopped_at == stopped_at
    assert story.state.trials[1].status is TrialStatus.RUNNING


def test_it_is_not_started_by_a_resume_of_a_cancelled_run() -> None:
    story = begun(job())
    sync(story, 0, 1)
    story.tell(CancelRequested)
    stop(story, 2)
    stop(story, 3)
    story.released("i-001", "i-002")
    assert story.state.course == "finished"
    commands = story.tell(DriverResumed, live=(), ended=())
    assert [one for one in commands if isinstance(one, LaunchInstance)] == [
        LaunchInstance(instance="i-003", market="on_demand")
    ]
    commands = story.ready("i-003")
    assert [command.trial for command in commands if isinstance(command, StartTrial)] == [0, 1]


def test_a_request_that_a_dead_driver_left_is_taken_in_by_the_next_one(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path)
    inbox.put(DriverRequest(id="stop-1", kind="stop", asked_at=1.0, trial=2))
    (tmp_path / "stop-2.json").write_text('{"id": "stop-2", "kind": "stop", "asked_at": 1.0, "trial": -2}')
    assert [(request.id, request.trial) for request in inbox.pending()] == [("stop-1", 2)]
    story = begun(job())
    story.tell(DriverResumed, live=(LiveInstance(instance="i-001", running_at=100.0),), ended=())
    stop(story, 2)
    commands = story.ready("i-001")
    assert [command.trial for command in commands if isinstance(command, StartTrial)] == [0, 1]


def test_reports_tables_and_lines_say_who_stopped_it() -> None:
    story = begun(job())
    narrator = Narrator(story.controller.job)
    narrator.lines(Started(occurred_at=story.at), story.controller)
    story.report(0, 0.5)
    whole = expected_iterations(story.state)
    event = TrialStopRequested(occurred_at=story.at + 1.0, request="s", trial=0)
    stop(story, 0, "s")
    assert "trial 0 stopped by the user after 1 iteration" in narrator.lines(event, story.controller)
    assert expected_iterations(story.state) == whole - 2
    result = summarise(story.state, {"configurations": [{"x": n} for n in range(4)]}, story.at)
    assert (result.stages[0].iterations_expected, result.stages[0].failed) == (10, 0)
    trial = result.trials[0]
    assert trial.status_text == "stopped (by the user at 1)"
    assert trial.stopped_s == story.at - story.state.started_at
    assert rows.trial_rows(result)[0]["stopped_s"] == trial.stopped_s
    assert [(one.what, one.text) for one in story_of(result)] == [
        ("trial stopped", "trial 0 stopped by the user after 1 iteration")
    ]
    sync(story, 1, 2, 3)
    assert any("1 stopped by the user" in line for line in narrator.lines(event, story.controller))


@pytest.mark.parametrize("replan", [False, True])
def test_the_forecast_of_later_stages_counts_only_the_trials_that_are_left(replan: bool) -> None:
    stages = tuple(Stage(trials=trials, iterations=4) for trials in (8, 7, 6))
    plan = Plan(stages=(StagePlan(instances=1, gpus_per_trial=1),) * 3)
    offer = dataclasses.replace(OFFER, max_instances=1)
    prediction = predict(stages, plan, JOB.profile, offer)
    given = dataclasses.replace(
        JOB, stages=stages, plan=plan, prediction=prediction, offer=offer, replan=replan, max_gpus_per_trial=1
    )
    seen = list[tuple[int, float]]()

    def look(_event: Event, controller: Controller) -> None:
        state = controller.state
        seen.append((sum(t.stopped_at is not None for t in state.trials), forecast(state, state.now).jct_s))

    def end_s(*stops: Stop) -> float:
        seen.clear()
        backend, controller = VirtualBackend("digits", offer, JOB.profile, metric="score"), Controller(given)
        drive(controller, backend, MemoryJournal(), observers=[look], requests=Stops(stops))
        return jct_s(controller.state)

    whole_s = end_s()
    assert [forecast_s for _, forecast_s in seen] == pytest.approx([whole_s] * len(seen))
    at_first, later = [(3, 6), (3, 7)], [(22, 4), (22, 5)]
    first_s, all_s = end_s(*at_first), end_s(*at_first, *later)
    assert all_s < first_s < whole_s
    assert {round(forecast_s) for stopped, forecast_s in seen if stopped == 2} == {round(first_s)}
    assert {round(forecast_s) for stopped, forecast_s in seen if stopped == 4} == {round(all_s)}


def test_checkpoints_that_are_kept_have_their_iterations_and_times() -> None:
    story = begun(job())
    for _ in range(3):
        story.report(3, 0.5)
    kept = summarise(story.state, {"configurations": [{}] * 4}, story.at).trials[3].checkpoints
    assert [(one.checkpoint, one.iterations) for one in kept] == [(checkpoint(3, 3), 3), (checkpoint(3, 2), 2)]
    assert kept[0].saved_s - kept[1].saved_s == 1.0


def test_the_journal_has_the_stop() -> None:
    event = TrialStopRequested(occurred_at=4.0, request="s", trial=2)
    assert decode_event("TrialStopRequested", '{"occurred_at": 4.0, "request": "s", "trial": 2}') == event


@pytest.mark.parametrize(("billing", "share"), [("per_instance", 1 / 2 * 1 / 2), ("per_function", 2 / 6)])
def test_a_later_stage_takes_the_waves_and_instances_of_the_trials_left(billing: Billing, share: float) -> None:
    # Six trials on two instances of 2 GPUs are two waves; the two that are left are one, on one instance.
    stages = (Stage(trials=8, iterations=1), Stage(trials=6, iterations=2))
    plan, offer = (
        Plan(stages=(StagePlan(instances=2, gpus_per_trial=1),) * 2),
        dataclasses.replace(OFFER, billing=billing, minimum_billed_s=0.0),
    )
    prediction = predict(stages, plan, JOB.profile, offer)
    story = begun(dataclasses.replace(JOB, stages=stages, plan=plan, prediction=prediction, offer=offer))
    lane, planned = story.state.lanes[0], story.state.predicted[1]
    assert later_stages(lane) == Forecast(jct_s=planned.duration_s, cost_usd=planned.cost_usd)
    assert planned.cost_usd > 0.0
    for trial in range(2, 7):
        stop(story, trial)
    story.state.trials[7].status = TrialStatus.FAILED
    found = later_stages(lane)
    assert found.jct_s == pytest.approx(planned.duration_s / 2)
    assert found.cost_usd == pytest.approx(planned.cost_usd * share)
    assert expected_iterations(story.state) == 2 * (1 + 2)


def test_a_trial_stopped_in_a_later_stage_leaves_out_its_own_iterations_only() -> None:
    story = begun(job())
    sync(story, 0, 1, 2, 3)
    assert expected_iterations(story.state) == 4 * 3 + 2 * 2
    stop(story, 3)
    assert expected_iterations(story.state) == 4 * 3 + 2
