"""The cache of the hub on one machine: which commits it has whole and verified, and the lock of who fetches."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from rubberband.cloud.fetch.hub import File
from rubberband.files import make_directories, private, write_atomically
from rubberband.spec.fetching import Source

_BLOCK = 1 << 20
_READERS = 4
"""Files that are read at once to verify them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A finished fetch."""

    size: int
    """Bytes that were fetched."""
    seconds: float
    """Time that fetching and verifying them took."""
    is_mirrored: bool = False
    """Whether they came from the mirror."""
    trouble: str = ""
    """Reason why the mirror was not used; empty: none."""


@dataclass(frozen=True, slots=True)
class Place:
    """A commit of a source in the cache at `root` (HF_HUB_CACHE)."""

    root: Path
    source: Source
    commit: str

    @property
    def repo(self) -> Path:
        """Folder of all commits of the source."""
        return self.root / f"{self.source.kind}s--{self.source.name.replace('/', '--')}"

    @property
    def snapshot(self) -> Path:
        """Folder of the files of the commit."""
        return self.repo / "snapshots" / self.commit

    @property
    def _note(self) -> Path:
        return self.repo / f"rubberband-{self.commit}.json"

    def fetched(self) -> Fetched | None:
        """Return the fetch that verified all files; None if there was none, or files are gone or of another size."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            note = json.loads(self._note.read_text())
            if all((self.snapshot / path).stat().st_size == size for path, size in note["files"].items()):
                return Fetched(**note["fetched"])
        return None

    def note(self, files: Sequence[File], fetched: Fetched) -> None:
        """Record that all files are here and verified. Raises OSError."""
        sizes = {file.path: file.size for file in files}
        words = {"files": sizes, "fetched": asdict(fetched)}
        write_atomically(self._note, json.dumps(words).encode(), durable=False)

    def missing(self, files: Sequence[File]) -> int:
        """Return the bytes of files that are not here."""
        return sum(file.size for file in files if _size(self.snapshot / file.path) != file.size)

    def wrong(self, files: Sequence[File]) -> list[str]:
        """Return the paths of files that are missing, or differ from their digests."""
        with ThreadPoolExecutor(_READERS) as readers:
            differ = readers.map(lambda file: not _is_right(self.snapshot / file.path, file), files)
            return [file.path for file, is_wrong in zip(files, differ, strict=True) if is_wrong]

    def drop(self, path: str) -> None:
        """Remove a file, and its content where the commit has a link to that."""
        link = self.snapshot / path
        with suppress(OSError):
            link.resolve().unlink()
        link.unlink(missing_ok=True)

    @property
    def is_named(self) -> bool:
        """Whether the revision leads to the commit, also without the hub."""
        if self.source.revision == self.commit:
            return True
        with suppress(OSError):
            return self._ref.read_text().strip() == self.commit
        return False

    def name(self) -> None:
        """Let the revision lead to the commit. Raises OSError."""
        if not self.is_named:
            self._ref.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._ref, self.commit.encode(), durable=False, mode=0o644)

    @property
    def _ref(self) -> Path:
        return self.repo / "refs" / self.source.revision

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of who fetches the source on this machine; wait for it as long as another process has it."""
        import fcntl

        folder = self.root / ".locks"
        make_directories(folder, 0o755)
        with open(folder / f"rubberband-{self.repo.name}.lock", "a", opener=private) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def commit_here(root: Path, source: Source) -> str | None:
    """Return the commit that a revision leads to in the cache; None if it leads to none there."""
    if len(source.revision) == 40 and not source.revision.strip("0123456789abcdef"):
        return source.revision
    with suppress(OSError):
        return (Place(root, source, "").repo / "refs" / source.revision).read_text().strip()
    return None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _is_right(path: Path, file: File) -> bool:
    if _size(path) != file.size:
        return False
    found = hashlib.sha256() if len(file.digest) == 64 else hashlib.sha1(usedforsecurity=False)
    if found.name == "sha1":
        found.update(f"blob {file.size}\0".encode())
    with open(path, "rb") as content:
        while block := content.read(_BLOCK):
            found.update(block)
    return found.hexdigest() == file.digest


def free_bytes(folder: Path) -> int:
    """Return the free space of the disk that has, or will have, a folder."""
    while not folder.exists():
        folder = folder.parent
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize
