"""A checkpoint as one file on a machine, which all workers of a gang there map into memory.

The first to come loads it; else each of eight workers would load and hold all of it. The file goes with its last user.
A process that is killed leaves it to the next call.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from rubberband.cloud.node import machine_folder
from rubberband.executor.checkpoints import CheckpointStore
from rubberband.executor.core.events import CheckpointRef


@contextlib.contextmanager
def on_machine(store: CheckpointStore, ref: CheckpointRef) -> Iterator[Path | bytes]:
    """Yield the file of a checkpoint while it is needed, or its bytes if this machine has no room for the file.

    Raises CheckpointError as `store.load` does.
    """
    try:
        folder = machine_folder() / "checkpoints"
        folder.mkdir(exist_ok=True)
        _sweep(folder, ref.digest)
        path = folder / ref.digest
        descriptor = _held(path, store, ref)
    except OSError:
        yield store.load(ref)
        return
    try:
        yield path
    finally:
        _drop(path, descriptor)


def _held(path: Path, store: CheckpointStore, ref: CheckpointRef) -> int:
    """Return a descriptor that keeps the whole file there, by a shared lock on it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if os.fstat(descriptor).st_size != ref.size_bytes:
                fcntl.flock(descriptor, fcntl.LOCK_EX)  # it lets go of the shared one, so another may write it first
                if os.fstat(descriptor).st_size != ref.size_bytes:
                    os.ftruncate(descriptor, 0)
                    with open(os.dup(descriptor), "wb") as file:
                        file.write(store.load(ref))
                fcntl.flock(descriptor, fcntl.LOCK_SH)
            if os.fstat(descriptor).st_nlink:
                return descriptor
        except BaseException:
            _drop(path, descriptor)
            raise
        os.close(descriptor)  # its last user has removed it in between


def _drop(path: Path, descriptor: int) -> None:
    """Close the file, and remove it unless another process uses it."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink:
            path.unlink()
    os.close(descriptor)


def _sweep(folder: Path, kept: str) -> None:
    """Remove the files that killed processes left."""
    for path in folder.iterdir():
        if path.name != kept:
            with contextlib.suppress(OSError):
                _drop(path, os.open(path, os.O_RDWR))
