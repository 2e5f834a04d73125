"""Parameter servers in threads of a worker's own process. A check uses them: its trial trains on one worker."""

from __future__ import annotations

import socket
from dataclasses import replace
from threading import Thread

from rubberband.executor.training.asynchronous.applying import ServedShard
from rubberband.executor.training.asynchronous.server import ParameterServer
from rubberband.executor.training.segment import Segment
from rubberband.executor.training.torch_trial import TorchTrial

_END_S = 5.0
"""The longest time for a server to end."""


class ServerThreads:
    """The servers of a segment; they listen at once, and serve after `start`."""

    def __init__(self, servers: int) -> None:
        self._listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(servers)]
        self.addresses = tuple(f"127.0.0.1:{each.getsockname()[1]}" for each in self._listeners)
        """`host:port` of each server."""
        self._error: BaseException | None = None
        self._running: list[tuple[ParameterServer, Thread]] = []

    def start(self, trial_class: type[TorchTrial], segment: Segment) -> None:
        """Serve one worker. The shards must fit into this machine's memory with the segment's number of workers.

        All are built before this returns: building draws from the random state of the process. Raises LacksMemory if
        that is too little, and what the trial raises.
        """
        shards = [ServedShard(trial_class(), segment, index) for index in range(len(self.addresses))]
        alone = replace(segment, num_workers=1)
        for index, (shard, listener) in enumerate(zip(shards, self._listeners, strict=True)):
            server = ParameterServer(shard, alone, index, checkpoint_every=1)
            thread = Thread(target=self._run, args=(server, listener), daemon=True)
            self._running.append((server, thread))
            thread.start()

    def _run(self, server: ParameterServer, listener: socket.socket) -> None:
        try:
            server.run(listener)
        except BaseException as error:
            self._error = self._error or error

    def failure(self) -> BaseException | None:
        """Return why a server ended before its worker, once all have ended; None if none failed."""
        self.close()
        for _, thread in self._running:
            thread.join(_END_S)
        return self._error

    def close(self) -> None:
        """End the servers. Idempotent."""
        for server, _ in self._running:
            server.end()
        for listener in self._listeners:
            listener.close()
