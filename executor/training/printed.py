"""Metrics that a program prints, or adds to a file; and the iteration of the files of its checkpoint.

A program does not wait after a line, so it is stopped (SIGSTOP) as soon as one is read. Its files are taken for
those of the line's iteration if it saves them right before or right after it prints, and all are whole. Others are not
taken, as they may be those of the line before, or of the next one: the trial resumes from older files
then, and repeats iterations. It never skips one.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rubberband.executor.training.program import Program
from rubberband.values.command import Metrics, metrics_in

Take = Callable[[int], None]
"""Keeps the files as they are, as those of an iteration; the program is stopped."""

_LOOK_S = 0.02
BESIDE_S = 0.05
"""Files that are saved so shortly before or after a line belong to its iteration."""
_QUIET_S = 0.05
"""How long files stay as they are until all are taken for saved."""
_SHORTEST_S = 0.1
"""The shortest iteration whose files are taken: those of a shorter one may be those of the next."""
_LAST_LINES = 20
_CHUNK = 2**16
_LONGEST_LINE = 2**16
"""Bytes of a line; of a longer one the beginning is not read for metrics."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line with the metric."""

    metrics: Mapping[str, float]
    at: float
    """Time at which it was read, in seconds since the epoch."""


class Printed:
    """The lines of one program, from its output or a file."""

    def __init__(self, metrics: Metrics, metric: str, folder: Path, checkpoint: Path, *, saves: bool) -> None:
        """`folder`: the program's; `saves`: whether its command names the folder `checkpoint`."""
        self.last = deque[str](maxlen=_LAST_LINES)
        """Its last lines of output."""
        self._is_read = metrics.source == "stdout"
        self._metric = metric
        self._pattern = None if metrics.pattern is None else re.compile(metrics.pattern)
        self._file = None if metrics.file is None else folder / metrics.file
        self._file_begin = self._size()
        self._file_rest = b""
        self._checkpoint = checkpoint
        self._saves = saves
        self._lines = deque[Line]()
        self._came = threading.Condition()
        self._program: Program | None = None
        self._thread: threading.Thread | None = None
        self._before = Line({}, time.time())
        self._signature = signature(checkpoint)

    def watch(self, program: Program, output: int) -> None:
        """Read the `output` of a program, which is closed then, in a thread."""
        self._program = program
        self._thread = threading.Thread(target=self._read, args=(output,), name="rubberband output", daemon=True)
        self._thread.start()

    def wait(self) -> Line | None:
        """Return the next line; None if none comes for a moment."""
        self._look_at_file()
        with self._came:
            if not self._lines:
                self._came.wait(_LOOK_S)
            return self._lines.popleft() if self._lines else None

    def finish(self) -> None:
        """Read the rest of an output whose program has ended."""
        if self._thread is not None:
            self._thread.join()
        self._look_at_file()

    @property
    def has_lines(self) -> bool:
        """Whether a line has come that no caller has waited for."""
        return bool(self._lines)

    def settle(self, line: Line, iteration: int, take: Take) -> Iterator[None]:
        """Take the files that were saved beside the `line` of an iteration; the program is stopped then."""
        assert self._program is not None
        before, self._before = self._before, line
        if line.at - before.at < _SHORTEST_S or not (self._saves or any(_files(self._checkpoint))):
            return
        found, changed_at = signature(self._checkpoint), line.at
        while not self.has_lines:
            latest, now, has_ended = signature(self._checkpoint), time.time(), self._program.poll() is not None
            if latest != found:
                found, changed_at = latest, now
            is_beside = found != self._signature and _newest(found) >= line.at - BESIDE_S
            if is_beside and (has_ended or now - changed_at > _QUIET_S) and self._is_whole(found):
                take(iteration)
                self._signature = found
                return
            if not is_beside and (has_ended or now - line.at > BESIDE_S):
                return
            self.go_on()
            yield
            self._look_at_file()
            with self._came:
                if not self._lines:
                    self._came.wait(_LOOK_S)

    def _is_whole(self, found: Signature) -> bool:
        """Whether nothing is written to the files, and no other line has come; the program is stopped then."""
        assert self._program is not None
        self._program.pause()
        self._look_at_file()
        is_same = signature(self._checkpoint) == found
        return is_same and not self.has_lines and not self._program.writes_in(self._checkpoint)

    def _read(self, output: int) -> None:
        rest = unshown = b""
        with open(output, "rb", buffering=0) as pipe:
            while content := pipe.read(_CHUNK):
                *lines, rest = (rest + content).split(b"\n")
                self._add(lines, time.time(), reads=self._is_read and self._file is None)
                rest = rest[-_LONGEST_LINE:]
                # Whole lines only: the programs of a gang print into one log, in pieces.
                unshown += content
                end = max(unshown.rfind(b"\n"), unshown.rfind(b"\r"), len(unshown) - _LONGEST_LINE) + 1
                _echo(unshown[:end])
                unshown = unshown[end:]
        _echo(unshown)
        if rest:
            self._add([rest], time.time(), reads=self._is_read and self._file is None)

    def _look_at_file(self) -> None:
        if self._file is None or self._size() <= self._file_begin:
            return
        with open(self._file, "rb") as file:
            file.seek(self._file_begin)
            content = file.read()
            at = os.fstat(file.fileno()).st_mtime
        self._file_begin += len(content)
        *lines, self._file_rest = (self._file_rest + content).split(b"\n")
        self._add(lines, at, reads=True)

    def _size(self) -> int:
        try:
            return 0 if self._file is None else self._file.stat().st_size
        except FileNotFoundError:
            return 0

    def _add(self, lines: list[bytes], at: float, *, reads: bool) -> None:
        texts = [line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2] for line in lines]
        self.last.extend(text for text in texts if text.strip())
        if not reads:
            return
        found = [metrics for text in texts if self._metric in (metrics := metrics_in(text, self._pattern))]
        if not found:
            return
        with self._came:
            if self._saves and self._program is not None:
                self._program.stop()
            self._lines.extend(Line(metrics, at) for metrics in found)
            self._came.notify()

    def go_on(self) -> None:
        """Let the program continue, unless it has printed a line that the runner has not seen."""
        assert self._program is not None
        with self._came:
            if not self._lines:
                self._program.go_on()


def _echo(content: bytes) -> None:
    while content:
        content = content[os.write(1, content) :]


Signature = tuple[tuple[str, int, int], ...]
"""State of a folder: paths, sizes and times of its files."""


def signature(folder: Path) -> Signature:
    """Return the signature of a folder."""
    found = []
    for path in _files(folder):
        try:
            stat = path.stat()
        except FileNotFoundError:
            continue
        found.append((str(path.relative_to(folder)), stat.st_size, stat.st_mtime_ns))
    return tuple(found)


def _newest(found: Signature) -> float:
    return max((changed for _, _, changed in found), default=0) / 1e9


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())
