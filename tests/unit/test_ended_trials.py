"""Trials that end by themselves are complete: they rank with their latest report, and train no more."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import rubberband
from rubberband.api.dashboard.experiment_texts import stage_rows
from rubberband.errors import CheckpointError
from rubberband.executor import (
    CheckpointStore,
    Controller,
    Entrypoint,
    Faults,
    Job,
    LaunchInstance,
    Noise,
    ReleaseInstance,
    Result,
    SegmentEnded,
    SegmentFailure,
    SegmentRepeated,
    SegmentReport,
    Started,
    StartTrial,
    TrialEnd,
    TrialEnded,
    TrialReported,
    TrialResult,
    TrialStatus,
    VirtualBackend,
    best_trial,
    expected_iterations,
    remaining,
    rows,
    run_segment,
    summarise,
)
from rubberband.executor.result.restoring import restore_trial
from rubberband.executor.training.check_findings import CheckOrder
from rubberband.executor.training.checking import check
from rubberband.planner.exact.model import predict
from rubberband.spec.schedulers import asha, sha
from rubberband.values.offer import Offer
from rubberband.values.plan import Plan, Stage, StagePlan
from rubberband.views.experiment import trial_view
from rubberband.views.live.narration import Narrator
from rubberband.views.report import tables
from tests.builders.brackets import divided
from tests.builders.jobs import JOB, OFFER, PROFILE
from tests.builders.memory import MemoryJournal
from tests.builders.segments import SEGMENT
from tests.builders.stories import Story, begun, checkpoint, kinds
from tests.builders.virtual_runs import run_until_killed, run_virtual
from tests.harness.chaos_cases import asha_prediction

# What the worker says


def run(trial: Any, store: CheckpointStore, **changes: Any) -> list[Any]:
    return list(run_segment(Entrypoint.from_object(trial), dataclasses.replace(SEGMENT, **changes), store))[1:]


def patient(config: dict[str, Any]) -> None:
    """Train two epochs in all."""
    for epoch in range(rubberband.get_checkpoint() or 0, 2):
        rubberband.report({"loss": 1.0 / (epoch + 1)}, checkpoint=epoch + 1)


def bare(config: dict[str, Any]) -> None:
    """The same without a checkpoint."""
    for epoch in range(2):
        rubberband.report({"loss": 1.0 / (epoch + 1)})


@pytest.mark.parametrize("train", [patient, bare])
def test_a_function_that_returns_has_ended_with_its_latest_report(train: Any, store: CheckpointStore) -> None:
    *reports, end = run(train, store)
    assert [report.iterations for report in reports] == [1, 2]
    assert end == SegmentEnded()


def test_a_function_that_has_nothing_left_to_do_when_it_is_promoted_ends_without_a_report(
    store: CheckpointStore,
) -> None:
    first = run(patient, store, until_iterations=2)[-1]
    assert isinstance(first, SegmentReport)
    assert run(patient, store, from_iterations=2, checkpoint=first.checkpoint) == [SegmentEnded()]


def test_a_function_without_checkpoints_ends_after_its_repeated_iterations(store: CheckpointStore) -> None:
    first = run(bare, store, until_iterations=2)[-1]
    items = run(bare, store, from_iterations=2, checkpoint=first.checkpoint)
    assert items == [SegmentRepeated(iterations=1), SegmentRepeated(iterations=2), SegmentEnded()]


def test_a_function_that_returns_without_a_report_fails_in_one_line(store: CheckpointStore) -> None:
    def idle(config: dict[str, Any]) -> None:
        return None

    (failure,) = run(idle, store)
    assert isinstance(failure, SegmentFailure)
    expected = "idle() returned without a report; call rubberband.report({'loss': ...}) once per iteration, "
    expected += "or return its metrics in a dict if it trains in one go"
    assert (failure.kind, failure.message) == ("raised", expected)


def test_metrics_that_a_function_returns_without_a_report_are_its_report(store: CheckpointStore, capfd: Any) -> None:
    def objective(config: dict[str, Any]) -> dict[str, Any]:
        return {"loss": 0.5, "eval": {"size": 2}}

    report, *rest = run(objective, store, until_iterations=2)
    assert (report.iterations, report.ended, rest) == (1, True, [])
    assert report.metrics == {"loss": 0.5, "eval/size": 2}
    assert "checkpoint" not in capfd.readouterr().err


def test_a_function_whose_last_checkpoint_cannot_be_written_has_failed_and_not_ended(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = type(store).save

    def save(self: Any, trial: int, iterations: int, payload: Any) -> Any:
        if iterations == 2:
            raise CheckpointError("the disk is full")
        return saved(self, trial, iterations, payload)

    monkeypatch.setattr(type(store), "save", save)
    report, failure = run(patient, store)
    assert (report.iterations, failure.kind, failure.message) == (1, "checkpoint", "the disk is full")


class Ending(rubberband.Trial):
    """Ends with its third iteration; checkpoints every five."""

    checkpoint_every = 5
    count = 0

    def iterate(self) -> dict[str, float]:
        self.count += 1
        self.ended = self.count == 3
        return {"loss": 1.0 / self.count}

    def save(self) -> Any:
        return self.count

    def load(self, state: Any) -> None:
        self.count = state


@pytest.mark.parametrize("until", [3, 4])
def test_the_last_report_of_a_trial_says_so_and_has_a_checkpoint(until: int, store: CheckpointStore) -> None:
    reports = run(Ending, store, until_iterations=until)
    assert [(report.iterations, report.ended) for report in reports] == [(1, False), (2, False), (3, True)]
    assert reports[-1].checkpoint is not None
    assert reports[-1].saved_iterations is None


class Hasty(rubberband.TorchTrial):
    """Ends before the iteration that is evaluated."""

    batch_size = 4
    eval_every = 3

    def build_model(self, config):
        return torch.nn.Linear(1, 1)

    def build_optimizer(self, config, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def train_dataset(self, config):
        return TensorDataset(torch.ones(8, 1))

    def eval_dataset(self, config):
        return self.train_dataset(config)

    def on_iteration(self, model, iterations):
        self.ended = iterations == 2

    def loss(self, model, batch):
        return model(batch[0]).square().mean()


def test_the_last_iteration_of_a_torch_trial_is_evaluated_saved_and_loaded_as_the_best(store: CheckpointStore) -> None:
    first, last = run(Hasty, store)
    assert (first.ended, last.ended, last.metrics["evaluated_at"]) == (False, True, 2)
    best = TrialResult(
        trial=0,
        status="completed",
        configuration={},
        iterations=2,
        metrics=last.metrics,
        failures=0,
        failure=None,
        checkpoint=last.checkpoint,
        curve=(),
        ended=True,
    )
    assert restore_trial(best, Hasty, is_simulated=False).model.weight.shape == (1, 1)


def test_a_first_report_is_all_that_a_check_asks_for(tmp_path: Path) -> None:
    (tmp_path / "jobs.py").write_text(
        "import rubberband\n"
        "def fit(config):\n"
        "    if rubberband.get_checkpoint() is None:\n"
        "        rubberband.report({'loss': 1.0}, checkpoint='model')\n"
    )
    segment = dataclasses.replace(SEGMENT, until_iterations=1)
    order = CheckOrder(entrypoint=Entrypoint.parse("jobs:fit", [tmp_path]), segment=segment, max_gpus=1)
    found = check(order, limit_s=60.0, output=None)
    assert (found.problems, found.is_finished, found.step) == ([], True, "continue")


# What the controller makes of it


def end(story: Story, trial: int) -> list[Any]:
    return story.tell(TrialEnded, trial=trial, attempt=story.state.trials[trial].attempt)


def last_report(story: Story, trial: int, score: float) -> list[Any]:
    state = story.state.trials[trial]
    return story.tell(
        TrialReported,
        trial=trial,
        attempt=state.attempt,
        iterations=state.iterations + 1,
        metrics={"score": score},
        checkpoint=checkpoint(trial, state.iterations + 1),
        ended=True,
    )


LONG = dataclasses.replace(
    JOB,
    stages=(Stage(trials=4, iterations=3), Stage(trials=2, iterations=2), Stage(trials=1, iterations=4)),
    plan=Plan(stages=(*JOB.plan.stages, StagePlan(instances=1, gpus_per_trial=1))),
)
LONG = dataclasses.replace(LONG, prediction=predict(LONG.stages, LONG.plan, PROFILE, OFFER))


def test_an_ended_trial_frees_its_gang_for_one_that_waits() -> None:
    plan = Plan(stages=(StagePlan(instances=1, gpus_per_trial=1), *LONG.plan.stages[1:]))
    story = Story(dataclasses.replace(LONG, plan=plan))
    story.tell(Started)
    story.ready("i-001")
    assert [trial.status for trial in story.state.trials[2:]] == [TrialStatus.QUEUED] * 2
    story.report(0, 0.5)
    (start,) = end(story, 0)
    assert (start.trial, start.gang) == (2, story.state.trials[0].gang)
    (start,) = last_report(story, 1, 0.4)
    assert (start.trial, start.gang) == (3, story.state.trials[1].gang)
    assert [trial.failures for trial in story.state.trials] == [0] * 4


def finish_stage(story: Story, scores: dict[int, float]) -> list[Any]:
    commands: list[Any] = []
    for trial, score in scores.items():
        for _ in range(LONG.stages[0].iterations):
            commands += story.report(trial, score)
    return commands


def test_an_ended_trial_is_promoted_by_its_latest_metric_and_does_not_train() -> None:
    story = begun(LONG)
    last_report(story, 0, 0.9)
    commands = finish_stage(story, {1: 0.1, 2: 0.2, 3: 0.5})
    assert story.state.stages[0].ranking == (0, 3, 2, 1)
    starts = [command for command in commands if isinstance(command, StartTrial)]
    assert [(start.trial, start.until_iterations) for start in starts] == [(3, 5)]
    assert story.state.trials[0].status is TrialStatus.PAUSED


def test_a_stage_without_a_trial_to_train_is_passed_and_the_search_may_end_early() -> None:
    story = begun(LONG)
    for trial, score in ((0, 0.9), (3, 0.8)):
        last_report(story, trial, score)
    commands = finish_stage(story, {1: 0.1, 2: 0.2})
    state = story.state
    assert [(stage.ranking, stage.ended_at == stage.started_at) for stage in state.stages[1:]] == [
        ((0, 3), True),
        ((0,), True),
    ]
    assert not [command for command in commands if isinstance(command, (StartTrial, LaunchInstance))]
    assert state.outcome == "done"
    best = best_trial(state)
    assert best is not None
    assert (best.trial, best.ended, best.iterations, best.status) == (0, True, 1, TrialStatus.COMPLETED)
    assert kinds(commands).count("ReleaseInstance") == 2


def test_instances_stay_for_the_lanes_next_bracket_while_a_stage_is_passed() -> None:
    """The trial that is promoted to the bracket's last stage has ended; the next bracket trains on what is held."""
    story = Story(divided([2, 1, 1], [1]))
    story.tell(Started)
    story.ready("i-001", "i-002", "i-003")
    last_report(story, 0, 0.9)
    commands = [command for trial in (1, 2, 3) for command in story.report(trial, 0.1)]
    lane = story.state.lanes[0]
    assert [(stage.stage, stage.ended_at is None) for stage in lane.stages] == [(0, False), (1, False), (2, True)]
    released = [command for command in commands if isinstance(command, ReleaseInstance)]
    starts = [command for command in commands if isinstance(command, StartTrial)]
    assert (len(released), len(starts)) == (1, 2)
    assert not [command for command in commands if isinstance(command, LaunchInstance)]


def test_idle_instances_that_no_later_trial_needs_are_given_back() -> None:
    story = begun(LONG)
    assert last_report(story, 0, 0.5) == []
    (release,) = last_report(story, 1, 0.5)
    assert release == ReleaseInstance(instance="i-001")
    assert {slot.instance for trial in story.state.running() for slot in trial.gang} == {"i-002"}
    assert last_report(story, 2, 0.5) == []  # the next stage needs one


def test_only_the_trials_that_are_left_are_planned_for() -> None:
    story = begun(dataclasses.replace(LONG, replan=True))
    last_report(story, 0, 0.9)
    finish_stage(story, {1: 0.1, 2: 0.2, 3: 0.5})
    (lane,) = story.state.lanes
    assert [stage.trials for stage in remaining(lane, PROFILE)[1:]] == [1, 1]


def test_ended_trials_climb_rungs_without_training_and_block_none() -> None:
    (stage,) = (asha(sha(9, 1, 9, 3), 3),)
    plan = Plan(stages=(StagePlan(instances=1, gpus_per_trial=1),))
    offer = dataclasses.replace(OFFER, max_instances=1)
    job = dataclasses.replace(
        JOB, stages=(stage,), plan=plan, offer=offer, prediction=asha_prediction(stage, plan.stages[0], PROFILE, offer)
    )
    ends = {0: TrialEnd(iterations=1), 1: TrialEnd(iterations=2, returns=True)}
    backend = VirtualBackend(
        job.name, offer, PROFILE, metric=job.metric, metric_of=lambda trial, _: -trial, faults=Faults(ends=ends)
    )
    controller, _, finish = run_virtual(job, backend=backend)
    first, second = controller.state.trials[:2]
    assert finish.outcome == "done"
    assert (first.ended, first.iterations, first.rung, first.status) == (True, 1, 2, TrialStatus.COMPLETED)
    assert (second.ended, second.iterations, second.rung) == (True, 2, 1)
    assert sum(use.trial == 0 for use in controller.state.allocations) == 1


def virtual(job: Job, **ends: TrialEnd) -> Faults:
    return Faults(ends={int(name[1:]): end for name, end in ends.items()})


@pytest.mark.parametrize("replan", [False, True])
def test_time_and_cost_stop_where_the_trials_end(replan: bool) -> None:
    """Trial 1 returns a second after it is promoted, and trial 0 needs one of the two iterations of the stage."""
    job = dataclasses.replace(LONG, replan=replan, offer=dataclasses.replace(OFFER, minimum_billed_s=0.0))
    faults = virtual(job, t0=TrialEnd(iterations=4), t1=TrialEnd(iterations=3, returns=True))
    controller, backend, finish = run_virtual(job, faults)
    state = controller.state
    assert finish.outcome == "done"
    assert [state.trials[trial].iterations for trial in (0, 1)] == [4, 3]
    lasted_s = [stage.ended_at - stage.started_at for stage in state.stages if stage.ended_at is not None]
    assert lasted_s == pytest.approx([30.0, 10.0, 0.0])
    assert backend.provider.bill_usd(backend.now()) == pytest.approx((2 * 30.0 + 10.0) * 0.001)


@pytest.mark.parametrize("replan", [False, True])
def test_a_journal_that_is_cut_anywhere_leads_to_the_same_ends(replan: bool) -> None:
    job = dataclasses.replace(LONG, replan=replan)
    faults = virtual(job, t0=TrialEnd(iterations=2, returns=True), t2=TrialEnd(iterations=1), t3=TrialEnd(iterations=5))
    journal = MemoryJournal()
    whole, _, _ = run_virtual(job, faults, journal)
    ends = [(trial.iterations, trial.ended, trial.status, 0) for trial in whole.state.trials]
    events = [event for _, event in journal.events()]
    assert sum(isinstance(event, TrialEnded) for event in events) == 1
    for length in range(1, len(events)):
        killed, backend = Controller(job), VirtualBackend(job.name, OFFER, PROFILE, metric=job.metric, faults=faults)
        kept = MemoryJournal()
        run_until_killed(killed, backend, kept, length)
        backend.forget()
        resumed, _, finish = run_virtual(job, journal=kept, backend=backend)
        assert finish.outcome == "done"
        assert [(t.iterations, t.ended, t.status, t.failures) for t in resumed.state.trials] == ends


def test_a_trials_end_is_shown_beside_its_status() -> None:
    ends = {0: TrialEnd(iterations=2, returns=True), 1: TrialEnd(iterations=4), 2: TrialEnd(iterations=1)}
    narrator, said = Narrator(LONG), list[str]()
    controller, _, _ = run_virtual(
        LONG, Faults(ends=ends), observers=[lambda event, controller: said.extend(narrator.lines(event, controller))]
    )
    result = summarise(controller.state, {"configurations": [{}] * 4, "seeds": [0] * 4}, controller.state.now)
    shown = {row[0]: row[-2] for row in tables.trials(result, None).rows}
    assert shown == {
        "0": "winner (ended at 2)",
        "1": "stopped (ended at 4)",
        "2": "stopped (ended at 1)",
        "3": "stopped",
    }
    assert [trial_view(trial, curves=False)["ended"] for trial in result.trials] == [True, True, True, False]
    assert [row["ended"] for row in rows.trial_rows(result)] == [True, True, True, False]
    assert "completed (ended at 2)" in rows.result_html(result)
    assert Result.from_json(result.to_json()).trials[0].status_text == "completed (ended at 2)"
    assert any(line.startswith("stage 1: 1 trial of 2 x 2 iterations") for line in said)
    assert sum(line.startswith("stage 1: ") for line in said) == 1
    assert any(line.startswith("SYNC 0") and line.count("2 ended early") == 1 for line in said)
    assert not any(line.startswith("stage 2") for line in said)
    assert [row.iterations for row in stage_rows(result)] == ["9 of 9", "1 of 1", "0 of 0"]
    assert [(stage.iterations_done, stage.iterations_expected) for stage in result.stages] == [(9, 9), (1, 1), (0, 0)]
    assert expected_iterations(controller.state) == 10


def test_the_noise_of_a_virtual_run_draws_ends_by_chance() -> None:
    offer = Offer(instance_type="test", gpus=1, price_usd_per_hour=1.0, max_instances=1)
    noise = Noise(PROFILE, offer, seed=3, now=lambda: 0.0, end_chance=0.25)
    drawn = [found for trial in range(400) if (found := noise.end(trial)) is not None]
    assert drawn == [noise.end(trial) for trial in range(400)]
    assert min(one.iterations for one in drawn) == 1
    assert sum(one.iterations for one in drawn) / 400 == pytest.approx(4.0, rel=0.15)
    assert 120 < sum(one.returns for one in drawn) < 280
    assert Noise(PROFILE, offer, seed=3, now=lambda: 0.0).end(1) is None
