"""The process of one slot: a Ray actor that stays warm and runs the segments of whatever trials come to the slot.

It runs one thing at a time, on its main thread, so that user code may set signal handlers and the like.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from rubberband.executor.checkpoints import CheckpointStore
from rubberband.executor.ray.code import Code, install
from rubberband.executor.ray.logs import LogPump, logs_folder
from rubberband.executor.training.segment import Segment, SegmentFailure, SegmentRepeated, SegmentReport, SegmentStarted
from rubberband.executor.trial_log import TrialLog

if TYPE_CHECKING:
    from rubberband.executor.training.entrypoint import Entrypoint

Device = Literal["cpu", "cuda"]

SegmentItem = SegmentStarted | SegmentRepeated | SegmentReport | SegmentFailure
"""What a worker streams."""


class SlotWorker:
    """Runs segments in this process; made into an actor by `crew`."""

    def __init__(
        self, entrypoint: Entrypoint, store: CheckpointStore, *, remote: bool = False, code: Code | None = None
    ) -> None:
        """`remote`: this is not the driver's machine, so that `code` is what it has of the driver's folders."""
        self._entrypoint = entrypoint if code is None else install(code, entrypoint)
        self._store = store
        self._log_pump = LogPump()
        if remote:
            _speak_where_others_listen()

    def warm_up(self, device: Device) -> None:
        """Import everything that training needs: most of what a cold start takes."""
        from rubberband.executor.training.run import warm_up

        self._log_pump.start()
        warm_up(self._entrypoint, device)

    def rendezvous(self) -> str:
        """Where the gang meets, if this worker is its rank 0: `tcp://host:port`."""
        import ray

        host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        with socket.socket() as listener:
            listener.bind(("", 0))
            port: int = listener.getsockname()[1]
        return f"tcp://{host}:{port}"

    def memory_kills(self) -> int:
        """How many processes its machine's kernel has ended for want of memory."""
        from rubberband.cloud.node import memory_kills

        return memory_kills()

    def run(self, segment: Segment, log: TrialLog | None) -> Iterator[SegmentItem]:
        """Train; what is printed meanwhile is added to `log`, a bare name of which lies on this machine.

        What was printed before an item is there when the item is.
        """
        from rubberband.executor.training.run import run_segment

        if log is not None and not log.path.is_absolute():
            log = replace(log, path=logs_folder() / log.path)
        with (
            self._log_pump.redirected(log) as drain,
            contextlib.closing(run_segment(self._entrypoint, segment, self._store)) as items,
        ):
            for item in items:
                drain()
                yield item


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
