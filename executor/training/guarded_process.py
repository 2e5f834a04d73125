"""A process that runs code of a user, held by `guard.py`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from rubberband.cloud.ray_head.worker_start import is_forked
from rubberband.executor.training import guard

_STOPPED_S = 0.2
"""The longest wait until all of a session has stopped."""
_LOOK_S = 0.001


class GuardedProcess:
    """One start of a program, or of a check."""

    def __init__(
        self,
        words: list[str],
        environment: Mapping[str, str],
        folder: str,
        output: int,
        errors: int,
        *,
        forks: bool = False,
        directory: Path | None = None,
    ) -> None:
        """`output`, `errors`: the pipes that it prints to; they are closed here.

        `forks`: `words` run a module of Python, in a process of the fork server's imports if it is safe. `directory`:
        the provider's, by default that of this process's environment.
        """
        self._line, theirs = socket.socketpair()
        streams = (theirs.fileno(), output, errors)
        self.began = time.monotonic()
        self._guard: subprocess.Popen[bytes] | None = None
        if not (forks and is_forked(words, streams, environment, directory)):
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", guard.__file__],
                stdin=theirs.fileno(),
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
        theirs.close()
        os.close(output)
        os.close(errors)
        self._code: int | None = None
        self._answers = self._line.makefile("rb")
        self._send(json.dumps({"words": words, "environment": dict(environment), "folder": folder}).encode() + b"\n")
        self._guard_pid, self._pid = map(int, self._answers.readline().split() or (0, 0))

    def poll(self) -> int | None:
        """Return its exit code, of 128 and more for a signal; None while it runs."""
        return self.wait(0.0)

    def wait(self, seconds: float) -> int | None:
        """Wait that long for its exit code."""
        if self._code is None and select.select([self._line], [], [], seconds)[0]:
            answer = b""
            with contextlib.suppress(ConnectionResetError):  # it was killed before it had read all
                answer = self._answers.readline()
            self._code = int(answer) if answer else -signal.SIGKILL  # the guard was killed
            if self._guard is not None:
                self._guard.wait()
        return self._code

    def stop(self) -> None:
        """Stop it and what it started, until `go_on`; it may run a moment longer."""
        self._signal(signal.SIGSTOP)
        self._signal_others(signal.SIGSTOP)

    def pause(self) -> None:
        """Stop it and what it started, until `go_on`, and wait until they have stopped."""
        self.stop()
        deadline = time.monotonic() + _STOPPED_S
        while any(_runs(process) for process in self._processes()) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
            self._signal_others(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal_others(signal.SIGCONT)
        self._signal(signal.SIGCONT)

    def writes_in(self, folder: Path, without: Path | None = None) -> bool:
        """Whether one of its processes has a file of the folder open to write; `without`: one that does not count."""
        return any(_writes(process, str(folder), str(without)) for process in self._processes())

    def end(self) -> None:
        """End it: SIGTERM, and SIGKILL to what is left 10 s later. Idempotent."""
        if self._answers.closed:
            return
        self._send(guard.TERMINATE)
        if self.wait(guard.PATIENCE_S + 1.0) is None and self._guard_pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._guard_pid, signal.SIGKILL)
            self.wait(guard.PATIENCE_S)
        self._answers.close()
        self._line.close()
        if self._code is None or self._code < 0:  # the guard was killed, and cannot end the session
            self._signal(signal.SIGKILL)

    def _processes(self) -> Iterator[int]:
        """Iterate over the processes that it consists of: all below the guard, to which none is lost."""
        found = guard.children(self._guard_pid) if self._code is None else []
        while found:
            process = found.pop()
            yield process
            found += guard.children(process)

    def _signal_others(self, number: int) -> None:
        """Send a signal to those outside of its process group: torchrun and `timeout` start the program in another."""
        for process in self._processes():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getpgid(process) != self._pid:
                    os.kill(process, number)

    def _signal(self, number: int) -> None:
        if self._pid:  # its number is its own until the guard has seen its end
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, number)

    def _send(self, content: bytes) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self._line.sendall(content)


def _runs(process: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "RS"
    return False


def _writes(process: int, folder: str, without: str) -> bool:
    with contextlib.suppress(OSError):
        for number in os.listdir(f"/proc/{process}/fd"):
            with contextlib.suppress(OSError):
                path = os.readlink(f"/proc/{process}/fd/{number}")
                if path.startswith(f"{folder}/") and path != without:
                    flags = re.search(r"flags:\s*(\d+)", Path(f"/proc/{process}/fdinfo/{number}").read_text())
                    if flags is not None and int(flags[1], 8) & (os.O_WRONLY | os.O_RDWR):
                        return True
    return False
