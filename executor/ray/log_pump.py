"""The way of what a worker prints to the log of its trial, by a process of its own (see `executor/trial_log.py`)."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

from rubberband.executor import trial_log
from rubberband.executor.trial_log import PIPE_BYTES, TrialLog

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
