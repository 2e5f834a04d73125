"""Starts a program, holds it, and ends it with all that it started: the parent of a trial's program.

`program.py` starts this file with Python alone (-I -S): only the standard library is imported, which takes 20 ms. Or
the fork server forks a process that calls it. The socket at stdin is the worker's: its order is a line of JSON with the
words, environment and folder, and a letter when the program is to end. The answers are lines: the ids of this process
and of the program, and its exit code. At the socket's end, which is also the worker's death, the program's whole
session ends. The program ends by the kernel if this process does (PR_SET_PDEATHSIG; it follows the thread that started
it, and here is only one). Processes that leave the session become children of this one (PR_SET_CHILD_SUBREAPER) and end
as well.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

PATIENCE_S = 10.0
"""From SIGTERM until SIGKILL."""
TERMINATE = b"t"
NOT_STARTED = 127
"""Exit code, after a line with the word that could not be started and why; a shell has the same."""
_PDEATHSIG, _SUBREAPER = 1, 36
_LOOK_S = 0.02

Order = dict[str, Any]


def main(call: Callable[[Order], None] | None = None) -> None:
    """Run the program of the order, or in its process `call`; answer with its exit code as a shell shows it."""
    order = json.loads(_line())
    prctl = ctypes.CDLL(None).prctl
    prctl(_SUBREAPER, 1, 0, 0, 0)
    program = _started(order, prctl, call)
    _answer(f"{os.getpid()} {program}")
    ended, stop_at = os.pidfd_open(program), float("inf")
    while time.monotonic() < stop_at:
        wait_s = None if stop_at == float("inf") else max(0.0, stop_at - time.monotonic())
        readable = select.select([0, ended], [], [], wait_s)[0]
        word = _read() if 0 in readable and ended not in readable else b""
        if ended in readable or (0 in readable and not word):
            break
        if word == TERMINATE:
            _send(program, signal.SIGTERM)
            _send(program, signal.SIGCONT)
            stop_at = time.monotonic() + PATIENCE_S
    while time.monotonic() < stop_at < float("inf") and _has_group(program) and not select.select([0], [], [], 0)[0]:
        time.sleep(_LOOK_S)  # a shell ends at once, and the program that it ran may still save
    _answer(str(_end(program)))


def _answer(line: str) -> None:
    with suppress(OSError):  # the worker is gone
        os.write(0, f"{line}\n".encode())


def _has_group(program: int) -> bool:
    """Whether more than the program itself, which has ended, is left of its process group."""
    for child in children(os.getpid()):
        with suppress(OSError):
            if child != program and os.getpgid(child) == program and os.waitpid(child, os.WNOHANG)[0] == 0:
                return True
    return False


def _read() -> bytes:
    """Read a byte; empty when the worker has closed the socket, or has died with an answer unread."""
    try:
        return os.read(0, 1)
    except ConnectionResetError:
        return b""


def _line() -> bytes:
    """Read the order; not a byte more, as what follows is for `select`."""
    found = bytearray()
    while not found.endswith(b"\n"):
        some = _read()
        if not some:
            sys.exit()
        found += some
    return bytes(found)


def _started(order: Order, prctl: Any, call: Callable[[Order], None] | None) -> int:
    guard = os.getpid()
    program = os.fork()
    if program:
        return program
    try:
        os.setsid()
        prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != guard:  # it was gone before
            os._exit(1)
        os.chdir(order["folder"])
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if call is None:
            os.execvpe(order["words"][0], order["words"], order["environment"])
    except OSError as error:
        print(f"{order['words'][0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(NOT_STARTED)
    assert call is not None
    call(order)
    sys.exit()


def _send(program: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(program, number)


def _end(program: int) -> int:
    """End what is left of the session and of its descendants; return the program's exit code."""
    _send(program, signal.SIGKILL)
    _, status = os.waitpid(program, 0)
    _send(program, signal.SIGKILL)
    while left := children(os.getpid()):
        for child in left:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        while True:
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    break
            except ChildProcessError:
                break
        time.sleep(_LOOK_S)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def children(process: int) -> list[int]:
    """Return the children of all threads of a process; none of one that is gone."""
    found = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{process}/task"):
            with suppress(OSError), open(f"/proc/{process}/task/{thread}/children") as file:
                found += [int(word) for word in file.read().split()]
    return found


if __name__ == "__main__":
    main()
