"""What a worker process runs: one trial through one segment."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator, Iterator
from typing import Literal, Protocol

from rubberband.errors import CheckpointError, EntrypointError
from rubberband.executor.checkpoints import CheckpointStore
from rubberband.executor.training.entrypoint import Entrypoint
from rubberband.executor.training.function import FunctionRunner
from rubberband.executor.training.runner import Runner, TrialRunner, describe
from rubberband.executor.training.segment import Segment, SegmentFailure, SegmentRepeated, SegmentReport, SegmentStarted
from rubberband.executor.training.torch_trial import TorchTrial
from rubberband.executor.training.trial import Trial

_log = logging.getLogger(__name__)


class _Closable(Protocol):
    def close(self) -> None: ...


def preload(entrypoint: Entrypoint) -> bool:
    """Import what training needs, and nothing more: this process may be forked. Tells whether torch is part of that.

    Raises EntrypointError.
    """
    target = entrypoint.load()
    uses_torch = isinstance(target, type) and issubclass(target, TorchTrial)
    if uses_torch:
        from rubberband.executor.training import gang, loop  # noqa: F401
    return uses_torch


def warm_up(entrypoint: Entrypoint, device: Literal["cpu", "cuda"]) -> None:
    """Import everything that training needs, so that the first segment starts as fast as the later ones.

    An entry point that does not load is left for `run_segment` to report: it fails the trials, and the worker is well.
    """
    with contextlib.suppress(EntrypointError):
        if preload(entrypoint):
            from rubberband.executor.training.loop import first_step

            first_step(device)


def run_segment(
    entrypoint: Entrypoint, segment: Segment, store: CheckpointStore
) -> Generator[SegmentStarted | SegmentRepeated | SegmentReport | SegmentFailure, None, None]:
    """Train as `segment` says, in this process; a backend calls it in every worker of the gang, and walks through it.

    Rank 0 yields SegmentStarted, a SegmentRepeated after each iteration that is done again, then a SegmentReport after
    each new one, whose checkpoint is durable by then; the other ranks yield nothing. Any rank ends with a
    SegmentFailure where something of the trial failed: exceptions of user code, `SystemExit` included, are turned into
    one. KeyboardInterrupt passes. However it ends, closing the iterator early included, the process group is destroyed
    and the process can run another segment.
    """
    resources: list[_Closable] = []
    failure: SegmentFailure | None = None
    try:
        yield from _train(entrypoint, segment, store, resources)
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        failure = describe(error, in_gang=segment.num_workers > 1)
    finally:
        while resources:
            _close(resources.pop(), segment)
    # Told only when the process group is gone: until then the other workers could hang in a collective.
    if failure is not None:
        yield failure


def _train(
    entrypoint: Entrypoint, segment: Segment, store: CheckpointStore, resources: list[_Closable]
) -> Iterator[SegmentStarted | SegmentRepeated | SegmentReport]:
    runner = _make_runner(entrypoint, segment, resources)
    resources.append(runner)
    if segment.from_iterations > 0:
        if segment.checkpoint is None:
            raise CheckpointError(
                f"trial {segment.trial} cannot go on from {segment.from_iterations} iterations: there is no checkpoint"
            )
        runner.restore(store.load(segment.checkpoint))
    if segment.rank == 0:
        yield SegmentStarted()
    for done in runner.catch_up():
        yield SegmentRepeated(iterations=done)
    for iterations in range(segment.from_iterations + 1, segment.until_iterations + 1):
        metrics = runner.iterate(iterations)
        is_last = iterations == segment.until_iterations
        if segment.rank > 0:
            continue
        checkpoint = store.save(segment.trial, iterations, runner.dump(iterations, metrics))
        if is_last:
            # Before the last report, after which a backend may close this iterator without walking to its end.
            runner.part()
        saved = runner.saved_iterations(iterations)
        yield SegmentReport(
            iterations=iterations,
            metrics=metrics,
            checkpoint=checkpoint,
            told=runner.batch_report(),
            saved_iterations=saved if saved < iterations else None,
        )
    if segment.rank > 0:
        runner.part()


def _make_runner(entrypoint: Entrypoint, segment: Segment, resources: list[_Closable]) -> Runner:
    target = entrypoint.load()
    if not isinstance(target, type):
        if segment.num_workers > 1:
            raise ValueError(f"{entrypoint} is a function and trains on one worker, not {segment.num_workers}")
        return FunctionRunner(target, segment)
    if issubclass(target, TorchTrial):
        return _make_torch_runner(target, segment, resources)
    assert issubclass(target, Trial)
    return TrialRunner(target, segment)


def _make_torch_runner(trial_class: type[TorchTrial], segment: Segment, resources: list[_Closable]) -> Runner:
    import torch

    from rubberband.executor.training.gang import Gang
    from rubberband.executor.training.loop import TorchRunner

    if segment.device == "cpu":
        # A worker stands for one logical GPU: with torch's default every worker would take all cores of the machine,
        # and a gang of four would be slower than one worker.
        torch.set_num_threads(1)
    gang = Gang.join(
        rank=segment.rank, num_workers=segment.num_workers, rendezvous=segment.rendezvous, device=segment.device
    )
    resources.append(gang)
    return TorchRunner(trial_class(), segment, gang)


def _close(resource: _Closable, segment: Segment) -> None:
    try:
        resource.close()
    except Exception:
        _log.warning("trial %d: closing it after its segment failed", segment.trial, exc_info=True)
