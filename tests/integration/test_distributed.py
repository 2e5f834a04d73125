"""Functions in every worker of a gang: what one process learns is learnt on any number, and failures are one line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from rubberband.executor import FolderCheckpoint, ForkServer, SegmentEnded, SegmentFailure, SegmentReport, open_store
from tests.builders import segments, trials
from tests.builders.processes.segment_worker import Worker, gang_of, run_gang

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


def run(workers: Any, store: Any, name: str, **changes: Any) -> list[list[Any]]:
    return run_gang(workers, trials.entrypoint(f"distributed_functions:{name}"), replace(SEGMENT, **changes), store)


def resized(workers: Any, store: Any, name: str, parts: Any, **changes: Any) -> list[SegmentReport]:
    """Run parts (workers, until) one after the other, each from where the last one ended; return all reports."""
    found: list[SegmentReport] = []
    for num_workers, until in parts:
        before = found[-1].checkpoint if found else None
        first, *others = run(
            workers[:num_workers],
            store,
            name,
            from_iterations=len(found),
            until_iterations=until,
            checkpoint=before,
            **changes,
        )
        assert all(isinstance(item, SegmentReport) for item in first[1:]), first
        assert others == [[]] * (num_workers - 1)
        found += first[1:]
    return found


def test_a_resized_function_learns_what_one_never_resized_learns(workers, tmp_path):
    store = open_store(str(tmp_path))
    whole = resized(workers, store, "ddp", [(1, 4)])
    parts = resized(workers, store, "ddp", [(1, 1), (2, 3), (1, 4)])
    for straight, again in zip(whole, parts, strict=True):
        assert again.metrics == pytest.approx(dict(straight.metrics), rel=1e-9)
    with store.file(parts[-1].checkpoint) as archive:
        folder = FolderCheckpoint.from_archive(archive)
    assert [file.name for file in folder.path.iterdir()] == ["state.pt"]


@pytest.mark.long
def test_a_resized_loop_of_accelerate_learns_what_one_never_resized_learns(workers, tmp_path):
    pytest.importorskip("accelerate", reason="pip install 'rubberband-tune[transformers]'")
    store = open_store(str(tmp_path))
    whole = resized(workers, store, "accelerated", [(1, 3)])
    parts = resized(workers, store, "accelerated", [(1, 1), (2, 2), (1, 3)])
    for straight, again in zip(whole, parts, strict=True):
        assert again.metrics == pytest.approx(dict(straight.metrics), rel=1e-6)


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
def test_a_failure_on_any_worker_is_that_of_the_trial(workers, tmp_path, name, line):
    found = run(workers[:2], open_store(str(tmp_path)), name)
    failures = [item for items in found for item in items if isinstance(item, SegmentFailure)]
    first = next(failure for failure in failures if not failure.secondary)
    assert first.message == line
    assert "Traceback" in first.details


def test_a_function_that_returns_has_ended_or_reports_what_it_returns(workers, tmp_path):
    store = open_store(str(tmp_path))
    first = run(workers[:1], store, "ends")[0]
    assert [type(item) for item in first[1:]] == [SegmentReport, SegmentReport, SegmentEnded]
    once = run(workers[:1], store, "returns_metrics")[0][-1]
    assert (once.metrics, once.ended) == ({"loss": 0.5}, True)


def test_a_function_begins_with_the_same_draws_in_each_stage_and_on_each_worker(workers, tmp_path):
    """A part that is held out at random would be another one, on which other workers, or earlier stages, train."""
    store = open_store(str(tmp_path))
    first, second = resized(workers, store, "draws", [(1, 1), (2, 2)])
    assert first.metrics["loss"] == second.metrics["loss"] == second.metrics["of_last"]


@pytest.mark.long
def test_a_rank_in_the_worker_s_own_environment_is_not_that_of_the_gang(tmp_path):
    with gang_of(1, RANK="7", LOCAL_RANK="7", WORLD_SIZE="9") as own:
        found = run(own, open_store(str(tmp_path)), "draws", until_iterations=1)[0]
    assert found[-1].metrics["rank"] == 0.0
