"""An attempt of asynchronous training: it goes on while workers are lost, and begins again if a server is.

A worker that dies alone is replaced on its slot and joins the gang again; its servers and the other workers go on. A
server takes its shard with it when it dies: then all begin again from the latest checkpoint, with new servers. Either
may happen once between two reports; the second time, the trial has failed. Where a worker runs out of memory, all begin
again in smaller passes. An instance that is lost ends the attempt,
as it does that of any gang.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import RayError

from rubberband.executor.core.events import Slot
from rubberband.executor.ray.attempt import GRACE_S, LOOK_S, Attempt, Gathered
from rubberband.executor.ray.workers import Worker, last_line
from rubberband.executor.training.asynchronous.protocol import SECRET_BYTES
from rubberband.executor.training.segment import SegmentFailure, SegmentReport

_SERVERS_S = 120.0
"""The longest time for the servers' processes to start."""
_UNNEEDED_S = 10.0
"""The longest wait for gradients after the last report: about as long as another worker takes to start."""


@dataclass(eq=False)
class _Gang:
    """Workers and servers that run, by their streams."""

    workers: dict[Any, int] = field(default_factory=dict)
    servers: dict[Any, int] = field(default_factory=dict)
    coming: dict[int, Future[Worker]] = field(default_factory=dict)
    """Rank -> the worker that takes the place of a dead one."""


@dataclass(eq=False)
class AsyncAttempt(Attempt):
    """Carries out a StartTrial with parameter servers."""

    def abandon(self) -> None:
        self.stop()

    def __post_init__(self) -> None:
        super().__post_init__()
        self._servers: dict[int, Any] = {}
        """By number: the actor that serves."""
        self._restarts = 0
        """Beginnings since the latest report."""
        self._fallen: set[int] = set()
        """Ranks whose worker died since the latest report."""

    def _train(self, workers: Sequence[Worker]) -> None:
        gathered, current = Gathered(), list(workers)
        while True:
            gathered.deaths.clear()
            gathered.failures.clear()
            gang = _Gang()
            with self._mutex:
                if self._stopped:
                    return  # the workers may train something else by now
                self._busy = dict(enumerate(current))
            lost = self._open(gang, gathered)
            if not lost:
                lost = self._follow_gang(gang, gathered)
            self._drop_servers()
            most = gathered.most_per_gpu
            if not (lost or most) or self._stopped:
                break
            if most:
                self.segment = replace(self.segment, most_per_gpu=most)
            elif self._restarts >= 1:
                # That another server started shows that the instance lives.
                gathered.failures.clear()
                gathered.deaths.append("parameter servers were lost twice without a report in between")
                break
            else:
                self._restarts += 1
            self._replace_busy()
            fresh = self._await_workers()
            if fresh is None:
                break
            current = fresh
        self._conclude(gathered)

    def _open(self, gang: _Gang, gathered: Gathered) -> bool:
        """Start servers and workers; return whether a server was lost."""
        training = self.segment.training
        assert training is not None
        self.segment = replace(self.segment, secret=secrets.token_hex(SECRET_BYTES))
        streams = []
        for index in range(training.servers):
            slot = self.start.gang[index % len(self.start.gang)]
            workers = self.workers_of(slot.instance)
            if workers is None:
                return False
            self._servers[index] = workers.server((slot.gpu, index // len(self.start.gang)))
            streams.append(self._servers[index].run.options(num_returns="streaming").remote(self.segment, index))
        try:
            addresses = [ray.get(next(stream), timeout=_SERVERS_S) for stream in streams]
        except RayError as error:
            gathered.deaths.append(f"parameter server: {last_line(error)}")
            return True
        self.segment = replace(self.segment, servers=tuple(addresses))
        gang.servers = {stream: index for index, stream in enumerate(streams)}
        with self._mutex:
            if self._stopped:
                return False
            self._vitals = [worker.vitals.remote(self.log) for worker in self._busy.values()]
        for rank, worker in self._busy.items():
            self._order(gang, rank, worker)
        return False

    def _order(self, gang: _Gang, rank: int, worker: Worker) -> None:
        stream = worker.run.options(num_returns="streaming").remote(replace(self.segment, rank=rank), self.log)
        gang.workers[stream] = rank

    def _follow_gang(self, gang: _Gang, gathered: Gathered) -> bool:
        """Pass on the items until all workers have returned; return whether a server was lost before the end."""
        deadline, lost = float("inf"), False
        while not self._stopped and time.monotonic() < deadline:
            if not gang.workers and not gang.coming and not (gang.servers and gathered.last is not None):
                break
            self._rejoin(gang)
            streams = [*gang.workers, *gang.servers]
            if not streams:
                time.sleep(LOOK_S)
                continue
            for stream in ray.wait(streams, num_returns=1, timeout=LOOK_S)[0]:
                if stream in gang.servers:
                    lost |= self._hear_server(gang, stream, gathered)
                else:
                    self._hear_worker(gang, stream, gathered)
            ends = lost or bool(gathered.failures)
            if ends and gathered.last is None:
                self._drop_servers()  # the other workers end
            if ends or gathered.last is not None:
                deadline = min(deadline, time.monotonic() + (_UNNEEDED_S if gathered.last is not None else GRACE_S))
        if gathered.last is not None or any(not failure.secondary for failure in gathered.failures):
            return False
        return lost or bool(gathered.failures)

    def _hear_server(self, gang: _Gang, stream: Any, gathered: Gathered) -> bool:
        """Take in an item of a server; return whether it died."""
        try:
            item = ray.get(next(stream))
            assert isinstance(item, SegmentFailure)
            gathered.failures.append(item)
        except StopIteration:
            self._servers.pop(gang.servers.pop(stream), None)
        except RayError as error:
            index = gang.servers.pop(stream)
            if index in self._servers:  # it was not dropped
                gathered.deaths.append(f"parameter server {index}: {last_line(error)}")
                return True
        return False

    def _hear_worker(self, gang: _Gang, stream: Any, gathered: Gathered) -> None:
        """Take in an item of a worker; one that died is replaced, unless it did so before without progress."""
        rank = gang.workers[stream]
        try:
            item = ray.get(next(stream))
            self._take_in(item, gathered)
            if isinstance(item, SegmentFailure) and self._loses_gpu(rank, item):
                del gang.workers[stream]
        except StopIteration:
            del gang.workers[stream]
            if rank not in gang.coming:
                self._busy.pop(rank, None)
        except RayError as error:
            del gang.workers[stream]
            if gathered.last is not None:
                return
            if rank in self._fallen:
                gathered.deaths.append(f"rank {rank}: {last_line(error)}")
                self._give_up(gathered)
                return
            self._fallen.add(rank)
            self._replace(gang, rank)

    def _give_up(self, gathered: Gathered) -> None:
        kind, message, details = gathered.cause()
        gathered.failures.append(SegmentFailure(kind=kind, message=message, details=details, secondary=False))

    def _replace(self, gang: _Gang, rank: int) -> None:
        """Begin to replace a dead worker on its slot."""
        slot, dead = self.start.gang[rank], self._busy.pop(rank)
        workers = self.workers_of(slot.instance)
        if workers is not None:
            workers.replace(slot.gpu, dead)
            gang.coming[rank] = workers.worker(slot.gpu)

    def _rejoin(self, gang: _Gang) -> None:
        """Let replaced workers that are warm take part."""
        for rank, coming in list(gang.coming.items()):
            if coming.done():
                del gang.coming[rank]
                self._busy[rank] = coming.result()
                self._order(gang, rank, coming.result())

    def _report(self, report: SegmentReport) -> None:
        super()._report(report)
        self._restarts = 0
        self._fallen.clear()

    def _replace_busy(self) -> list[Slot]:
        self._drop_servers()
        return super()._replace_busy()

    def _drop_servers(self) -> None:
        """End the servers that still serve."""
        servers, self._servers = self._servers, {}
        for index, server in servers.items():
            slot = self.start.gang[index % len(self.start.gang)]
            workers = self.workers_of(slot.instance)
            if workers is not None:
                workers.drop_server((slot.gpu, index // len(self.start.gang)), server)
