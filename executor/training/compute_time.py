"""The own time of a worker in a step: all of it without the wait for other workers.

DistributedDataParallel sums gradients while the backward pass computes them, and then waits for the slowest worker, so
that a step takes the same time everywhere. The own part ends with the last gradient of the last pass: a callback of
autograd is queued at the beginning of that pass, before DDP's own one, which waits. It goes on when the gradients are
those of the gang. Waits in the gang's own collectives are subtracted.

On a GPU, events mark these points. They are read when the GPU has passed them; no step waits for that.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import torch
from torch.autograd import Variable

from rubberband.executor.training.gang import Gang


class ComputeTimer:
    """Times nothing: for a worker whose share does not depend on its speed."""

    def begin(self) -> None:
        """Note that a step begins."""

    def watch(self, loss: torch.Tensor) -> None:
        """Note when all gradients of `loss` are computed, in the backward pass that comes next."""

    def computed(self) -> None:
        """Note that the gradients are computed, and that the wait for other workers begins."""

    def averaged(self) -> None:
        """Note that the wait is over."""

    def end(self, *, counts: bool) -> None:
        """Note that the step ends; `counts`: its time is of use."""

    def take(self) -> tuple[int, float]:
        """Return the steps since the last call that counted and are over on the device, and their own seconds."""
        return 0, 0.0


class CpuTimer(ComputeTimer):
    """Times the steps of a worker on a CPU."""

    def __init__(self, gang: Gang, clock: Callable[[], float] = time.perf_counter) -> None:
        self._gang = gang
        self._clock = clock
        self._began = self._waited = 0.0
        self._waits_since: float | None = None
        self._steps, self._own_s = 0, 0.0

    def begin(self) -> None:
        self._waited, self._waits_since = -self._gang.waited_s, None
        self._began = self._clock()

    def watch(self, loss: torch.Tensor) -> None:
        if loss.requires_grad:
            loss.register_hook(self._queue)  # type: ignore[no-untyped-call]

    def _queue(self, _: torch.Tensor) -> None:
        Variable._execution_engine.queue_callback(self.computed)

    def computed(self) -> None:
        self._waits_since = self._clock()

    def averaged(self) -> None:
        if self._waits_since is not None:
            self._waited += self._clock() - self._waits_since
            self._waits_since = None

    def end(self, *, counts: bool) -> None:
        if counts:
            self._steps += 1
            self._own_s += self._clock() - self._began - self._waited - self._gang.waited_s

    def take(self) -> tuple[int, float]:
        found = self._steps, self._own_s
        self._steps, self._own_s = 0, 0.0
        return found


class CudaTimer(ComputeTimer):
    """Times the steps of a worker on a GPU."""

    def __init__(self) -> None:
        self._spare: list[torch.cuda.Event] = []
        self._step: list[torch.cuda.Event] = []
        """The beginning of the step, and of the wait, and its end; as far as the step has come."""
        self._pending: deque[list[torch.cuda.Event]] = deque()

    def _mark(self) -> None:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._step.append(event)

    def begin(self) -> None:
        self._spare += self._step
        self._step = []
        self._mark()

    def watch(self, loss: torch.Tensor) -> None:
        if loss.requires_grad:
            loss.register_hook(self._queue)  # type: ignore[no-untyped-call]

    def _queue(self, _: torch.Tensor) -> None:
        Variable._execution_engine.queue_callback(self.computed)

    def computed(self) -> None:
        if len(self._step) == 1:
            self._mark()

    def averaged(self) -> None:
        if len(self._step) == 2:
            self._mark()

    def end(self, *, counts: bool) -> None:
        if counts and len(self._step) == 3:
            self._mark()
            self._pending.append(self._step)
            self._step = []

    def take(self) -> tuple[int, float]:
        steps, own_ms = 0, 0.0
        while self._pending and self._pending[0][-1].query():  # type: ignore[no-untyped-call]
            began, computed, averaged, ended = events = self._pending.popleft()
            steps += 1
            own_ms += began.elapsed_time(computed) + averaged.elapsed_time(ended)
            self._spare += events
        return steps, own_ms / 1e3


def make_timer(gang: Gang, device: torch.device) -> ComputeTimer:
    """Return the timer for a worker's device."""
    return CudaTimer() if device.type == "cuda" else CpuTimer(gang)
