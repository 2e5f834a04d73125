"""A directory whose disk loses power: what was not synced is gone."""

from __future__ import annotations

import os
import stat
from pathlib import Path


class PowerCut:
    """Stands in for `os.fsync`; `cut` leaves what was synced, files by their content and names by their directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._contents: dict[int, bytes] = {}
        """Inode -> what of it is on the disk."""
        self._names: dict[str, int] = {}

    def fsync(self, descriptor: int) -> None:
        """Put a file's content, or the names in the directory, on the disk."""
        found = os.fstat(descriptor)
        if not stat.S_ISDIR(found.st_mode):
            self._contents[found.st_ino] = Path(f"/proc/self/fd/{descriptor}").read_bytes()
        elif os.path.samestat(found, self._directory.stat()):
            self._names = {path.name: path.stat().st_ino for path in self._directory.iterdir()}

    def cut(self) -> None:
        """The power fails, and comes back."""
        for path in self._directory.iterdir():
            path.unlink()
        for name, inode in self._names.items():
            (self._directory / name).write_bytes(self._contents.get(inode, b""))
        self._names = {path.name: path.stat().st_ino for path in self._directory.iterdir()}
        self._contents = {inode: (self._directory / name).read_bytes() for name, inode in self._names.items()}
