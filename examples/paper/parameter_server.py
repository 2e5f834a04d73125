"""A parameter server and its workers: simulated, by the paper's equations 2 to 4, and as a program that sleeps.

The paper is "A model-based approach to streamlining distributed training for asynchronous SGD" (Lin et al.).
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from threading import Thread
from typing import Literal, NamedTuple

import numpy as np

from rubberband.planner.queueing import Floats, Network, Numbers
from rubberband.values.asynchronous import AsyncTimes

Links = Literal["in turn", "shared"]
"""Whether a link carries one transfer after another, or all of them at an equal share."""
Discipline = Links | Literal["delay"]
"""Or all at once at full speed."""
Law = Callable[[np.random.Generator, int], Floats]
"""(random, size) -> factors with mean 1."""


def exponential(random: np.random.Generator, size: int) -> Floats:
    return random.exponential(size=size)


def constant(random: np.random.Generator, size: int) -> Floats:
    return np.ones(size)


def gamma(cv: float) -> Law:
    """Return the gamma law with this coefficient of variation."""
    return lambda random, size: random.gamma(cv**-2, cv**2, size=size)


def simulated_throughputs(
    demands_s: Floats,
    disciplines: Sequence[Discipline],
    laws: Sequence[Law],
    *,
    replicas: int = 500,
    steps: int = 4000,
    warm_up: int = 1000,
    seed: int = 0,
) -> Floats:
    """Return (workers,) updates per second, counted event by event, for mean times `demands_s` of (workers, stations).

    Every worker visits the stations in their order, again and again. Of `steps` events per replica, `warm_up` do not
    count.
    """
    random = np.random.default_rng(seed)
    workers, stations = demands_s.shape
    at = random.integers(stations, size=(replicas, workers))
    left_s = np.empty((replicas, workers))
    for station in range(stations):
        rows, who = np.nonzero(at == station)
        left_s[rows, who] = demands_s[who, station] * laws[station](random, len(rows))
    arrived = random.random((replicas, workers)) - 1.0
    updates, elapsed_s = np.zeros(workers), 0.0
    every = np.arange(replicas)
    shared, queued = (np.array([each == kind for each in disciplines]) for kind in ("shared", "in turn"))
    for step in range(steps):
        places = every[:, None] * stations + at
        present = np.bincount(places.ravel(), minlength=replicas * stations)
        speed = np.where(shared[at], 1.0 / present[places], 1.0)
        for station in np.flatnonzero(queued):
            here = at == station
            order = np.where(here, arrived, np.inf)
            speed[here & (order > order.min(axis=1, keepdims=True))] = 0.0
        with np.errstate(divide="ignore"):
            until_s = np.where(speed > 0.0, left_s / speed, np.inf)
        who = until_s.argmin(axis=1)
        passed_s = until_s[every, who]
        left_s -= passed_s[:, None] * speed
        old = at[every, who]
        new = (old + 1) % stations
        at[every, who], arrived[every, who] = new, step
        for station in range(stations):
            rows = np.flatnonzero(new == station)
            left_s[rows, who[rows]] = demands_s[who[rows], station] * laws[station](random, len(rows))
        if step >= warm_up:
            elapsed_s += passed_s.sum()
            updates += np.bincount(who[new == 0], minlength=workers)
    return updates / (elapsed_s / replicas) / replicas


# X(K) by the other forms of the paper (eqs. 2 to 4). The product plans with a band instead.

SHARING_BEGINS = 0.8
"""Utilisation of a link from which on its transfers overlap (eq. 4)."""
HALVINGS = 54
Pair = tuple[Numbers, Numbers]
"""Values at the uplink and at the downlink."""


def first_come(network: Network, workers: int, *, is_bounded: bool = True) -> Floats:
    """Return X(1), …, X(workers) by eq. 2, at most 1 / max S: as printed it exceeds that by up to a third."""
    ceiling = network.ceiling if is_bounded else np.inf
    return _recursion(network, workers, ceiling, lambda n, waits_s, under_way_s: (0.5, 0.5))


def hybrid(network: Network, workers: int, begins: float = SHARING_BEGINS) -> Floats:
    """Return the same where transfers overlap on links that are busier than `begins`, below 1 (eqs. 3 and 4).

    The overlap on a link follows from its total utilisation by all n workers. That depends on X(n) itself, which is a
    fixed point. The utilisation by single workers, as printed, never reaches 0.8; with that at n - 1, X falls for some
    n.
    """

    def shares(throughput: Numbers) -> Pair:
        """Return (1 - g) / 2 of the links (eq. 4), where g is the share of overlapping transfers."""
        up, down = (
            0.5 * (1.0 - np.clip((throughput * link_s - begins) / (1.0 - begins), 0.0, 1.0))
            for link_s in (network.up_s, network.down_s)
        )
        return up, down

    def passed(n: int, waits_s: Numbers, under_way_s: Pair) -> Pair:
        """Return the shares at X = n / T(X), which lies between those of all and of no overlaps: X T(X) rises."""
        low, high = n / waits_s, np.minimum(n / (waits_s - 0.5 * sum(under_way_s)), network.ceiling)
        for _ in range(HALVINGS):
            middle = 0.5 * (low + high)
            up, down = shares(middle)
            is_above = middle * (waits_s - up * under_way_s[0] - down * under_way_s[1]) > n
            low, high = np.where(is_above, low, middle), np.where(is_above, middle, high)
        return shares(high)

    return _recursion(network, workers, network.ceiling, passed)


def _recursion(
    network: Network, workers: int, ceiling: Numbers, passed: Callable[[int, Numbers, Pair], Pair]
) -> Floats:
    """X(n): `passed` gives the share of the transfer under way that has passed on each link."""
    up_s, server_s, down_s, found = network.up_s, network.server_s, network.down_s, []
    up: Numbers = 0.0  # mean tasks at the stations, and X, with one worker less
    server, down, throughput = up, up, up
    for n in range(1, workers + 1):
        up_wait_s, server_wait_s, down_wait_s = up_s * (1.0 + up), server_s * (1.0 + server), down_s * (1.0 + down)
        under_way_s = throughput * up_s**2, throughput * down_s**2
        shares = passed(n, network.delay_s + up_wait_s + server_wait_s + down_wait_s, under_way_s)
        up_wait_s, down_wait_s = up_wait_s - shares[0] * under_way_s[0], down_wait_s - shares[1] * under_way_s[1]
        throughput = np.minimum(n / (network.delay_s + up_wait_s + server_wait_s + down_wait_s), ceiling)
        up, server, down = throughput * up_wait_s, throughput * server_wait_s, throughput * down_wait_s
        found.append(throughput)
    return np.asarray(found)


# The paper's own check of §III-A: a program that sends as much and sleeps in place of computing.

CHUNKS = 24
"""Parts of a transfer, between which those that share a link take turns."""
CHUNK_BYTES = 4096
LATE_S = 2e-3
"""By so much a sleep may end late on a busy machine: a link makes up for it."""


class Transfer(NamedTuple):
    """Seconds at which a transfer began and ended on a link."""

    began_s: float
    ended_s: float


class Link:
    """Direction of the server's network: one transfer after another, or the chunks of all by turns."""

    def __init__(self, transfer_s: float, links: Links) -> None:
        self._chunk_s, self._free_at, self._lock = transfer_s / CHUNKS, 0.0, threading.Lock()
        self._turn = threading.Lock() if links == "in turn" else contextlib.nullcontext()
        self.transfers: list[Transfer] = []

    def carry(self, end: socket.socket) -> None:
        """Send a gradient or parameters, at the speed of the link."""
        with self._turn:
            began_s = self._chunk(end) - self._chunk_s
            for _ in range(CHUNKS - 2):
                self._chunk(end)
            self.transfers.append(Transfer(began_s, self._chunk(end)))

    def _chunk(self, end: socket.socket) -> float:
        with self._lock:
            now = time.perf_counter()
            self._free_at = until = max(self._free_at, now - LATE_S) + self._chunk_s
        time.sleep(max(0.0, until - now))
        end.sendall(bytes(CHUNK_BYTES))
        return until


class Slept(NamedTuple):
    updates_per_s: float
    up: Sequence[Transfer]
    down: Sequence[Transfer]


def slept(times: AsyncTimes, workers: int, links: Links, updates: int) -> Slept:
    """Train nothing with a server and `workers` threads over TCP, for `updates` updates, and time the transfers.

    The times are real; the bytes are few, so that the processors do not become the bottleneck.
    """
    up, down, serving = Link(times.up_s, links), Link(times.down_s, links), threading.Lock()
    applied: list[float] = []

    def serve(end: socket.socket) -> None:
        while _received(end):
            with serving:
                time.sleep(times.server_s)
                applied.append(time.perf_counter())
            down.carry(end)

    def work(end: socket.socket) -> None:
        while len(applied) < updates:
            time.sleep(times.compute_s)
            up.carry(end)
            _received(end)
        end.shutdown(socket.SHUT_WR)

    with contextlib.ExitStack() as sockets:
        listener = sockets.enter_context(socket.create_server(("127.0.0.1", 0)))
        threads = []
        for _ in range(workers):
            near = sockets.enter_context(socket.create_connection(listener.getsockname()))
            far = sockets.enter_context(listener.accept()[0])
            threads += [Thread(target=serve, args=(far,)), Thread(target=work, args=(near,))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    counted = sorted(applied)[min(2 * workers, updates // 2) : updates]
    return Slept((len(counted) - 1) / (counted[-1] - counted[0]), up.transfers, down.transfers)


def _received(end: socket.socket) -> bool:
    """Read a whole transfer; return False at the end of all."""
    return len(end.recv(CHUNKS * CHUNK_BYTES, socket.MSG_WAITALL)) == CHUNKS * CHUNK_BYTES
