"""A checkpoint as one file on a machine, which all workers of a gang there map into memory.

The first to come loads it; else each of eight workers would load and hold all of it. The file goes with its last user.
A process that is killed leaves it to the next call.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from rubberband.cloud.node import machine_folder
from rubberband.executor.checkpoints import CheckpointStore
from rubberband.executor.core.events import CheckpointRef

_PAUSE_S = 0.01


@contextlib.contextmanager
def on_machine(store: CheckpointStore, ref: CheckpointRef) -> Iterator[Path | bytes]:
    """Yield the file of a checkpoint while it is needed, or its bytes if this machine has no room for the file.

    Raises CheckpointError as `store.load` does.
    """
    try:
        folder = machine_folder() / "checkpoints"
        folder.mkdir(exist_ok=True)
        _remove_abandoned(folder, ref.digest)
        path = folder / ref.digest
        descriptor = _hold(path, store, ref)
    except OSError:
        yield store.load(ref)
        return
    try:
        yield path
    finally:
        _let_go(path, descriptor)


def _hold(path: Path, store: CheckpointStore, ref: CheckpointRef) -> int:
    """Return a descriptor that keeps the whole file there, by a shared lock on it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        while True:
            fcntl.flock(descriptor, fcntl.LOCK_SH)  # waits for a worker that loads it
            status = os.fstat(descriptor)
            if not status.st_nlink:  # its last user has removed it in between
                _unlock(descriptor)
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            elif status.st_size == ref.size_bytes:
                return descriptor
            else:
                _fill(descriptor, store, ref)
    except BaseException:
        _let_go(path, descriptor)
        raise


def _fill(descriptor: int, store: CheckpointStore, ref: CheckpointRef) -> None:
    """Write the file, unless another worker has or does."""
    try:
        # To wait here could last until another worker, which has it by then, is through; and that one waits for us.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        time.sleep(_PAUSE_S)
        return
    if os.fstat(descriptor).st_size != ref.size_bytes:
        os.ftruncate(descriptor, 0)
        with open(os.dup(descriptor), "r+b") as file:
            store.fetch(ref, file)


def _let_go(path: Path, descriptor: int) -> None:
    """Close the file, and remove it unless another process uses it."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink:
            path.unlink()
    _unlock(descriptor)


def _unlock(descriptor: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_UN)  # a loader worker that was forked meanwhile has the descriptor too
    os.close(descriptor)


def _remove_abandoned(folder: Path, kept: str) -> None:
    """Remove the files that killed processes left."""
    for path in folder.iterdir():
        if path.name != kept:
            with contextlib.suppress(OSError):
                _let_go(path, os.open(path, os.O_RDWR))
