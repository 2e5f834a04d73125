"""A command on a terminal of its own, as a person sees it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

CTRL_C = b"\x03"
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PATIENCE_S, _AGAIN_S = 120.0, 10.0
_ROWS, _COLUMNS = 60, 120


class Terminal:
    def __init__(self, process: subprocess.Popen[bytes], ours: int) -> None:
        self.process, self._ours = process, ours
        self.shown = ""
        """All that was shown, without colours and moves of the cursor."""
        self._raw = b""

    def until(self, pattern: str) -> re.Match[str]:
        until = time.monotonic() + _PATIENCE_S
        while (found := re.search(pattern, self.shown)) is None:
            assert time.monotonic() < until, f"never shown: {pattern}\n{self.shown}"
            assert self._read(), f"ended before: {pattern}\n{self.shown}"
        return found

    def type(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def interrupt(self) -> int:
        """Press Ctrl-C until the command ends, and return its exit code.

        Python loses one that comes after a prompt is shown and before its answer is read.
        """
        while self.process.poll() is None:
            self.type(CTRL_C)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_AGAIN_S)
        return self.end()

    def end(self) -> int:
        """Read until the command ends, and return its exit code."""
        while self._read():
            pass
        return self.process.wait(_PATIENCE_S)

    def _read(self) -> bool:
        try:
            if not select.select([self._ours], [], [], _PATIENCE_S)[0]:
                raise AssertionError(f"nothing more is shown\n{self.shown}")
            piece = os.read(self._ours, 65536)
        except OSError:  # the last process has closed the terminal, or we have
            return False
        self._raw += piece
        self.shown = _ESCAPES.sub("", self._raw.decode(errors="ignore")).replace("\r", "")
        return bool(piece)


def _owned() -> None:
    """Make the terminal on stdin the controlling one of this process, so that Ctrl-C is a signal that it takes."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # tests in the background of a script ignore it
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@contextmanager
def on_terminal(*arguments: str, folder: Path, environment: Mapping[str, str]) -> Iterator[Terminal]:
    """`rubberband` with these arguments on a terminal; it is killed if it still runs at the end."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, _COLUMNS, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "rubberband.cli", *arguments],
        cwd=folder,
        env={**environment, "TERM": "xterm"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=_owned,
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(ours)
