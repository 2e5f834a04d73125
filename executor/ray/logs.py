"""What trials print on an instance that is another machine: files there, from which the driver takes what is new."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from rubberband.cloud.node import machine_folder
from rubberband.executor import trial_log
from rubberband.executor.trial_log import PIPE_BYTES, Appender, TrialLog, left_out_line, printed_bytes, read

_PART_BYTES = 2**18
_PARTS_BYTES = 2**20
_NAME = re.compile(r"[A-Za-z0-9_-]+\.log")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPart:
    """A stretch of a log file."""

    name: str
    offset: int
    content: bytes
    left_out: int = 0
    """Bytes before it that the driver did not take, and does not get."""

    @property
    def end(self) -> int:
        """Where the next part begins."""
        return self.offset + len(self.content)


def logs_folder() -> Path:
    """Where the logs of this machine lie."""
    folder = machine_folder() / "logs"
    folder.mkdir(exist_ok=True)
    return folder


def read_new(folder: Path, taken: Mapping[str, int], *, is_last: bool = False) -> Sequence[LogPart]:
    """What lies in the logs beyond what the driver has `taken` (name -> bytes): not all at once where that is much.

    The last time it is the end of each log. What a driver has taken is noted beside the log, for the next one, which
    does not know.
    """
    parts: list[LogPart] = []
    room = _PARTS_BYTES
    paths = sorted(folder.glob("*.log"))
    most_bytes = min(_PART_BYTES, _PARTS_BYTES // max(1, len(paths))) if is_last else _PART_BYTES
    for path in paths:
        note = path.with_suffix(".taken")
        offset = taken.get(path.name)
        if offset is None:
            offset = _noted(note)
        elif offset != _noted(note):
            note.write_text(str(offset))
        begin = max(offset, printed_bytes(path) - most_bytes) if is_last else offset
        new = read(path, begin, min(most_bytes, room))
        if new.content:
            left_out = new.begin - offset
            parts.append(LogPart(name=path.name, offset=new.begin, content=new.content, left_out=left_out))
            room -= len(new.content)
        if room <= 0:
            break
    return parts


def _noted(note: Path) -> int:
    with suppress(OSError, ValueError):
        return int(note.read_text())
    return 0


def append(folder: Path, part: LogPart, limit_bytes: int) -> None:
    """Add a part to the driver's own log of that name, of which `limit_bytes` are kept. Raises OSError."""
    if _NAME.fullmatch(part.name) is None:
        return
    missing = f"\n{left_out_line(part.left_out)}\n".encode() if part.left_out else b""
    with closing(Appender(TrialLog(path=folder / part.name, limit_bytes=limit_bytes))) as log:
        log.write(missing + part.content)


# The way of what a worker prints to the log of its trial, by a process of its own (see `executor/trial_log.py`).


_PATIENCE_S = 5.0
"""For what was printed to be in the log; a disk that takes longer does not hold up the trial."""


class LogPump:
    """The worker's end of it. It serves one log at a time, from one thread."""

    def __init__(self) -> None:
        self._control: socket.socket | None = None

    def start(self) -> None:
        """Start the process, if it was not; it ends with the worker, once all is written."""
        if self._control is not None:
            return
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-I", "-S", trial_log.__file__, str(theirs.fileno())]
            nowhere = subprocess.DEVNULL
            starting = subprocess.Popen(
                command,
                stdin=nowhere,
                stdout=nowhere,
                stderr=nowhere,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
            starting.wait()
        ours.settimeout(_PATIENCE_S)
        self._control = ours

    def close(self) -> None:
        """Let the process end."""
        if self._control is not None:
            self._control.close()
            self._control = None

    @contextlib.contextmanager
    def redirected(self, log: TrialLog | None) -> Iterator[Callable[[], None]]:
        """Add what this process prints (and its children and C libraries print) to `log` while in the block.

        Gives a function that waits until all that was printed so far is there.
        """
        if log is None:
            yield lambda: None
            return
        pipe = self._open(log)
        streams = sys.stdout, sys.stderr
        _flush(*streams)
        kept = os.dup(1), os.dup(2)
        with open(pipe, "w", buffering=1, encoding="utf-8", errors="backslashreplace") as file:
            os.dup2(pipe, 1)
            os.dup2(pipe, 2)
            sys.stdout = sys.stderr = file
            try:
                yield lambda: self._drain(file)
            finally:
                self._drain(file)
                sys.stdout, sys.stderr = streams
                for number, original in zip((1, 2), kept, strict=True):
                    os.dup2(original, number)
                    os.close(original)

    def _open(self, log: TrialLog) -> int:
        """A pipe whose bytes are added to `log`."""
        reading, writing = os.pipe()
        with contextlib.suppress(OSError, AttributeError):  # the user's share of such pipes is used up
            fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        try:
            self._send(trial_log.opening(log), [reading])
        finally:
            os.close(reading)
        return writing

    def _send(self, message: bytes, fds: list[int]) -> None:
        try:
            self.start()
            assert self._control is not None
            socket.send_fds(self._control, [message], fds)
        except OSError:  # its process was killed: once more, with another one
            self.close()
            self.start()
            assert self._control is not None
            socket.send_fds(self._control, [message], fds)

    def _drain(self, file: io.TextIOBase) -> None:
        _flush(file)
        if self._control is None:
            return
        try:
            self._control.sendall(trial_log.draining())
            if not self._control.recv(1):
                raise ConnectionResetError
        except OSError:
            self.close()  # an answer that comes late would be taken for another one's


def _flush(*streams: io.TextIOBase | object) -> None:
    for stream in streams:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()  # type: ignore[union-attr]
