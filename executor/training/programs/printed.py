"""Metrics that a program prints, or adds to a file; and the iteration of the files of its checkpoint.

A program does not wait after a line, so one that saves is stopped (SIGSTOP) as soon as one is read. Its files are taken
for those of the line's iteration if it saves them right before it prints, or within a part of an iteration after it,
and all are whole. Others are not taken, as they may be those of the line before, or of the next one: the trial resumes
from older files then, and repeats iterations. It never skips one.
"""

from __future__ import annotations

import os
import re
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rubberband.executor.training.failures import UnclearMetric
from rubberband.executor.training.guarded_process import GuardedProcess
from rubberband.units import shown
from rubberband.values.command import CHECKPOINT_PLACE, Metrics
from rubberband.values.metric_lines import (
    ambiguous,
    is_another_kind,
    is_signed,
    metrics_in,
    numbers_in,
    pattern_of,
    unread,
)

_LOOK_S = 0.02
BESIDE_S = 0.05
"""Files that are saved so shortly before or after a line belong to its iteration; of long iterations, up to `_PART`."""
_PART = 0.05
_MOST_BEFORE_S = 0.5
_MOST_AFTER_S = 10.0
_MOST_FIRST_S = 0.5
"""The longest time after a program's first line: nothing says yet how long an iteration takes."""
_QUIET_S = 0.05
"""How long files stay as they are until all are taken for saved; after the line of a long iteration, up to
`_QUIET_PART`: a model and its optimizer may be saved one after the other."""
_QUIET_PART = 0.02
_MOST_QUIET_S = 1.0
SHORTEST_S = 0.1
"""The shortest iteration whose files are taken: those of a shorter one may be those of the next."""
_LAST_LINES = 60
"""A launcher writes some 30 lines below the exception of its program."""
_CHUNK = 2**16
_LONGEST_LINE = 2**16
"""Bytes of a line; of a longer one the beginning is not read for metrics."""
_REWRITTEN_S = 0.2
"""Seconds for which a file stays shorter than it was until it is taken for another one."""
_OF_A_TEST = re.compile(r"\b(val|valid|validation|eval|evaluation|dev|test)\b", re.IGNORECASE)
_NUMBERED = re.compile(r".*?(\d+)")
_TAIL = 64
"""Bytes at the end of what is known of a file, which another file does not have there."""


@dataclass(frozen=True, slots=True)
class MetricLine:
    """A line with the metric."""

    metrics: Mapping[str, float]
    at: float
    """Time at which it was read, in seconds since the epoch."""
    text: str = ""


class Printed:
    """The lines of one program, from its output or a file."""

    def __init__(
        self,
        metrics: Metrics,
        metric: str,
        checkpoint: Path,
        *,
        saves: bool,
        numbered: bool = False,
        took_s: float = 0.0,
    ) -> None:
        """`saves`: whether the program's command names the folder `checkpoint`; others are seen to save.

        `numbered`: whether it saves each iteration into a folder of its own, as the Trainer of Hugging Face does: after
        the line, and after requests to the hub that may take seconds.

        `took_s`: duration of an iteration of an earlier start; 0 if there was none.
        """
        self.last = deque[str](maxlen=_LAST_LINES)
        self.is_too_fast = False
        """Whether the latest iteration was too short to take files."""
        self._is_read = metrics.source == "stdout"
        self._metric = metric
        self._pattern = None if metrics.pattern is None else re.compile(metrics.pattern)
        self.file = None if metrics.file is None else Path(metrics.file.replace(CHECKPOINT_PLACE, str(checkpoint)))
        self._file_inode, self._file_known = 0, b""
        self._file_rest = b""
        if self.file is not None and self.file.is_file():
            self._file_inode, self._file_known = self.file.stat().st_ino, self.file.read_bytes()
        self._fault: Exception | None = None
        self._line_before = ""
        self._is_signed = False
        """Whether a line had a sign before the metric's number, as in `loss=0.5`: `new best loss 0.5` is none then."""
        self.unread = ""
        """The latest line in which `null` and the like stand for the metric, until another has its number."""
        self.took_s = took_s
        """Duration of the latest iteration."""
        self._checkpoint = checkpoint
        self._is_numbered = numbered
        self._saves = saves or any(_files(checkpoint))
        self._is_saving = False
        """Whether files that belong to the line before are not whole yet."""
        self._lines = deque[MetricLine]()
        self._came = threading.Condition()
        self._program: GuardedProcess | None = None
        self._thread: threading.Thread | None = None
        self._before = MetricLine({}, time.time())
        self._signature = self._saved()

    def watch(self, program: GuardedProcess, outputs: Collection[int]) -> None:
        """Read the `outputs` of a program, which are closed then, in a thread."""
        self._program = program
        self._thread = threading.Thread(target=self._read, args=(outputs,), name="rubberband output", daemon=True)
        self._thread.start()

    def wait(self) -> MetricLine | None:
        """Return the next line; None if none comes for a moment. Raises UnclearMetric."""
        self._look_at_file()
        with self._came:
            if not self._lines and self._fault is None:
                self._came.wait(_LOOK_S)
            if not self._lines and self._fault is not None:
                raise self._fault
            return self._lines.popleft() if self._lines else None

    def finish(self) -> None:
        """Read the rest of an output whose program has ended."""
        if self._thread is not None:
            self._thread.join()
        self._look_at_file(is_last=True)

    @property
    def has_lines(self) -> bool:
        """Whether a line has come that no caller has waited for."""
        return bool(self._lines) or self._fault is not None

    def numbers_in(self, line: MetricLine) -> Mapping[str, float]:
        return numbers_in(line.text, self._pattern)

    def skip(self, line: MetricLine) -> None:
        """Pass over a line that is no new iteration; files beside it are not taken."""
        self._before = line
        self.go_on()

    def settle(self, line: MetricLine, take: Callable[[], None]) -> Iterator[None]:
        """`take` the files that were saved beside the `line` of an iteration; the program is stopped then.

        Files whose save had begun beside the line before, and was not over at this one, may be those of either.
        """
        assert self._program is not None
        before, self._before = self._before, line
        since_s = line.at - before.at
        self.is_too_fast = since_s < SHORTEST_S and not self._has_state()
        is_first = not (before.metrics or self.took_s)
        self.took_s = since_s if before.metrics else self.took_s  # of the first line, it has the start as well
        if self.is_too_fast:
            return
        after_s = min(max(BESIDE_S, _PART * (self.took_s or since_s)), _MOST_FIRST_S if is_first else _MOST_AFTER_S)
        after_s = _MOST_AFTER_S if self._is_numbered else after_s
        quiet_s = min(max(_QUIET_S, _QUIET_PART * self.took_s), _MOST_QUIET_S)
        was_saving = self._is_saving
        found, changed_at, self._is_saving = self._saved(), line.at, False
        while not self.has_lines:
            latest, now, has_ended = self._saved(), time.time(), self._program.poll() is not None
            if latest != found:
                found, changed_at, self._saves = latest, now, True
            has_state = self._has_state()  # with it, a save is over before the next line, and follows its own
            begin = line.at if has_state else line.at - self.beside_s()
            self._is_saving = found != self._signature and newest(found) >= begin
            long_s = _QUIET_S if newest(found) < line.at else quiet_s
            is_quiet = now - changed_at > (_MOST_QUIET_S if self._is_numbered and not has_state else long_s)
            if self._is_saving and (has_ended or is_quiet) and self._is_whole(found):
                self.keep((lambda: None) if was_saving else take)
                return
            if not self._is_saving and (has_ended or now - line.at > after_s):
                self._is_saving = was_saving and self._program.writes_in(self._checkpoint, self.file)
                return
            self.go_on()
            yield
            self._look_at_file()
            with self._came:
                if not self._lines:
                    self._came.wait(_LOOK_S)

    def beside_s(self) -> float:
        """Return the longest time before a line in which files of its iteration are saved, in seconds."""
        return min(max(BESIDE_S, _PART * self.took_s), _MOST_BEFORE_S)

    def keep(self, take: Callable[[], None]) -> None:
        """Take the files if they are others than those that were taken last."""
        found = self._saved()
        if found != self._signature:
            take()
            self._signature, self._is_saving = found, False

    def _has_state(self) -> bool:
        """Whether the latest numbered folder has the file that the Trainer of Hugging Face writes last."""
        return self._is_numbered and (last_checkpoint(self._checkpoint) / "trainer_state.json").is_file()

    def _is_whole(self, found: Signature) -> bool:
        """Whether nothing is written to the files, and no other line has come; the program is stopped then."""
        assert self._program is not None
        self._program.pause()
        self._look_at_file()
        is_same = self._saved() == found
        return is_same and not self.has_lines and not self._program.writes_in(self._checkpoint, self.file)

    def _saved(self) -> Signature:
        """Return the signature of the checkpoint's files, without the one to which each line is added."""
        own = None if self.file is None else str(self.file)
        return tuple(each for each in signature(self._checkpoint) if str(self._checkpoint / each[0]) != own)

    def _read(self, outputs: Collection[int]) -> None:
        """Read each output by itself: a progress bar on stderr has no end of a line before what comes on stdout."""
        rests, unshown = dict.fromkeys(outputs, b""), dict.fromkeys(outputs, b"")
        reads = self._is_read and self.file is None
        with selectors.DefaultSelector() as selector:
            for output in outputs:
                selector.register(output, selectors.EVENT_READ)
            while selector.get_map():
                for output in (key.fd for key, _ in selector.select()):
                    content = os.read(output, _CHUNK)
                    if not content:
                        selector.unregister(output)
                        os.close(output)
                        continue
                    *lines, rest = (rests[output] + content).split(b"\n")
                    self._add(lines, time.time(), reads=reads)
                    rests[output] = rest[-_LONGEST_LINE:]
                    unshown[output] = _show(unshown[output] + content)
        for output in outputs:
            _echo(unshown[output])
            self._add([rests[output]] if rests[output] else [], time.time(), reads=reads)

    def _look_at_file(self, *, is_last: bool = False) -> None:
        if self.file is None:
            return
        with suppress(FileNotFoundError), open(self.file, "rb") as file:
            stat = os.fstat(file.fileno())
            if content := self._added(file, stat):
                self._file_known += content
                *lines, self._file_rest = (self._file_rest + content).split(b"\n")
                self._add(lines, stat.st_mtime, reads=True)
        if is_last and self._file_rest:
            rest, self._file_rest = self._file_rest, b""
            self._add([rest], time.time(), reads=True)

    def _added(self, file: IO[bytes], stat: os.stat_result) -> bytes:
        """Return what the file has beyond what is known of it.

        Programs add to it, write it again with a line more, or begin a new one in place of an earlier start's.
        """
        known = self._file_known
        if stat.st_ino == self._file_inode and stat.st_size >= len(known):
            end = known[-_TAIL:]
            file.seek(len(known) - len(end))
            if (content := file.read()).startswith(end):
                return content[len(end) :]
            file.seek(0)
        content, self._file_inode = file.read(), 0
        if content.startswith(known):
            self._file_inode = stat.st_ino
            return content[len(known) :]
        if known.startswith(content) and (not content or time.time() - stat.st_mtime < _REWRITTEN_S):
            return b""  # it may be about to be written again
        self._file_inode, self._file_known, self._file_rest = stat.st_ino, b"", b""
        return content

    def _add(self, lines: list[bytes], at: float, *, reads: bool) -> None:
        texts = [line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2] for line in lines]
        self.last.extend(text for text in texts if text.strip())
        if not reads:
            return
        found = list(self._found_in(texts))
        if not found:
            return
        with self._came:
            if self._saves and self._program is not None:
                self._program.stop()
            self._lines.extend(MetricLine(metrics, at, text) for text, metrics in found)
            self._came.notify()

    def _found_in(self, texts: list[str]) -> Iterator[tuple[str, Mapping[str, float]]]:
        """Iterate over the lines that have the metric, with their metrics, up to one where it is not clear."""
        for text in texts:
            if self._fault is not None or (self._pattern is None and self._metric not in text):
                continue
            values = [] if self._pattern is not None else ambiguous(text, self._metric)
            if values:
                self._fault = UnclearMetric(
                    f"a line has {self._metric} as {' and '.join(values)}: {shown(text.strip())}; say by "
                    f"entrypoint.metrics.pattern which one counts{_example(text, self._metric, len(values))}"
                )
            elif self._metric in (metrics := metrics_in(text, self._pattern)):
                if self._pattern is None and not self._is_signed:
                    self._is_signed = is_signed(text, self._metric)
                elif self._pattern is None and not is_signed(text, self._metric):
                    continue
                before, self._line_before, self.unread = self._line_before, text, ""
                if before and self._pattern is None and is_another_kind(text, before, self._metric):
                    self._fault = UnclearMetric(_two_kinds(self._metric, before, text))
                    return
                yield text, metrics
            else:
                value, has_comma = unread(text, self._metric, self._pattern)
                self.unread = text if value else self.unread
                if has_comma:
                    self._fault = UnclearMetric(
                        f"a line has {self._metric} as {value}, a number with a comma: {shown(text.strip())}; print it "
                        "without one"
                    )

    def go_on(self) -> None:
        """Let the program continue, unless it has printed a line that the runner has not seen."""
        assert self._program is not None
        with self._came:
            if not self._lines:
                self._program.go_on()


def _example(line: str, metric: str, values: int) -> str:
    """Return the end of an error, with a pattern for one of several values in a line: that of a test, or the last."""
    patterns = [pattern for number in range(values) if (pattern := pattern_of(line, metric, number))]
    of_tests = (each for each in patterns if _OF_A_TEST.search(each.removeprefix(r"\b")))
    found = next(of_tests, patterns[-1] if patterns else "")
    return f", such as {{pattern: '{found}'}}" if found else ""


def _two_kinds(metric: str, *lines: str) -> str:
    patterns = [pattern_of(line, metric) for line in sorted(lines, key=lambda line: _OF_A_TEST.search(line) is None)]
    apart = [each for each in patterns if each and sum(re.search(each, line) is not None for line in lines) == 1]
    example = f", such as {{pattern: '{apart[0]}'}}" if apart else ""
    return (
        f"two kinds of line have {metric}, {' and '.join(shown(line.strip()) for line in lines)}, and each would count "
        f"as an iteration; say by entrypoint.metrics.pattern which one counts{example}"
    )


def _show(content: bytes) -> bytes:
    """Echo whole lines only, as the programs of a gang print into one log; return what remains of them."""
    end = max(content.rfind(b"\n"), content.rfind(b"\r"), len(content) - _LONGEST_LINE) + 1
    _echo(content[:end])
    return content[end:]


def _echo(content: bytes) -> None:
    while content:
        content = content[os.write(1, content) :]


Signature = tuple[tuple[str, int, int], ...]
"""State of a folder: paths, sizes and times of its files."""


def signature(folder: Path) -> Signature:
    """Return the names, sizes and times of the files of a folder, which show whether they have changed."""
    found = []
    for path in _files(folder):
        try:
            stat = path.stat()
        except FileNotFoundError:
            continue
        found.append((str(path.relative_to(folder)), stat.st_size, stat.st_mtime_ns))
    return tuple(found)


def newest(found: Signature) -> float:
    """Return the time of the latest change, in seconds since the epoch; 0 without any file."""
    return max((changed for _, _, changed in found), default=0) / 1e9


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def last_checkpoint(folder: Path) -> Path:
    """Return the folder in it with the highest number at the end of its name; without any, the folder itself.

    The Trainer of Hugging Face saves into `checkpoint-500`, and others into `epoch_3`.
    """
    found = [
        (int(match[1]), each)
        for each in folder.iterdir()
        if each.is_dir() and (match := _NUMBERED.fullmatch(each.name)) is not None
    ]
    return max(found, default=(0, folder))[1]
