"""Samples of many lengths: what runs out of memory goes on in smaller passes and learns the same, by itself or in a
gang; the size is remembered."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rubberband.executor import CheckpointStore, Entrypoint, Segment, SegmentFailure, SegmentReport, open_store
from rubberband.values.adaptive import AdaptiveBatch
from tests.builders import segments, trials
from tests.builders.command_line import CommandLine
from tests.builders.processes.segment_worker import Worker, run_again
from tests.builders.segments import content

GROWING, NARROW, PARTLY = (trials.entrypoint(f"memory_trials:{name}") for name in ("Growing", "Narrow", "Partly"))
SEGMENT = replace(segments.SEGMENT, metric="train_loss", config={}, until_iterations=2)
PLACES = ["before", "forward", "loss", "backward"]


def run(
    entrypoint: Entrypoint, segment: Segment, store: CheckpointStore, workers: list[Worker] | None = None
) -> list[SegmentReport]:
    reports, failures = run_again(workers or [], entrypoint, segment, store)
    assert not failures
    return reports


def last(run: tuple[CheckpointStore, list[SegmentReport]]) -> tuple[CheckpointStore, SegmentReport]:
    return run[0], run[1][-1]


@pytest.fixture(scope="module")
def unlimited(tmp_path_factory: pytest.TempPathFactory) -> tuple[CheckpointStore, list[SegmentReport]]:
    """A trial that has memory enough; micro-batches make no difference to what it learns."""
    store = open_store(str(tmp_path_factory.mktemp("unlimited")))
    return store, run(GROWING, SEGMENT, store)


def assert_same(
    one: tuple[CheckpointStore, list[SegmentReport]], other: tuple[CheckpointStore, list[SegmentReport]]
) -> None:
    """Equal metrics of every iteration, and equal weights in the end."""
    for before, after in zip(one[1], other[1], strict=True):
        assert before.metrics == pytest.approx(dict(after.metrics), rel=1e-10)
    weights, others = (content(store, reports[-1])["model"] for store, reports in (one, other))
    for name, weight in weights.items():
        torch.testing.assert_close(others[name], weight, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("entrypoint", [GROWING, NARROW], ids=["whole", "accumulating"])
def test_a_worker_that_runs_out_of_memory_begins_again_in_smaller_passes_and_learns_the_same(
    store, unlimited, entrypoint
):
    limited = run(entrypoint, replace(SEGMENT, config={"memory": 100, "at": "backward"}), store)
    assert_same((store, limited), unlimited)
    assert "batching" not in content(*last(unlimited))
    assert content(store, limited[-1])["batching"] == {"per_gpu": 2}


@pytest.mark.by_default(4)
@pytest.mark.parametrize("entrypoint", [GROWING, NARROW], ids=["whole", "accumulating"])
@pytest.mark.parametrize(("at", "rank"), [*((place, 1) for place in PLACES), ("backward", 0)])
def test_a_gang_in_which_one_worker_runs_out_begins_again_and_learns_the_same(
    workers, store, unlimited, at, entrypoint, rank
):
    limited = run(entrypoint, replace(SEGMENT, config={"memory": 100, "at": at, "rank": rank}), store, workers)
    assert_same((store, limited), unlimited)
    assert content(store, limited[-1])["batching"] == {"per_gpu": 2}


@pytest.mark.by_default(1)
@pytest.mark.parametrize(("at", "rank"), [("before", 1), ("backward", 0), ("loss", 1)])
def test_samples_that_count_unequally_count_the_same_where_a_step_is_done_again(workers, store, at, rank):
    counting = trials.entrypoint("memory_trials:Counting")
    plenty = run(counting, SEGMENT, store)
    assert set(plenty[0].metrics) == {"train_loss", "train_twice"}
    config = {"memory": 100, "at": at, "rank": rank}
    assert_same((store, run(counting, replace(SEGMENT, config=config), store, workers)), (store, plenty))
    if rank == 0:
        assert_same((store, run(counting, replace(SEGMENT, config=config), store)), (store, plenty))


@pytest.mark.by_default(1)
@pytest.mark.parametrize("at", ["loss", "backward"])
def test_parameters_that_the_loss_does_not_use_are_left_out_again(workers, store, at):
    segment = replace(SEGMENT, config={"memory": 100, "at": at, "rank": 1})
    whole = run(PARTLY, replace(SEGMENT, config={}), store)
    assert_same((store, run(PARTLY, segment, store, workers)), (store, whole))


@pytest.mark.by_default(2)
@pytest.mark.parametrize("gang", [0, 2])
@pytest.mark.parametrize(("optimizer", "accumulation"), [("sgd", True), ("adam", False)])
def test_adaptive_batches_finish_where_the_trial_pass_saw_short_samples_only(
    workers, store, gang, optimizer, accumulation
):
    config = {"memory": 200, "at": "backward", "rank": gang // 2, "optimizer": optimizer, "samples": 128}
    batch = AdaptiveBatch(max=128, interval=4, accumulation=accumulation)
    segment = replace(SEGMENT, config=config, batch=batch, until_iterations=3)
    reports = run(GROWING, segment, store, workers[:gang])
    assert [report.iterations for report in reports] == [1, 2, 3]
    limit = reports[-1].batch.limits.max_per_gpu
    assert 2 <= limit <= 200 // 4
    resumed = replace(segment, from_iterations=3, until_iterations=4, checkpoint=reports[-1].checkpoint)
    after = run(GROWING, resumed, store)
    assert after[0].batch.limits.max_per_gpu <= limit, "a retry does not grow there again"
    assert max(use.per_gpu for report in after for use in report.batch.batches) <= limit


@pytest.mark.parametrize("batch", [None, AdaptiveBatch()], ids=["fixed", "adaptive"])
def test_where_one_sample_does_not_fit_the_trial_fails_with_a_remedy(store, workers, batch):
    (alone,) = run_again([], GROWING, replace(SEGMENT, config={"memory": 30}, batch=batch), store)[1]
    segment = replace(SEGMENT, config={"memory": 30, "rank": 1}, batch=batch)
    echo, in_gang = run_again(workers, GROWING, segment, store)[1]
    assert echo.secondary
    for failure in (alone, in_gang):
        assert isinstance(failure, SegmentFailure)
        assert "out of memory" in failure.message
        assert "use a smaller model, or an instance with more memory" in failure.message
        assert "\n" not in failure.message
        assert not failure.secondary


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_run_goes_on_though_its_gang_runs_out_of_memory_and_no_failure_counts(tmp_path: Path) -> None:
    shutil.copy(trials.FOLDER / "memory_trials.py", tmp_path)
    (tmp_path / "oom.yaml").write_text(
        """
version: 1
name: sleepy
entrypoint: memory_trials:Growing
search:
  space: {memory: {type: choice, values: [100]}, at: backward, rank: 1}
  scheduler: {type: stages, stages: [{trials: 1, iterations: 3}]}
  metric: train_loss
  mode: min
constraints: {deadline: 10m, max_failures: 0}
resources:
  provider: local
  gpus_per_instance: 2
  price_per_hour: 1
  max_instances: 1
  gpus_per_trial: {min: 2, max: 2}
profile: {seconds_per_iteration: {2: 1}, trial_startup: 2}
"""
    )
    command_line = CommandLine(tmp_path)
    command_line("run", "oom.yaml", "--no-check")
    (trial,) = command_line.result().trials
    assert (trial.iterations, trial.failures) == (3, 0)
    assert "begins again from its checkpoint, with at most 2 samples at once" in command_line.shows("logs", "sleepy")
