"""Atomic writing: a reader finds the old content or the new one, also after a crash."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def write_atomically(
    path: Path, data: bytes, *, durable: bool, mode: int = 0o666, modified_at: float | None = None
) -> None:
    """Write the file at `path` by way of a draft beside it.

    With `durable` the file and its name survive a power cut once this returns. `mode` is that of a new file, less the
    umask. `modified_at` (Unix time) is its time of modification; None: now. Raises OSError and leaves no draft.
    """
    draft = path.with_name(f".{path.name}.{os.urandom(4).hex()}.new")
    try:
        write_new(draft, data, durable=durable, mode=mode)
        if modified_at is not None:
            os.utime(draft, (modified_at, modified_at))
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(path.parent)


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a draft beside `path` to write; afterwards it is durable, and the file at `path`.

    Raises OSError. No draft is left after an error.
    """
    draft = path.with_name(f".{path.name}.{os.urandom(4).hex()}.new")
    try:
        yield draft
        _sync(draft, os.O_RDWR)
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def write_new(path: Path, data: bytes, *, durable: bool, mode: int = 0o666) -> None:
    """Write a new file; with `durable` its content, not its name, survives a power cut once this returns.

    Raises OSError; a part of the file may remain.
    """
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
        file.write(data)
        if durable:
            file.flush()
            os.fsync(file.fileno())


def make_directories(path: Path, mode: int = 0o700) -> None:
    """Make a directory and its parents, unless they are there; new ones survive a power cut once this returns.

    `mode` is that of new ones, less the umask: by default they are this user's alone. Raises OSError.
    """
    if not path.is_dir():
        make_directories(path.parent, mode)
        path.mkdir(mode, exist_ok=True)
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory survive a power cut."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
