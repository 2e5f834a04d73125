"""A worker process that stays warm, as a slot's does, and runs the segments that it is sent; and its client.

The protocol is pickles in a pipe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import current_process
from multiprocessing.connection import Connection
from typing import Any

from rubberband.cloud.local.ray_node import free_port
from rubberband.executor.checkpoints import CheckpointStore
from rubberband.executor.training.entrypoint import Entrypoint
from rubberband.executor.training.run import run_segment
from rubberband.executor.training.segment import Segment
from tests.integration.forked import CONTEXT, start

Shares = Sequence[Sequence[int]]


def run_unequal(entrypoint: Entrypoint, segment: Segment, shares: Shares) -> tuple[list[float], dict[str, Any]]:
    """Train with the given shares, step by step; train losses and the weights in the end."""
    from rubberband.executor.training.gang import Gang
    from rubberband.executor.training.loop import TorchRunner

    gang = Gang.join(
        rank=segment.rank, num_workers=segment.num_workers, rendezvous=segment.rendezvous, device=segment.device
    )
    steps = 0

    def policy(batch_size: int, num_workers: int) -> Sequence[int]:
        nonlocal steps
        steps += 1
        wanted = shares[(steps - 1) % len(shares)] if num_workers > 1 else [16]
        assert sum(wanted) == 16
        return wanted

    runner = TorchRunner(entrypoint.load()(), segment, gang, shares=policy)
    metrics = [runner.iterate(iterations) for iterations in range(1, segment.until_iterations + 1)]
    weights = {name: weight.clone() for name, weight in runner._module.state_dict().items()}
    runner.part()
    return [values.get("train_loss", 0.0) for values in metrics], weights


class Worker:
    """A warm worker in another process."""

    def __init__(self) -> None:
        self._jobs, theirs = CONTEXT.Pipe()
        self._process = start(_serve, theirs)
        theirs.close()

    @property
    def pid(self) -> int:
        """Of its process."""
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
        """End the process."""
        self._process.kill()
        self._process.join()
        self._jobs.close()


def run_gang(
    workers: Sequence[Worker], entrypoint: Entrypoint, segment: Segment, last: CheckpointStore | Shares
) -> list[Any]:
    """Run one segment on all the workers; what each of them got, None for one whose process ended."""
    rendezvous = f"tcp://127.0.0.1:{free_port()}"
    for rank, worker in enumerate(workers):
        worker.send(entrypoint, replace(segment, rank=rank, num_workers=len(workers), rendezvous=rendezvous), last)
    results = []
    for worker in workers:
        try:
            results.append(worker.receive())
        except EOFError:
            results.append(None)
    return results


def _serve(jobs: Connection) -> None:
    """Serve jobs until there are no more."""
    # It ends with this pipe, and a trial may start loader workers, which daemons may not.
    current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    while True:
        try:
            entrypoint, segment, last = jobs.recv()
        except EOFError:
            return
        run = run_unequal if isinstance(last, list) else run_segment
        result = run(entrypoint, segment, last)
        jobs.send(result if isinstance(result, tuple) else list(result))
