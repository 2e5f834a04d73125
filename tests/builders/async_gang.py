"""An asynchronous gang in processes of this machine, without Ray: workers come and go as a test says."""

from __future__ import annotations

import contextlib
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
from typing import Any
from unittest import mock

from rubberband.executor import (
    CheckpointStore,
    Entrypoint,
    Segment,
    SegmentFailure,
    SegmentReport,
    run_segment,
    run_server,
)
from rubberband.executor.training.asynchronous.protocol import Wire
from rubberband.values.asynchronous import AsyncTraining
from tests.builders.forked import CONTEXT, start


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
