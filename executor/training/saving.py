"""Reports on their way to the driver: each goes out in its turn, when its checkpoint is durable.

A thread writes the checkpoint, one at a time, while training goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

from rubberband.errors import CheckpointError
from rubberband.executor.checkpoints import CheckpointStore, Payload
from rubberband.executor.core.events import CheckpointRef
from rubberband.executor.training.segment import SegmentReport


class Reports:
    """Reports of one segment, in order; they leave by the thread that iterates over `ready` or `all`."""

    def __init__(self, store: CheckpointStore, trial: int) -> None:
        self._store = store
        self._trial = trial
        self._waiting: deque[tuple[SegmentReport, Future[CheckpointRef] | None]] = deque()
        self._writer: ThreadPoolExecutor | None = None

    def add(self, report: SegmentReport, payload: Payload | None) -> None:
        """Append a report, and begin to write its checkpoint, if it has one."""
        if payload is None:
            self._waiting.append((report, None))
            return
        if self._writer is None:
            self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rubberband checkpoint")
        written = self._writer.submit(self._store.save, self._trial, report.iterations, payload)
        self._waiting.append((report, written))

    def ready(self) -> Iterator[SegmentReport]:
        """Yield those that can leave now. Raises CheckpointError if a checkpoint could not be written."""
        while self._waiting and (self._waiting[0][1] is None or self._waiting[0][1].done()):
            yield self._next()

    def all(self) -> Iterator[SegmentReport]:
        """Wait for the checkpoints, and yield all reports. Raises CheckpointError as `ready` does."""
        while self._waiting:
            self.wait()
            yield self._next()

    def wait(self) -> None:
        """Wait until the next report can leave."""
        if self._waiting and (written := self._waiting[0][1]) is not None:
            written.exception()

    def rest(self) -> Iterator[SegmentReport]:
        """Yield the reports before the first checkpoint that could not be written, after a failure."""
        with suppress(CheckpointError):
            yield from self.all()

    def close(self) -> None:
        """Wait until nothing is written any more."""
        if self._writer is not None:
            self._writer.shutdown()

    def _next(self) -> SegmentReport:
        report, written = self._waiting.popleft()
        return report if written is None else replace(report, checkpoint=written.result())
