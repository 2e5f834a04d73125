"""A directory whose disk loses power: it holds files as they were last synced, under the names that their folders had
when those were last synced."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest


class PowerCut:
    """Watches a directory from now on, in this process. What lies there already is safe."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch) -> None:
        self._directory = directory
        self._files: dict[int, bytes] = {}
        """Inode -> what of it is on the disk."""
        self._folders: dict[int, dict[str, int]] = {}
        """Inode -> the names that are on the disk, and their inodes."""
        self._keep_all()
        really = os.fsync

        def fsync(descriptor: int) -> None:
            really(descriptor)
            self._keep(Path(f"/proc/self/fd/{descriptor}"))

        patch.setattr(os, "fsync", fsync)

    def survivors(self, into: Path) -> Path:
        """What is there when the power is back, as a new directory `into`."""
        self._restore(self._directory.stat().st_ino, into)
        return into

    def cut(self) -> None:
        """The power fails, and comes back."""
        kept = self.survivors(self._directory.with_name(f"{self._directory.name}.kept"))
        for entry in self._directory.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        shutil.copytree(kept, self._directory, dirs_exist_ok=True)
        shutil.rmtree(kept)
        self._keep_all()

    def _keep_all(self) -> None:
        self._files.clear()
        self._folders.clear()
        for folder, _, files in os.walk(self._directory):
            for path in (Path(folder), *(Path(folder, name) for name in files)):
                self._keep(path)

    def _keep(self, path: Path) -> None:
        found = path.stat()
        if stat.S_ISDIR(found.st_mode):
            self._folders[found.st_ino] = {entry.name: entry.inode() for entry in os.scandir(path)}
        else:
            self._files[found.st_ino] = path.read_bytes()

    def _restore(self, folder: int, into: Path) -> None:
        into.mkdir()
        for name, inode in self._folders[folder].items():
            if inode in self._folders:
                self._restore(inode, into / name)
            else:  # a name whose content was not synced is an empty file
                (into / name).write_bytes(self._files.get(inode, b""))
