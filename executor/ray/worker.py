"""The process of one slot: a Ray actor that stays warm and runs the segments of whatever trials come to the slot.

It runs one thing at a time, on its main thread, so that user code may set signal handlers and the like.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rubberband.executor.checkpoints import CheckpointStore
from rubberband.executor.ray.code import Code, install
from rubberband.executor.ray.remote_logs import logs_folder
from rubberband.executor.training.segment import Segment, SegmentFailure, SegmentReport, SegmentStarted

if TYPE_CHECKING:
    from rubberband.executor.training.entrypoint import Entrypoint

Device = Literal["cpu", "cuda"]

SegmentItem = SegmentStarted | SegmentReport | SegmentFailure
"""What a worker streams."""


class SlotWorker:
    """Runs segments in this process; made into an actor by `crew`."""

    def __init__(
        self, entrypoint: Entrypoint, store: CheckpointStore, *, remote: bool = False, code: Code | None = None
    ) -> None:
        """`remote`: this is not the driver's machine, so that `code` is what it has of the driver's folders."""
        self._entrypoint = entrypoint if code is None else install(code, entrypoint)
        self._store = store
        if remote:
            _speak_where_others_listen()

    def warm_up(self, device: Device) -> None:
        """Import everything that training needs: most of what a cold start takes."""
        from rubberband.executor.training.run import warm_up

        warm_up(self._entrypoint, device)

    def rendezvous(self) -> str:
        """Where the gang meets, if this worker is its rank 0: `tcp://host:port`."""
        import ray

        host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        with socket.socket() as listener:
            listener.bind(("", 0))
            port: int = listener.getsockname()[1]
        return f"tcp://{host}:{port}"

    def run(self, segment: Segment, log: Path | None) -> Iterator[SegmentItem]:
        """Train; what is printed meanwhile is appended to the file `log`, a bare name of which lies on this machine."""
        from rubberband.executor.training.run import run_segment

        with redirected(log if log is None or log.is_absolute() else logs_folder() / log):
            yield from run_segment(self._entrypoint, segment, self._store)


def _speak_where_others_listen() -> None:
    """Let gloo and NCCL use the interface by which the instances know each other.

    On their own they take that of the host's name, which may be the loopback, or any that is there (Docker's).
    """
    import psutil
    import ray

    address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    for interface, addresses in psutil.net_if_addrs().items():
        if any(found.address == address for found in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


@contextlib.contextmanager
def redirected(log: Path | None) -> Iterator[None]:
    """Append what this process prints (and its children and C libraries print) to `log` while in the block."""
    if log is None:
        yield
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    streams = sys.stdout, sys.stderr
    _flush(*streams)
    kept = os.dup(1), os.dup(2)
    with open(log, "a", buffering=1, encoding="utf-8", errors="backslashreplace") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = file
        try:
            yield
        finally:
            _flush(file)
            sys.stdout, sys.stderr = streams
            for number, original in zip((1, 2), kept, strict=True):
                os.dup2(original, number)
                os.close(original)


def _flush(*streams: io.TextIOBase | object) -> None:
    for stream in streams:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()  # type: ignore[union-attr]
