"""The files of a checkpoint as they are at one moment, while its program or function waits: it trains on meanwhile.

Small files are copied. Large ones are hard links where the program does not write again into the files that it has
saved: it writes others in their place, or below another name, as most do. Whether it does is seen at its second save,
so those of the first are copied, and a linked file is compared once more after it was packed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rubberband.executor.checkpoints.folders import FolderCheckpoint, Rewritten, settled, walk, write_archive
from rubberband.executor.checkpoints.scratch import Scratch

LARGE_BYTES = 2**24
"""Bytes of a file from which on it is linked."""
_FICLONE = 0x40049409
"""Linux: makes a file a copy-on-write copy of another one, on file systems that have these (XFS, Btrfs)."""
_CHUNK_BYTES = 2**24
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
    rewritten: set[str]
    """The paths of large files that the program changes in place, to which it adds."""
    links: dict[str, _State] = field(default_factory=dict)
    has_files: bool = False
    is_packed_now: bool = False

    def payload(self) -> Callable[[Path], None]:
        """Return what writes them into an archive; they must stay until it is called.

        It raises CheckpointError, and Rewritten if the program has written into a file meanwhile.
        """
        self.is_packed_now = True
        return self._pack

    def _pack(self, to: Path) -> None:
        try:
            write_archive({"": self.path}, to, **self.content)
            self.verify()
        finally:
            self.is_packed_now = False

    def verify(self) -> None:
        """Raise Rewritten if the program has written into a linked file."""
        changed = [path for path, state in self.links.items() if _state(os.stat(self.path / path)) != state]
        if changed:
            self.rewritten.update(changed)
            raise Rewritten(f"{changed[0]} was written again while the checkpoint was packed")

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


class Snapshots:
    """Takes the snapshots of one program or function."""

    def __init__(self, scratch: Scratch) -> None:
        """`scratch`: a folder for them, on the file system of the checkpoint."""
        self._scratch = scratch
        self._place = scratch.path / "saved"
        self._place.mkdir()
        self._taken = 0
        self._before: dict[str, _State] = {}
        self._rewritten = set[str]()
        """Paths of large files that the program changes in place."""

    def take(self, folder: Path, content: Mapping[str, Any], *, without: Collection[str] = ()) -> Snapshot:
        """Return the files of a folder as they are now, but those at the paths `without`; `content` for the manifest.

        Raises CheckpointError for a folder that changes meanwhile, or that has something else than files.
        """
        self._taken += 1
        snapshot, self._before = settled([folder], lambda: self._read(folder, content, without))
        return snapshot

    def checkpoint(self, folder: Path) -> FolderCheckpoint:
        """Return the files of a folder, for a function. Raises CheckpointError."""
        snapshot = self.take(folder, {})
        made = FolderCheckpoint(snapshot.path, self, snapshot.verify)
        weakref.finalize(made, snapshot.remove)
        return made

    def _read(
        self, folder: Path, content: Mapping[str, Any], without: Collection[str]
    ) -> tuple[Snapshot, dict[str, _State]]:
        snapshot = Snapshot(self._place / str(self._taken), content, self._rewritten)
        found, links = dict[str, _State](), list[Path]()
        held = self._place / "held"
        for each in (held, snapshot.path):
            shutil.rmtree(each, ignore_errors=True)
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
                state = _state(entry.status)
                if entry.status.st_size < LARGE_BYTES:
                    shutil.copy2(entry.place, to)
                    continue
                found[entry.path] = state
                if self._is_kept(entry.path, state) and _linked(entry.place, to):
                    snapshot.links[entry.path] = state
                    continue
                _copy(entry.place, to)
                if not self._before:  # its inode stays its own until the next save, which shows what becomes of it
                    held.mkdir(exist_ok=True)
                    _linked(entry.place, held / str(len(found)))
        latest_s = max((changed_ns for _, _, changed_ns in snapshot.links.values()), default=0) / 1e9
        time.sleep(max(0.0, min(latest_s + _TICK_S - time.time(), _TICK_S)))
        for link in links:
            if not link.exists():  # it leads to what is left out
                link.unlink()
        return snapshot, found

    def _is_kept(self, path: str, state: _State) -> bool:
        """Whether the program probably leaves this file as it is, or removes it."""
        before = self._before.get(path)
        if before is not None and before[0] == state[0] and before != state:
            self._rewritten.add(path)
        return bool(self._before) and path not in self._rewritten


def _state(status: os.stat_result) -> _State:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _linked(source: str, to: Path) -> bool:
    """Link a file; return whether that was possible."""
    try:
        os.link(source, to)
    except OSError:  # another file system, or one without links
        return False
    return True


def _copy(source: str, to: Path) -> None:
    with open(source, "rb") as file, open(to, "wb") as made:
        try:
            fcntl.ioctl(made.fileno(), _FICLONE, file.fileno())
        except OSError:
            shutil.copyfileobj(file, made, _CHUNK_BYTES)
    shutil.copystat(source, to)
