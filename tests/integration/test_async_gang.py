"""Asynchronous gangs of real processes: equal to synchronous training without staleness, and alive without a worker."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch

from rubberband.executor import (
    CheckpointRef,
    CheckpointStore,
    Entrypoint,
    Segment,
    SegmentFailure,
    SegmentReport,
    SegmentUse,
    run_segment,
    run_server,
)
from rubberband.executor.training.asynchronous.protocol import Wire
from rubberband.executor.training.torch_trial import ASYNC_REFUSAL
from rubberband.values.asynchronous import AsyncTraining
from tests.builders.forked import CONTEXT, start
from tests.builders.segments import SEGMENT, reports
from tests.builders.trials import paced_trials
from tests.builders.waiting import eventually


def _worker(entrypoint: Entrypoint, segment: Segment, store: CheckpointStore, items: Connection) -> None:
    for item in run_segment(entrypoint, segment, store):
        items.send(item)
    items.close()


def _dies_amid(after: int, entrypoint: Entrypoint, segment: Segment, store: CheckpointStore, items: Connection) -> None:
    """A worker that is killed soon after its first `after` items, amid whatever it does then."""
    for number, item in enumerate(run_segment(entrypoint, segment, store), start=1):
        items.send(item)
        if number == after:
            threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGKILL)).start()


def _dies_between_servers(entrypoint: Entrypoint, segment: Segment, store: CheckpointStore, items: Connection) -> None:
    """A worker whose tenth gradient reaches the first server alone."""
    announce, seen = Wire.announce, itertools.count(1)

    def announce_or_die(wire: Wire, header: dict[str, Any], size_bytes: int) -> None:
        if "number" in header and next(seen) == 10:
            time.sleep(0.2)  # the first server has it by then, and nothing here hears of that
            os._exit(1)
        announce(wire, header, size_bytes)

    with mock.patch.object(Wire, "announce", announce_or_die):
        _worker(entrypoint, segment, store, items)


def _server(entrypoint: Entrypoint, segment: Segment, index: int, listener: socket.socket, items: Connection) -> None:
    failure = run_server(entrypoint, segment, index, listener)
    if failure is not None:
        items.send(failure)
    items.close()


@dataclass(eq=False)
class Process:
    process: BaseProcess
    items: Connection

    def next(self) -> Any:
        """The next item; None where the process has ended."""
        try:
            return self.items.recv()
        except EOFError:
            return None

    def rest(self) -> list[Any]:
        return list(iter(self.next, None))

    def kill(self) -> None:
        """End it as a kernel does that lacks memory."""
        self.process.kill()
        self.process.join()


@dataclass(eq=False)
class AsyncGang:
    """Servers, and workers that join them."""

    entrypoint: Entrypoint
    segment: Segment
    store: CheckpointStore
    servers: list[Process] = field(default_factory=list)
    workers: list[Process] = field(default_factory=list)

    def join(
        self, rank: int, *, dies_between_servers: bool = False, dies_after: int | None = None, **changes: Any
    ) -> Process:
        segment = replace(self.segment, rank=rank, **changes)
        ours, theirs = CONTEXT.Pipe(duplex=False)
        target = _dies_between_servers if dies_between_servers else _worker
        target = target if dies_after is None else partial(_dies_amid, dies_after)
        worker = Process(start(target, self.entrypoint, segment, self.store, theirs), ours)
        theirs.close()
        self.workers.append(worker)
        return worker

    def all(self) -> list[SegmentReport]:
        """Start all workers; the reports of the whole segment."""
        workers = [self.join(rank) for rank in range(self.segment.num_workers)]
        found = [item for item in workers[0].rest() if isinstance(item, (SegmentReport, SegmentFailure))]
        assert all(isinstance(item, SegmentReport) for item in found), found
        for worker in workers[1:]:
            assert not [item for item in worker.rest() if isinstance(item, SegmentFailure)]
        return [item for item in found if isinstance(item, SegmentReport)]


@contextlib.contextmanager
def async_gang(
    entrypoint: Entrypoint, segment: Segment, store: CheckpointStore, training: AsyncTraining, workers: int = 2
) -> Iterator[AsyncGang]:
    """Start the servers of a segment; all processes end with the block."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(training.servers)]
    segment = replace(
        segment,
        num_workers=workers,
        training=training,
        servers=tuple(f"127.0.0.1:{each.getsockname()[1]}" for each in listeners),
        secret=secrets.token_hex(32),
    )
    gang = AsyncGang(entrypoint, segment, store)
    try:
        for index, listener in enumerate(listeners):
            ours, theirs = CONTEXT.Pipe(duplex=False)
            gang.servers.append(Process(start(_server, entrypoint, segment, index, listener, theirs), ours))
            theirs.close()
            listener.close()
        yield gang
    finally:
        for each in [*gang.workers, *gang.servers]:
            each.kill()
            each.items.close()


SHARED = AsyncTraining(servers=2, max_staleness=0)
FREE = AsyncTraining(servers=2)
ITERATIONS = 150
"""Enough for a worker to die and another to come."""
PACED = Entrypoint.parse("tests.builders.trials.paced_trials:Paced", (os.getcwd(),))
COUNTED = replace(SEGMENT, config={"lr": 0.1, "compute_s": 0.0005}, metric="accuracy")


def entry(name: str) -> Entrypoint:
    return Entrypoint.parse(f"tests.builders.trials.segment_trials:{name}", (os.getcwd(),))


def content(store: CheckpointStore, ref: CheckpointRef | None) -> dict[str, Any]:
    assert ref is not None
    found: dict[str, Any] = torch.load(io.BytesIO(store.load(ref)), weights_only=False)
    return found


def test_without_staleness_it_equals_synchronous_training(store: CheckpointStore) -> None:
    segment = replace(SEGMENT, config={"optimizer": "adam", "scheduler": "plateau"})
    alone = reports(list(run_segment(entry("Counted"), segment, store)))
    with async_gang(entry("Counted"), segment, store, SHARED) as gang:
        found = gang.all()
    assert [each.iterations for each in found] == [1, 2, 3, 4]
    for one, other in zip(alone, found, strict=True):
        assert other.metrics == pytest.approx(one.metrics, rel=0.0, abs=1e-12)
        assert other.batch.updates is not None
        assert (other.batch.updates.updates, other.batch.updates.max_staleness) == (4, 0)
    expected, held = content(store, alone[-1].checkpoint), content(store, found[-1].checkpoint)
    for name, weight in expected["model"].items():
        assert torch.allclose(held["model"][name], weight, rtol=0.0, atol=1e-12)
    assert held["scheduler"].pop("best") == pytest.approx(expected["scheduler"].pop("best"), rel=1e-12)
    assert held["scheduler"] == expected["scheduler"]
    assert held["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]
    for number, state in expected["optimizer"]["state"].items():
        for name, value in state.items():
            assert torch.allclose(held["optimizer"]["state"][number][name], value, rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("training", [FREE, SHARED], ids=["free", "shared"])
def test_all_workers_end_with_the_iteration_in_which_rank_0_says_so(
    store: CheckpointStore, training: AsyncTraining
) -> None:
    with async_gang(entry("Ending"), replace(SEGMENT, until_iterations=50), store, training) as gang:
        found = gang.all()
    assert [(each.iterations, each.ended) for each in found] == [(1, False), (2, True)]
    assert content(store, found[-1].checkpoint)["iterations"] == 2


def check_counts(found: list[SegmentReport], *, lost: int = 0) -> None:
    """Every update is in the parameters, and every sample was used as often as there were epochs.

    Batches in hand at the end of an iteration come later.
    """
    for each in found:
        assert each.batch.updates is not None
        assert each.metrics["updates"] >= each.iterations * paced_trials.UPDATES - lost
        assert each.metrics["least_used"] >= each.iterations - 1
        assert each.metrics["most_used"] <= each.iterations + 1


def test_it_resumes_with_another_number_of_workers_and_trains_every_batch_once(store: CheckpointStore) -> None:
    with async_gang(PACED, replace(COUNTED, until_iterations=3), store, FREE) as gang:
        first = gang.all()
    held = content(store, first[-2].checkpoint)["batching"]["data"]
    used = set(range(held["next_ticket"])) - set(held["returned"])
    assert len(used) == 2 * paced_trials.UPDATES
    rest = replace(COUNTED, from_iterations=2, until_iterations=4, checkpoint=first[-2].checkpoint)
    with async_gang(PACED, rest, store, replace(FREE, max_staleness=1), workers=1) as gang:
        second = gang.all()
    assert [each.iterations for each in first + second] == [1, 2, 3, 3, 4]
    check_counts(first + second)
    # One worker takes the batches in order, and those that were in hand first.
    assert second[-1].metrics["least_used"] == second[-1].metrics["most_used"] == 4


def test_loader_workers_load_the_batches_that_a_worker_takes_next(store: CheckpointStore) -> None:
    segment = replace(SEGMENT, config={"num_workers": 2}, metric="train_loss", until_iterations=3)
    with async_gang(entry("Loaded"), segment, store, AsyncTraining(), workers=1) as gang:
        ahead = gang.all()
    segment = replace(segment, config={"num_workers": 0})
    with async_gang(entry("Loaded"), segment, store, AsyncTraining(), workers=1) as gang:
        alone = gang.all()
    assert [each.metrics for each in ahead] == [each.metrics for each in alone]
    data = content(store, ahead[-1].checkpoint)["batching"]["data"]
    assert data["next_ticket"] > 12  # batches are in hand
    assert len(set(range(data["next_ticket"])) - set(data["returned"])) == 12


@pytest.mark.parametrize("training", [FREE, pytest.param(SHARED, marks=pytest.mark.long)], ids=["free", "shared"])
def test_it_goes_on_without_a_worker_that_is_killed_and_takes_in_another(
    store: CheckpointStore, training: AsyncTraining
) -> None:
    segment = replace(SEGMENT, until_iterations=ITERATIONS)
    with async_gang(entry("Regression"), segment, store, training) as gang:
        first, second = gang.join(0), gang.join(1)
        items = [first.next()]
        while (last := items[-1]) is not None and not takes_two(last):
            items.append(first.next())
        second.kill()
        gang.join(1)
        items += first.rest()
    found = [item for item in items if isinstance(item, SegmentReport)]
    assert [each.iterations for each in found] == list(range(1, ITERATIONS + 1)), items[-1]
    uses = [each.batch.updates for each in found if each.batch.updates is not None]
    assert sum(use.updates + (use.lost if training is FREE else 0) for use in uses) == 4 * ITERATIONS
    assert sum(use.lost for use in uses) <= 1
    assert {use.workers for use in uses} == {1, 2}


def takes_two(item: Any) -> bool:
    """Whether it reports an iteration of two workers."""
    updates = item.batch.updates if isinstance(item, SegmentReport) else None
    return updates is not None and updates.workers == 2


@pytest.mark.parametrize(
    "workers", [2, pytest.param(3, marks=pytest.mark.long)], ids=["rank 0 trains on", "others train on"]
)
def test_no_worker_waits_for_an_update_that_reached_one_server_alone(store: CheckpointStore, workers: int) -> None:
    with async_gang(entry("Regression"), replace(SEGMENT, until_iterations=40), store, FREE, workers) as gang:
        first = gang.join(0)
        for rank in range(1, workers):
            gang.join(rank, dies_between_servers=rank == 1)
        found = [item for item in first.rest() if isinstance(item, SegmentReport)]
    assert [each.iterations for each in found] == list(range(1, 41))


def test_rank_0_returns_to_the_servers_without_losing_an_update(store: CheckpointStore) -> None:
    with async_gang(PACED, replace(COUNTED, until_iterations=24), store, FREE) as gang:
        first, _ = gang.join(0, dies_after=4), gang.join(1)
        last = [item for item in first.rest() if isinstance(item, SegmentReport)][-1]
        again = gang.join(0, from_iterations=last.iterations, checkpoint=last.checkpoint)
        found = [item for item in again.rest() if isinstance(item, SegmentReport)]
    assert [each.iterations for each in found] == list(range(last.iterations + 1, 25))
    check_counts(found, lost=1)
    uses = [each.batch.updates for each in found if each.batch.updates is not None]
    assert any(use.workers == 2 for use in uses)  # the other one went on, and may end first


def rests(process: psutil.Process) -> bool:
    """Whether a process computes nothing: it is an iteration ahead, and waits."""
    before = process.cpu_times()
    time.sleep(0.5)  # whatever it computes shows in its times by then
    return process.cpu_times() == before


def test_rank_0_that_falls_behind_ends_iterations_before_it_goes_on(store: CheckpointStore, tmp_path: Path) -> None:
    segment = replace(SEGMENT, until_iterations=40, config={"counted": str(tmp_path)})
    with async_gang(entry("Regression"), segment, store, FREE) as gang:
        first, second = gang.join(0), gang.join(1)
        items = [first.next()]
        while not takes_two(items[-1]):
            items.append(first.next())
        assert first.process.pid is not None
        os.kill(first.process.pid, signal.SIGSTOP)
        batches = (tmp_path / str(second.process.pid)).stat
        before = batches().st_size
        other = psutil.Process(second.process.pid)
        eventually(lambda: batches().st_size >= before + 4 or rests(other), "the second worker goes on, or is ahead")
        os.kill(first.process.pid, signal.SIGCONT)
        items += first.rest()
        assert [item for item in second.rest() if not isinstance(item, SegmentUse)] == []
    found = [item for item in items if isinstance(item, SegmentReport)]
    assert [each.iterations for each in found] == list(range(1, 41))
    assert all(each.batch.updates is not None and each.batch.updates.updates == 4 for each in found)


@pytest.mark.long
def test_workers_end_when_a_server_is_killed(store: CheckpointStore) -> None:
    with async_gang(entry("Regression"), replace(SEGMENT, until_iterations=10_000), store, FREE) as gang:
        first, second = gang.join(0), gang.join(1)
        first.next(), first.next()
        gang.servers[1].kill()
        ends = [each.rest()[-1] for each in (first, second)]
    assert all(isinstance(end, SegmentFailure) and end.secondary for end in ends)
    assert "a parameter server is gone" in ends[0].message


@pytest.mark.parametrize(
    ("words", "training", "message"),
    [
        ({"precision": "fp16"}, FREE, f'precision = "fp16" {ASYNC_REFUSAL}'),
        ({"static_graph": True}, FREE, f"static_graph {ASYNC_REFUSAL}"),
        ({"gradient_compression": "bf16"}, FREE, f"gradient_compression {ASYNC_REFUSAL}"),
        ({"gradient_clip_norm": 1.0}, SHARED, f"gradient_clip_norm with max_staleness: 0 {ASYNC_REFUSAL}"),
        ({}, AsyncTraining(servers=5), "training.servers=5 are more than the tensors that are trained (4)"),
    ],
)
def test_words_that_do_not_go_with_it_are_refused_in_one_line(
    store: CheckpointStore, words: dict[str, Any], training: AsyncTraining, message: str
) -> None:
    segment: Segment = replace(SEGMENT, config={"words": words}, training=training, num_workers=2)
    (failure,) = run_segment(entry("Regression"), segment, store)
    assert isinstance(failure, SegmentFailure)
    assert failure.message.startswith(message)
    assert "\n" not in failure.message


def test_a_dataset_without_positions_is_refused(store: CheckpointStore) -> None:
    segment = replace(SEGMENT, config={"num_workers": 0, "shards": 1}, training=FREE)
    (failure,) = run_segment(entry("Loaded"), segment, store)
    assert isinstance(failure, SegmentFailure)
    assert failure.message == f"a dataset that is read from front to end {ASYNC_REFUSAL}"
