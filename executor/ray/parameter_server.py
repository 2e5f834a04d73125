"""The process of a parameter server: a Ray actor that stays warm and serves one segment after another.

It is beside a slot's worker, on the same instance, and takes no GPU of its own; it outlives that worker.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator

from rubberband.executor.ray.code import Code, install
from rubberband.executor.training.entrypoint import Entrypoint
from rubberband.executor.training.segment import Segment, SegmentFailure

_QUEUE = 128


class ServerProcess:
    """Serves segments in this process; `Workers` makes it an actor."""

    def __init__(self, entrypoint: Entrypoint, *, code: Code | None = None) -> None:
        """`code` holds the driver's folders, if this is not the driver's machine."""
        self._entrypoint = entrypoint if code is None else install(code, entrypoint)

    def warm_up(self) -> None:
        """Import everything that serving needs."""
        from rubberband.executor.training.run import warm_up

        warm_up(self._entrypoint, "cpu")

    def run(self, segment: Segment, index: int) -> Iterator[str | SegmentFailure]:
        """Serve as server `index` of the segment; yield its `host:port`, and in the end why it failed, if it did."""
        import ray

        from rubberband.executor.training.run import run_server

        host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        listener = socket.create_server(("", 0), backlog=_QUEUE)
        yield f"{host}:{listener.getsockname()[1]}"
        failure = run_server(self._entrypoint, segment, index, listener)
        if failure is not None:
            yield failure
