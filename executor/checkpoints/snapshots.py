"""The files of a checkpoint as they are at one moment, while its program or function waits: it trains on meanwhile.

Small files are copied. Large ones are hard links, and are packed at once, so that most programs do not write into them
before that, also one that saves into the same file again. A file that has changed once it was packed makes no
checkpoint; after two such saves in a row it is copied. So is at once a file that is open for writing: writes through
a mapping (numpy.memmap) leave its time of change as it is.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

from rubberband.errors import CheckpointError
from rubberband.executor.checkpoints.folders import FolderCheckpoint, Rewritten, settled, walk, write_archive
from rubberband.executor.checkpoints.scratch import Scratch

LARGE_BYTES = 2**24
"""Bytes of a file from which on it is linked."""
_MOST_REWRITTEN = 2
_FICLONE = 0x40049409
"""Linux: makes a file a copy-on-write copy of another one, on file systems that have these (XFS, Btrfs)."""
_TICK_S = 0.02
"""Two writes that are further apart leave other times of change."""
_State = tuple[int, int, int]
"""Inode, size and time of change of a file."""


@dataclass(slots=True)
class Snapshot:
    """The files, in a folder of their own."""

    path: Path
    content: Mapping[str, Any]
    """Further keys of their archive's manifest."""
    rewritten: Counter[str]
    """Path of a large file -> times in a row that the program wrote into it before it was packed; it counts there."""
    links: dict[str, _State] = field(default_factory=dict)
    has_files: bool = False
    is_packed_now: bool = False

    def payload(self) -> Callable[[Path], str]:
        """Return what writes them into an archive; they must stay until it is called.

        It raises CheckpointError, and Rewritten if the program has written into a file meanwhile.
        """
        self.is_packed_now = True
        return self._pack

    def _pack(self, to: Path) -> str:
        try:
            digest = write_archive({"": self.path}, to, **self.content)
        except CheckpointError:  # it may have changed all the time
            self.verify()
            raise
        else:
            self.verify()
            return digest
        finally:
            self.is_packed_now = False

    def verify(self) -> None:
        """Raise Rewritten if the program has written into a linked file."""
        changed = [path for path, state in self.links.items() if _state(os.stat(self.path / path)) != state]
        self.rewritten.update(changed)
        if changed:
            raise Rewritten(f"{changed[0]} was written again while the checkpoint was packed")
        for path in self.links:
            del self.rewritten[path]

    def remove(self) -> None:
        """Delete them; large files in a thread, as that takes a third of a second for 2 GB."""
        if self.links:
            with suppress(RuntimeError):  # Python ends: the scratch folder goes, too
                Thread(target=self._remove, name="rubberband snapshot").start()
        else:
            self._remove()

    def _remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


class Snapshots:
    """Takes the snapshots of one program or function."""

    def __init__(self, scratch: Scratch) -> None:
        """`scratch`: a folder for them, on the file system of the checkpoint."""
        self._scratch = scratch
        self._place = scratch.path / "saved"
        self._place.mkdir()
        self._taken = 0
        self._rewritten = Counter[str]()

    def take(self, folder: Path, content: Mapping[str, Any], *, without: Collection[str] = ()) -> Snapshot:
        """Return the files of a folder as they are now, but those at the paths `without`; `content` for the manifest.

        Raises CheckpointError for a folder that changes meanwhile, or that has something else than files.
        """
        self._taken += 1
        return settled([folder], lambda: self._read(folder, content, without))

    def checkpoint(self, folder: Path) -> FolderCheckpoint:
        """Return the files of a folder, for a function. Raises CheckpointError."""
        snapshot = self.take(folder, {})
        made = FolderCheckpoint(snapshot.path, self, snapshot.verify)
        weakref.finalize(made, snapshot.remove)
        return made

    def _read(self, folder: Path, content: Mapping[str, Any], without: Collection[str]) -> Snapshot:
        snapshot = Snapshot(self._place / str(self._taken), content, self._rewritten)
        links = list[Path]()
        shutil.rmtree(snapshot.path, ignore_errors=True)
        snapshot.path.mkdir()
        for entry in walk(str(folder), top=str(folder)):
            to = snapshot.path / entry.path
            if entry.link is not None:
                to.parent.mkdir(parents=True, exist_ok=True)
                os.symlink(entry.link, to)
                links.append(to)
            elif entry.is_folder:
                to.mkdir(parents=True, exist_ok=True)
            elif entry.path not in without:
                snapshot.has_files = True
                to.parent.mkdir(parents=True, exist_ok=True)
                is_linked = entry.status.st_size >= LARGE_BYTES and self._rewritten[entry.path] < _MOST_REWRITTEN
                if is_linked and not _is_written(entry.place) and _linked(entry.place, to):
                    snapshot.links[entry.path] = _state(entry.status)
                else:
                    _copy(entry.place, to)
        latest_s = max((changed_ns for _, _, changed_ns in snapshot.links.values()), default=0) / 1e9
        time.sleep(max(0.0, min(latest_s + _TICK_S - time.time(), _TICK_S)))
        for link in links:
            if not link.exists():  # it leads to what is left out
                link.unlink()
        return snapshot


def _state(status: os.stat_result) -> _State:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _is_written(path: str) -> bool:
    """Return whether a process has the file open or mapped for writing; False where the system cannot say."""
    try:
        with open(path, "rb") as file:
            fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)  # to whom the lease is broken; it is ignored
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)  # none can be had while a writer is there
    except BlockingIOError:
        return True
    except (OSError, AttributeError):  # another owner's file, a file system without leases, or not Linux
        pass
    return False


def _linked(source: str, to: Path) -> bool:
    """Link a file; return whether that was possible."""
    try:
        os.link(source, to)
    except OSError:  # another file system, or one without links
        return False
    return True


def _copy(source: str, to: Path) -> None:
    try:
        with open(source, "rb") as file, open(to, "wb") as made:
            fcntl.ioctl(made.fileno(), _FICLONE, file.fileno())
        shutil.copystat(source, to)
    except OSError:
        shutil.copy2(source, to)
