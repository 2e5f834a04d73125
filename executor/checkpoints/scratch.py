"""Folders of this machine for large files that are needed for a while."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path

from rubberband.cloud.node import machine_folder


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
