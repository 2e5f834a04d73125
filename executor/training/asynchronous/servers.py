"""A worker's end of its connections to the parameter servers of its gang."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rubberband.executor.training.asynchronous.protocol import TIMES, Wire
from rubberband.executor.training.asynchronous.shards import Buffer, Shard, size_bytes
from rubberband.executor.training.failures import GangBroken

T = TypeVar("T")


class ServerGone(GangBroken):
    """A parameter server is not there any more, and its shard with it; the gang begins again from a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSnapshot:
    """The state at the end of an iteration; the parameters are in the worker's model."""

    use: dict[str, Any]
    sums: dict[str, float]
    data: dict[str, Any]
    optimizer: dict[str, Any]
    """Without its tensors where the iteration has no checkpoint."""
    scheduler: Any


class Servers:
    """The servers as one worker sees them. Every method raises ServerGone if one is gone."""

    def __init__(
        self, addresses: Sequence[str], secret: str, parameters: Mapping[str, nn.Parameter], *, pulls_later: bool
    ) -> None:
        """`parameters` are those that are trained, by name.

        `pulls_later`: the other servers are asked for parameters once the first one has let the worker begin.
        """
        self._parameters = parameters
        self._shards = Shard.all(parameters, len(addresses))
        self._pulls_later = pulls_later
        is_pinned = next(iter(parameters.values())).is_cuda
        like = [[parameters[name].detach() for name in shard.names] for shard in self._shards]
        self._gradients = [Buffer(each, pinned=is_pinned) for each in like]
        self._received = [Buffer(each, pinned=is_pinned) for each in like]
        self._adopt()
        self._times: dict[str, float] | None = None
        self._ready_at = 0.0
        self._pool = ThreadPoolExecutor(len(addresses)) if len(addresses) > 1 else None
        self.tickets: list[int] = []
        self.members: list[str] = []
        """Workers that share the next batch, if they share them."""
        self.cut = 0
        self.is_over = False
        """Whether the segment needs no more gradients."""
        self._wires: list[Wire] = []
        try:
            self._wires = [Wire.connect(address, secret) for address in addresses]
        except OSError as error:
            raise ServerGone(f"a parameter server does not answer: {error}") from error

    def _adopt(self) -> None:
        """Let the parameters be views of the memory that is received into, where they can be."""
        self._copies: list[tuple[Tensor, Tensor]] = []
        for shard, buffer in zip(self._shards, self._received, strict=True):
            for name, view in zip(shard.names, buffer.tensors, strict=True):
                parameter = self._parameters[name]
                if parameter.device.type == "cpu" and parameter.is_contiguous():
                    parameter.data = view.copy_(parameter.detach())
                else:
                    self._copies.append((parameter.detach(), view))

    def _on_all(self, call: Callable[[int], T]) -> list[T]:
        """Call for every server at once; return the results in their order."""

        def call_one(server: int) -> T:
            try:
                return call(server)
            except OSError:
                self._hang_up()  # what waits for the others ends as well
                raise

        try:
            if self._pool is None:
                return [call(0)]
            return list(self._pool.map(call_one, range(len(self._wires))))
        except OSError as error:
            raise ServerGone(f"a parameter server is gone: {error}") from error

    # Rank 0 begins

    def closed(self) -> int | None:
        """Return the iterations that rank 0 has closed; None if the servers wait for the state."""
        found: int | None = self._status()["closed"]
        return found

    def _status(self) -> dict[str, Any]:
        def ask() -> dict[str, Any]:
            self._wires[0].send({"kind": "status"})
            return self._wires[0].header()

        return self._once(ask)

    def _once(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except OSError as error:
            raise ServerGone(f"a parameter server is gone: {error}") from error

    def begin(self, header: dict[str, Any], optimizer: Optimizer, scheduler: Any) -> None:
        """Send the parameters of this worker's model, and the states of its optimizer and schedule, to the servers."""
        state = optimizer.state_dict()
        numbers = _numbers(optimizer)

        def send(server: int) -> None:
            shard, buffer = self._shards[server], self._received[server]
            for name, view in zip(shard.names, buffer.tensors, strict=True):
                view.copy_(self._parameters[name].detach())
            own = {numbers[id(self._parameters[name])] for name in shard.names}
            content = io.BytesIO()
            part = {**state, "state": {number: each for number, each in state["state"].items() if number in own}}
            torch.save({"parameters": buffer.whole, "optimizer": part, "scheduler": scheduler}, content)
            self._wires[server].send({"kind": "begin", **header}, content.getbuffer())
            self._wires[server].header()

        self._on_all(send)

    # Updates

    def join(self, worker: str, hand: int, *, closes: bool) -> None:
        """Become a worker that holds `hand` tickets at a time; return with the parameters, once it may begin.

        One of them `closes` the iterations.
        """

        def ask(server: int) -> None:
            self._wires[server].send({"kind": "join", "worker": worker, "hand": hand, "closes": closes})
            self._take(server)

        # The first one last: its workers are known to all others.
        for server in reversed(range(len(self._wires))):
            self._once(partial(ask, server))
        self._now_ready()

    def pull(self) -> None:
        """Fetch the parameters, once this worker may begin; the first server's last word comes before the others'."""
        self._once(partial(self._pull, 0))
        self._pull_others()
        self._now_ready()

    def exchange(self, weight: float, sums: dict[str, float]) -> bool:
        """Send the gradients, and fetch the parameters once they are applied and this worker may begin again.

        `weight` is what the gradients count in an update that workers share, and `sums` those of their losses. Returns
        False, and sends nothing, if the segment needs no more, or rank 0 must end an iteration first.
        """
        sent_at = time.perf_counter()
        compute_s = sent_at - self._ready_at
        absent = self._collect() if weight else [[] for _ in self._shards]
        header = {"kind": "push", "weight": weight, "times": self._times, "members": self.members, "pull": True}
        sizes = [buffer.size_bytes if weight else 0 for buffer in self._gradients]

        def announce() -> dict[str, Any]:
            self._wires[0].announce({**header, "absent": absent[0], "sums": sums}, sizes[0])
            answer = self._wires[0].header()
            self.cut, self.is_over = answer["cut"], answer["is_over"]
            return answer

        answer = self._once(announce)
        header |= {"number": answer["number"], "latest": answer["latest"]}
        if answer["number"] is None:
            self._ready_at = time.perf_counter()
            return False

        def push(server: int) -> dict[str, float]:
            wire, pulls = self._wires[server], server == 0 or not self._pulls_later
            if server:
                wire.announce({**header, "absent": absent[server], "sums": {}, "pull": pulls}, sizes[server])
            wire.write(self._gradients[server].memory[: sizes[server]])
            return self._take(server, sent_at)

        found = self._on_all(push)
        if self._pulls_later:
            asked_at = time.perf_counter()
            self._pull_others()
            found[0]["down_s"] += time.perf_counter() - asked_at
        self._now_ready()
        slowest = {name: max(times[name] for times in found) for name in TIMES if name != "compute_s"}
        self._times = {"compute_s": compute_s, **slowest}
        return True

    def _pull(self, server: int) -> None:
        self._wires[server].send({"kind": "pull"})
        self._take(server)

    def _pull_others(self) -> None:
        if len(self._wires) > 1:
            self._on_all(lambda server: self._pull(server) if server else None)

    def _collect(self) -> list[list[int]]:
        """Copy the gradients into their buffers; return, for each server, the tensors that have none."""
        absent = []
        for shard, buffer in zip(self._shards, self._gradients, strict=True):
            missing, pairs = [], []
            for number, name in enumerate(shard.names):
                gradient = self._parameters[name].grad
                if gradient is None:
                    missing.append(number)
                else:
                    pairs.append((buffer.tensors[number], gradient))
            if pairs:
                views, gradients = map(list, zip(*pairs, strict=True))
                torch._foreach_copy_(views, gradients)
            absent.append(missing)
        return absent

    def _take(self, server: int, sent_at: float = 0.0) -> dict[str, float]:
        """Read an answer with parameters, or without; return the times of the update."""
        wire = self._wires[server]
        answer = wire.header()
        came_at = time.perf_counter()
        if answer["bytes"]:
            wire.read(self._received[server].memory)
        if server == 0:
            self.tickets, self.members = answer["tickets"], answer["members"]
            self.cut, self.is_over = answer["cut"], answer["is_over"]
        return {
            "up_s": max(0.0, came_at - sent_at - answer["wait_s"] - answer["server_s"]),
            "wait_s": answer["wait_s"],
            "server_s": answer["server_s"],
            "down_s": time.perf_counter() - came_at,
        }

    def _now_ready(self) -> None:
        """Put what was received into the model; the next gradient begins."""
        if self._copies:
            parameters, views = map(list, zip(*self._copies, strict=True))
            torch._foreach_copy_(parameters, views)
        self._ready_at = time.perf_counter()

    # Rank 0 ends iterations

    def snapshot(self, iteration: int, optimizer: Optimizer) -> ServerSnapshot:
        """Wait until an iteration is complete, and load its parameters into the model; `optimizer` is the worker's."""
        first, states = self._fetch(0, iteration)
        merged = dict(states["optimizer"]["state"])
        for server in range(1, len(self._wires)):
            merged |= self._fetch(server, iteration)[1]["optimizer"]["state"]
        self._now_ready()
        numbers = _numbers(optimizer)
        known = {numbers[id(parameter)] for parameter in self._parameters.values()}
        return ServerSnapshot(
            use=first["use"],
            sums=first["sums"],
            data=first["data"],
            optimizer={**states["optimizer"], "state": {n: each for n, each in merged.items() if n in known}},
            scheduler=states["scheduler"],
        )

    def _fetch(self, server: int, iteration: int) -> tuple[dict[str, Any], dict[str, Any]]:
        def ask() -> tuple[dict[str, Any], dict[str, Any]]:
            wire = self._wires[server]
            while True:
                latest = self._status()["latest"] if server else {}
                wire.send({"kind": "cut", "iteration": iteration, "latest": latest})
                answer = wire.header()
                if answer["bytes"]:
                    break
                if answer["is_there"]:
                    raise ServerGone(f"the servers hold iteration {iteration} no more")
            wire.read(self._received[server].memory)
            content = wire.content(wire.header())
            return answer, torch.load(io.BytesIO(content), weights_only=False)

        return self._once(ask)

    def close_iteration(self, iteration: int, value: float | None) -> dict[str, Any] | None:
        """Let the servers go on; with the metric's `value`, return the states after ReduceLROnPlateau's step."""

        def tell(server: int) -> bytearray:
            self._wires[server].send({"kind": "close", "iteration": iteration, "value": value})
            return self._wires[server].content(self._wires[server].header())

        content = self._on_all(tell)[0]
        return torch.load(io.BytesIO(content), weights_only=False) if content else None

    def finish(self) -> None:
        """End the servers' segment."""

        def tell(server: int) -> None:
            self._wires[server].send({"kind": "finish"})
            self._wires[server].header()

        self._on_all(tell)

    def close(self) -> None:
        self._hang_up()
        if self._pool is not None:
            self._pool.shutdown()

    def _hang_up(self) -> None:
        for wire in self._wires:
            wire.close()

    @property
    def sizes_bytes(self) -> list[int]:
        return [size_bytes(each) for each in self._parameters.values()]


def _numbers(optimizer: Optimizer) -> dict[int, int]:
    """Return identity of a parameter -> its number in the optimizer's `state_dict`."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {id(parameter): number for number, parameter in enumerate(parameters)}
