"""Files that a trial gives to be kept with it, on their way to the checkpoint store (rank 0)."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rubberband.errors import CheckpointError
from rubberband.executor.checkpoints import CheckpointStore, copy_of
from rubberband.executor.training.reporting import ARTIFACTS, DRAFT
from rubberband.executor.training.segment import Segment, SegmentArtifact
from rubberband.units import format_bytes

MOST_FILES = 1_000
"""Names that a trial may give within a segment."""
LARGEST_BYTES = 10 * 10**9
"""Size of the largest file that is kept."""


class Artifacts:
    """The folder that `rubberband.artifact` copies to, and that programs write to (`RUBBERBAND_ARTIFACTS`).

    It is looked at after each iteration and at the segment's end. Other ranks have one too, whose files are not kept.
    """

    def __init__(self, store: CheckpointStore, segment: Segment) -> None:
        self._store, self._trial = store, segment.trial
        self._rank, self._folder = segment.rank, Path(tempfile.mkdtemp(prefix="rubberband-artifacts-"))
        self._known: dict[str, tuple[int, int, int]] = {}
        self._iterations = segment.from_iterations
        self._before = os.environ.get(ARTIFACTS)
        os.environ[ARTIFACTS] = str(self._folder)

    def new(self, iterations: int | None = None) -> Iterator[SegmentArtifact]:
        """Save the files that are new or have changed, and yield them. Raises CheckpointError."""
        self._iterations = self._iterations if iterations is None else iterations
        for name, path in self._found():
            status = path.stat()
            stamp = status.st_mtime_ns, status.st_size, status.st_ino
            if self._known.get(name) == stamp:
                continue
            is_fresh, self._known[name] = name not in self._known, stamp
            if status.st_size > LARGEST_BYTES:
                self._leave_out(
                    name, f"it has {format_bytes(status.st_size)}, the limit is {format_bytes(LARGEST_BYTES)}"
                )
            elif is_fresh and len(self._known) > MOST_FILES:
                self._leave_out(name, f"a trial keeps at most {MOST_FILES:,} files")
            else:
                ref = self._store.save(self._trial, self._iterations, copy_of(path))
                yield SegmentArtifact(name=name, iterations=self._iterations, file=ref)

    def rest(self) -> Iterator[SegmentArtifact]:
        """Save as `new` does, after a failure."""
        with suppress(CheckpointError, OSError):
            yield from self.new()

    def close(self) -> None:
        """Remove the folder."""
        if self._before is None:
            os.environ.pop(ARTIFACTS, None)
        else:
            os.environ[ARTIFACTS] = self._before
        if self._rank and (found := self._found()):
            self._leave_out(found[0][0], f"rank {self._rank} of a gang gave it, and the files of rank 0 are")
        shutil.rmtree(self._folder, ignore_errors=True)

    def _found(self) -> list[tuple[str, Path]]:
        """Return the files, without links and drafts, by name."""
        every = [Path(top, file) for top, _, files in os.walk(self._folder) for file in files]
        files = [path for path in every if not path.is_symlink() and path.is_file() and not path.name.startswith(DRAFT)]
        return sorted((path.relative_to(self._folder).as_posix(), path) for path in files)

    def _leave_out(self, name: str, why: str) -> None:
        print(f"rubberband: artifact {name} is not kept: {why}", file=sys.stderr, flush=True)
