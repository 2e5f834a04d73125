"""The socket at which a program reports."""

from __future__ import annotations

import contextlib
import json
import select
import socket
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rubberband.executor.training.reporting import BEGUN, GO_ON, short

LOOK_S = 0.02
"""The longest wait for what a program reports."""


class Reports:
    """The socket at which a program reports."""

    def __init__(self, path: Path) -> None:
        self._found = deque[tuple[Mapping[str, Any], socket.socket]]()
        self._listener = socket.socket(socket.AF_UNIX)
        with short(str(path)) as name:
            self._listener.bind(name)
        self._listener.listen()
        self._received: dict[socket.socket, bytes] = {}
        self.has_begun = False
        """Whether the process has said that its start is over."""
        self._waiting: socket.socket | None = None
        """The connection whose report waits for the next iteration."""

    def go_on(self) -> None:
        """Let the program train its next iteration."""
        if self._waiting is not None:
            with contextlib.suppress(OSError):
                self._waiting.sendall(GO_ON)
            self._waiting = None

    def wait(self) -> Mapping[str, Any] | None:
        """Return the next report; None if none comes for a moment."""
        if not self._found:
            self._look(LOOK_S)
        if not self._found:
            return None
        found, self._waiting = self._found.popleft()
        return found

    def has_more(self) -> bool:
        """Whether a report has come that no caller has waited for."""
        self._look(0)
        return bool(self._found)

    def close(self) -> None:
        for each in (self._listener, *self._received):
            each.close()

    def _look(self, wait_s: float) -> None:
        while ready := select.select([self._listener, *self._received], [], [], wait_s)[0]:
            for each in ready:
                if each is self._listener:
                    self._received[each.accept()[0]] = b""
                else:
                    self._read(each)
            wait_s = 0

    def _read(self, connection: socket.socket) -> None:
        some = b""
        with contextlib.suppress(OSError):
            some = connection.recv(2**16)
        if not some:
            del self._received[connection]
            connection.close()
            return
        *lines, self._received[connection] = (self._received[connection] + some).split(b"\n")
        for content in map(json.loads, lines):
            self.has_begun = True
            if content != BEGUN:
                self._found.append((content, connection))
