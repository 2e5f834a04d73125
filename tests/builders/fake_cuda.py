"""A stand-in for `torch.cuda` with a clock of its own: what is timed on a GPU is tested without one.

The host hands kernels to streams and goes on, as with CUDA: `now` is the host's time in simulated seconds, and a stream
is busy until its own. Tensors stay on the CPU, and kernels compute nothing.

    def test_…(fake_cuda):                        # the fixture of tests/unit/conftest.py
        fake_cuda.launch(0.1, host_s=0.004)       # a kernel of 100 ms, handed over in 4 ms
        assert fake_cuda.now == 0.004
        torch.cuda.synchronize()                  # also torch.cuda.Event, Stream, stream(), current_stream()
        assert fake_cuda.now == 0.104             # fake_cuda.clock is for code that takes a clock

With `others` other threads want the host's CPU, which spins in a synchronize as CUDA's does: `queued_s` grows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


class FakeCuda:
    """One GPU and the host thread that feeds it."""

    def __init__(self, *, others: int = 0) -> None:
        self.now = 0.0
        self.queued_s = 0.0
        """Seconds that the host's thread stood in the queue of its CPU, as the system counts them."""
        self.waited_s = 0.0
        """Seconds that the host waited for the GPU."""
        self.others = others
        self.streams: list[Stream] = []
        self.default = self.current = Stream(self)

    def clock(self) -> float:
        return self.now

    def compute(self, seconds: float) -> None:
        """Let the host compute for `seconds`; it takes longer where others want its CPU."""
        self._pass(seconds * (1 + self.others))

    def sleep(self, seconds: float) -> None:
        """Let the host wait for something that is no GPU: the queue of its CPU does not see it."""
        self.now += seconds

    def launch(self, seconds: float, *, host_s: float = 0.0) -> None:
        """Hand a kernel of `seconds` to the current stream, which takes the host `host_s`."""
        self.compute(host_s)
        self.current.busy_until = self.current.reached_at() + seconds

    def wait_until(self, time_s: float) -> None:
        if time_s > self.now:
            self.waited_s += time_s - self.now
            self._pass(time_s - self.now)

    def synchronize(self, device: Any = None) -> None:
        self.wait_until(max(stream.busy_until for stream in self.streams))

    def _pass(self, seconds: float) -> None:
        self.now += seconds
        self.queued_s += seconds * self.others / (1 + self.others)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Put it in the place of `torch.cuda`'s functions."""
        import torch  # only here: tests that need none of it begin sooner

        patch.setattr(torch.cuda, "Event", lambda enable_timing=False, **_: Event(self, timed=enable_timing))
        patch.setattr(torch.cuda, "Stream", lambda *_, **__: Stream(self))
        patch.setattr(torch.cuda, "stream", self.stream)
        patch.setattr(torch.cuda, "current_stream", lambda *_: self.current)
        patch.setattr(torch.cuda, "synchronize", self.synchronize)


class Stream:
    """Kernels in their order."""

    def __init__(self, gpu: FakeCuda) -> None:
        self._gpu = gpu
        self.busy_until = 0.0
        gpu.streams.append(self)

    def reached_at(self) -> float:
        return max(self.busy_until, self._gpu.now)

    def query(self) -> bool:
        return self.busy_until <= self._gpu.now

    def synchronize(self) -> None:
        self._gpu.wait_until(self.busy_until)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._gpu)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self.busy_until = max(self.busy_until, event.passed_at)


class Event:
    """A mark in a stream; without a record it counts as passed."""

    def __init__(self, gpu: FakeCuda, *, timed: bool = False) -> None:
        self._gpu = gpu
        self._timed = timed
        self._recorded = False
        self.passed_at = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self._recorded, self.passed_at = True, (stream or self._gpu.current).reached_at()

    def query(self) -> bool:
        return self.passed_at <= self._gpu.now

    def synchronize(self) -> None:
        self._gpu.wait_until(self.passed_at)

    def wait(self, stream: Stream | None = None) -> None:
        """Let later kernels of a stream wait for it."""
        (stream or self._gpu.current).wait_event(self)

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds up to another event. Raises RuntimeError as CUDA does, before both are passed."""
        if not all(event._timed and event._recorded and event.query() for event in (self, end)):
            raise RuntimeError("both events must be made with enable_timing=True, recorded and passed")
        return 1e3 * (end.passed_at - self.passed_at)


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    gpu = FakeCuda()
    gpu.install(monkeypatch)
    return gpu
