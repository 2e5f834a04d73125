"""Checkpoints that are written while training goes on: copies that stay as they were, reports in their turn."""

from __future__ import annotations

import io
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

import rubberband
from rubberband.errors import CheckpointError
from rubberband.executor import (
    CheckpointRef,
    Entrypoint,
    HostCopy,
    LocalCheckpointStore,
    SegmentFailure,
    SegmentReport,
    SegmentStarted,
    checkpoint,
    open_store,
    run_segment,
)
from rubberband.executor.checkpoints import Payload
from tests.builders.segments import SEGMENT

STEPS = 20
SEGMENT_OF_4 = replace(SEGMENT, metric="train_loss")
WAIT_S = 120.0


class Line(rubberband.TorchTrial):
    """Twenty steps an iteration; `at_step` is called after each."""

    batch_size = 2
    steps: ClassVar[int] = 0

    def build_model(self, config):
        Line.steps = 0
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))

    def build_optimizer(self, config, model):
        return torch.optim.Adam(model.parameters(), lr=0.01)

    def train_dataset(self, config):
        inputs = torch.randn(2 * STEPS, 3)
        return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))

    def loss(self, model, batch):
        Line.steps += 1
        self.at_step(Line.steps)
        inputs, targets = batch
        return torch.nn.functional.mse_loss(model(inputs), targets)

    def at_step(self, step):
        pass


@dataclass
class Gate:
    """Holds the writing of checkpoints up."""

    opened: threading.Event = field(default_factory=threading.Event)
    has_written: threading.Event = field(default_factory=threading.Event)
    written: list[int] = field(default_factory=list)
    is_reported: bool = False
    fails_at: int = 0


GATE = Gate()


class Slow(LocalCheckpointStore):
    """Writes when the gate is open."""

    def save(self, trial: int, iterations: int, payload: Payload) -> CheckpointRef:
        assert threading.current_thread() is not threading.main_thread()
        assert GATE.opened.wait(WAIT_S)
        if iterations == GATE.fails_at:
            raise CheckpointError("the disk is full")
        ref = super().save(trial, iterations, payload)
        GATE.written.append(iterations)
        GATE.has_written.set()
        return ref


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalCheckpointStore]:
    global GATE
    GATE = Gate()
    yield Slow(directory=tmp_path)
    GATE.opened.set()


def walk(trial: type, store: LocalCheckpointStore, **changes: Any) -> Any:
    return run_segment(Entrypoint.from_object(trial), replace(SEGMENT_OF_4, **changes), store)


def content(store: LocalCheckpointStore, report: SegmentReport) -> dict[str, Any]:
    assert report.checkpoint is not None
    loaded: dict[str, Any] = torch.load(io.BytesIO(store.load(report.checkpoint)), weights_only=False)
    return loaded


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


class OpensLater(Line):
    """The first checkpoint is written when the second iteration is in its third step."""

    def at_step(self, step):
        if step == STEPS + 3:
            GATE.opened.set()
        elif STEPS + 3 < step < 2 * STEPS:
            assert GATE.has_written.wait(WAIT_S)
            threading.Event().wait(0.0 if GATE.is_reported else 0.1)  # the report leaves between these steps


def test_training_goes_on_and_a_report_leaves_when_its_checkpoint_is_there(store):
    items = walk(OpensLater, store)
    assert isinstance(next(items), SegmentStarted)
    first, GATE.is_reported = next(items), True
    assert (first.iterations, GATE.written) == (1, [1])
    assert STEPS + 3 <= Line.steps < 2 * STEPS, "neither before the next iteration nor after it"
    rest = list(items)
    assert [report.iterations for report in rest] == [2, 3, 4]
    assert GATE.written == [1, 2, 3, 4]
    alone = [*walk(Line, store, until_iterations=1, max_iterations=4)][-1]
    assert same(content(store, first), content(store, alone)), "what was trained since is not in it"


def test_a_checkpoint_that_cannot_be_written_fails_the_trial(store):
    GATE.fails_at = 2
    GATE.opened.set()
    _, first, failure = walk(Line, store)
    assert first.iterations == 1
    assert (failure.kind, failure.message) == ("checkpoint", "the disk is full")


class Raises(Line):
    """The second iteration fails while the first checkpoint is still being written."""

    def at_step(self, step):
        if step == STEPS + 2:
            threading.Timer(0.05, GATE.opened.set).start()
            raise ArithmeticError("no more")


def test_a_failure_of_the_next_iteration_does_not_lose_the_report_before_it(store):
    _, first, failure = walk(Raises, store)
    assert (first.iterations, content(store, first)["iterations"]) == (1, 1)
    assert failure.message == "ArithmeticError: no more"


def test_a_disk_that_is_full_is_a_failed_checkpoint_and_leaves_no_draft(tmp_path, monkeypatch):
    def full(content: Any, path: str) -> None:
        Path(path).write_bytes(b"a part")
        raise RuntimeError("[enforce fail at inline_container.cc:664] .\nunexpected pos 64 vs 0")

    monkeypatch.setattr(torch, "save", full)
    *_, failure = walk(Line, open_store(str(tmp_path)))
    assert isinstance(failure, SegmentFailure)
    assert failure.kind == "checkpoint"
    assert "could not be written to" in failure.message
    assert "\n" not in failure.message
    assert list(tmp_path.iterdir()) == []


def test_a_state_that_cannot_be_pickled_is_a_failed_checkpoint(tmp_path):
    class Locked(Line):
        def build_scheduler(self, config, optimizer):
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            scheduler.lock = threading.Lock()
            return scheduler

    for until in (1, 2):  # the last checkpoint of a segment is written from the model itself, the others from a copy
        *_, failure = walk(Locked, open_store(str(tmp_path)), until_iterations=until)
        assert failure.kind == "checkpoint"
        assert "cannot pickle '_thread.lock' object" in failure.message


def test_a_bad_interval_of_checkpoints_is_one_line(tmp_path):
    class Never(Line):
        checkpoint_every = 0

    (failure,) = walk(Never, open_store(str(tmp_path)))
    assert failure.message == "ValueError: checkpoint_every must be a positive integer, not 0"


CPU = torch.device("cpu")


def test_a_copy_shares_what_the_original_shares_and_nothing_with_it():
    weight = torch.randn(4, 6)
    state = OrderedDict(
        weight=weight, tied=weight, part=weight[1:3, ::2], turned=weight.t(), none=None, empty=weight[:0]
    )
    state._metadata = {"": {"version": 2}}  # type: ignore[attr-defined]
    shared = [1, {"x": weight}]
    content = {"model": state, "twice": (shared, shared), "number": 3, "kinds": torch.float32}
    host = HostCopy(CPU)
    copied = host.take(content)
    assert same(copied, content)
    assert copied["model"]._metadata == {"": {"version": 2}}
    assert copied["twice"][0] is copied["twice"][1]
    before = weight.clone()
    weight.zero_()
    shared.append(2)
    assert torch.equal(copied["model"]["weight"], before)
    assert len(copied["twice"][0]) == 2
    copied["model"]["weight"][1, 0] = 7.0
    assert copied["model"]["part"][0, 0] == copied["model"]["turned"][0, 1] == copied["twice"][0][1]["x"][1, 0] == 7.0


def test_the_next_copy_uses_the_memory_of_the_one_before():
    host, state = HostCopy(CPU), {"w": torch.zeros(8), "b": torch.ones(3)}
    places = [{name: host.take(state)[name].data_ptr() for name in state} for _ in range(3)]
    assert places[0] == places[1] == places[2]


class Cuda:
    """CUDA's functions for host memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, answer: int = 0) -> None:
        self.locked: dict[int, int] = {}
        self.answer = answer
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "Event", lambda: self)
        monkeypatch.setattr(HostCopy, "_memory", None)

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        if not self.answer:
            self.locked[address] = size
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.locked[address]
        return 0

    def record(self) -> None:
        pass

    synchronize = record


CUDA = torch.device("cuda", 0)


def test_page_locked_memory_has_the_size_of_the_state_and_goes_with_the_segment_if_it_is_large(monkeypatch):
    cuda, state = Cuda(monkeypatch), {"w": torch.arange(5000.0), "b": torch.ones(100)}
    host = HostCopy(CUDA)
    for _ in range(3):
        assert same(host.take(state), state)
    assert list(cuda.locked.values()) == [20_032 + 448]
    host.close()
    HostCopy(CUDA).take({"w": torch.ones(4000)})
    assert list(cuda.locked.values()) == [20_032 + 448], "the next trial uses it"
    larger = {"w": torch.arange(50_000.0)}
    assert same(host.take(larger), larger)
    assert len(cuda.locked) == 1, "what was too small is page-locked no more"
    monkeypatch.setattr(checkpoint, "MOST_KEPT_BYTES", 100_000)
    copied = host.take(larger)
    host.close()
    assert not cuda.locked
    assert same(copied, larger), "it is still being written"


def test_a_copy_is_there_when_its_mark_is_set(monkeypatch):
    cuda, state, seen = Cuda(monkeypatch), {"w": torch.arange(4.0)}, list[list[float]]()
    cuda.record = lambda: seen.append(HostCopy._memory.part(0, 16).view(torch.float32).tolist())
    HostCopy(CUDA).take(state)
    assert seen == [[0.0, 1.0, 2.0, 3.0]]


def test_a_checkpoint_is_written_when_its_copy_is_there(tmp_path):
    path, seen = tmp_path / "checkpoint", []
    checkpoint.write({}, SimpleNamespace(wait=lambda: seen.append(path.exists())), path)
    assert seen == [False]
    assert path.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's list of mappings")
def test_a_fork_does_not_get_page_locked_memory(monkeypatch):
    cuda = Cuda(monkeypatch)
    HostCopy(CUDA).take({"w": torch.ones(5000)})
    (address,) = cuda.locked
    mappings = re.findall(
        r"^([0-9a-f]+)-([0-9a-f]+) .*?^VmFlags: (.*?)$", Path("/proc/self/smaps").read_text(), re.M | re.S
    )
    (flags,) = [flags for begin, end, flags in mappings if int(begin, 16) <= address < int(end, 16)]
    assert "dc" in flags.split(), "do not copy: the GPU would write to the child's pages"


def test_memory_that_cannot_be_page_locked_is_used_as_it_is(monkeypatch, capfd):
    Cuda(monkeypatch, answer=2)
    raised: list[str] = []

    def zeros(*_: Any, device: str) -> None:
        raised.append(device)
        raise torch.AcceleratorError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "zeros", zeros)
    state = {"w": torch.arange(5000.0)}
    assert same(HostCopy(CUDA).take(state), state)
    assert raised == ["cuda"], "CUDA gives the error to the next kernel"
    assert "cannot be page-locked, so training waits while a checkpoint is copied" in capfd.readouterr().err


def test_a_copy_is_in_host_memory_whatever_the_default_device(monkeypatch):
    monkeypatch.setattr(HostCopy, "_memory", None)
    state = {"w": torch.arange(6.0), "none": torch.ones(0), "p": torch.nn.Parameter(torch.ones(2))}
    torch.set_default_device("meta")
    try:
        copied = HostCopy(CPU).take(state)
    finally:
        torch.set_default_device(None)
    assert same(copied, state)
    assert type(copied["p"]) is torch.nn.Parameter


_TENSORS = st.builds(
    lambda shape, dtype: torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8]),
)
_STATES = st.recursive(
    st.one_of(_TENSORS, st.integers(), st.text(max_size=3), st.none(), st.floats(allow_nan=False)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=2), inner, max_size=3), st.tuples(inner, inner)
    ),
    max_leaves=10,
)


@given(st.lists(_STATES, min_size=1, max_size=3))
@settings(deadline=None, max_examples=50)
def test_any_state_is_copied_as_it_is(states):
    host = HostCopy(CPU)
    for state in states:
        assert same(host.take(state), state)


@pytest.mark.gpu
def test_a_copy_from_a_gpu_is_of_the_instant_at_which_it_was_taken():
    device = torch.device("cuda", 0)
    host, weight = HostCopy(device), torch.ones(2**24, device=device)
    for round in range(3):
        copied = host.take({"w": weight})
        weight.add_(1.0)
        host.wait()
        assert copied["w"].is_pinned()
        assert torch.equal(copied["w"], torch.full((2**24,), 1.0 + round))
