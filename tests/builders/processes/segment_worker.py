"""A worker process that stays warm, as a slot's does, and runs the segments that it is sent; and its client.

The protocol is pickles in a pipe.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import current_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rubberband.cloud.ray_head.ray_node import free_port
from rubberband.executor import (
    CheckpointStore,
    Entrypoint,
    Segment,
    SegmentFailure,
    SegmentReport,
    SegmentStarted,
    SegmentUse,
    run_segment,
)
from tests.builders.forked import CONTEXT, start

Shares = Sequence[Sequence[int]]
Unequal = tuple[list[float], dict[str, Any], bytes, int]
"""What `run_unequal` returns."""


def run_unequal(entrypoint: Entrypoint, segment: Segment, shares: Shares, payload: bytes | None = None) -> Unequal:
    """Train with the given shares, step by step; train losses, and weights, checkpoint and passes in the end.

    It begins from the checkpoint `payload`, if there is one.
    """
    from torch.distributed.tensor import DTensor

    from rubberband.executor import TorchRunner
    from rubberband.executor import WorkerGang as Gang

    gang = Gang.join(
        rank=segment.rank, num_workers=segment.num_workers, rendezvous=segment.rendezvous, device=segment.device
    )
    steps = 0
    trial = entrypoint.load()()

    def policy(batch_size: int, num_workers: int) -> Sequence[int]:
        nonlocal steps
        steps += 1
        wanted = shares[(steps - 1) % len(shares)] if num_workers > 1 else [16]
        assert sum(wanted) == 16
        return wanted

    runner = TorchRunner(trial, segment, gang, shares=policy)
    runner.begin(payload)
    metrics = [
        runner.iterate(iterations) for iterations in range(segment.from_iterations + 1, segment.until_iterations + 1)
    ]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "checkpoint")
        write = runner.dump(segment.until_iterations, {}, is_last=True)
        assert callable(write)
        write(file)
        saved = file.read_bytes()
    state = runner.module.state_dict()
    weights = {name: each.full_tensor() if isinstance(each, DTensor) else each.clone() for name, each in state.items()}
    passes = getattr(trial, "batches", 0)
    runner.part()
    return [values.get("train_loss", 0.0) for values in metrics], weights, saved, passes


class Worker:
    def __init__(self, **environment: str) -> None:
        self._jobs, theirs = CONTEXT.Pipe()
        self._process = start(_serve, theirs, environment)
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def send(self, *job: Any) -> None:
        """Let it run `run_segment(*job)`, or `run_unequal` where the third argument is a list."""
        self._jobs.send(job)

    def receive(self) -> Any:
        """What came of it; EOFError where the process ended."""
        try:
            return self._jobs.recv()
        except ConnectionError:
            raise EOFError from None

    def stop(self) -> None:
        self._process.kill()
        self._process.join()
        self._jobs.close()


@contextmanager
def gang_of(num_workers: int, **environment: str) -> Iterator[list[Worker]]:
    """Warm workers with these variables, which end with the block."""
    started = [Worker(**environment) for _ in range(num_workers)]
    try:
        yield started
    finally:
        for worker in started:
            worker.stop()


def run_gang(
    workers: Sequence[Worker], entrypoint: Entrypoint, segment: Segment, last: CheckpointStore | Shares, *more: Any
) -> list[Any]:
    """Run one segment on all the workers; what each of them got, None for one whose process ended."""
    rendezvous = f"tcp://127.0.0.1:{free_port()}"
    for rank, worker in enumerate(workers):
        worker.send(
            entrypoint, replace(segment, rank=rank, num_workers=len(workers), rendezvous=rendezvous), last, *more
        )
    results = []
    for worker in workers:
        try:
            results.append(worker.receive())
        except EOFError:
            results.append(None)
    return results


def resized(
    workers: Sequence[Worker],
    entrypoint: Entrypoint,
    segment: Segment,
    store: CheckpointStore,
    parts: Sequence[tuple[Any, ...]],
) -> list[SegmentReport]:
    """Run parts (workers, until, changes of the configuration), each from where the last one ended; all reports."""
    found: list[SegmentReport] = []
    for num_workers, until, *changes in parts:
        part = replace(
            segment,
            config={**segment.config, **(changes[0] if changes else {})},
            from_iterations=len(found),
            until_iterations=until,
            checkpoint=found[-1].checkpoint if found else None,
        )
        (started, *reports), *others = run_gang(workers[:num_workers], entrypoint, part, store)
        assert isinstance(started, SegmentStarted), started
        assert all(isinstance(report, SegmentReport) for report in reports), reports
        assert others == [[]] * (num_workers - 1)
        found += reports
    return found


def run_again(
    workers: Sequence[Worker], entrypoint: Entrypoint, segment: Segment, store: CheckpointStore
) -> tuple[list[SegmentReport], list[SegmentFailure]]:
    """The reports and failures of a gang that begins again where a worker runs out of memory, as attempts let it.

    Without workers it is one worker, in this process.
    """
    found: list[SegmentReport] = []
    for _ in range(9):
        alone = not workers and [list(run_segment(entrypoint, segment, store))]
        ends = alone or run_gang(workers, entrypoint, segment, store)
        found += [item for item in ends[0] if isinstance(item, SegmentReport)]
        failures = [end[-1] for end in ends if end and isinstance(end[-1], SegmentFailure)]
        most = next((failure.most_per_gpu for failure in failures if not failure.secondary), None)
        if most is None:
            return found, failures
        segment = replace(segment, most_per_gpu=most)
        if found:
            segment = replace(segment, from_iterations=found[-1].iterations, checkpoint=found[-1].checkpoint)
    raise AssertionError("it begins again and again")


def _serve(jobs: Connection, environment: Mapping[str, str]) -> None:
    """Serve jobs until there are no more."""
    os.environ.update(environment)
    # It ends with this pipe, and a trial may start loader workers, which daemons may not.
    current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    while True:
        try:
            entrypoint, segment, last, *more = jobs.recv()
        except EOFError:
            return
        run = run_unequal if isinstance(last, list) else run_segment
        result = run(entrypoint, segment, last, *more)
        if not isinstance(result, tuple):  # how a machine was used is the backend's matter
            result = [item for item in result if not isinstance(item, SegmentUse)]
        jobs.send(result)
