"""Gangs of real processes that lose a worker or wait for one: who learns what, and who stays warm."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from rubberband.executor import CheckpointRef, Entrypoint, LocalCheckpointStore, SegmentReport
from rubberband.executor.checkpoints import Payload
from tests.builders import segments
from tests.builders.processes.segment_worker import Worker, gang_of, run_gang
from tests.builders.segments import reports

LOSSY = Entrypoint.parse("tests.builders.trials.nccl_trials:Lossy", [Path(__file__).parents[2]])
WAITING = Entrypoint.parse("tests.builders.trials.waiting_trials:Waiting", [Path(__file__).parents[2]])
WAIT_S = 1.4
SEGMENT = replace(segments.SEGMENT, until_iterations=3)


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    with gang_of(2) as started:
        yield started


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_worker_of_gpus_that_raises_is_heard_and_both_stay_warm(workers, store, rank):
    results = run_gang(workers, LOSSY, replace(SEGMENT, config={"raise_on_rank": rank}), store)
    failure, echo = results[rank][-1], results[1 - rank][-1]
    assert (failure.message, failure.secondary) == ("ArithmeticError: no more", False)
    assert (echo.message, echo.secondary) == (f"worker {rank} failed: ArithmeticError: no more", True)
    assert len(reports(run_gang(workers, LOSSY, SEGMENT, store)[0])) == 3


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_worker_of_gpus_that_is_killed_leaves_the_other_warm_and_nothing_worthless_is_reported(workers, store, rank):
    results = run_gang(workers, LOSSY, replace(SEGMENT, config={"killed_rank": rank}), store)
    assert results[rank] is None
    echo = results[1 - rank][-1]
    assert (echo.message, echo.secondary) == (f"the process of worker {rank} is gone", True)
    assert not any(isinstance(item, SegmentReport) for item in results[1 - rank])
    workers[rank].stop()
    workers[rank] = Worker()
    assert len(reports(run_gang(workers, LOSSY, SEGMENT, store)[0])) == 3


@dataclass(frozen=True, slots=True)
class SlowStore(LocalCheckpointStore):
    """Takes longer than a collective may."""

    def save(self, trial: int, iterations: int, payload: Payload) -> CheckpointRef:
        time.sleep(WAIT_S if iterations == 2 else 0.0)  # collectives end by real time
        return LocalCheckpointStore.save(self, trial, iterations, payload)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"slow": 1, "at": "data"},
        pytest.param({"slow": 0, "at": "data"}, marks=pytest.mark.long),
        pytest.param({"slow": 1, "at": "restore"}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_gang_waits_for_data_and_store_longer_than_a_collective_may_take(workers, store, tmp_path, config):
    (first,) = reports(run_gang(workers, WAITING, replace(SEGMENT, until_iterations=1), store)[0])
    segment = replace(SEGMENT, from_iterations=1, until_iterations=4, checkpoint=first.checkpoint, config=config)
    found = run_gang(workers, WAITING, segment, store if config else SlowStore(tmp_path))
    assert [report.iterations for report in reports(found[0])] == [2, 3, 4]
    assert found[1] == []
