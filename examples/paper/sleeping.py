"""Trials that sleep for the times of a profile, and meet over a slowed network: no GPU, no torch.

They stand for the paper's ResNets on local instances. Processes, gangs, checkpoints and instances are real.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from multiprocessing.connection import Client, Listener
from typing import Any
from urllib.parse import urlsplit

import rubberband

SCALE = 4.0
"""Times faster than the paper's, and gradients smaller, so that the speed of the links is the same."""
STEP_S = 1024 / 749.58 / SCALE
"""A step of ResNet-50 with a batch of 1024 on one GPU (Table 1)."""
GRADIENT_BYTES = 4 * 25.6e6 / SCALE
LINK_BYTES_PER_S = 0.3e9
"""Between instances: 2.4 Gbit/s, at which 4 scattered GPUs are as fast as in Table 1."""
SENT_BYTES = 1 << 14
"""Of each part that is really sent: this machine's memory is not the bottleneck."""
STEPS = 4
_MEET_S = 30.0


class Ring:
    """Connections of a gang's workers, each to the next; those that leave an instance are slow."""

    def __init__(self, context: rubberband.TrialContext, instance: str) -> None:
        place = urlsplit(context.rendezvous or "")
        hub = (place.hostname, place.port)
        with Listener(("127.0.0.1", 0)) as own:
            mine = {context.rank: (instance, own.address)}
            known = _all(mine, context.num_workers, hub) if context.rank == 0 else _received(mine, hub)
            following, address = known[(context.rank + 1) % context.num_workers]
            self.leaves = following != instance
            self.instances = len({where for where, _ in known.values()})
            self._size, self._next = context.num_workers, Client(address)
            self._previous = own.accept()

    def reduce(self) -> None:
        """Send as often as a ring all-reduce of the gradients does, and take as long on slow connections."""
        for _ in range(2 * (self._size - 1)):
            if self.leaves:
                time.sleep(GRADIENT_BYTES / self._size / LINK_BYTES_PER_S)
            self._next.send_bytes(bytes(SENT_BYTES))
            self._previous.recv_bytes()

    def close(self) -> None:
        self._next.close()
        self._previous.close()


Places = dict[int, tuple[str, Any]]
"""Rank -> its instance, and its address."""


def _all(mine: Places, workers: int, hub: Any) -> Places:
    """Gather the places of all workers, and send them to each. They may all connect before the first is accepted."""
    with Listener(hub, backlog=workers) as listener, ExitStack() as connections:
        others = [connections.enter_context(listener.accept()) for _ in range(workers - 1)]
        known = dict(mine)
        for other in others:
            known |= other.recv()
        for other in others:
            other.send(known)
    return known


def _received(mine: Places, hub: Any) -> Places:
    """Send the place of this worker, and return those of all.

    Until rank 0 is there, its machine keeps the port and resets all connections.
    """
    until = time.monotonic() + _MEET_S
    while True:
        try:
            with Client(hub) as first:
                first.send(mine)
                found: Places = first.recv()
                return found
        except (ConnectionError, EOFError):
            if time.monotonic() > until:
                raise
            time.sleep(0.02)


class Sleeping(rubberband.Trial):
    """Trial whose state is the number of its iterations."""

    _iterations = 0

    def save(self) -> int:
        return self._iterations

    def load(self, state: int) -> None:
        self._iterations = state


class Placed(Sleeping):
    """Steps of ResNet-50 whose gradients are averaged over the links between a gang's workers (Table 1)."""

    _ring: Ring | None = None

    def setup(self, config: Mapping[str, Any], context: rubberband.TrialContext) -> None:
        self._gpus = context.num_workers
        self._ring = Ring(context, os.environ.get("RUBBERBAND_INSTANCE", "")) if self._gpus > 1 else None

    def iterate(self) -> dict[str, float]:
        """Train some steps; report the seconds of one, at the paper's scale."""
        began_s = time.perf_counter()
        for _ in range(STEPS):
            time.sleep(STEP_S / self._gpus)
            if self._ring:
                self._ring.reduce()
        self._iterations += 1
        return {
            "step_s": SCALE * (time.perf_counter() - began_s) / STEPS,
            "gpus": float(self._gpus),
            "instances": float(self._ring.instances if self._ring else 1),
        }

    def close(self) -> None:
        if self._ring:
            self._ring.close()


class Epochs(Sleeping):
    """Epochs of a training whose times are in its configuration, by the size of the gang (Table 2)."""

    def setup(self, config: Mapping[str, Any], context: rubberband.TrialContext) -> None:
        self._epoch_s, self._quality = config[f"epoch_s_{context.num_workers}"], config["quality"]

    def iterate(self) -> dict[str, float]:
        """Sleep for an epoch; the accuracy rises as 1 - quality / epochs."""
        time.sleep(self._epoch_s)
        self._iterations += 1
        return {"accuracy": 1.0 - self._quality / self._iterations}
