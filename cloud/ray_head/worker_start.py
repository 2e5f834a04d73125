"""Start one worker of a local Ray node: forked from the driver's fork server, which has all imports, or as Ray does.

The raylet runs it by path in place of Ray's own script, with the same arguments. It imports only the standard library.
If the fork server does not accept the worker, it runs Ray's script.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

FORK_SERVER = "fork-server"
"""File in the provider's directory: the name of the fork server's socket (Linux's abstract ones)."""
DIRECTORY_TAG = "RUBBERBAND_DIRECTORY"
WORKER_SCRIPT = "RUBBERBAND_WORKER_SCRIPT"
"""Environment variable: path of Ray's own script."""
READY, FORKED = b"r", b"f"

_PATIENCE_S = 120.0
"""Time limit for the server's imports; the worker's own would take as long."""
_LOOK_S = 0.2


def main(argv: Sequence[str]) -> None:
    """Let the fork server start the worker, or else run Ray's script."""
    script = os.environ[WORKER_SCRIPT]
    if is_forked([script, *argv], (0, 1, 2)):
        return
    flags = ["-S"] * sys.flags.no_site + ["-s"] * sys.flags.no_user_site
    os.execv(sys.executable, [sys.executable, *flags, script, *argv])


def is_ready(directory: Path, waits: Callable[[], bool]) -> bool:
    """Wait for the imports of the fork server of a provider's folder, as long as `waits`; return whether it forks."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as server:
        server.connect(_address(directory))
        while waits():
            if select.select([server], [], [], _LOOK_S)[0]:
                return server.recv(1) == READY
    return False


def is_forked(
    argv: Sequence[str], streams: Sequence[int], program: Mapping[str, str] | None = None, directory: Path | None = None
) -> bool:
    """Return whether the fork server has forked a process with these arguments and standard streams.

    `program`: the environment of a function, in whose process that one calls `executor/training/guard.py`. `directory`
    is the provider's, by default that of this process's environment.
    """
    with contextlib.suppress(OSError, ValueError, KeyError), socket.socket(socket.AF_UNIX) as server:
        server.settimeout(_PATIENCE_S)
        server.connect(_address(directory or Path(os.environ[DIRECTORY_TAG])))
        if peer_uid(server) == os.getuid() and server.recv(1) == READY:
            _send(server, argv, streams, program)
            return server.recv(1) == FORKED
    return False


def _address(directory: Path) -> str:
    return f"\0{Path(directory, FORK_SERVER).read_text()}"


def _send(
    server: socket.socket, argv: Sequence[str], streams: Sequence[int], program: Mapping[str, str] | None
) -> None:
    """Send the server the environment that a process with these arguments would have as a child of this one."""
    order = {
        "argv": list(argv),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "nice": os.nice(0),
        "oom_score": int(Path("/proc/self/oom_score_adj").read_text()),
        "ignores_children": program is None and signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN,
        "program": None if program is None else dict(program),
    }
    content = json.dumps(order).encode()
    socket.send_fds(server, [struct.pack("!I", len(content))], list(streams))
    server.sendall(content)


def peer_uid(connection: socket.socket) -> int:
    """Return the user id of the other end."""
    return int(struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1])


if __name__ == "__main__":
    main(sys.argv[1:])
