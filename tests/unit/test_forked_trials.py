"""A trial that goes on from another trial's checkpoint, with a configuration of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rubberband.executor import (
    Command,
    DiscardCheckpoint,
    DriverResumed,
    Fork,
    Job,
    LiveInstance,
    Result,
    StartTrial,
    TrialForked,
    TrialStatus,
    best_trial,
    sampling,
    summarise,
)
from rubberband.executor.core.events import CheckpointLost
from rubberband.executor.run.callbacks import ReportInfo
from rubberband.executor.run.trackers import _Configurations
from rubberband.planner.exact.model import predict
from rubberband.spec.search import Search
from rubberband.values.plan import Plan, Stage, StagePlan
from rubberband.views.charts.learning import learning_curves
from rubberband.views.report.headlines import best_lines, schedule
from rubberband.views.report.tables import exchanges
from tests.builders.jobs import JOB, OFFER
from tests.builders.stories import Story, begun, checkpoint

STAGES = (Stage(trials=4, iterations=3), Stage(trials=4, iterations=3))
PLAN = Plan(stages=(StagePlan(instances=2, gpus_per_trial=1),) * 2)
FORKED = dataclasses.replace(JOB, stages=STAGES, plan=PLAN, prediction=predict(STAGES, PLAN, JOB.profile, OFFER))
SETUP = {"configurations": [{"lr": 0.1 * (trial + 1)} for trial in range(4)]}


def fork(story: Story, trial: int, parent: int, iterations: int = 3, lr: float = 0.5) -> list[Command]:
    return story.tell(
        TrialForked,
        trial=trial,
        parent=parent,
        iterations=iterations,
        configuration={"lr": lr},
        changes={"lr": (0.1 * (parent + 1), lr)},
        reason="last",
    )


def three_paused(job: Job = FORKED) -> Story:
    """Three trials have done the first stage, and one of the four has not begun its last iteration."""
    story = begun(job)
    for trial in (0, 1, 2):
        for iterations in (1, 2, 3):
            story.report(trial, trial + iterations / 10)
    story.report(3, 3.1)
    story.report(3, 3.2)
    return story


def test_it_has_the_reports_and_the_checkpoints_of_the_other_one() -> None:
    story = three_paused()
    orders = fork(story, 0, 2)
    trial, parent = story.state.trials[0], story.state.trials[2]
    assert orders == [DiscardCheckpoint(checkpoint=checkpoint(0, 3)), DiscardCheckpoint(checkpoint=checkpoint(0, 2))]
    assert [report.metrics["score"] for report in trial.reports] == [2.1, 2.2, 2.3]
    assert list(trial.kept()) == list(parent.kept())
    assert [report.metrics["score"] for report in trial.made] == [0.1, 0.2, 0.3]


def test_a_checkpoint_is_deleted_when_no_trial_refers_to_it_any_more() -> None:
    story = three_paused()
    fork(story, 0, 2)
    orders = story.report(3, 3.3)
    starts = {order.trial: order for order in orders if isinstance(order, StartTrial)}
    assert starts[0].checkpoint == starts[2].checkpoint == checkpoint(2, 3)
    assert story.report(2, 2.4) == []  # both were of trial 0 too
    assert story.report(0, 0.4) == [DiscardCheckpoint(checkpoint=checkpoint(2, 2))]
    assert story.report(2, 2.5) == []
    assert story.report(0, 0.5) == [DiscardCheckpoint(checkpoint=checkpoint(2, 3))]


def test_a_sampler_learns_nothing_of_a_configuration_from_iterations_of_another_one() -> None:
    search = Search.model_validate(
        {
            "space": {"lr": {"type": "uniform", "lower": 0, "upper": 1}},
            "scheduler": {"type": "sha", "num_samples": 4, "max_t": 6},
            "sampler": {"type": "optuna"},
            "metric": "score",
            "mode": "max",
        }
    )
    story = three_paused()
    fork(story, 0, 2)
    drawn = sampling.configurations(story.state, SETUP)
    iterations, known = sampling.known_results(search, story.state, drawn, enough=3)
    assert iterations == 3
    assert [entry.configuration for entry in known if entry.values is not None] == SETUP["configurations"][1:3]


def test_its_best_iteration_is_one_of_its_present_configuration() -> None:
    story = three_paused(dataclasses.replace(FORKED, keep_best=True))
    orders = fork(story, 0, 2)
    assert [order.checkpoint for order in orders if isinstance(order, DiscardCheckpoint)] == [
        checkpoint(0, 3),
        checkpoint(0, 2),
    ]
    trial = story.state.trials[0]
    assert trial.best is None
    story.report(3, 3.3)
    story.report(0, 0.1)
    assert (trial.best, trial.best_iterations) == (checkpoint(0, 4), 4)


def test_a_lost_checkpoint_that_two_trials_have_takes_both_back() -> None:
    story = three_paused()
    fork(story, 0, 2)
    story.report(3, 3.3)
    for number in (0, 2):
        trial = story.state.trials[number]
        story.tell(CheckpointLost, trial=number, attempt=trial.attempt, message="gone")
        assert (trial.iterations, trial.checkpoint) == (2, checkpoint(2, 2))
    trial = story.state.trials[0]
    assert [span.after for span in trial.configured] == [0, 2]
    assert [(span.trial, span.configuration) for span in trial.configured] == [(2, None), (0, {"lr": 0.5})]
    story.report(0, 0.9)
    assert trial.has_reported


def test_it_is_not_the_best_before_it_has_trained_with_its_own_configuration() -> None:
    story = three_paused()
    fork(story, 0, 3, iterations=2)
    assert best_trial(story.state) is story.state.trials[3]
    assert story.state.trials[0].metric("score") is None
    story.report(3, 3.3)
    story.report(0, 9.0)
    assert best_trial(story.state) is story.state.trials[0]


def test_the_result_has_its_present_configuration_and_what_has_changed() -> None:
    story = three_paused()
    fork(story, 0, 2)
    fork(story, 1, 0, lr=0.7)
    result = summarise(story.state, SETUP, story.at)
    assert [trial.configuration["lr"] for trial in result.trials] == [0.5, 0.7, 0.1 * 3, 0.4]
    assert [(one.trial, one.parent, dict(one.changes)) for one in result.forks] == [
        (0, 2, {"lr": (0.1 * 3, 0.5)}),
        (1, 0, {"lr": (0.1, 0.7)}),
    ]
    assert [iterations for _, iterations, _ in result.trials[0].curve] == [1, 2, 3]
    assert [span.trial for span in story.state.trials[1].configured] == [2, 1]


def test_a_failed_trial_goes_on() -> None:
    story = three_paused()
    for _ in range(2):
        story.fail(3)
    trial = story.state.trials[3]
    assert trial.status is TrialStatus.FAILED
    fork(story, 3, 2)
    assert (trial.status, trial.failures, trial.iterations) == (TrialStatus.PAUSED, 0, 3)


def test_a_trial_that_cannot_be_forked_is_left_alone() -> None:
    story = three_paused()
    for trial, parent, iterations in ((3, 2, 3), (0, 2, 1), (0, 0, 3)):  # it trains; no such checkpoint; itself
        assert fork(story, trial, parent, iterations) == []
    assert not story.state.history.of(Fork)


def test_a_resume_keeps_it() -> None:
    story = three_paused()
    fork(story, 0, 2)
    live = tuple(LiveInstance(instance=name, running_at=101.0) for name in ("i-001", "i-002"))
    story.tell(DriverResumed, live=live, ended=())
    story.ready("i-001", "i-002")
    story.report(3, 3.3)
    assert story.state.trials[0].gang
    assert summarise(story.state, SETUP, story.at).trials[0].configuration == {"lr": 0.5}


def told() -> Result:
    story = three_paused()
    fork(story, 0, 2)
    story.report(3, 3.3)
    story.report(0, 9.0)
    return summarise(story.state, SETUP, story.at)


def test_the_best_trial_has_the_schedule_that_led_to_it() -> None:
    result = told()
    assert result.best is not None
    steps = [(step.after, step.trial, step.configuration["lr"]) for step in result.best.schedule]
    assert steps == [(0, 2, 0.1 * 3), (3, 0, 0.5)]
    assert schedule(result).rows == (("1 to 3", "2", "lr=0.3"), ("4 to 4", "0", "lr=0.5"))
    assert "  iterations 1 to 3: lr=0.3 (trial 2)" in best_lines(result)
    assert Result.from_json(result.to_json()).best == result.best


def test_the_report_says_who_took_over_whose_checkpoint() -> None:
    (row,) = exchanges(told()).rows
    assert row[1:] == ("0", "2", "3", "lr 0.3 -> 0.5", "last")


def test_a_curve_is_broken_where_another_trial_s_weights_begin() -> None:
    figure = learning_curves(told(), trial=0)
    assert figure is not None
    assert figure["data"][-1]["x"] == [1, 2, 3, None, 4, None]


def test_a_tracker_shows_the_changed_configuration() -> None:
    known = _Configurations()
    before, after = {"lr": 0.1, "kind": "a"}, {"lr": 0.5, "kind": "a"}
    reports = [report(1, before), report(2, before), report(3, after), report(4, after)]
    assert [known.changed(each) for each in reports] == [{}, {}, {"config.lr": 0.5}, {}]


def report(iterations: int, config: Mapping[str, Any]) -> ReportInfo:
    return ReportInfo(
        trial=0, config=config, iterations=iterations, metrics={}, stage=0, elapsed_s=0.0, reported_at=0.0
    )
