"""Large files that this machine needs for a while: drafts in a folder, and checkpoints that a gang's workers share."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rubberband.cloud.node import machine_folder

if TYPE_CHECKING:
    from rubberband.executor.checkpoints import CheckpointStore
    from rubberband.executor.core.events import CheckpointRef


class Scratch:
    """A new, empty folder. It goes with this object; that of a killed process goes with the next one that is made."""

    def __init__(self) -> None:
        """Raises OSError."""
        top = machine_folder() / "scratch"
        top.mkdir(exist_ok=True)
        _remove_abandoned(top)
        self.path, descriptor = _new_folder(top)
        self.close = weakref.finalize(self, _end, os.getpid(), self.path, descriptor)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


def _new_folder(top: Path) -> tuple[Path, int]:
    """Return a new folder, and a descriptor that holds a lock on it."""
    while True:
        path = Path(tempfile.mkdtemp(dir=top))
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if path.exists():  # another process may have found it without a lock
                return path, descriptor
            os.close(descriptor)


def _remove_abandoned(top: Path) -> None:
    for path in top.iterdir():
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)


def _end(process: int, path: Path, descriptor: int) -> None:
    if os.getpid() == process:  # a fork has the object too
        shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)


_PAUSE_S = 0.01


@contextlib.contextmanager
def on_machine(store: CheckpointStore, ref: CheckpointRef) -> Iterator[Path | bytes]:
    """Yield the file of a checkpoint while it is needed, or its bytes if this machine has no room for the file.

    All workers of a gang here map that file into memory: the first to come loads it, else each of eight would load and
    hold all of it. The file goes with its last user. A process that is killed leaves it to the next call.

    Raises CheckpointError as `store.load` does.
    """
    try:
        folder = machine_folder() / "checkpoints"
        folder.mkdir(exist_ok=True)
        path = folder / ref.digest
        for other in folder.iterdir():  # killed processes leave some
            if other != path:
                with contextlib.suppress(OSError):
                    _let_go(other, os.open(other, os.O_RDWR))
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
