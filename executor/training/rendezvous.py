"""The port of a gang. Rank 0's process listens there from the moment that it names it, so that it stays free."""

from __future__ import annotations

import socket

_kept: dict[int, socket.socket] = {}
_QUEUE = 1024


def reserve() -> int:
    """Return a port at which this process listens; the one before is given up."""
    release()
    listener = socket.create_server(("", 0), backlog=_QUEUE)
    port: int = listener.getsockname()[1]
    _kept[port] = listener
    return port


def take(port: int) -> int | None:
    """Return the descriptor of the socket that listens at `port`, for its new owner; None if there is none."""
    listener = _kept.pop(port, None)
    return None if listener is None else listener.detach()


def release() -> None:
    """Give the port up, to a trial that listens there itself."""
    while _kept:
        _kept.popitem()[1].close()
