"""Trains segments side by side for the check of a trial, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import select
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from rubberband.cloud.ray_head.ray_node import free_port
from rubberband.errors import EntrypointError
from rubberband.executor.training.entrypoint import Entrypoint
from rubberband.executor.training.failures import TrialFailure, describe
from rubberband.executor.training.guarded_process import GuardedProcess
from rubberband.executor.training.reporting import short
from rubberband.executor.training.run import preload
from rubberband.executor.training.segment import Segment, SegmentFailure
from rubberband.values.environment import HASH_SEED

GANG_LIMIT_S = 10.0
"""Seconds of the workers after the first one has ended, beside four times the seconds of that."""
_NO_COMPILING = "TORCH_COMPILE_DISABLE"
"""Variable with which torch.compile does nothing: it takes long."""
_ADDRESS = "RUBBERBAND_CHECK_ORDERS"
_LOOK_S = 0.2

Train = Callable[[Segment], Iterable[Any]]
"""Trains a segment; what it yields can be pickled."""


@dataclass(slots=True)
class WorkerRun:
    """One worker of a segment: what it yielded, and how it ended."""

    items: list[Any] = field(default_factory=list)
    failure: SegmentFailure | None = None
    is_over: bool = False


def gang_of(segment: Segment, num_workers: int) -> list[Segment]:
    """Return the segments of the workers of a gang on this machine."""
    rendezvous = f"tcp://127.0.0.1:{free_port()}" if num_workers > 1 else None
    return [replace(segment, rank=rank, num_workers=num_workers, rendezvous=rendezvous) for rank in range(num_workers)]


def failure_of(runs: Sequence[WorkerRun]) -> SegmentFailure | None:
    """Return the first failure, if possible one that is not another's consequence."""
    failures = [run.failure for run in runs if run.failure is not None]
    return min(failures, key=lambda failure: failure.secondary, default=None)


def train_side_by_side(train: Train, segments: Sequence[Segment], *, limit_s: float) -> list[WorkerRun]:
    """Train segments in processes that are forked here; the first one has `limit_s` seconds."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="rubberband-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a thread that only waits for the end is not copied
        files = [Path(folder, str(number)) for number in range(len(segments))]
        processes = [
            context.Process(target=_work, args=(train, segment, file), daemon=False)
            for segment, file in zip(segments, files, strict=True)
        ]
        began_s = time.monotonic()
        try:
            for process in processes:
                process.start()
            processes[0].join(limit_s)
            until_s = time.monotonic() + GANG_LIMIT_S + 4.0 * (time.monotonic() - began_s)
            for process in processes[1:]:
                process.join(max(0.0, until_s - time.monotonic()))
        finally:
            for process in processes:
                process.kill()
                process.join()
        return [_read(file) for file in files]


def _work(train: Train, segment: Segment, file: Path) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):  # the check has shown what the trial prints
        os.dup2(nothing, stream)
    with file.open("wb") as items:

        def write(item: Any) -> None:
            pickle.dump(item, items)
            items.flush()

        try:
            for item in train(segment):
                write(item)
            write(None)
        except BaseException as error:
            failure = describe(error, in_gang=segment.num_workers > 1)
            write(replace(failure, details="") if isinstance(error, TrialFailure) else failure)
    os._exit(0)


def _read(file: Path) -> WorkerRun:
    run = WorkerRun()
    with suppress(FileNotFoundError, EOFError, pickle.UnpicklingError), file.open("rb") as items:
        while not run.is_over and run.failure is None:
            item = pickle.load(items)
            if item is None or isinstance(item, SegmentFailure):
                run.failure, run.is_over = item, item is None
            else:
                run.items.append(item)
    return run


class TrainServer:
    """A process forked from this one that trains segments side by side whenever it is asked."""

    _orders: Connection

    def __init__(self, entrypoint: Entrypoint, train: Train, *, limit_s: float) -> None:
        self._orders, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=_serve, args=(theirs, entrypoint, train, limit_s), daemon=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        theirs.close()

    def train(self, segments: Sequence[Segment]) -> list[WorkerRun]:
        with suppress(EOFError, OSError):  # it was killed: there is too little memory
            self._orders.send(segments)
            runs: list[WorkerRun] = self._orders.recv()
            return runs
        return [WorkerRun() for _ in segments]

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._orders.close()


class FreshServer(TrainServer):
    """The same as a process that has imported the trial by itself, in a run by the driver's fork server, with another
    order of sets than this process has if that was not forked there.
    """

    def __init__(self, entrypoint: Entrypoint, train: Train, *, limit_s: float) -> None:
        self._given = entrypoint, train, limit_s
        self._folder = tempfile.TemporaryDirectory(prefix="rubberband-")
        address = str(Path(self._folder.name, "orders"))
        self._ending = ExitStack()
        self._listener = Listener(self._ending.enter_context(short(address)), "AF_UNIX")  # which its end needs
        environment = os.environ | {HASH_SEED: entrypoint.environment.hash_seed, _ADDRESS: address}
        environment.pop(_NO_COMPILING, None)  # a fork server has none
        words = [sys.executable, "-P", "-m", __name__]
        self._fresh = GuardedProcess(words, environment, os.getcwd(), os.dup(1), os.dup(2), forks=True)

    def train(self, segments: Sequence[Segment]) -> list[WorkerRun]:
        if not hasattr(self, "_orders"):
            while not select.select([self._listener._listener._socket], [], [], _LOOK_S)[0]:  # type: ignore[attr-defined]
                if self._fresh.poll() is not None:
                    return [WorkerRun() for _ in segments]
            self._orders = self._listener.accept()
            self._orders.send(self._given)
        return super().train(segments)

    def close(self) -> None:
        self._fresh.end()
        self._listener.close()
        self._ending.close()
        self._folder.cleanup()


def _serve(orders: Connection, entrypoint: Entrypoint, train: Train, limit_s: float) -> None:
    with suppress(EOFError):
        with suppress(EntrypointError):  # the workers report it
            preload(entrypoint)
        while True:
            orders.send(train_side_by_side(train, orders.recv(), limit_s=limit_s))
    os._exit(0)


def compile_nothing() -> None:
    """Let torch.compile do nothing in this process, which may have imported torch."""
    os.environ[_NO_COMPILING] = "1"
    if (dynamo := sys.modules.get("torch._dynamo.config")) is not None:  # which has read it
        dynamo.disable = True  # type: ignore[attr-defined]


def serve_fresh() -> None:
    """Train what the process asks for that started this one; nothing is compiled."""
    compile_nothing()
    with short(os.environ.pop(_ADDRESS)) as name, Client(name, "AF_UNIX") as orders:
        _serve(orders, *orders.recv())


if __name__ == "__main__":
    from rubberband.executor.training import check_workers  # by its name, as the other process knows what is sent

    check_workers.serve_fresh()
