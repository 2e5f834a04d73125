"""Functions in every worker of a gang: what one process learns is learnt on any number, and failures are one line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rubberband.executor import Entrypoint, ForkServer, SegmentEnded, SegmentFailure, SegmentReport, read_manifest
from tests.builders import segments, trials
from tests.builders.processes.segment_worker import Worker, gang_of, resized, run_gang

EXAMPLES = Path(__file__).parents[2] / "examples"

SEGMENT = replace(segments.SEGMENT, config={"lr": 0.05}, max_iterations=8)


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Worker]]:
    """Workers of an instance on this machine, on which functions are forked."""
    directory = tmp_path_factory.mktemp("instances")
    server = ForkServer("test", directory, None)
    try:
        with gang_of(2, RUBBERBAND_DIRECTORY=str(directory), PYTHONHASHSEED="0") as started:
            yield started
    finally:
        server.close()


def function(name: str) -> Entrypoint:
    return trials.entrypoint(f"distributed_functions:{name}")


def run(workers: Any, store: Any, name: str, **changes: Any) -> list[list[Any]]:
    return run_gang(workers, function(name), replace(SEGMENT, **changes), store)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "package", "words", "tolerance"),
    [
        ("ddp", "torch", {}, 1e-9),
        pytest.param("accelerated", "accelerate", {}, 1e-6, marks=pytest.mark.long),
        pytest.param(
            *("hf:train", "transformers", {"metric": "eval_loss", "config": {"lr": 0.01, "weight_decay": 0.01}}, 1e-6),
            marks=pytest.mark.long,
        ),
        pytest.param(
            *("lightning_trainer:train", "lightning", {"metric": "val_loss", "config": {"lr": 0.01, "width": 16}}),
            *(1e-6,),
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_resized_function_learns_what_one_never_resized_learns(workers, store, name, package, words, tolerance):
    pytest.importorskip(package)
    entrypoint = Entrypoint.parse(name, [EXAMPLES]) if ":" in name else function(name)
    segment = replace(SEGMENT, **words)
    whole = resized(workers, entrypoint, segment, store, [(1, 3)])
    parts = resized(workers, entrypoint, segment, store, [(1, 1), (2, 2), (1, 3)])
    for straight, again in zip(whole, parts, strict=True):
        known = {metric: value for metric, value in straight.metrics.items() if not metric.endswith("_per_second")}
        known = {metric: value for metric, value in known.items() if not metric.endswith("runtime")}
        assert {metric: again.metrics[metric] for metric in known} == pytest.approx(known, rel=tolerance, abs=tolerance)
    files = {file["path"] for file in read_manifest(store.load(parts[-1].checkpoint))["files"]}
    assert name != "ddp" or files == {"state.pt"}
    assert "light" not in name or files == {"trainer.ckpt", "random-states.pt", "kept/checkpoints-0/best.ckpt"}


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("raises_at_rank_1", "KeyError: 'no such sample'"),
        (
            "odd_batch",
            "ValueError: per_worker(15): a batch of 15 cannot be divided equally among 2 workers, which a trial may "
            "get; give a multiple of 2, or write resources.gpus_per_trial: {sizes: [1]}",
        ),
        (
            "without_report",
            "distributed_functions:without_report returned without a report; call rubberband.report({'loss': ...}) "
            "once per iteration",
        ),
    ],
)
def test_a_failure_on_any_worker_is_that_of_the_trial(workers, store, name, line):
    found = run(workers, store, name)
    failures = [item for items in found for item in items if isinstance(item, SegmentFailure)]
    first = next(failure for failure in failures if not failure.secondary)
    assert first.message == line
    assert "Traceback" in first.details


def test_a_function_that_returns_has_ended_or_reports_what_it_returns(workers, store):
    first = run(workers[:1], store, "ends")[0]
    assert [type(item) for item in first[1:]] == [SegmentReport, SegmentReport, SegmentEnded]
    once = run(workers[:1], store, "returns_metrics")[0][-1]
    assert (once.metrics, once.ended) == ({"loss": 0.5}, True)


def test_a_function_begins_with_the_same_draws_in_each_stage_and_on_each_worker(workers, store):
    """A part that is held out at random would be another one, on which other workers, or earlier stages, train."""
    first, second = resized(workers, function("draws"), SEGMENT, store, [(1, 1), (2, 2)])
    assert first.metrics["loss"] == second.metrics["loss"] == second.metrics["of_last"]


@pytest.mark.long
def test_a_rank_in_the_worker_s_own_environment_is_not_that_of_the_gang(store):
    with gang_of(1, RANK="7", LOCAL_RANK="7", WORLD_SIZE="9") as own:
        found = run(own, store, "draws", until_iterations=1)[0]
    assert found[-1].metrics["rank"] == 0.0
