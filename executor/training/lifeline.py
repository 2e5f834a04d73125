"""Life lines: connections by which the workers of a gang learn at once that one of them failed, died or was lost.

They form a star around rank 0. A collective of NCCL does not return when another worker is gone, and a wait in the
store does not either. But the kernel closes the connections of a process that dies, and answers for one that is busy.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping

from rubberband.executor.training.failures import GangBroken

_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""A machine that answers nothing for 20 s is lost."""
_NAMED_S = 5.0
"""The longest time for a connection to say whose it is."""
_FAREWELL = b"farewell"
_MOST_BYTES = 2000
_END = b"\0"
"""End of a message that is not the last one."""


class Lifeline:
    """One worker's connections: to rank 0, or to all others. The last message of each says why it ends."""

    def __init__(self, rank: int, lines: Mapping[int, socket.socket], on_loss: Callable[[], None]) -> None:
        """`on_loss` is called once, in a thread, when another worker failed or is gone; `broken` says why by then."""
        self.broken = ""
        self.has_farewell = False
        """Whether another worker has left in order."""
        self._rank = rank
        self._lines = dict(lines)
        self._messages: list[tuple[int, str]] = []
        self._on_loss = on_loss
        self._mutex, self._sending = threading.Lock(), threading.Lock()
        self._is_over = False
        _open.add(self)
        self._thread = threading.Thread(target=self._watch, name="rubberband life line", daemon=True)
        self._thread.start()

    def fail(self, line: str) -> None:
        """Report to the others that this worker failed; `line` says why."""
        with self._mutex:
            if self._is_over or self.broken:
                return
            self._is_over = True
        self._send(f"worker {self._rank} failed: {line}".encode()[:_MOST_BYTES])

    def tell(self, rank: int, message: str) -> None:
        """Send a worker at the other end of a line a message, which it takes by `message_of`."""
        with self._sending:
            _quietly(lambda: self._lines[rank].sendall(message.encode() + _END))

    def message_of(self, rank: int, start: str = "") -> str | None:
        """Return the rest of that worker's next message with that start, if there is one."""
        with self._mutex:
            for place, (sender, message) in enumerate(self._messages):
                if sender == rank and message.startswith(start):
                    del self._messages[place]
                    return message.removeprefix(start)
        return None

    def leave(self) -> None:
        """Leave in order: the others lose nothing."""
        with self._mutex:
            self._is_over = True
        self._send(_FAREWELL)

    def close(self) -> None:
        """Close all connections; a worker that neither failed nor left is taken for lost."""
        with self._mutex:
            self._is_over = True
        for line in self._lines.values():
            _quietly(lambda line=line: line.shutdown(socket.SHUT_RDWR))  # type: ignore[misc]
        if self._thread is not threading.current_thread():
            self._thread.join()
        self.forget()

    def forget(self) -> None:
        """Close this process's ends alone, such as those that a forked process has."""
        _open.discard(self)
        for line in self._lines.values():
            line.close()

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, line in self._lines.items():
                selector.register(line, selectors.EVENT_READ, (rank, bytearray()))
            while selector.get_map():
                for key, _ in selector.select():
                    rank, said = key.data
                    is_open = _hear(self._lines[rank], said)
                    *messages, rest = bytes(said).split(_END)
                    with self._mutex:
                        self._messages += [(rank, message.decode()) for message in messages]
                    said[:] = rest
                    if not is_open:
                        selector.unregister(key.fileobj)
                        self._end_of(rank, bytes(said))

    def _end_of(self, rank: int, said: bytes) -> None:
        with self._mutex:
            if said == _FAREWELL:
                self.has_farewell = True
            if said == _FAREWELL or self._is_over or self.broken:
                return
            self.broken = said.decode(errors="replace") or f"the process of worker {rank} is gone"
        if self._rank == 0:
            self._send(self.broken.encode())
        self._on_loss()

    def _send(self, message: bytes) -> None:
        for line in self._lines.values():
            with self._sending:
                _quietly(lambda line=line: (line.sendall(message), line.shutdown(socket.SHUT_WR)))  # type: ignore[misc]


class Peers:
    """The other workers of a gang, at the other ends of this one's life line."""

    _line: Lifeline | None
    """None for a gang of one."""

    @property
    def broken(self) -> str:
        """How the gang lost another worker, in one line; empty while it has all."""
        return "" if self._line is None else self._line.broken

    def check(self) -> None:
        """Raise GangBroken if another worker failed or is gone: what collectives returned since is worthless."""
        if self.broken:
            raise GangBroken(self.broken)

    def fail(self, line: str) -> None:
        """Report to the others, at once, that this worker failed, and why."""
        if self._line is not None:
            self._line.fail(line)


def accepted(listener: socket.socket, num_workers: int, timeout_s: float) -> dict[int, socket.socket]:
    """Return rank 0's connections, by rank. Raises TimeoutError if a worker does not come."""
    lines: dict[int, socket.socket] = {}
    deadline = time.monotonic() + timeout_s
    while len(lines) < num_workers - 1:
        listener.settimeout(max(0.001, deadline - time.monotonic()))
        line = listener.accept()[0]
        line.settimeout(_NAMED_S)
        try:
            rank = int(line.recv(4).decode())
        except (OSError, ValueError):
            rank = 0
        if not 0 < rank < num_workers or rank in lines:
            line.close()
            continue
        lines[rank] = kept_alive(line)
    return lines


def connected(host: str, port: int, rank: int, timeout_s: float) -> dict[int, socket.socket]:
    """Return the connection of another worker to rank 0. Raises OSError."""
    line = socket.create_connection((host, port), timeout_s)
    line.sendall(f"{rank:04d}".encode())
    return {0: kept_alive(line)}


def kept_alive(line: socket.socket) -> socket.socket:
    """Let the kernel close a connection whose other machine is lost."""
    line.settimeout(None)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return line


def _hear(line: socket.socket, said: bytearray) -> bool:
    """Add what has come; return whether more may come."""
    try:
        found = line.recv(_MOST_BYTES)
    except OSError:
        return False
    said += found
    return bool(found)


def _quietly(call: Callable[[], object]) -> None:
    with contextlib.suppress(OSError):  # the other end is gone, or this one closed
        call()


# A process that a worker forks, such as a loader worker, would keep its connections open after its death.

_open: weakref.WeakSet[Lifeline] = weakref.WeakSet()


def _forget_all() -> None:
    for each in list(_open):
        each.forget()


os.register_at_fork(after_in_child=_forget_all)
