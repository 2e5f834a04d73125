"""The process group of a gang: the workers of one torch trial meet, wait for each other, and part.

A gang of one has none. Collectives (gradients) go through torch.distributed. A wait that may take longer than any
sensible timeout of a collective goes through the store: for rank 0's evaluation and checkpoints, and for the data of
all. It ends when all come, or when one of them fails or is gone, as the life lines say; how long it may take is for
the driver to say.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch

# DDP and the optimizers import it at their first use. If the process group exists by then, something in there keeps a
# reference, and its connections stay open when it is destroyed: the others would wait in vain.
import torch._dynamo
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from rubberband.executor.training.failures import GangBroken, TrialFailure
from rubberband.executor.training.lifeline import Lifeline, Peers, accepted, connected
from rubberband.executor.training.trial import Device
from rubberband.executor.training.worker_process import take_port

RENDEZVOUS_TIMEOUT = timedelta(seconds=60)
"""The longest wait of the workers for each other at the start."""
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""The longest wait of a collective for a silent worker: longer than the driver waits for one that hangs."""
EXCHANGE_TIMEOUT = timedelta(seconds=60)
"""The longest wait for a worker that does not exchange a text, and may be in a collective."""
FAREWELL_TIMEOUT = timedelta(seconds=10)
"""The longest time that rank 0 keeps the store open for the others at the end."""
LEAVE_TIMEOUT_S = 10.0
"""The longest time to leave a process group of GPUs; a process that does not manage to is ended."""

_SHORTEST_LOOK_S, _LONGEST_LOOK_S = 0.001, 0.02
_LIFELINE = "lifeline"
_CONNECTING_BYTES = 32 * 2**20
_leaving = threading.Lock()

_log = logging.getLogger(__name__)


class Gang(Peers):
    """This worker's membership in the gang; `close` must be called in the end."""

    def __init__(
        self, rank: int, num_workers: int, store: Store | None, device: Device = "cpu", line: Lifeline | None = None
    ) -> None:
        self.rank = rank
        self.num_workers = num_workers
        self._store = store
        self._device = device
        self._line = line
        self._group = None if store is None else dist.group.WORLD
        self._round = self._exchanged = self._met = 0
        self.waited_s = 0.0
        """Seconds in collectives of this object; on GPUs, they only begin in this time."""

    @classmethod
    def join(cls, *, rank: int, num_workers: int, rendezvous: str | None, device: Device) -> Gang:
        """Meet the other workers at `rendezvous` and form the process group (gloo, and on GPUs nccl beside it).

        Raises TrialFailure if rank 0 cannot listen there, and torch's DistError or GangBroken if another worker does
        not come.
        """
        if num_workers == 1:
            return cls(rank, num_workers, None)
        if rendezvous is None:
            raise ValueError(f"a gang of {num_workers} needs a rendezvous")
        place = urlsplit(rendezvous)
        if place.scheme != "tcp" or place.hostname is None or place.port is None:
            raise ValueError(f"rendezvous {rendezvous} is not tcp://host:port")
        store = _open_store(place.hostname, place.port, rank, num_workers)
        line = _tie(store, place.hostname, rank, num_workers, device)
        try:
            form_group(store, rank, num_workers, device)
        except BaseException:
            line.close()
            raise
        return cls(rank, num_workers, store, device, line)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.waited_s += time.perf_counter() - began
        self.check()

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum the tensor over all workers, in place."""
        if self._store is not None:
            with self._waiting():
                dist.all_reduce(tensor)
        return tensor

    def table(self, row: Sequence[float]) -> list[list[float]]:
        """Return the rows of all workers, by rank; every one is as long."""
        if self._store is None:
            return [list(row)]
        found = torch.zeros(self.num_workers, len(row), dtype=torch.float64, device="cpu")
        found[self.rank] = torch.tensor(list(row), dtype=torch.float64, device="cpu")
        rows: list[list[float]] = self.sum(found).tolist()
        return rows

    def copy(self, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        """Overwrite the tensors with those of rank `source`."""
        if self._store is not None:
            with self._waiting():
                for tensor in tensors:
                    dist.broadcast(tensor, source)

    def gather(self, found: Any) -> list[Any]:
        """Return what every rank found, in their order; it is small and can be pickled."""
        if self._store is None:
            return [found]
        gathered: list[Any] = [None] * self.num_workers
        with self._waiting():
            dist.all_gather_object(gathered, found)
        return gathered

    def sum_later(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to sum the tensor over all workers, in place; the result waits for the sum."""
        if self._store is None:
            return lambda: tensor
        work = dist.all_reduce(tensor, async_op=True)

        def wait() -> torch.Tensor:
            with self._waiting():
                work.wait()
            return tensor

        return wait

    def share(self, values: Sequence[float]) -> list[float]:
        """Return rank 0's `values` on every rank, by a collective; the others pass as many, which do not count."""
        if self._store is None:
            return list(values)
        tensor = torch.tensor(list(values), dtype=torch.float64, device="cpu")
        with self._waiting():
            dist.broadcast(tensor, 0)
        shared: list[float] = tensor.tolist()
        return shared

    def exchange(self, text: str) -> list[str] | None:
        """Return the texts of all ranks, by rank; None if some worker does not come within `EXCHANGE_TIMEOUT`.

        It is no collective, so a worker that does not come may be in one meanwhile.
        """
        if self._store is None:
            return [text]
        self._exchanged += 1
        keys = [f"exchanged-{self._exchanged}-{rank}" for rank in range(self.num_workers)]
        self._store.set(keys[self.rank], text)
        with self._waiting():
            try:
                self._store.wait(keys, EXCHANGE_TIMEOUT)
            except dist.DistStoreError as error:
                if "timeout" not in str(error).lower():
                    raise
                return None
        return [self._store.get(key).decode() for key in keys]

    def agree(self, value: float | None) -> float:
        """Return rank 0's `value` on every rank; the others wait for it. Raises GangBroken if a worker is lost."""
        self._round += 1
        key = f"agreed-{self._round}"
        self.check()
        if self.rank == 0:
            assert value is not None
            if self._store is not None:
                self._store.set(key, repr(value))
            return value
        assert self._store is not None
        self._await([key])
        return float(self._store.get(key).decode())

    def tell(self, name: str, text: str) -> None:
        """Leave a text of that name for rank 0; any thread may."""
        assert self._store is not None
        self._store.set(f"told-{name}-{self.rank}", text)

    def told(self, name: str) -> list[str]:
        """Return the texts of that name of the other ranks, once all are there. Raises GangBroken if one is lost."""
        keys = [f"told-{name}-{rank}" for rank in range(1, self.num_workers)]
        self._await(keys)
        assert self._store is not None
        return [self._store.get(key).decode() for key in keys]

    def meet(self) -> None:
        """Wait until every worker is here, however long that takes. Raises GangBroken if one is lost."""
        if self._store is None:
            return
        self._met += 1
        keys = [f"met-{self._met}-{rank}" for rank in range(self.num_workers)]
        self._store.set(keys[self.rank], "")
        self._await(keys)

    def _await(self, keys: list[str]) -> None:
        """Wait for keys of the store while the gang has all its workers.

        It looks again and again, later and later: a wait of the store itself prints a warning whenever it is over.
        """
        assert self._store is not None
        began = time.monotonic()
        while True:
            self.check()
            if self._store.check(keys):
                return
            time.sleep(min(_LONGEST_LOOK_S, _SHORTEST_LOOK_S + (time.monotonic() - began) / 20))

    def part(self) -> None:
        """Leave at the end of a segment without failure, together.

        The others wait for rank 0, which may wait for its checkpoint, and it keeps the store until all have read it.
        """
        in_order = True
        if self._store is not None:
            try:
                self.agree(0.0 if self.rank == 0 else None)
                if self.rank > 0:
                    self._store.set(f"left-{self.rank}", "")
                else:
                    self._store.wait([f"left-{rank}" for rank in range(1, self.num_workers)], FAREWELL_TIMEOUT)
            except (GangBroken, dist.DistError):
                if self.rank > 0:
                    raise
                in_order = False
                _log.warning("rank %d: the gang did not shut down cleanly", self.rank, exc_info=True)
            if self._line is not None:
                self._line.leave()
        self._leave(in_order=in_order)

    def close(self) -> None:
        """Leave at once, which breaks the others' collectives. Harmless when repeated or after `part`.

        The caller must have dropped every DistributedDataParallel: when the group is destroyed, its threads may wait
        for Python's global lock. Dropping `_group` releases it; dropping DDP's reducer, as its last owner, does not.
        """
        self._leave(in_order=False)

    def _leave(self, *, in_order: bool) -> None:
        if self._store is not None:
            self._store = None
            leave_group(self._device, in_order=in_order)
            self._group = None
        if self._line is not None:
            self._line.close()  # keeps `broken`


def _open_store(host: str, port: int, rank: int, num_workers: int) -> Store:
    try:
        return TCPStore(
            host,
            port,
            world_size=num_workers,
            is_master=rank == 0,
            timeout=RENDEZVOUS_TIMEOUT,
            wait_for_workers=True,
            master_listen_fd=take_port(port) if rank == 0 else None,
        )
    except dist.DistNetworkError as error:
        if rank == 0:
            line = f"rank 0 cannot listen at tcp://{host}:{port}: {error}".splitlines()[0]
            raise TrialFailure("raised", line) from error
        raise


def _tie(store: Store, host: str, rank: int, num_workers: int, device: Device) -> Lifeline:
    """Connect the life lines. Raises GangBroken if a worker does not come."""
    timeout_s = RENDEZVOUS_TIMEOUT.total_seconds()
    try:
        if rank == 0:
            with socket.create_server(("", 0), backlog=num_workers) as listener:
                store.set(_LIFELINE, str(listener.getsockname()[1]))
                lines = accepted(listener, num_workers, timeout_s)
        else:
            lines = connected(host, int(store.get(_LIFELINE)), rank, timeout_s)
    except OSError as error:
        raise GangBroken(f"the workers did not find each other at {host}: {error}") from error
    return Lifeline(rank, lines, lambda: release_waits(device))


def release_waits(device: Device) -> None:
    """Let collectives of this process return although another worker is gone; those of gloo do by themselves."""
    if device == "cuda":
        leave_group(device, in_order=False)


def form_group(store: Store, rank: int, num_workers: int, device: Device) -> None:
    """Form torch's default process group. For GPUs it has gloo too, for tensors of the host.

    NCCL's own reaction to errors would end the process, or let kernels return with worthless sums. The first collective
    connects all GPUs while there is memory.
    """
    if device == "cpu":
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_workers, timeout=COLLECTIVE_TIMEOUT)
        return
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("NCCL_DEBUG", "WARN")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        store=store,
        rank=rank,
        world_size=num_workers,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=torch.device("cuda", 0),
    )
    dist.all_reduce(torch.zeros(_CONNECTING_BYTES // 4, device="cuda"))
    torch.cuda.synchronize()


def leave_group(device: Device, *, in_order: bool) -> None:
    """Leave torch's process groups, if there are any; `in_order`: all workers do so.

    To destroy one of NCCL waits for the others, so where one of them may be gone it is aborted. Neither returns for
    sure: then this process ends, and another one takes its place.
    """
    abort = dist.distributed_c10d._abort_process_group
    with _leaving:
        if not dist.is_initialized():
            return
        if device == "cpu":
            dist.destroy_process_group()
            return
        for leave in (dist.destroy_process_group, abort) if in_order else (abort,):
            thread = threading.Thread(target=leave, name="rubberband leave", daemon=True)
            thread.start()
            thread.join(LEAVE_TIMEOUT_S)
            if not thread.is_alive():
                return
    print("rubberband: NCCL does not let go of this worker's GPU; its process ends", file=sys.stderr, flush=True)
    os._exit(1)
