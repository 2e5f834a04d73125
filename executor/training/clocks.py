"""Clocks of training steps, on a CPU and on a GPU, where handing over a step takes far less time than the step itself.

`ComputeTimer` times the steps of a worker of a gang, for balancing. `LapClock` times stretches of steps, to choose the
batch by.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.autograd import Variable

from rubberband.executor.training.gang import Gang
from rubberband.executor.training.own_time import own_time

# The own time of a worker in a step: all of it without the wait for other workers.
#
# DistributedDataParallel sums gradients while the backward pass computes them, and then waits for the slowest worker,
# so that a step takes the same time everywhere. The own part ends with the last gradient of the last pass: a callback
# of autograd is queued at the beginning of that pass, before DDP's own one, which waits. It goes on when the gradients
# are those of the gang. Waits in the gang's own collectives are subtracted.
#
# On a GPU, events mark these points. They are read when the GPU has passed them; no step waits for that.


@dataclass(slots=True)
class StepTimes:
    """Times since a timer was asked last. Sums are over the steps that counted and are over on the device."""

    steps: int = 0
    own_s: float = 0.0
    step_s: float = 0.0
    """Sum of their seconds, from the beginning of each to its end."""
    changed_s: float = math.nan
    """Seconds of the latest step that began with other shares; nan without one."""


class ComputeTimer:
    """Times nothing: for a worker whose share does not depend on its speed."""

    waited_s = 0.0
    """Seconds from the last own gradient to those of the gang, in all steps."""

    def begin(self) -> None:
        """Note that a step begins."""

    def watch(self, loss: torch.Tensor) -> None:
        """Note when all gradients of `loss` are computed, in the backward pass that comes next."""

    def computed(self) -> None:
        """Note that the gradients are computed, and that the wait for other workers begins."""

    def averaged(self) -> None:
        """Note that the wait is over."""

    def end(self, *, counts: bool, has_changed: bool = False) -> None:
        """Note that the step ends; `counts`: its time is of use. `has_changed`: it is the first with its shares."""

    def take(self) -> StepTimes:
        """Return the times of the steps since the last call."""
        return StepTimes()


class _GradientTimer(ComputeTimer):
    """Notes when all gradients of a backward pass are computed."""

    def watch(self, loss: torch.Tensor) -> None:
        if loss.requires_grad:
            loss.register_hook(self._queue)  # type: ignore[no-untyped-call]

    def _queue(self, _: torch.Tensor) -> None:
        Variable._execution_engine.queue_callback(self.computed)


class CpuTimer(_GradientTimer):
    """Times the steps of a worker on a CPU."""

    def __init__(self, gang: Gang, clock: Callable[[], float] = time.perf_counter) -> None:
        self._gang = gang
        self._clock = clock
        self._began = self._waited = 0.0
        self._waits_since: float | None = None
        self._times = StepTimes()

    def begin(self) -> None:
        self._waited, self._waits_since = -self._gang.waited_s, None
        self._began = self._clock()

    def computed(self) -> None:
        self._waits_since = self._clock()

    def averaged(self) -> None:
        if self._waits_since is not None:
            waited_s, self._waits_since = self._clock() - self._waits_since, None
            self._waited += waited_s
            self.waited_s += waited_s

    def end(self, *, counts: bool, has_changed: bool = False) -> None:
        step_s = self._clock() - self._began
        if counts:
            self._times.steps += 1
            self._times.step_s += step_s
            self._times.own_s += step_s - self._waited - self._gang.waited_s
        elif has_changed:
            self._times.changed_s = step_s

    def take(self) -> StepTimes:
        found, self._times = self._times, StepTimes()
        return found


class CudaTimer(_GradientTimer):
    """Times the steps of a worker on a GPU."""

    def __init__(self) -> None:
        self._spare: list[torch.cuda.Event] = []
        self._step: list[torch.cuda.Event] = []
        """The beginning of the step, and of the wait, and its end; as far as the step has come."""
        self._pending: deque[tuple[bool, list[torch.cuda.Event]]] = deque()
        """Whether the step counts, and its events; in their order."""

    def _mark(self) -> None:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._step.append(event)

    def begin(self) -> None:
        self._spare += self._step
        self._step = []
        self._mark()

    def computed(self) -> None:
        if len(self._step) == 1:
            self._mark()

    def averaged(self) -> None:
        if len(self._step) == 2:
            self._mark()

    def end(self, *, counts: bool, has_changed: bool = False) -> None:
        if (counts or has_changed) and len(self._step) == 3:
            self._mark()
            self._pending.append((counts, self._step))
            self._step = []

    def take(self) -> StepTimes:
        times = StepTimes()
        while self._pending and self._pending[0][1][-1].query():  # type: ignore[no-untyped-call]
            counts, events = self._pending.popleft()
            began, computed, averaged, ended = events
            step_s, waited_s = began.elapsed_time(ended) / 1e3, computed.elapsed_time(averaged) / 1e3
            self.waited_s += waited_s
            if counts:
                times.steps += 1
                times.step_s += step_s
                times.own_s += step_s - waited_s
            else:
                times.changed_s = step_s
            self._spare += events
        return times


def make_timer(gang: Gang, device: torch.device) -> ComputeTimer:
    """Return the timer of a worker's computation on its device."""
    return CudaTimer() if device.type == "cuda" else CpuTimer(gang)


# The time of stretches of steps.

LONG_PAUSE_S = 1e-3
"""In a shorter pause nothing was sent, and the thread did not wait for a CPU; to look would take a tenth of this."""


class LapClock:
    """Times stretches of steps on a CPU, and leaves out pauses."""

    def __init__(self, now: Callable[[], float] = time.perf_counter, own: Callable[[], float] = own_time) -> None:
        """`own` is the time without that which other work on the machine takes."""
        self.now, self.own = now, own
        self._mark = self._own_mark = self._paused_at = 0.0

    def wait(self) -> None:
        """Wait until the device is done."""

    def lap(self) -> tuple[float, float]:
        """Return the seconds since the last lap, all and own, when the device is done; the next lap begins."""
        self.wait()
        now, own = self.now(), self.own()
        lap = now - self._mark, own - self._own_mark
        self._mark, self._own_mark = now, own
        return lap

    def pause(self) -> None:
        """Note that no step is under way, as reports may leave."""
        self._paused_at = self.now()

    def resume(self) -> None:
        """Note that the next step may begin."""
        own_s = seconds = self.now() - self._paused_at
        if seconds >= LONG_PAUSE_S:
            # The own clock stood still while the thread waited for a CPU: in the pause, as far as that is possible.
            queued_s = (self.now() - self._mark) - (self.own() - self._own_mark)
            own_s = min(seconds, max(0.0, seconds - queued_s))
        self._mark += seconds
        self._own_mark += own_s


class CudaLapClock(LapClock):
    """Times stretches of steps on a GPU: all of its time is the trial's own, and only in a pause it may stand still.

    The thread that waits for a GPU spins. So it can be in the queue of its CPU while the GPU works, and the system's
    count of that would make steps too short.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(now, now)
        self._began = self._event()
        """Marks where the GPU has done all that was handed over before the present pause."""
        self._pauses: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def _event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        torch.cuda.synchronize()

    def lap(self) -> tuple[float, float]:
        seconds, _ = super().lap()
        seconds -= sum(began.elapsed_time(ended) for began, ended in self._pauses) / 1e3
        self._pauses = []
        return seconds, seconds

    def pause(self) -> None:
        super().pause()
        self._began.record()

    def resume(self) -> None:
        if self.now() - self._paused_at >= LONG_PAUSE_S:
            ended = self._event()
            ended.record()
            self._pauses.append((self._began, ended))
            self._began = self._event()
