"""One attempt: a trial's segment on the workers of its gang, followed from its own thread until the gang is free."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import ray
from ray.exceptions import RayError

from rubberband.executor.core.events import (
    CheckpointLost,
    Event,
    FailureKind,
    Slot,
    StartTrial,
    TrialFailed,
    TrialRepeated,
    TrialReported,
    TrialStarted,
)
from rubberband.executor.ray import connection
from rubberband.executor.ray.slot_worker import SegmentItem
from rubberband.executor.ray.workers import Crew, Worker, last_line
from rubberband.executor.training.segment import Segment, SegmentFailure, SegmentRepeated, SegmentReport, SegmentStarted
from rubberband.executor.trial_log import TrialLog

_GRACE_S = 2.0
"""After the first sign of an end, how long the rest of the gang may take to end too."""
_PROOF_S = 20.0
"""How long an instance may take to prove itself alive, by a new worker in the place of a dead one."""
_LOOK_S = 0.25
RAN_OUT = (
    "it ran out of memory (killed by the kernel); use less of it (smaller batches, fewer processes that load data), or "
    "an instance_type with more"
)


class Fleet(Protocol):
    """What an attempt needs to know of the instances."""

    def crew(self, instance: str) -> Crew | None:
        """The crew of an instance that is held, or None."""
        ...


@dataclass(slots=True)
class _Gathered:
    """What the gang has said so far."""

    failures: list[SegmentFailure] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)
    last: SegmentReport | None = None
    """The report of the last iteration, kept back until the gang is free."""
    ran_out: bool = False
    """Whether the kernel ended processes for want of memory on a machine on which one of the gang died."""

    @property
    def over(self) -> bool:
        """Whether the end has begun."""
        return bool(self.failures or self.deaths or self.last)

    @property
    def lost(self) -> SegmentFailure | None:
        """What a worker said of a checkpoint that is lost."""
        return next((failure for failure in self.failures if failure.lost), None)

    def cause(self) -> tuple[FailureKind, str, str]:
        """Kind, message and details of what went wrong first, not of what followed from it."""
        for failure in self.failures:
            if not failure.secondary:
                return failure.kind, failure.message, failure.details
        if self.deaths and self.ran_out:
            return "died", RAN_OUT, "\n".join(self.deaths)
        if self.deaths:
            told = "its process exited (os._exit, a crash in native code, or out of memory)"
            return "died", f"{told}; see the trial's log", "\n".join(self.deaths)
        if self.failures:
            return self.failures[0].kind, self.failures[0].message, self.failures[0].details
        return "died", "the gang ended before its last iteration", ""


class Attempt:
    """Carries out a StartTrial; its events go to `put`."""

    def __init__(
        self,
        start: StartTrial,
        segment: Segment,
        log: TrialLog | None,
        fleet: Fleet,
        put: Callable[[Callable[[float], Event]], None],
    ) -> None:
        """`segment` is that of rank 0, with the rendezvous still open."""
        self._start = start
        self._segment = segment
        self._log = log
        self._fleet = fleet
        self._put = put
        self._mutex = threading.Lock()
        self._stopped = False
        self._busy: dict[int, Worker] = {}
        self._kills_before: list[Any] = []
        """Of each rank's machine: how many processes had been ended for want of memory (a reference to it)."""
        self._thread: threading.Thread | None = None

    def uses(self, instance: str) -> bool:
        """Whether a worker of the gang is on `instance`."""
        return any(slot.instance == instance for slot in self._start.gang)

    def begin(self) -> None:
        """Start to carry it out."""
        self._thread = connection.start(self._run, f"trial-{self._start.trial}-{self._start.attempt}")

    def stop(self, *, replace_workers: bool = True) -> None:
        """No event comes of this attempt any more; workers that have not returned are killed and replaced."""
        with self._mutex:
            self._stopped = True
        if replace_workers:
            self._replace_busy()

    def wait(self, timeout_s: float) -> None:
        """Wait until the thread has ended, but not longer."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            workers = self._await_workers()
            if workers is not None:
                self._train(workers)
        except Exception as error:
            # Of Ray, or ours: the driver must not wait for a thread that is gone.
            self._replace_busy()
            if self._gone():
                return
            self._fail("died", f"the backend lost track of it: {type(error).__name__}: {last_line(error)}", str(error))

    def _await_workers(self) -> list[Worker] | None:
        """The warm workers of the gang; None if there is nothing to start any more."""
        futures = [self._future(slot) for slot in self._start.gang]
        while not all(future is not None and future.done() for future in futures):
            if self._stopped or self._gone():
                return None
            time.sleep(0.02)
            futures = [self._future(slot) for slot in self._start.gang]
        return [future.result() for future in futures if future is not None]

    def _future(self, slot: Slot) -> Future[Worker] | None:
        crew = self._fleet.crew(slot.instance)
        return None if crew is None else crew.worker(slot.gpu)

    def _gone(self) -> bool:
        """Whether an instance of the gang is gone: then its loss is what is told, not a failure of the trial."""
        return any(self._fleet.crew(slot.instance) is None for slot in self._start.gang)

    def _train(self, workers: Sequence[Worker]) -> None:
        gathered = _Gathered()
        try:
            rendezvous = ray.get(workers[0].rendezvous.remote(), timeout=_PROOF_S) if len(workers) > 1 else None
        except RayError as error:
            gathered.deaths.append(f"rank 0: {last_line(error)}")
            self._busy = dict(enumerate(workers[:1]))
        else:
            self._follow(self._submit(workers, rendezvous), gathered)
        slots = self._replace_busy()
        if gathered.last is not None:
            self._report(gathered.last)
        elif not self._stopped and self._survives(slots, gathered):
            if gathered.lost is not None:
                self._lose(gathered.lost.message)
            else:
                gathered.ran_out = bool(gathered.deaths) and any(map(self._ran_out, slots))
                self._fail(*gathered.cause())

    def _submit(self, workers: Sequence[Worker], rendezvous: str | None) -> dict[Any, int]:
        """Order every worker to run its segment: stream -> rank."""
        with self._mutex:
            if self._stopped:
                return {}
            self._busy = dict(enumerate(workers))
            self._kills_before = [worker.memory_kills.remote() for worker in workers]
            return {
                worker.run.options(num_returns="streaming").remote(
                    replace(self._segment, rank=rank, rendezvous=rendezvous), self._log
                ): rank
                for rank, worker in enumerate(workers)
            }

    def _follow(self, streams: dict[Any, int], gathered: _Gathered) -> None:
        """Pass on what comes until every worker has returned, or the grace after the first end is over."""
        deadline = float("inf")
        while streams and not self._stopped and time.monotonic() < deadline:
            ready: list[Any] = ray.wait(list(streams), num_returns=1, timeout=_LOOK_S)[0]
            for stream in ready:
                try:
                    self._take_in(ray.get(next(stream)), gathered)
                except StopIteration:
                    self._busy.pop(streams.pop(stream), None)
                except RayError as error:
                    gathered.deaths.append(f"rank {streams.pop(stream)}: {last_line(error)}")
            if gathered.over:
                deadline = min(deadline, time.monotonic() + _GRACE_S)

    def _take_in(self, item: SegmentItem, gathered: _Gathered) -> None:
        match item:
            case SegmentStarted():
                trial, attempt = self._start.trial, self._start.attempt
                self._tell(lambda at: TrialStarted(occurred_at=at, trial=trial, attempt=attempt))
            case SegmentRepeated():
                trial, attempt, done = self._start.trial, self._start.attempt, item.iterations
                self._tell(lambda at: TrialRepeated(occurred_at=at, trial=trial, attempt=attempt, iterations=done))
            case SegmentReport() if item.iterations >= self._start.until_iterations:
                gathered.last = item
            case SegmentReport():
                self._report(item)
            case SegmentFailure():
                gathered.failures.append(item)

    def _replace_busy(self) -> list[Slot]:
        """Replace the workers that have not returned, and tell on which slots they were."""
        with self._mutex:
            busy, self._busy = self._busy, {}
        slots = []
        for rank, worker in busy.items():
            slot = self._start.gang[rank]
            slots.append(slot)
            crew = self._fleet.crew(slot.instance)
            if crew is not None:
                crew.replace(slot.gpu, worker)
        return slots

    def _survives(self, slots: Sequence[Slot], gathered: _Gathered) -> bool:
        """Whether the instances outlive the failure; if not, they were lost and the trial did not fail.

        A worker that dies with its instance looks like one that dies alone, for a few seconds; but only a living
        instance brings up another one. A failure that is nobody's echo needs no proof.
        """
        if any(not failure.secondary for failure in gathered.failures):
            return not self._gone()
        deadline = time.monotonic() + _PROOF_S
        while not self._stopped and time.monotonic() < deadline:
            if self._gone():
                return False
            futures = [self._future(slot) for slot in slots]
            if all(future is not None and future.done() for future in futures):
                return True
            time.sleep(0.02)
        return not self._stopped

    def _ran_out(self, slot: Slot) -> bool:
        """Whether a machine, on whose slot there is another worker by now, had processes ended for want of memory."""
        fresh = self._future(slot)
        if not self._kills_before or fresh is None or not fresh.done():
            return False
        before = self._kills_before[self._start.gang.index(slot)]
        try:
            earlier, now = ray.get([before, fresh.result().memory_kills.remote()], timeout=_PROOF_S)
        except RayError:
            return False
        return bool(now > earlier)

    def _report(self, report: SegmentReport) -> None:
        self._tell(
            lambda at: TrialReported(
                occurred_at=at,
                trial=self._start.trial,
                attempt=self._start.attempt,
                iterations=report.iterations,
                metrics=report.metrics,
                checkpoint=report.checkpoint,
                batches=report.told.batches,
                limits=report.told.limits,
                samples_per_iteration=report.told.samples_per_iteration,
                saved_iterations=report.saved_iterations,
            )
        )

    def _lose(self, message: str) -> None:
        trial, attempt = self._start.trial, self._start.attempt
        self._tell(lambda at: CheckpointLost(occurred_at=at, trial=trial, attempt=attempt, message=message))

    def _fail(self, kind: FailureKind, message: str, details: str) -> None:
        self._tell(
            lambda at: TrialFailed(
                occurred_at=at,
                trial=self._start.trial,
                attempt=self._start.attempt,
                kind=kind,
                message=message,
                details=details,
            )
        )

    def _tell(self, event: Callable[[float], Event]) -> None:
        with self._mutex:
            if not self._stopped:
                self._put(event)
