"""A parameter server: takes gradients from workers, applies them to its shard, and returns parameters.

Every worker has a connection of its own, and a thread here. An update has a number from the first server, which is the
same on all of them. A server applies no update of an iteration before all of the last one are applied or lost; then it
takes a snapshot, so that the snapshots of all servers hold the same updates. Rank 0 fetches them, evaluates them and
writes the checkpoint, while training goes on.

An update is acknowledged by the parameters that are returned. It lives here then, and is lost only with the server.

`ServerThreads` runs the servers of a check inside the process of its only worker.
"""

from __future__ import annotations

import contextlib
import io
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from rubberband.executor.training.asynchronous.protocol import SECRET_BYTES, Order, Pace, Tally, Wire
from rubberband.executor.training.asynchronous.shards import Buffer, GradientPart, ServedShard, memory_of
from rubberband.executor.training.entrypoint import Entrypoint
from rubberband.executor.training.failures import describe
from rubberband.executor.training.run import close_all
from rubberband.executor.training.runner import positive
from rubberband.executor.training.segment import Segment, SegmentFailure
from rubberband.executor.training.torch_trial import TorchTrial
from rubberband.executor.training.worker_process import Leftovers

_LOOK_S = 0.2
_ALL_THERE_S = 60.0
"""The longest wait for all workers before the first update."""
_FAREWELL_S = 2.0
"""The longest time for workers to learn that the segment is over."""
_MISSING_S = 5.0
"""The longest wait for parts of an update that the first server has already made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The shard as it was at the end of an iteration."""

    parameters: Tensor
    states: dict[str, Any]
    known: dict[str, Any]
    """From the first server: position of the data, sums of the losses, fields of an AsyncUse."""


@dataclass(eq=False, slots=True)
class _Peer:
    """A worker's connection, with its memory."""

    wire: Wire
    worker: str = ""
    closes: bool = False
    """Whether it is rank 0, for which nothing may wait that waits for it."""
    version: int = 0
    """Updates in the parameters that it has."""
    gradients: Buffer | None = None
    reply: Buffer | None = None
    reading: int | None = None
    """The update whose gradient is on its way, or waits to be applied."""


class ParameterServer:
    """Server number `index` of a segment; `run` serves until rank 0 ends the segment."""

    def __init__(self, shard: ServedShard, segment: Segment, index: int, *, checkpoint_every: int) -> None:
        assert segment.training is not None
        self._shard = shard
        self._segment = segment
        self._shares = segment.training.max_staleness == 0
        self._max_staleness = segment.training.max_staleness
        self._is_first = index == 0
        self._checkpoint_every = checkpoint_every
        self._changed = threading.Condition()
        self._using = threading.Lock()
        """Held while an update is applied or the shard is read, so that gradients come in meanwhile. Taken before
        `_changed`, never while that is held."""
        self._peers: list[_Peer] = []
        self._gone: set[str] = set()
        self._error: BaseException | None = None
        self._is_finished = False
        self._joined = 0
        self._order: Order | None = None
        """None until rank 0 sends the state."""
        self._pace: Pace
        self._tally: Tally
        self._cuts: dict[int, Cut] = {}
        self._applied = 0
        self._latest: dict[str, int] = {}
        """Worker -> its latest update. If it left, that update may be on some servers and not on others."""
        self._round: dict[str, tuple[_Peer, dict[str, Any]]] = {}
        """Worker -> its part of the present update, if all share one."""
        self._round_began_at = 0.0

    def run(self, listener: socket.socket) -> None:
        """Serve until rank 0 ends the segment. Raises the first error of the optimizer, or of the protocol."""
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        with self._changed:
            while self._error is None and not self._is_finished:
                self._changed.wait(_LOOK_S)
            until = time.monotonic() + _FAREWELL_S
            while self._error is None and self._peers and time.monotonic() < until:
                self._changed.wait(_LOOK_S)  # workers that still compute learn that it is over
            peers = list(self._peers)
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        listener.close()
        for peer in peers:
            peer.wire.close()
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        """Let `run` return."""
        with self._changed:
            self._is_finished = True
            if self._order is not None:  # a trial that ended by itself needs no more updates
                self._pace.until_updates = min(self._pace.until_updates, self._pace.updates)
            self._changed.notify_all()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connected, _ = listener.accept()
            except OSError:
                return
            peer = _Peer(Wire(connected))
            threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: _Peer) -> None:
        try:
            if peer.wire.accept(self._segment.secret):
                with self._changed:
                    self._peers.append(peer)
                while self._answer(peer, peer.wire.header()):
                    pass
        except OSError:
            pass
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
        finally:
            peer.wire.close()
            with self._changed:
                self._left(peer)

    def _answer(self, peer: _Peer, header: dict[str, Any]) -> bool:
        """Answer a message; return whether another may follow."""
        match header["kind"]:
            case "push":
                self._push(peer, header)
            case "pull":
                self._pull(peer)
            case "join":
                self._join(peer, header)
            case "status":
                with self._changed:
                    closed = None if self._order is None else self._order.closed
                    status = {"closed": closed, "latest": dict(self._latest)}
                peer.wire.send(status)
            case "begin":
                self._begin(header, peer.wire.content(header))
                peer.wire.send({})
            case "cut":
                self._send_cut(peer, header)
            case "close":
                self._close(peer, header)
            case "finish":
                peer.wire.send({})
                self.end()
                return False
            case kind:
                raise ValueError(f"a worker sent a message of kind {kind!r}")
        return True

    def _wait_for(self, holds: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait with the lock; return False after the timeout. Raises OSError once the server ends."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while not holds():
            if self._error is not None:
                raise ConnectionAbortedError("the server ends")
            left_s = _LOOK_S if until is None else min(_LOOK_S, until - time.monotonic())
            if left_s <= 0.0:
                return False
            self._changed.wait(left_s)
        return True

    @property
    def _now_in_order(self) -> Order:
        assert self._order is not None, "rank 0 sent the state"
        return self._order

    # Workers come

    def _begin(self, header: dict[str, Any], content: bytearray) -> None:
        with self._changed:
            self._shard.load(content, header["total_steps"])
            boundaries = header["boundaries"]
            self._applied = boundaries[0]
            self._pace = Pace(
                self._max_staleness,
                until_updates=boundaries[-1],
                updates=boundaries[0],
                next_ticket=header["next_ticket"],
                returned=deque(header["returned"]),
            )
            self._tally = Tally(time.perf_counter())
            self._order = Order(header["iteration"], boundaries)
            self._changed.notify_all()

    def _join(self, peer: _Peer, header: dict[str, Any]) -> None:
        peer.gradients, peer.reply = self._shard.another_buffer(), self._shard.another_buffer()
        with self._changed:
            self._wait_for(lambda: self._order is not None)
            peer.worker, peer.closes = header["worker"], header["closes"]
            self._joined += 1
            if self._is_first:
                self._pace.join(peer.worker, header["hand"])
            self._changed.notify_all()
        self._pull(peer)

    # Updates

    def _pull(self, peer: _Peer, waited_s: float = 0.0, applied_s: float = 0.0) -> None:
        """Send the parameters. The first server sends them once the worker may begin, with its tickets."""
        assert peer.reply is not None
        answer: dict[str, Any] = {}
        asked_at = time.perf_counter()
        if self._is_first:
            with self._changed:
                answer = self._turn(peer)
        with self._using, self._changed:
            began_at = time.perf_counter()
            peer.reply.whole.copy_(self._shard.buffer.whole)
            peer.version = self._applied
            answer["cut"] = self._now_in_order.cut
            now = time.perf_counter()
        answer |= {"wait_s": waited_s + began_at - asked_at, "server_s": applied_s + now - began_at}
        peer.wire.send(answer, peer.reply.memory)

    def _turn(self, peer: _Peer) -> dict[str, Any]:
        """Wait until the worker may begin; return its tickets, and those that share its batch."""
        pace, members = self._pace, tuple[str, ...]()
        if self._applied == self._now_in_order.boundaries[0]:  # all of them are part of the start-up
            self._wait_for(lambda: self._joined >= self._segment.num_workers, _ALL_THERE_S)
        order = self._now_in_order
        self._wait_for(lambda: pace.is_over or (peer.closes and order.waits) or self._may_begin(peer.worker))
        if not pace.is_over and self._may_begin(peer.worker):
            members = pace.begin(peer.worker)
        tickets = [pace.next_ticket] if self._shares else list(pace.held[peer.worker])
        return {"tickets": tickets, "members": list(members), "is_over": pace.is_over}

    def _may_begin(self, worker: str) -> bool:
        return self._pace.may_begin(worker) and worker in self._pace.begin(worker)

    def _push(self, peer: _Peer, header: dict[str, Any]) -> None:
        """Take a gradient in and apply it; answer with the parameters, or without if they are asked for later."""
        assert peer.gradients is not None
        if self._is_first:
            with self._changed:
                number, order = None, self._now_in_order
                # One that can only be applied once rank 0 has closed an iteration must not keep it from that.
                if not peer.closes or order.may_apply_unclosed(self._pace.updates):
                    number = self._pace.number()
                if number is not None:
                    peer.reading = self._latest[peer.worker] = number
                is_over = self._pace.is_over and number is None
                answer = {"number": number, "latest": dict(self._latest), "cut": order.cut, "is_over": is_over}
            peer.wire.send(answer)
            if number is None:
                return
        else:
            number = header["number"]
            with self._changed:
                peer.reading = number
                self._hear(header["latest"])
        peer.wire.read(peer.gradients.memory[: header["bytes"]])
        read_at = time.perf_counter()
        if self._shares:
            with self._changed:
                began_at = self._share(peer, header, number)
        else:
            began_at = self._apply(peer, header, number)
        applied_at = time.perf_counter()
        if header["pull"]:
            self._pull(peer, began_at - read_at, applied_at - began_at)
        else:
            peer.wire.send({"wait_s": began_at - read_at, "server_s": applied_at - began_at})

    def _apply(self, peer: _Peer, header: dict[str, Any], number: int) -> float:
        """Apply a worker's gradient as an update of its own; return when that began."""
        assert peer.gradients is not None
        order = self._now_in_order
        with self._changed:
            self._wait_for(lambda: self._is_finished or order.may_apply(number))
            if self._is_finished or order.is_done(number):
                return time.perf_counter()  # the trial has ended by itself, or it was taken for lost
        with self._using:  # no iteration ends meanwhile: this one waits for the update
            began_at = time.perf_counter()
            if header["weight"]:
                self._shard.update([GradientPart(1.0, peer.gradients.tensors, header["absent"])])
            with self._changed:
                self._tally.note(header["sums"], header["times"], self._applied - peer.version)
                if self._is_first:
                    self._pace.used(peer.worker)
                peer.reading = None
                self._applied_one(number)
        return began_at

    def _applied_one(self, number: int) -> None:
        self._tally.updates += 1
        self._applied += 1
        if self._now_in_order.done(number):
            self._take_cut()
        self._changed.notify_all()

    def _share(self, peer: _Peer, header: dict[str, Any], number: int) -> float:
        """Add a worker's gradient to the update that all share, and wait for it; return when that began."""
        order = self._now_in_order
        # A worker that came later may be here before the parts of the last update, or their senders are gone.
        if not self._wait_for(lambda: order.low >= number, _MISSING_S) and not self._round:
            while order.low < number:
                self._applied_one(order.low)
        self._wait_for(lambda: self._is_finished or (order.low >= number and order.may_apply(number)))
        if order.low == number and not self._is_finished:
            self._round[peer.worker] = (peer, header)
            self._end_round_if_whole()
            self._wait_for(lambda: self._is_finished or order.low > number)
        peer.reading = None
        return self._round_began_at

    def _end_round_if_whole(self) -> None:
        members = next((header["members"] for _, header in self._round.values()), None)
        if members is not None and all(each in self._round or each in self._gone for each in members):
            self._end_round(members)

    def _end_round(self, members: list[str]) -> None:
        """Make the update that the workers share: their gradients' mean, by weight, in the order of their names."""
        self._round_began_at = time.perf_counter()
        parts = [self._round[worker] for worker in sorted(self._round)]
        self._round = {}
        total = sum(header["weight"] for _, header in parts)
        if total > 0.0:
            self._shard.update(
                [
                    GradientPart(header["weight"] / total, peer.gradients.tensors, header["absent"])
                    for peer, header in parts
                    if header["weight"] and peer.gradients is not None
                ]
            )
        for _, header in parts:
            self._tally.note(header["sums"], header["times"], 0)
        self._tally.lost += len(members) - len(parts)
        if self._is_first:
            self._pace.end_round(members)
        self._applied_one(self._now_in_order.low)

    def _left(self, peer: _Peer) -> None:
        """Take a worker out; a gradient that was on its way is lost."""
        if peer in self._peers:
            self._peers.remove(peer)
        self._changed.notify_all()
        if not peer.worker or self._order is None or self._is_finished:
            return
        self._gone.add(peer.worker)
        if self._is_first:
            self._pace.leave(peer.worker)
        if self._shares:
            self._end_round_if_whole()
        else:
            self._hear({} if peer.reading is None else {peer.worker: peer.reading})
        peer.reading = None
        self._changed.notify_all()

    def _hear(self, latest: dict[str, int]) -> None:
        """Learn the workers' latest updates; those of workers that left, and are not here, are lost.

        A worker has one update at a time, so that no other can be missing. Those that push send it, as rank 0 may
        itself wait for a missing one.
        """
        for worker, number in latest.items():
            self._latest[worker] = max(number, self._latest.get(worker, number))
        for worker in self._gone & self._latest.keys():
            number = self._latest[worker]
            if not self._shares and not self._now_in_order.is_done(number):
                self._tally.lost += 1
                if self._now_in_order.done(number):
                    self._take_cut()
                self._changed.notify_all()

    # Iterations end

    def _take_cut(self) -> None:
        order = self._now_in_order
        while order.ends():
            iteration = order.end()
            self._shard.end_iteration()
            is_saved = iteration % self._checkpoint_every == 0 or iteration == order.last
            now = time.perf_counter()
            known = {}
            if self._is_first:
                use = self._tally.use(len(self._pace.workers), now)
                known = {"data": self._pace.state(), "sums": self._tally.sums, "use": use}
            self._cuts[iteration] = Cut(
                parameters=self._shard.buffer.whole.clone(),
                states=self._shard.states(with_tensors=is_saved),
                known=known,
            )
            self._tally = Tally(now)
        self._changed.notify_all()

    def _send_cut(self, peer: _Peer, header: dict[str, Any]) -> None:
        """Send the snapshot of an iteration, or that it is not complete yet, or not there any more."""
        iteration, order = header["iteration"], self._now_in_order
        with self._changed:
            self._hear(header["latest"])
            is_there = self._wait_for(lambda: order.cut >= iteration, _LOOK_S)
            cut = self._cuts.get(iteration)
        if cut is None:
            peer.wire.send({"is_there": is_there})
            return
        states = io.BytesIO()
        torch.save(cut.states, states)
        peer.wire.send({"is_there": True, **cut.known}, memory_of(cut.parameters))
        peer.wire.send({}, states.getbuffer())

    def _close(self, peer: _Peer, header: dict[str, Any]) -> None:
        """Note that rank 0 is done with an iteration; answer with the states after a step of ReduceLROnPlateau."""
        states = io.BytesIO()
        with self._using, self._changed:
            self._now_in_order.closed = header["iteration"]
            self._cuts = {number: cut for number, cut in self._cuts.items() if number >= header["iteration"]}
            if header["value"] is not None:
                self._shard.step_plateau(header["value"])
                torch.save(self._shard.states(with_tensors=False), states)
            self._changed.notify_all()
        peer.wire.send({}, states.getbuffer())


_END_S = 5.0


class ServerThreads:
    """The servers of a segment; they listen at once, and serve after `start`."""

    def __init__(self, servers: int) -> None:
        self._listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(servers)]
        self.addresses = tuple(f"127.0.0.1:{each.getsockname()[1]}" for each in self._listeners)
        self._error: BaseException | None = None
        self._running: list[tuple[ParameterServer, Thread]] = []

    def beside(self, segment: Segment, num_workers: int) -> Segment:
        """Return the segment as one of that many workers takes part in it."""
        secret = secrets.token_hex(SECRET_BYTES)
        return replace(segment, num_workers=num_workers, servers=self.addresses, secret=secret)

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
        for server, _ in self._running:
            server.end()
        for listener in self._listeners:
            listener.close()


def run_server(entrypoint: Entrypoint, segment: Segment, index: int, listener: socket.socket) -> SegmentFailure | None:
    """Serve as parameter server `index` of a segment, in this process, until rank 0 ends it; return why that failed.

    It accepts workers at `listener`, which is closed in the end. The process can then serve another segment.
    """
    resources: list[Any] = []
    failure: SegmentFailure | None = None
    with listener:
        try:
            _serve(entrypoint, segment, index, listener, resources)
        except BaseException as error:
            failure = describe(error, in_gang=True, environment=entrypoint.environment)
    close_all(resources, segment)
    return failure


def _serve(entrypoint: Entrypoint, segment: Segment, index: int, listener: socket.socket, resources: list[Any]) -> None:
    target = entrypoint.load()
    resources.append(Leftovers("cpu"))
    if segment.device == "cpu":
        torch.set_num_threads(1)
    if not (isinstance(target, type) and issubclass(target, TorchTrial)):
        raise ValueError(f"{entrypoint} is no TorchTrial, and cannot be trained asynchronously")
    trial = target()
    every = positive("checkpoint_every", trial.checkpoint_every)
    shard = ServedShard(trial, segment, index)
    ParameterServer(shard, segment, index, checkpoint_every=every).run(listener)
