"""A parameter server in this process, and workers that speak its protocol."""

from __future__ import annotations

import io
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import rubberband
from rubberband.executor.training.asynchronous.protocol import Wire
from rubberband.executor.training.asynchronous.server import ParameterServer
from rubberband.executor.training.asynchronous.shards import Buffer, ServedShard
from rubberband.values.asynchronous import AsyncTraining
from tests.builders.segments import SEGMENT

PATIENCE_S = 120.0
SECRET = "5a" * 32
PUSH: dict[str, Any] = {
    "kind": "push",
    "weight": 1.0,
    "times": None,
    "members": [],
    "pull": True,
    "absent": [],
    "sums": {},
}
BEGIN = {"kind": "begin", "total_steps": 2, "boundaries": [0, 2], "next_ticket": 0, "returned": [], "iteration": 0}


class Slow(rubberband.TorchTrial):
    """One weight, whose optimizer takes until `go` is set."""

    batch_size = 1
    go, stepping = threading.Event(), threading.Event()

    def build_model(self, config: Mapping[str, Any]) -> torch.nn.Module:
        return torch.nn.Linear(1, 1, bias=False)

    def build_optimizer(self, config: Mapping[str, Any], model: torch.nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

        def wait(*_: Any) -> None:
            self.stepping.set()
            assert self.go.wait(PATIENCE_S)

        optimizer.register_step_pre_hook(wait)
        return optimizer

    def train_dataset(self, config: Mapping[str, Any]) -> TensorDataset:
        return TensorDataset(torch.zeros(2, 1))

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        raise AssertionError("servers compute no loss")


def parameters(wire: Wire) -> float:
    """Read an answer with parameters; return the weight."""
    return float(torch.frombuffer(wire.content(wire.header()), dtype=torch.float32)[0])


GRADIENT = torch.tensor([1.0]).numpy().tobytes()


@contextmanager
def served(trial: Slow, workers: int, **begin: Any) -> Iterator[list[Wire]]:
    """Connections to a server of the trial, which has begun with the weight 1; it ends with the block."""
    every = begin.pop("checkpoint_every", 1)
    begin = {**BEGIN, **begin}
    segment = replace(SEGMENT, num_workers=workers, until_iterations=len(begin["boundaries"]) - 1, secret=SECRET)
    segment = replace(segment, training=AsyncTraining(servers=1))
    listener = socket.create_server(("127.0.0.1", 0))
    server = ParameterServer(ServedShard(trial, segment, 0), segment, 0, checkpoint_every=every)
    thread = threading.Thread(target=server.run, args=(listener,), daemon=True)
    thread.start()
    wires = [Wire.connect(f"127.0.0.1:{listener.getsockname()[1]}", SECRET) for _ in range(workers)]
    state, start = io.BytesIO(), Buffer([torch.zeros(1, 1)])
    start.tensors[0].fill_(1.0)
    torch.save({"parameters": start.whole, "optimizer": None, "scheduler": None}, state)
    wires[0].send(begin, state.getbuffer())
    wires[0].header()
    for number, wire in enumerate(wires):
        wire.send({"kind": "join", "worker": "ab"[number], "hand": 1, "closes": number == 0})
    assert [parameters(wire) for wire in wires] == [1.0] * workers
    yield wires
    wires[0].send({"kind": "finish"})
    for wire in wires:
        wire.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def push(wire: Wire) -> int:
    """Send a gradient; return the number of its update, once it is applied."""
    wire.announce(PUSH, len(GRADIENT))
    number: int = wire.header()["number"]
    wire.write(GRADIENT)
    parameters(wire)
    return number


def test_a_gradient_comes_in_while_another_is_applied() -> None:
    with served(Slow(), 2) as (first, second):
        first.announce(PUSH, len(GRADIENT))
        assert first.header()["number"] == 0
        first.write(GRADIENT)
        assert Slow.stepping.wait(PATIENCE_S)
        second.announce(PUSH, len(GRADIENT))
        answered = threading.Event()
        answers: list[Any] = []

        def listen() -> None:
            answers.append(second.header()["number"])
            answered.set()

        threading.Thread(target=listen, daemon=True).start()
        assert answered.wait(PATIENCE_S / 2), "the second worker waits for the optimizer"
        assert answers == [1]
        Slow.go.set()
        second.write(GRADIENT)
        assert sorted(parameters(wire) for wire in (first, second))[0] == 0.0


class Momentum(Slow):
    """Its optimizer has a state."""

    def build_optimizer(self, config: Mapping[str, Any], model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def test_the_last_checkpoint_of_a_segment_has_the_optimizers_state_at_any_interval() -> None:
    """Else the next stage would begin with an optimizer that has forgotten all."""
    with served(Momentum(), 1, checkpoint_every=5) as (wire,):
        push(wire)
        wire.send({"kind": "cut", "iteration": 1, "latest": {"a": push(wire)}})
        header = wire.header()
        assert header["is_there"]
        wire.content(header)
        states = torch.load(io.BytesIO(bytes(wire.content(wire.header()))), weights_only=True)
        assert float(states["optimizer"]["state"][0]["momentum_buffer"]) == pytest.approx(1.9)


def test_a_snapshot_has_no_update_of_the_next_iteration() -> None:
    with served(Momentum(), 1, boundaries=[0, 1, 2]) as (wire,):
        push(wire)
        wire.send({"kind": "cut", "iteration": 1, "latest": {"a": push(wire)}})
        assert parameters(wire) == 0.5
        wire.content(wire.header())


def test_a_server_keeps_no_snapshot_before_that_with_which_rank_0_is_done() -> None:
    """Each is as large as its shard."""
    with served(Momentum(), 1, boundaries=[0, 1, 2, 3, 4], total_steps=4) as (wire,):
        for iteration in (1, 2, 3):
            latest = push(wire)
            for asked in range(iteration, 0, -1):
                wire.send({"kind": "cut", "iteration": asked, "latest": {"a": latest}})
                header = wire.header()
                assert ("use" in header) == (asked == iteration)
                if asked == iteration:
                    wire.content(header)
                    wire.content(wire.header())
                    wire.send({"kind": "close", "iteration": iteration, "value": None})
                    wire.content(wire.header())


def test_a_server_takes_the_states_of_workers_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers have none."""
    segment = replace(SEGMENT, until_iterations=1, training=AsyncTraining(servers=1), secret=SECRET)
    shard, state = ServedShard(Momentum(), segment, 0), io.BytesIO()
    optimizer = torch.optim.SGD([torch.zeros(1, 1)], lr=0.5, momentum=0.9).state_dict()
    optimizer["state"] = {0: {"momentum_buffer": torch.ones(1, 1)}}
    with monkeypatch.context() as on_a_gpu:
        on_a_gpu.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        torch.save({"parameters": shard.buffer.whole, "optimizer": optimizer, "scheduler": None}, state)
    shard.load(bytearray(state.getvalue()), 2)
    assert float(shard.states(with_tensors=True)["optimizer"]["state"][0]["momentum_buffer"]) == 1.0
