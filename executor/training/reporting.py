"""`rubberband.report` and `rubberband.get_checkpoint` in a program. Only the standard library is imported."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from typing import Any

LINE, CHECKPOINT, CONFIG = "RUBBERBAND_LINE", "RUBBERBAND_CHECKPOINT", "RUBBERBAND_CONFIG"
"""Variables of the program: the socket of its reports, the folder of its checkpoint, its configuration as JSON."""
GO_ON = b"g"

_connections: dict[int, socket.socket] = {}
"""By process: a forked one has its own."""


def report(metrics: Mapping[str, Any], checkpoint: str | os.PathLike[str] | None) -> None:
    """Hand one iteration over, and wait until the next is wanted; outside a search print it."""
    place = os.environ.get(LINE)
    if place is None:
        print(" ".join(f"{name}={_plain(value)}" for name, value in metrics.items()), flush=True)
        return
    if os.environ.get("RANK", "0") != "0":
        return
    content = {"metrics": dict(metrics), "checkpoint": None if checkpoint is None else os.fspath(checkpoint)}
    connection = _connections.get(os.getpid())
    if connection is None:
        connection = _connections[os.getpid()] = socket.socket(socket.AF_UNIX)
        connection.connect(place)
    connection.sendall(json.dumps(content, default=_plain).encode() + b"\n")
    if connection.recv(1) != GO_ON:
        raise SystemExit("rubberband: the search is over")


def checkpoint_folder() -> str | None:
    """Return the folder with the files of the trial's last checkpoint; None where there are none."""
    folder = os.environ.get(CHECKPOINT)
    return folder if folder is not None and os.path.isdir(folder) and os.listdir(folder) else None


def _plain(value: Any) -> Any:
    """Return a number of NumPy or torch as one of Python."""
    return value.item() if hasattr(value, "item") else value
