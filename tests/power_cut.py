"""A disk that loses what was not synced: after a power cut it holds files as they were last synced, under the names
that their directories had when those were last synced."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest


class PowerCut:
    """Watches a directory from now on, in this process. What lies there already is safe."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch) -> None:
        self._directory = directory
        self._files: dict[int, bytes] = {}
        self._folders: dict[int, dict[str, int]] = {}
        for folder, _, files in os.walk(directory):
            self._keep(Path(folder))
            for name in files:
                self._keep(Path(folder, name))
        really = os.fsync

        def fsync(descriptor: int) -> None:
            really(descriptor)
            self._keep(Path(f"/proc/self/fd/{descriptor}").resolve())

        patch.setattr(os, "fsync", fsync)

    def _keep(self, path: Path) -> None:
        seen = path.stat()
        if stat.S_ISDIR(seen.st_mode):
            self._folders[seen.st_ino] = {entry.name: entry.inode() for entry in os.scandir(path)}
        else:
            self._files[seen.st_ino] = path.read_bytes()

    def survivors(self, into: Path) -> Path:
        """The directory as it is found when the power is back, made anew at `into`."""
        self._restore(self._directory.stat().st_ino, into)
        return into

    def _restore(self, folder: int, into: Path) -> None:
        into.mkdir()
        for name, inode in self._folders.get(folder, {}).items():
            if inode in self._files:
                (into / name).write_bytes(self._files[inode])
            elif inode in self._folders:
                self._restore(inode, into / name)
