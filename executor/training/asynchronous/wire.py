"""Messages between a worker and a parameter server: a header of plain values, then bytes, over TCP.

TCP sockets are read and written without Python's global lock and without a copy, straight from and to the tensors'
memory; they work the same on one machine and between machines; and each worker's connection breaks alone. Ray's calls
copy each tensor through its object store, and a process group of torch breaks as a whole when one worker is lost.

A server runs no code that a stranger sends: the first bytes of a connection must be the secret of the trial's attempt.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import struct
from typing import Any

SECRET_BYTES = 32
CONNECT_TIMEOUT_S = 30.0
_LENGTH = struct.Struct("!I")
_SILENCE_S = 10
"""Seconds without an answer of the other machine after which the kernel begins to ask for one."""


class Wire:
    """One connection; it is used by one thread at a time. Every method raises OSError if it is broken."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENCE_S)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _SILENCE_S // 2)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        self._socket = connected

    @classmethod
    def connect(cls, address: str, secret: str) -> Wire:
        """Connect to the server at `host:port`."""
        host, _, port = address.rpartition(":")
        connected = socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S)
        connected.settimeout(None)
        wire = cls(connected)
        connected.sendall(bytes.fromhex(secret))
        return wire

    def accept(self, secret: str) -> bool:
        """Read what the other end sends first; return whether it is the secret."""
        self._socket.settimeout(CONNECT_TIMEOUT_S)
        found = bytearray(SECRET_BYTES)
        self.read(memoryview(found))
        self._socket.settimeout(None)
        return hmac.compare_digest(bytes(found), bytes.fromhex(secret))

    def send(self, header: dict[str, Any], content: memoryview | bytes = b"") -> None:
        """Send the header with the number of bytes of `content`, and these."""
        self.announce(header, len(content))
        self.write(content)

    def announce(self, header: dict[str, Any], size_bytes: int) -> None:
        """Send the header of a message whose `size_bytes` bytes follow by `write`."""
        encoded = json.dumps({**header, "bytes": size_bytes}).encode()
        self._socket.sendall(_LENGTH.pack(len(encoded)) + encoded)

    def write(self, content: memoryview | bytes) -> None:
        """Send bytes."""
        if len(content):
            self._socket.sendall(content)

    def header(self) -> dict[str, Any]:
        """Read the header of the next message; its `bytes` follow."""
        length = bytearray(_LENGTH.size)
        self.read(memoryview(length))
        encoded = bytearray(_LENGTH.unpack(length)[0])
        self.read(memoryview(encoded))
        found: dict[str, Any] = json.loads(encoded)
        return found

    def read(self, memory: memoryview) -> None:
        """Fill the memory."""
        while len(memory):
            count = self._socket.recv_into(memory)
            if count == 0:
                raise ConnectionResetError("the other end closed the connection")
            memory = memory[count:]

    def content(self, header: dict[str, Any]) -> bytearray:
        """Read the bytes that follow the header."""
        found = bytearray(header["bytes"])
        self.read(memoryview(found))
        return found

    def close(self) -> None:
        """Close it; a thread that reads is woken. Idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
