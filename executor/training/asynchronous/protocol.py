"""The protocol between workers and parameter servers: the order of gradients and updates, and messages. No torch.

The first server decides for all workers, by a `Pace`: which batches they take, and who may begin when. On every server
an `Order` says which updates are applied.

A ticket is the number of a batch of the trial, counted from its beginning: the order of the samples depends on the
seed alone, whichever worker takes which batch. Every ticket is given out once; those of a lost worker are given out
again. An update has a number as well, in the order in which gradients are ready.

With a bound of staleness s > 0, a worker begins its next gradient if it has made at most s updates more than the
slowest one (Ho et al. 2013, stale synchronous parallel). With s = 0 all workers share each batch, and take one update
together.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rubberband.executor.training.lifeline import kept_alive


@dataclass(eq=False)
class Pace:
    """Tickets, clocks and numbers of updates of one attempt; workers are known by names of their own."""

    max_staleness: int | None
    until_updates: int
    """Updates of the trial at the end of the segment."""
    updates: int = 0
    """Updates of the trial that have a number."""
    next_ticket: int = 0
    returned: deque[int] = field(default_factory=deque)
    """Tickets that were given out and not used, in order."""
    held: dict[str, list[int]] = field(default_factory=dict)
    _clocks: dict[str, int] = field(default_factory=dict)
    """Worker -> its updates, counted from the slowest one's when it came."""
    _rounds: dict[str, int] = field(default_factory=dict)
    """Worker -> the update that it last took part in, if all share a batch."""
    _members: tuple[str, ...] = ()
    _round: int = -1

    @property
    def shares(self) -> bool:
        """Whether all workers share the batch of an update."""
        return self.max_staleness == 0

    @property
    def is_over(self) -> bool:
        """Whether all updates of the segment have a number."""
        return self.updates >= self.until_updates

    @property
    def workers(self) -> Sequence[str]:
        return tuple(self._clocks)

    def join(self, worker: str, hand: int = 1) -> None:
        """Add a worker, which holds `hand` tickets at a time."""
        self._clocks[worker] = min(self._clocks.values(), default=0)
        self._rounds[worker] = self.updates - 1
        self.held[worker] = []
        if not self.shares:
            self._fill(worker, hand)

    def leave(self, worker: str) -> None:
        """Take a worker out; its tickets are given to others."""
        self._clocks.pop(worker, None)
        self._rounds.pop(worker, None)
        self.returned.extend(self.held.pop(worker, ()))

    def may_begin(self, worker: str) -> bool:
        """Whether the worker may begin its next gradient."""
        if worker not in self._clocks:
            return False
        if self.shares:
            return self._rounds[worker] < self.updates
        if self.max_staleness is None:
            return True
        return self._clocks[worker] - min(self._clocks.values()) <= self.max_staleness

    def begin(self, worker: str) -> tuple[str, ...]:
        """Note that the worker begins; return those that share its batch, in the order of their parts."""
        if not self.shares:
            return (worker,)
        if self._round < self.updates or not set(self._members) & set(self._clocks):
            self._round, self._members = self.updates, tuple(sorted(self._clocks))
        return self._members if worker in self._members else ()

    def number(self) -> int | None:
        """Return the number of the next update; None if the segment needs no more."""
        if self.is_over:
            return None
        if self.shares:
            return self.updates
        self.updates += 1
        return self.updates - 1

    def used(self, worker: str) -> None:
        """Note that the worker's gradient is applied: it takes another ticket in place of its first."""
        if worker not in self._clocks:
            return
        self._clocks[worker] += 1
        if not self.shares and self.held[worker]:
            self.held[worker].pop(0)
            self._fill(worker, len(self.held[worker]) + 1)

    def end_round(self, workers: Sequence[str]) -> None:
        """Note that the update is made that `workers` shared."""
        for worker in workers:
            if worker in self._rounds:
                self._rounds[worker] = self.updates
        self.updates += 1
        self.next_ticket += 1

    def _fill(self, worker: str, hand: int) -> None:
        while len(self.held[worker]) < hand:
            if self.returned:
                self.held[worker].append(self.returned.popleft())
            else:
                self.held[worker].append(self.next_ticket)
                self.next_ticket += 1

    def state(self) -> dict[str, Any]:
        """Return a copy of the position of the data: the next ticket, and those that workers hold."""
        held = {worker: list(tickets) for worker, tickets in self.held.items()}
        return {"next_ticket": self.next_ticket, "held": held, "returned": list(self.returned)}


AHEAD = 2
"""Iterations that may be complete on a server before rank 0 has closed the first of them."""


@dataclass(eq=False)
class Order:
    """Which updates a server has applied, by their numbers, and which iterations are complete."""

    first: int
    boundaries: Sequence[int]
    """Updates of the trial at the end of that iteration, and of each that follows."""

    def __post_init__(self) -> None:
        self.cut = self.closed = self.first
        """Iterations whose updates are complete; and those that rank 0 has closed."""
        self.low = self.boundaries[0]
        """All updates below this number are applied or lost."""
        self._above: set[int] = set()

    @property
    def last(self) -> int:
        """The iteration at the end of the segment."""
        return self.first + len(self.boundaries) - 1

    def may_apply(self, number: int) -> bool:
        """Whether the update belongs to the present iteration, and rank 0 is not too far behind."""
        return number < self.boundaries[min(self.cut + 1, self.closed + AHEAD, self.last) - self.first]

    @property
    def waits(self) -> bool:
        """Whether nothing can be applied before rank 0 closes an iteration."""
        return self.cut < self.last and self.cut >= self.closed + AHEAD

    def may_apply_unclosed(self, number: int) -> bool:
        """Whether the update can be applied, now or later, without rank 0 closing an iteration before."""
        return number < self.boundaries[min(self.closed + AHEAD, self.last) - self.first]

    def is_done(self, number: int) -> bool:
        """Whether the update is applied or lost."""
        return number < self.low or number in self._above

    def done(self, number: int) -> bool:
        """Note that the update is applied or lost; return whether that completes an iteration: then call `end`."""
        self._above.add(number)
        while self.low in self._above:
            self._above.discard(self.low)
            self.low += 1
        return self.ends()

    def ends(self) -> bool:
        """Whether the present iteration is complete."""
        return self.cut < self.last and self.low >= self.boundaries[self.cut + 1 - self.first]

    def end(self) -> int:
        self.cut += 1
        return self.cut


@dataclass(eq=False, slots=True)
class Tally:
    """Sums over the updates of an iteration."""

    began_at: float
    updates: int = 0
    lost: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    """Sums of losses and metrics by name; of their weights by the empty name."""
    _staleness: int = 0
    _max_staleness: int = 0
    _timed: int = 0
    _times: dict[str, float] = field(default_factory=dict)

    def note(self, sums: dict[str, float], times: dict[str, float] | None, staleness: int) -> None:
        """Add a worker's part of an update: its losses, the times of the one before, and its staleness."""
        self._staleness += staleness
        self._max_staleness = max(self._max_staleness, staleness)
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        if times is not None:
            self._timed += 1
            for name, seconds in times.items():
                self._times[name] = self._times.get(name, 0.0) + seconds

    def use(self, workers: int, now: float) -> dict[str, float]:
        mean = {name: self._times.get(name, 0.0) / max(self._timed, 1) for name in TIMES}
        return mean | {
            "workers": workers,
            "updates": self.updates,
            "duration_s": now - self.began_at,
            "staleness": self._staleness / max(self.updates, 1),
            "max_staleness": self._max_staleness,
            "lost": self.lost,
        }


TIMES = ("compute_s", "up_s", "wait_s", "server_s", "down_s")
"""Fields of an AsyncUse that a worker measures."""


# Messages between a worker and a parameter server: a header of plain values, then bytes, over TCP. TCP sockets are
# read and written without Python's global lock and without a copy, straight from and to the tensors' memory; they
# work the same on one machine and between machines; and each worker's connection breaks alone. Ray's calls copy each
# tensor through its object store, and a process group of torch breaks as a whole when one worker is lost. A server
# runs no code that a stranger sends: the first bytes of a connection must be the secret of the trial's attempt.


SECRET_BYTES = 32
CONNECT_TIMEOUT_S = 30.0
_LENGTH = struct.Struct("!I")


class Wire:
    """One connection; it is used by one thread at a time. Every method raises OSError if it is broken."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = kept_alive(connected)

    @classmethod
    def connect(cls, address: str, secret: str) -> Wire:
        host, _, port = address.rpartition(":")
        connected = socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S)
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
        while len(memory):
            count = self._socket.recv_into(memory)
            if count == 0:
                raise ConnectionResetError("the other end closed the connection")
            memory = memory[count:]

    def content(self, header: dict[str, Any]) -> bytearray:
        found = bytearray(header["bytes"])
        self.read(memoryview(found))
        return found

    def close(self) -> None:
        """Close it; a thread that reads is woken. Idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
