"""The process group of a gang: the workers of one torch trial meet, wait for rank 0, and part.

A gang of one has none. Collectives (gradients) go through torch.distributed. Waiting for rank 0's evaluation goes
through the store, because it may take longer than any sensible timeout of a collective.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal
from urllib.parse import urlsplit

import torch

# DDP and the optimizers import it at their first use. If the process group exists by then, something in there keeps a
# reference, and its connections stay open when it is destroyed: the others would wait in vain.
import torch._dynamo
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from rubberband.executor.training.runner import GangBroken, TrialFailure

RENDEZVOUS_TIMEOUT = timedelta(seconds=60)
"""The longest wait of the workers for each other at the start."""
COLLECTIVE_TIMEOUT = timedelta(seconds=300)
"""The longest wait of a collective for a silent worker; one that died breaks it at once (gloo)."""
EXCHANGE_TIMEOUT = timedelta(seconds=60)
"""The longest wait for a worker that does not exchange a text, and may be in a collective."""
FAREWELL_TIMEOUT = timedelta(seconds=10)
"""The longest time that rank 0 keeps the store open for the others at the end."""

_ABANDONED = "abandoned"

_log = logging.getLogger(__name__)


class Gang:
    """This worker's membership in the gang; `close` must be called in the end."""

    def __init__(
        self, rank: int, num_workers: int, store: Store | None, device: Literal["cpu", "cuda"] = "cpu"
    ) -> None:
        self.rank = rank
        self.num_workers = num_workers
        self._store = store
        self._device = device
        self._group = None if store is None else dist.group.WORLD
        self._round = self._exchanged = 0
        self.waited_s = 0.0
        """Seconds in collectives of this object; on GPUs, they only begin in this time."""

    @classmethod
    def join(cls, *, rank: int, num_workers: int, rendezvous: str | None, device: Literal["cpu", "cuda"]) -> Gang:
        """Meet the other workers at `rendezvous` and form the process group (gloo on CPUs, nccl on GPUs).

        Raises TrialFailure if rank 0 cannot listen there, and torch's DistError if another worker does not come.
        """
        if num_workers == 1:
            return cls(rank, num_workers, None)
        if rendezvous is None:
            raise ValueError(f"a gang of {num_workers} needs a rendezvous")
        store = _open_store(rendezvous, rank, num_workers)
        target: dict[str, Any] = {"device_id": torch.device("cuda", 0)} if device == "cuda" else {}
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=num_workers,
            timeout=COLLECTIVE_TIMEOUT,
            **target,
        )
        return cls(rank, num_workers, store, device)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.waited_s += time.perf_counter() - began

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
        found = torch.zeros(self.num_workers, len(row), dtype=torch.float64)
        found[self.rank] = torch.tensor(list(row), dtype=torch.float64)
        rows: list[list[float]] = self.sum(found.to(self._device)).tolist()
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

    def least(self, value: float) -> float:
        """Return the smallest `value` of all workers, by a collective."""
        if self._store is None:
            return value
        tensor = torch.tensor(value, dtype=torch.float64, device=self._device)
        with self._waiting():
            dist.all_reduce(tensor, dist.ReduceOp.MIN)
        return tensor.item()

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
        tensor = torch.tensor(list(values), dtype=torch.float64, device=self._device)
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
        """Return rank 0's `value` on every rank; the others wait while rank 0 lives. Raises GangBroken if it left."""
        self._round += 1
        key = f"agreed-{self._round}"
        if self.rank == 0:
            assert value is not None
            if self._store is not None:
                self._store.set(key, repr(value))
            return value
        assert self._store is not None
        while True:
            try:
                agreed = self._store.get(key).decode()
                break
            except dist.DistStoreError as error:
                if "timeout" not in str(error):
                    raise
        if agreed == _ABANDONED:
            raise GangBroken("rank 0 failed")
        return float(agreed)

    def part(self) -> None:
        """Leave at the end of a segment without failure: rank 0 keeps the store until all others have read it."""
        if self._store is not None:
            try:
                if self.rank > 0:
                    self._store.set(f"left-{self.rank}", "")
                else:
                    self._store.wait([f"left-{rank}" for rank in range(1, self.num_workers)], FAREWELL_TIMEOUT)
            except dist.DistError:
                _log.warning("rank %d: the gang did not shut down cleanly", self.rank, exc_info=True)
        self._destroy()

    def close(self) -> None:
        """Leave at once, which breaks the others' collectives. Harmless when repeated or after `part`.

        The caller must have dropped every DistributedDataParallel: when the group is destroyed, its threads may wait
        for Python's global lock. Dropping `_group` releases it; dropping DDP's reducer, as its last owner, does not.
        """
        if self._store is not None and self.rank == 0:
            # Objects of torch may keep the store, and the others' connection to it, alive for a while.
            self._store.set(f"agreed-{self._round + 1}", _ABANDONED)
        self._destroy()

    def _destroy(self) -> None:
        if self._store is not None:
            self._store = None
            if dist.is_initialized():
                dist.destroy_process_group()
            self._group = None


def _open_store(rendezvous: str, rank: int, num_workers: int) -> Store:
    place = urlsplit(rendezvous)
    if place.scheme != "tcp" or place.hostname is None or place.port is None:
        raise ValueError(f"rendezvous {rendezvous} is not tcp://host:port")
    try:
        return TCPStore(
            place.hostname,
            place.port,
            world_size=num_workers,
            is_master=rank == 0,
            timeout=RENDEZVOUS_TIMEOUT,
            wait_for_workers=True,
        )
    except dist.DistNetworkError as error:
        if rank == 0:
            raise TrialFailure("raised", f"rank 0 cannot listen at {rendezvous}: {error}".splitlines()[0]) from error
        raise
