"""One attempt: a trial's segment on the workers of its gang, followed from its own thread until the gang is free."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import RayError

from rubberband.executor.core.events import (
    CheckpointLost,
    Event,
    FailureKind,
    Slot,
    StartTrial,
    TrialArtifact,
    TrialEnded,
    TrialFailed,
    TrialRepeated,
    TrialReported,
    TrialStarted,
)
from rubberband.executor.logs.trial_log import TrialLog
from rubberband.executor.ray import connection
from rubberband.executor.ray.slot_worker import DeathCause, SegmentItem
from rubberband.executor.ray.workers import Worker, Workers, last_line
from rubberband.executor.training.check_findings import brief
from rubberband.executor.training.segment import (
    Segment,
    SegmentArtifact,
    SegmentEnded,
    SegmentFailure,
    SegmentRepeated,
    SegmentReport,
    SegmentStarted,
    SegmentUse,
)
from rubberband.values.machine_use import MachineUse, mean_use

GRACE_S = 2.0
"""How long the rest of the gang may take to end after a worker died."""
_LAST_WORDS_S = 10.0
"""How long workers may take to end after one of them said that it ended: a busy machine needs time for the rest of the
output, and workers that end by themselves stay warm."""
_PROOF_S = 20.0
"""How long an instance may take to prove that it is alive, by starting a worker in place of a dead one."""
LOOK_S = 0.25
"""The longest time between two looks at an attempt's state."""
RAN_OUT = (
    "it ran out of memory (killed by the kernel); use less of it (smaller batches, fewer processes that load data), or "
    "an instance_type with more"
)
HUNG = (
    "its gang hung: a collective did not end in time, and torch ended a process; let every worker take the same steps, "
    "none that depends on its rank, and see the trial's log"
)
_DIED: Mapping[DeathCause, str] = {
    "memory": RAN_OUT,
    "hang": HUNG,
    "": "its process exited (os._exit, a crash in native code, or out of memory); see the trial's log",
}


@dataclass(slots=True)
class Gathered:
    """Everything that a gang has sent so far."""

    failures: list[SegmentFailure] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)
    last: SegmentReport | SegmentEnded | None = None
    """The report of the last iteration, or the end of the function, kept back until the gang is free."""
    died_of: DeathCause = ""
    """Why a worker died, as its machine shows."""

    @property
    def over(self) -> bool:
        """Whether the end has begun."""
        return bool(self.failures or self.deaths or self.last)

    @property
    def lost(self) -> SegmentFailure | None:
        """The first failure that reports a lost checkpoint."""
        return next((failure for failure in self.failures if failure.lost), None)

    @property
    def most_per_gpu(self) -> int | None:
        """With how many samples at once the gang begins again, as workers ran out of memory; None: it does not."""
        own = [failure.most_per_gpu for failure in self.failures if not failure.secondary]
        asked = [most for most in own if most is not None]
        return min(asked) if asked and len(asked) == len(own) and not self.deaths and self.last is None else None

    def cause(self) -> tuple[FailureKind, str, str]:
        """Return kind, message and details of the first failure, not of its consequences."""
        for failure in self.failures:
            if not failure.secondary:
                return failure.kind, failure.message, failure.details
        if self.deaths:
            return "died", _DIED[self.died_of], "\n".join(self.deaths)
        if self.failures:
            return self.failures[0].kind, self.failures[0].message, self.failures[0].details
        return "died", "the gang ended before its last iteration", ""


@dataclass(eq=False)
class Attempt:
    """Carries out a StartTrial."""

    start: StartTrial
    segment: Segment
    """That of rank 0, without its rendezvous."""
    log: TrialLog | None
    workers_of: Callable[[str], Workers | None]
    """Gives the workers of an instance that is held, or None."""
    put: Callable[[Callable[[float], Event]], None]
    """Takes the events."""

    def __post_init__(self) -> None:
        self._mutex = threading.Lock()
        self._stopped = False
        self._abandoned_until: float | None = None
        """Instant by which the workers that are left must have ended after an instance of the gang is gone."""
        self._busy: dict[int, Worker] = {}
        self._vitals: list[Any] = []
        """By rank: a reference to the `Vitals` of its machine before the attempt."""
        self._thread: threading.Thread | None = None
        self._has_started = False
        self._others: dict[int, MachineUse] = {}
        """By rank: the latest use of its machine by each worker beside rank 0."""

    def uses(self, instance: str) -> bool:
        """Whether a worker of the gang is on `instance`."""
        return any(slot.instance == instance for slot in self.start.gang)

    def begin(self) -> None:
        """Start the thread."""
        self._thread = connection.start(self._run, f"trial-{self.start.trial}-{self.start.attempt}")

    def stop(self, *, replace_workers: bool = True) -> None:
        """Send no more events; workers that have not returned are killed and replaced."""
        with self._mutex:
            self._stopped = True
            is_ending = self._abandoned_until is not None
        if replace_workers and not is_ending:
            self._replace_busy()

    def abandon(self) -> None:
        """Send no more events, as an instance of the gang is gone; workers that end by themselves soon stay warm."""
        with self._mutex:
            if self._stopped:
                return
            self._stopped, self._abandoned_until = True, time.monotonic() + GRACE_S
            for rank, worker in self._busy.items():
                if (workers := self._workers_of(rank)) is not None:
                    workers.hold(self.start.gang[rank].gpu, worker)

    def wait(self, timeout_s: float) -> None:
        """Wait until the thread has ended."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            workers = self._await_workers()
            if workers is not None:
                self._train(workers)
        except Exception as error:
            # Ray's error, or ours: the driver must not wait for a thread that is gone.
            self._replace_busy()
            if self._gone():
                return
            self._fail("died", f"the backend lost track of it: {type(error).__name__}: {last_line(error)}", str(error))

    def _await_workers(self) -> list[Worker] | None:
        """Return the gang's warm workers; None if there is nothing to start any more."""
        futures = [self._future(slot) for slot in self.start.gang]
        while not all(future is not None and future.done() for future in futures):
            if self._stopped or self._gone():
                return None
            time.sleep(0.02)
            futures = [self._future(slot) for slot in self.start.gang]
        return [future.result() for future in futures if future is not None]

    def _future(self, slot: Slot) -> Future[Worker] | None:
        workers = self.workers_of(slot.instance)
        return None if workers is None else workers.worker(slot.gpu)

    def _gone(self) -> bool:
        """Whether an instance of the gang is gone: then its loss is reported, not a failure of the trial."""
        return any(self.workers_of(slot.instance) is None for slot in self.start.gang)

    def _train(self, workers: Sequence[Worker]) -> None:
        gathered = self._trained_once(workers)
        while not self._stopped and (most := gathered.most_per_gpu) is not None:
            self.segment = replace(self.segment, most_per_gpu=most)
            self._replace_busy()
            fresh = self._await_workers()
            if fresh is None:
                break
            gathered = self._trained_once(fresh)
        self._conclude(gathered)

    def _trained_once(self, workers: Sequence[Worker]) -> Gathered:
        """Let the gang train its segment from the latest report; return what it has sent."""
        gathered = Gathered()
        try:
            rendezvous = ray.get(workers[0].rendezvous.remote(), timeout=_PROOF_S) if len(workers) > 1 else None
        except RayError as error:
            gathered.deaths.append(f"rank 0: {last_line(error)}")
            self._busy = dict(enumerate(workers[:1]))
        else:
            self._follow(self._submit(workers, rendezvous), gathered)
        return gathered

    def _conclude(self, gathered: Gathered) -> None:
        """Report how the attempt ended, once its gang is free."""
        slots = self._replace_busy()
        if isinstance(gathered.last, SegmentEnded):
            self._send(TrialEnded)
        elif gathered.last is not None:
            self._report(gathered.last)
        elif not self._stopped and self._survives(slots, gathered):
            if gathered.lost is not None:
                self._send(CheckpointLost, message=gathered.lost.message)
            else:
                causes = map(self._died_of, slots if gathered.deaths else [])
                gathered.died_of = next((cause for cause in causes if cause), "")
                self._fail(*gathered.cause())

    def _submit(self, workers: Sequence[Worker], rendezvous: str | None) -> dict[Any, int]:
        """Order every worker to run its segment; return stream -> rank."""
        with self._mutex:
            if self._stopped:
                return {}
            self._busy = dict(enumerate(workers))
            self._vitals = [worker.vitals.remote(self.log) for worker in workers]
            return {
                worker.run.options(num_returns="streaming").remote(
                    replace(self.segment, rank=rank, rendezvous=rendezvous), self.log
                ): rank
                for rank, worker in enumerate(workers)
            }

    def _follow(self, streams: dict[Any, int], gathered: Gathered) -> None:
        """Pass on the items until every worker has returned, or the grace after the first end is over."""
        deadline = float("inf")
        while streams and not self._gives_up() and time.monotonic() < deadline:
            ready: list[Any] = ray.wait(list(streams), num_returns=1, timeout=LOOK_S)[0]
            for stream in ready:
                try:
                    item = ray.get(next(stream))
                    self._take_in(item, gathered)
                    if isinstance(item, SegmentFailure) and self._loses_gpu(streams[stream], item):
                        del streams[stream]
                except StopIteration:
                    self._free(streams.pop(stream))
                except RayError as error:
                    gathered.deaths.append(f"rank {streams.pop(stream)}: {last_line(error)}")
            if gathered.over:
                deadline = min(deadline, time.monotonic() + (GRACE_S if gathered.deaths else _LAST_WORDS_S))

    def _gives_up(self) -> bool:
        return self._stopped and (self._abandoned_until is None or time.monotonic() > self._abandoned_until)

    def _free(self, rank: int) -> None:
        """Let a worker that has returned train other trials."""
        with self._mutex:
            worker = self._busy.pop(rank, None)
            if self._abandoned_until is not None and (workers := self._workers_of(rank)) is not None:
                workers.give_back(self.start.gang[rank].gpu, worker)

    def _workers_of(self, rank: int) -> Workers | None:
        return self.workers_of(self.start.gang[rank].instance)

    def _take_in(self, item: SegmentItem, gathered: Gathered) -> None:
        match item:
            case SegmentStarted():
                if not self._has_started:
                    self._send(TrialStarted)
                self._has_started = True
            case SegmentUse():
                self._others[item.rank] = item.use[-1]
            case SegmentArtifact():
                self._send(TrialArtifact, name=item.name, iterations=item.iterations, file=item.file)
            case SegmentRepeated():
                self._send(TrialRepeated, iterations=item.iterations)
            case SegmentReport() if item.ended or item.iterations >= self.start.until_iterations:
                gathered.last = item
            case SegmentEnded():
                gathered.last = item
            case SegmentReport():
                self._report(item)
            case SegmentFailure():
                gathered.failures.append(item)

    def _loses_gpu(self, rank: int, failure: SegmentFailure) -> bool:
        """Count it for the GPU if that is at fault; return whether the worker's process can use its GPU no more.

        Then it is not followed to its end, and is replaced as one that has not returned.
        """
        slot = self.start.gang[rank]
        workers = self.workers_of(slot.instance)
        if failure.kind == "gpu" and workers is not None:
            workers.note_gpu_failure(slot.gpu, failure.message)
        return failure.context_lost

    def _replace_busy(self) -> list[Slot]:
        """Replace the workers that have not returned; return their slots."""
        with self._mutex:
            busy, self._busy = self._busy, {}
        slots = []
        for rank, worker in busy.items():
            slots.append(self.start.gang[rank])
            if (workers := self._workers_of(rank)) is not None:
                workers.replace(self.start.gang[rank].gpu, worker)
        return slots

    def _survives(self, slots: Sequence[Slot], gathered: Gathered) -> bool:
        """Whether the instances outlive the failure; if not, they were lost and the trial did not fail.

        For a few seconds, a worker that dies with its instance looks like one that dies alone. But only a living
        instance starts another one. A failure that is no echo of another needs no proof.
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

    def _died_of(self, slot: Slot) -> DeathCause:
        """Return what killed the slot's worker, as the one that is there by now sees it; empty: that is not known."""
        fresh = self._future(slot)
        if not self._vitals or fresh is None or not fresh.done():
            return ""
        before = self._vitals[self.start.gang.index(slot)]
        try:
            cause: DeathCause = ray.get(fresh.result().death_cause.remote(before, self.log), timeout=_PROOF_S)
        except RayError:
            return ""
        return cause

    def _report(self, report: SegmentReport) -> None:
        """Pass a report on; workers that begin later go on from it."""
        checkpoint = report.checkpoint or self.segment.checkpoint
        self.segment = replace(self.segment, from_iterations=report.iterations, checkpoint=checkpoint)
        balance = report.batch.balance
        self._send(
            TrialReported,
            iterations=report.iterations,
            metrics=report.metrics,
            checkpoint=report.checkpoint,
            batches=report.batch.batches,
            limits=report.batch.limits,
            samples_per_iteration=report.batch.samples_per_iteration,
            updates=report.batch.updates,
            saved_iterations=report.saved_iterations,
            balance=None if balance is None or balance.is_equal else balance,
            ended=report.ended,
            use=tuple(mean_use(each, tuple(self._others.values())) for each in report.use),
        )

    def _fail(self, kind: FailureKind, message: str, details: str) -> None:
        if kind == "memory":
            message += f" ({brief(self.segment.config)})"
        self._send(TrialFailed, kind=kind, message=message, details=details)

    def _send(self, event: Callable[..., Event], **fields: Any) -> None:
        trial, attempt = self.start.trial, self.start.attempt
        with self._mutex:
            if not self._stopped:
                self.put(lambda now: event(occurred_at=now, trial=trial, attempt=attempt, **fields))
