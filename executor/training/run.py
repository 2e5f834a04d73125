"""One segment of one trial, as a worker process runs it."""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from rubberband.errors import CheckpointError, EntrypointError
from rubberband.executor.checkpoints import CheckpointStore, Payload
from rubberband.executor.checkpoints.folders import Rewritten
from rubberband.executor.checkpoints.scratch import on_machine
from rubberband.executor.core.events import CheckpointRef
from rubberband.executor.training import failures
from rubberband.executor.training.artifacts import Artifacts
from rubberband.executor.training.entrypoint import Entrypoint
from rubberband.executor.training.failures import GangBroken, TrainingEnded, describe
from rubberband.executor.training.kinds import kind_of
from rubberband.executor.training.lifeline import Peers
from rubberband.executor.training.runner import Runner
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
from rubberband.executor.training.torch_trial import TorchTrial
from rubberband.executor.training.trial import Device
from rubberband.executor.training.waits import WaitClock
from rubberband.executor.training.worker_process import Leftovers
from rubberband.features import LOOP, made_by, parts
from rubberband.values.machine_use import MachineUse

_log = logging.getLogger(__name__)


class _Closable(Protocol):
    def close(self) -> None: ...


def preload(entrypoint: Entrypoint | None) -> bool:
    """Import what training needs, and nothing more: this process may be forked. Returns whether it needs torch.

    Without an entry point (None) that is what any TorchTrial needs. Raises EntrypointError.
    """
    target = TorchTrial if entrypoint is None else entrypoint.load()
    uses_torch = isinstance(target, type) and issubclass(target, TorchTrial)
    if uses_torch:
        from rubberband.executor.training import gang, loop  # noqa: F401

        for socket in LOOP:
            list(parts(socket))
    elif "torch" in sys.modules:
        import torch._dynamo  # noqa: F401 - the first optimizer does, which would keep the frames of its trial
    return uses_torch


def warm_up(entrypoint: Entrypoint, device: Device) -> None:
    """Import everything that training needs, so that the first segment starts as fast as the later ones.

    `run_segment` reports an entry point that does not load: it fails the trials, and the worker is well.
    """
    with contextlib.suppress(EntrypointError):
        if preload(entrypoint):
            from rubberband.executor.training.loop import first_step

            first_step(device)
    gc.collect()
    gc.freeze()  # the collection at the end of each segment looks only at what came after


def run_segment(
    entrypoint: Entrypoint, segment: Segment, store: CheckpointStore
) -> Generator[
    SegmentStarted | SegmentRepeated | SegmentReport | SegmentUse | SegmentArtifact | SegmentEnded | SegmentFailure,
    None,
    None,
]:
    """Train as `segment` says, in this process. A backend iterates over it in every worker of the gang.

    Rank 0 yields SegmentStarted, a SegmentRepeated after each repeated iteration, then a SegmentReport for each new
    one, when its checkpoint is durable: by then the next iteration is under way, except after the last. A trial that
    ends by itself says so in its last report, or by a SegmentEnded if its function returned. The other ranks yield
    a SegmentUse now and then. Any rank ends with a SegmentFailure if the trial failed: every exception of user code is
    turned into one, SystemExit and KeyboardInterrupt included. The others of the gang learn of it before. In the end,
    also if the iterator is closed early, all that the segment left behind is put away, and the process can run another
    one, unless its CUDA context is lost (`context_lost` of the failure) or `function_runs_on`.
    """
    reports = Reports(store, segment.trial)
    artifacts = Artifacts(store, segment)
    resources: list[_Closable] = [reports]
    failure: SegmentFailure | None = None
    try:
        try:
            try:
                yield from _train(entrypoint, segment, store, reports, artifacts, resources)
            except TrainingEnded:
                yield from reports.all()  # without its last checkpoint the trial has failed
                for runner in (each for each in resources if isinstance(each, Runner)):
                    runner.part()
                yield from artifacts.new()
                yield SegmentEnded()
        except GeneratorExit:
            raise
        except BaseException as error:
            failure = _described(error, entrypoint, segment, resources)
            if failures.context_is_lost():
                failure = replace(failure, context_lost=True)
        # The error is gone by now, and with it what its frames hold. To close may take long, so this comes first.
        if failure is not None:
            yield from reports.rest()
            yield from artifacts.rest()
            yield failure
    finally:
        close_all(resources, segment)
        artifacts.close()  # after what gives the process its environment back


def _described(
    error: BaseException, entrypoint: Entrypoint, segment: Segment, resources: Sequence[_Closable]
) -> SegmentFailure:
    """Return the failure to report; the other workers of the gang learn of it if it does not come from one of them."""
    gang = next((each for each in resources if isinstance(each, Peers)), None)
    in_gang = segment.num_workers > 1 or segment.training is not None
    broken = "" if gang is None else gang.broken
    failure = describe(error, in_gang=in_gang, broken=broken, environment=entrypoint.environment)
    if gang is not None and not failure.secondary:
        gang.fail(failure.message)
    return failure


def _train(
    entrypoint: Entrypoint,
    segment: Segment,
    store: CheckpointStore,
    reports: Reports,
    artifacts: Artifacts,
    resources: list[_Closable],
) -> Iterator[SegmentStarted | SegmentRepeated | SegmentReport | SegmentUse | SegmentArtifact]:
    runner = make_runner(entrypoint, segment, resources)
    resources.append(runner)
    runner.save = partial(store.save, segment.trial)
    with _checkpoint(segment, store, runner) as held:
        saved = runner.begin(held)
    reports.begin(runner.parts, saved)
    meter = made_by("meter", segment, {**runner.waited, "checkpoint": reports.waiting.seconds})
    resources += [meter] if meter is not None else []
    is_first = segment.rank == 0
    started = iter([SegmentStarted()] if is_first else [])
    if not runner.compiles:
        yield from started
    for done in range(saved + 1, segment.from_iterations + 1):
        yield from _iterate(runner, done, reports, started)
        if is_first:
            yield SegmentRepeated(iterations=done)
    for iterations in range(segment.from_iterations + 1, segment.until_iterations + 1):
        metrics = yield from _iterate(runner, iterations, reports, started)
        is_last = iterations == segment.until_iterations or runner.ended
        saves = is_last or runner.saves_after(iterations)
        if is_first:
            yield from artifacts.new(iterations)
            saved = runner.saved_iterations(iterations) if saves else saved
            report, dump = _report(runner, iterations, metrics, saved), partial(runner.dump, iterations, metrics)
            if saves and not is_last and runner.may_wait and reports.is_writing:
                reports.add_later(report, dump, partial(runner.saved_iterations, iterations))
            else:
                if is_last:
                    reports.overtake()
                yield from reports.all() if saves else ()  # one checkpoint at a time
                with reports.waiting:
                    payload = dump(is_last=is_last) if saves else None
                reports.add(report, payload)
        elif saves:
            runner.dump_part(iterations, is_last=is_last)
        if is_last:
            # Before the last report, after which a backend may close this iterator without walking to its end.
            reports.wait()
            runner.part()
        use = () if meter is None else meter.take(is_last=is_last)
        if is_first:
            reports.note(use)
        elif use:
            yield SegmentUse(rank=segment.rank, use=use)
        if is_last or not runner.pauses:
            yield from reports.all()
        if is_last:
            return
        if saves:
            runner.meet()


def _report(runner: Runner, iterations: int, metrics: Mapping[str, float], saved: int) -> SegmentReport:
    """Return the report of an iteration, to which its checkpoint is added once it is durable."""
    return SegmentReport(
        iterations=iterations,
        metrics=metrics,
        checkpoint=None,
        batch=runner.batch_report(),
        saved_iterations=saved if saved < iterations else None,
        ended=runner.ended,
    )


@contextlib.contextmanager
def _checkpoint(segment: Segment, store: CheckpointStore, runner: Runner) -> Iterator[bytes | Path | None]:
    """Yield what the runner begins from; workers of the gang on one machine share one file."""
    if segment.checkpoint is None:
        yield None
        return
    with ExitStack() as stack:
        files = [stack.enter_context(_file(segment, store, runner, ref)) for ref in segment.checkpoint.files()]
        runner.parts_held = files[1:]
        yield files[0]


@contextlib.contextmanager
def _file(segment: Segment, store: CheckpointStore, runner: Runner, ref: CheckpointRef) -> Iterator[bytes | Path]:
    if runner.maps and segment.num_workers > segment.num_instances:
        with on_machine(store, ref) as found:
            yield found
    elif runner.by_path:
        with store.only(ref) as found:
            yield found
    else:
        yield store.load(ref)


def _iterate(
    runner: Runner, iterations: int, reports: Reports, started: Iterator[SegmentStarted]
) -> Generator[SegmentStarted | SegmentRepeated | SegmentReport, None, Mapping[str, float]]:
    """Train one iteration; yield `started` after its first step, and repeats and earlier reports as they come."""
    steps, repeated = runner.steps(iterations), runner.repeated
    while True:
        try:
            next(steps)
        except StopIteration as end:
            metrics: Mapping[str, float] = end.value
            return metrics
        yield from started
        if runner.repeated > repeated:
            repeated = runner.repeated
            yield SegmentRepeated(iterations=repeated)
        yield from reports.ready()


def make_runner(entrypoint: Entrypoint, segment: Segment, resources: list[_Closable]) -> Runner:
    """Make the trial for a segment; `resources` gets what must be closed after it, beside the runner itself."""
    target = entrypoint.load()
    resources.insert(0, Leftovers(segment.device))  # closed last
    return kind_of(target).make_runner(entrypoint, target, segment, resources)


def close_all(resources: list[_Closable], segment: Segment) -> None:
    """Close what a segment has opened, in the reverse order."""
    while resources:
        try:
            resources.pop().close()
        except Exception:
            _log.warning("trial %d: closing it after its segment failed", segment.trial, exc_info=True)


# Reports on their way to the driver: each goes out in its turn, when its checkpoint is durable.
#
# A thread writes the checkpoint, one at a time, while training goes on.


@dataclass(slots=True)
class _Waiting:
    report: SegmentReport
    written: Future[CheckpointRef] | None = None
    dump: Callable[[], Payload] | None = None
    """Returns its checkpoint, which is not written yet; None: it has none, or another report has overtaken it."""
    held: Callable[[], int] = int
    """Returns the iterations that `dump` would save now."""


class Reports:
    """Reports of one segment, in order; they leave by the thread that iterates over `ready` or `all`."""

    def __init__(self, store: CheckpointStore, trial: int) -> None:
        self._store = store
        self._trial = trial
        self._waiting = deque[_Waiting]()
        self.waiting = WaitClock()
        """Waits of training for a checkpoint."""
        self._parts: Callable[[], tuple[CheckpointRef, ...]] = tuple
        self._saved = 0
        """Iterations that the latest durable checkpoint holds."""
        self._writer: ThreadPoolExecutor | None = None

    def begin(self, parts: Callable[[], tuple[CheckpointRef, ...]], saved: int) -> None:
        """Say how the parts that other workers save are asked for, and how many iterations are saved."""
        self._parts, self._saved = parts, saved

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is not durable yet."""
        return any(each.dump or (each.written is not None and not each.written.done()) for each in self._waiting)

    def add(self, report: SegmentReport, payload: Payload | None) -> None:
        """Append a report, and begin to write its checkpoint, if it has one."""
        self.overtake()
        self._waiting.append(_Waiting(report))
        if payload is not None:
            self._waiting[-1].written = self._written(report, payload)

    def add_later(self, report: SegmentReport, dump: Callable[[], Payload], held: Callable[[], int]) -> None:
        """Append a report whose checkpoint is written as soon as that before it is durable.

        It goes without, if another report comes first.
        """
        self.overtake()
        self._waiting.append(_Waiting(report, dump=dump, held=held))

    def note(self, use: tuple[MachineUse, ...]) -> None:
        """Add the use of the machine to the latest report, which has not left."""
        if use:
            self._waiting[-1].report = replace(self._waiting[-1].report, use=use)

    def overtake(self) -> None:
        """Let the latest report go without its checkpoint, unless that is being written."""
        if self._waiting:
            self._waiting[-1].dump = None

    def ready(self) -> Iterator[SegmentReport]:
        """Yield those that can leave now. Raises CheckpointError if a checkpoint could not be written."""
        while self._waiting and ((written := self._begun()) is None or written.done()):
            yield self._next()

    def all(self) -> Iterator[SegmentReport]:
        """Wait for the checkpoints, and yield all reports. Raises CheckpointError as `ready` does."""
        while self._waiting:
            self.wait()
            yield self._next()

    def wait(self) -> None:
        """Wait until the next report can leave."""
        if self._waiting and (written := self._begun()) is not None:
            with self.waiting:
                written.exception()

    def rest(self) -> Iterator[SegmentReport]:
        """Yield the reports before the first checkpoint that could not be written, or got no part, after a failure."""
        with suppress(CheckpointError, GangBroken):
            yield from self.all()

    def close(self) -> None:
        """Wait until nothing is written any more."""
        if self._writer is not None:
            self._writer.shutdown()
        self._waiting.clear()

    def _begun(self) -> Future[CheckpointRef] | None:
        """Return the write of the next report's checkpoint, which begins now if it has waited for those before."""
        first = self._waiting[0]
        if first.dump is not None:
            report, dump, first.dump = first.report, first.dump, None
            saves = report.iterations if report.saved_iterations is None else report.saved_iterations
            if first.held() == saves:  # the trial may have gone on within its iteration
                first.written = self._written(report, dump())
        return first.written

    def _next(self) -> SegmentReport:
        first = self._waiting.popleft()
        report = first.report
        with suppress(Rewritten):
            if first.written is not None:
                report = replace(report, checkpoint=first.written.result())
                self._saved = report.iterations if report.saved_iterations is None else report.saved_iterations
        if report.checkpoint is None:
            report = replace(report, saved_iterations=self._saved)
        return report

    def _written(self, report: SegmentReport, payload: Payload) -> Future[CheckpointRef]:
        if self._writer is None:
            self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rubberband checkpoint")
        return self._writer.submit(self._write, report.iterations, payload)

    def _write(self, iterations: int, payload: Payload) -> CheckpointRef:
        saved = self._store.save(self._trial, iterations, payload)
        return replace(saved, parts=self._parts())
