"""A folder of files as the checkpoint of a function trial: of libraries that write their state into files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class FolderCheckpoint:
    """The files of a folder, in memory; `result.load_best(train)` returns it."""

    files: Mapping[str, bytes] = field(repr=False)
    """Path below the folder -> content."""

    @classmethod
    def from_directory(cls, folder: str | Path) -> FolderCheckpoint:
        """Read all files of a folder."""
        top = Path(folder)
        paths = sorted(path for path in top.rglob("*") if path.is_file())
        return cls({path.relative_to(top).as_posix(): path.read_bytes() for path in paths})

    def to_directory(self, folder: str | Path) -> Path:
        """Write the files into a folder, which is made if it is not there; return it."""
        top = Path(folder)
        top.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            path = top / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return top
