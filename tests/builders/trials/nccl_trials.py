"""Trials of gangs that lose a worker, on a process group that behaves as NCCL's does within a machine, without GPUs.

A collective returns only when all workers take part: that another one died is not noticed. Where it is aborted it
returns too, as a kernel does, without an error and with worthless content. To destroy the group waits for all others.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rubberband.executor import gang
from tests.builders.trials.segment_trials import STUMBLES_AT, Regression

_LOOK_S = 0.001
aborted: list[Spinning] = []
"""Groups that were aborted; their connections stay open, as those of NCCL may."""


class _Work(dist.Work):
    def __init__(self, group: Spinning, work: Any, result: Any) -> None:
        super().__init__()
        self._group, self._work, self._result = group, work, result

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._group.spin(self._work)
        return True

    def get_future(self) -> Any:
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(self._result)
        return future


class Spinning(dist.ProcessGroup):
    """Passes collectives on to gloo, and hides its errors."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._inner = dist.ProcessGroupGloo(store, rank, size, timedelta(hours=1))
        self._timeout_s = timeout.total_seconds()
        self._is_aborted = threading.Event()

    def spin(self, work: Any) -> None:
        """Wait for all workers, or the end of the group; the watchdog ends the process after the timeout."""
        began = time.monotonic()
        while not self._is_aborted.is_set():
            if work.is_completed() and not _has_failed(work):
                return
            if time.monotonic() - began > self._timeout_s and os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") != "0":
                print("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(...)", file=sys.stderr)
                sys.stderr.flush()
                os.abort()
            time.sleep(_LOOK_S)  # NCCL's kernels spin, too

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        return _Work(self, self._inner.allreduce(tensors, opts or dist.AllreduceOptions()), tensors)

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        return _Work(self, self._inner.broadcast(tensors, opts), tensors)

    def allgather(self, gathered: Any, tensors: Any, opts: Any = None) -> Any:
        return _Work(self, self._inner.allgather(gathered, tensors, opts or dist.AllgatherOptions()), gathered)

    def abort(self) -> None:
        aborted.append(self)
        self._is_aborted.set()

    def shutdown(self) -> None:
        self.spin(self._inner.barrier())

    def getBackendName(self) -> str:  # noqa: N802 - torch's
        return "spinning"


def _has_failed(work: Any) -> bool:
    try:
        work.wait()
    except RuntimeError:
        return True
    return False


def install() -> None:
    """Let gangs of this process take it for NCCL, and the CPU for a GPU."""
    if "SPINNING" in dist.Backend.backend_list or "spinning" in dist.Backend.backend_list:
        return
    dist.Backend.register_backend("spinning", Spinning, devices=["cpu"])
    real_init, real_zeros, real_join = dist.init_process_group, torch.zeros, gang.Gang.join

    def init(backend: str, *, device_id: Any = None, **words: Any) -> None:
        real_init("spinning" if "nccl" in backend else backend, **words)

    def zeros(*size: Any, device: Any = None, **words: Any) -> torch.Tensor:
        return real_zeros(*size, device="cpu" if device == "cuda" else device, **words)

    def join(**words: Any) -> gang.Gang:
        return real_join(**{**words, "device": "cuda"})

    dist.init_process_group, torch.zeros = init, zeros  # type: ignore[assignment]
    torch.cuda.synchronize = lambda device=None: None
    gang.Gang.join = join  # type: ignore[method-assign]


install()


class Lossy(Regression):
    """Is killed on one rank, in the middle of an iteration."""

    num_workers = 0

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        found = super().loss(model, batch)
        if self.batches == STUMBLES_AT and self.config.get("killed_rank") == torch.distributed.get_rank():
            os.kill(os.getpid(), signal.SIGKILL)
        return found
