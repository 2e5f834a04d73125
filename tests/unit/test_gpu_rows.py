"""Batches of in-memory datasets for a GPU, for which the CPU stands here: copies that it holds, rows gathered ahead."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset, random_split

import rubberband
from rubberband.executor import Entrypoint, Feed, metrics, open_store, run_segment
from rubberband.executor.training import loop
from rubberband.executor.training.gpu_rows import GpuRows, Residence
from rubberband.executor.training.loading import Part
from tests.builders.segments import SEGMENT, reports
from tests.builders.waiting import eventually

CPU = torch.device("cpu")
MiB = 1 << 20


class AtOnce(Executor):
    """Runs what it is given before it returns."""

    def submit(self, call: Any, /, *args: Any, **words: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(call(*args, **words))
        except RuntimeError as error:
            done.set_exception(error)
        return done


def residence(free: int = 100 * MiB, total: int = 100 * MiB, steps: int = 2, pool: Any = None) -> Residence:
    found = Residence(CPU, lambda: (free, total), pool=pool or AtOnce())
    for _ in range(steps):
        found.begin_step()
    return found


PART = np.array([5, 2, 2, 7])


def held(data: TensorDataset, there: Residence) -> bool:
    """Whether a batch comes from copies on the GPU."""
    found = there.rows(data.tensors, PART)
    assert found is None or all(torch.equal(one, each[PART]) for one, each in zip(found, data.tensors, strict=True))
    return found is not None


def test_a_small_set_is_held_after_the_first_step_where_memory_is_free() -> None:
    small = TensorDataset(torch.randn(100, 8), torch.arange(100))
    assert held(small, residence())
    assert not held(small, residence(steps=1)), "the first step shows what else is needed"
    large = TensorDataset(torch.randn(2 * MiB + 1000, 3))  # 24 of 100 MiB
    assert not held(large, residence())
    assert not held(small, residence(free=5000))


def test_training_and_evaluation_set_share_what_they_hold_and_its_limit() -> None:
    there, whole = residence(), TensorDataset(torch.randn(MiB, 4))  # 16 MiB
    assert held(whole, there)
    assert held(whole, there), "one copy: two would be 32 %"
    large, small = TensorDataset(torch.randn(MiB, 2)), TensorDataset(torch.randn(MiB // 2, 1))
    assert not held(large, there), "24 % in all"
    assert held(small, there), "18 %"


def test_a_change_of_the_set_is_seen() -> None:
    data, there = TensorDataset(torch.zeros(10, 2)), residence()
    rows = GpuRows(data, there)
    assert held(data, there)
    data.tensors[0][5] = 1.0
    (found,) = rows.load(PART, lambda indices: indices)
    assert found[:, 0].tolist() == [1.0, 0.0, 0.0, 0.0]
    assert not rows.leave(), "its memory was given back"
    data.tensors = (torch.full((10, 2), 3.0),)
    assert rows.load(PART, lambda indices: indices)[0][0, 0] == 3.0


@pytest.mark.parametrize("kind", ["numpy", "shared", "inference", "trained"])
def test_memory_that_others_may_write_to_is_not_held(kind: str) -> None:
    array = np.zeros((10, 2), dtype=np.float32)
    if kind == "inference":
        with torch.inference_mode():
            tensor = torch.zeros(10, 2)
    else:
        tensor = {
            "numpy": lambda: torch.from_numpy(array),
            "shared": lambda: torch.zeros(10, 2).share_memory_(),
            "trained": lambda: torch.zeros(10, 2).requires_grad_(),
        }[kind]()
    data, there = TensorDataset(tensor), residence()
    rows = GpuRows(data, there)
    assert not held(data, there)
    array[5] = 1.0
    rows.follow()
    assert torch.equal(rows.load(PART, lambda indices: indices)[0], tensor[PART])


def test_a_copy_that_fails_is_not_used() -> None:
    failed: Future[None] = Future()
    failed.set_exception(RuntimeError("pretended"))
    there = residence(pool=SimpleNamespace(submit=lambda *_: failed))
    data = TensorDataset(torch.randn(10, 2), torch.arange(10))
    assert not held(data, there)
    assert torch.equal(GpuRows(data, there).load(PART, lambda indices: indices)[1], data.tensors[1][PART])


def test_memory_that_is_being_filled_is_not_given_back() -> None:
    filled: Future[None] = Future()
    there = residence(pool=SimpleNamespace(submit=lambda *_: filled))
    assert there.rows([torch.ones(10)], PART) is None
    leaves = threading.Thread(target=there.leave, daemon=True)
    leaves.start()
    leaves.join(0.05)
    assert leaves.is_alive()
    filled.set_result(None)
    leaves.join(10.0)
    assert not leaves.is_alive()
    assert not there.leave(), "it was given back"


def ahead(parts: list[Any]) -> Iterator[Part]:
    return iter([Part(indices=part, epoch=0) for part in parts])


def test_the_next_batch_is_gathered_ahead_and_again_if_it_changed() -> None:
    data = TensorDataset(torch.arange(10.0))
    rows, parts = GpuRows(data, residence(steps=0)), [np.array([each, each + 1]) for each in range(4)]

    placed: list[list[int]] = []

    def place(indices: Any) -> Any:
        placed.append(indices.tolist())
        return indices + 1

    def load(number: int) -> list[float]:
        return list(rows.load(parts[number], place)[0].tolist())

    rows.expect(parts[:2], lambda: ahead(parts[2:3]))
    for number in (0, 1):
        assert load(number) == [number + 1, number + 2]
        assert placed[-1] == [number + 1, number + 2], "the part after it is gathered"
    data.tensors[0][3] = 30.0
    rows.expect([parts[2]], lambda: ahead([]))
    assert load(2) == [30.0, 4.0]
    assert load(0) == [1.0, 2.0], "none that was expected"
    rows.close()


def test_rows_gathered_ahead_of_a_set_that_is_replaced_are_not_used() -> None:
    data = TensorDataset(torch.zeros(10))
    rows, parts = GpuRows(data, residence(steps=0)), [np.array([0, 1]), np.array([2, 3])]
    rows.expect(parts, lambda: ahead([]))
    rows.load(parts[0], lambda indices: indices)
    data.tensors = (torch.ones(10),)
    assert rows.load(parts[1], lambda indices: indices)[0].tolist() == [1.0, 1.0]
    rows.close()


PLAIN = {"numpy": False, "changes": ""}


class Line(rubberband.TorchTrial):
    """Trains on a part of a set in memory, which a hook changes."""

    batch_size = 6
    max_batch_size_per_gpu = 4

    def build_model(self, config: Any) -> torch.nn.Module:
        return torch.nn.Linear(3, 1)

    def build_optimizer(self, config: Any, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def parts(self) -> Any:
        inputs = torch.randn(40, 3)
        self.whole = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
        if self.numpy:
            self.whole = TensorDataset(*(torch.from_numpy(each.numpy()) for each in self.whole.tensors))
        return random_split(self.whole, [29, 11])

    def train_dataset(self, config: Any) -> Any:
        self.numpy, self.changes = config["numpy"], config["changes"]
        return self.parts()[0]

    def eval_dataset(self, config: Any) -> Any:
        return self.parts()[1]

    def on_iteration(self, model: torch.nn.Module, iterations: int) -> None:
        if self.changes == "iteration" and iterations == 3:
            target = self.whole.tensors[1]
            (target.numpy() if self.numpy else target)[:] = 0.0

    def on_step(self, model: torch.nn.Module, step: int, batch_size: int) -> None:
        if self.changes == "step" and step % 3 == 0:
            self.whole.tensors[1].mul_(0.5)

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


@pytest.mark.by_default(2)
@pytest.mark.parametrize("changes", ["", "iteration", "step"])
@pytest.mark.parametrize("numpy", [False, True])
def test_a_curve_does_not_depend_on_where_the_rows_are(
    changes: str, numpy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, made = open_store(str(tmp_path)), residence(steps=0)
    segment = replace(SEGMENT, config={"numpy": numpy, "changes": changes})

    def trained() -> tuple[list[Any], Any]:
        found = reports(list(run_segment(Entrypoint.from_object(Line), segment, store)))
        assert found[-1].checkpoint is not None
        content = torch.load(io.BytesIO(store.load(found[-1].checkpoint)), weights_only=False)
        return [dict(report.metrics) for report in found], content["model"]["weight"].tolist()

    plain, used = trained(), []

    def feed(*args: Any, **words: Any) -> Feed:
        found = Feed(*args, **{**words, "residence": made})
        rows = made.rows
        monkeypatch.setattr(made, "rows", lambda *each: [used.append(batch := rows(*each)), batch][1])
        return found

    monkeypatch.setattr(loop, "Feed", feed)
    monkeypatch.setattr(metrics, "Feed", feed)
    assert trained() == plain
    assert any(each is not None for each in used) is not numpy


class Lacks(Line):
    """Has no memory for two samples beside the set."""

    made: ClassVar[Residence]
    sizes: ClassVar[list[int]] = []

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        if self.made.has_copies and len(batch[0]) > 1:
            raise torch.OutOfMemoryError("pretended")
        if model.training:
            self.sizes.append(len(batch[0]))
        return super().loss(model, batch)


@pytest.mark.long
def test_a_full_gpu_gives_the_set_up_before_it_divides_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, segment, store = residence(steps=0), replace(SEGMENT, config=PLAIN), open_store(str(tmp_path))
    plain = reports(list(run_segment(Entrypoint.from_object(Line), segment, store)))
    Lacks.made = made
    monkeypatch.setattr(loop, "Feed", lambda *args, **words: Feed(*args, **{**words, "residence": made}))
    found = reports(list(run_segment(Entrypoint.from_object(Lacks), segment, store)))
    assert not made.has_copies
    assert min(Lacks.sizes) > 1, "no smaller passes"
    assert [report.metrics for report in found] == [report.metrics for report in plain]


@pytest.mark.gpu
def test_a_gpu_gets_the_same_rows_from_both_places(tmp_path: Path) -> None:
    data = TensorDataset(torch.randn(1000, 3, 8, 8), torch.randn(1000, 2, 4, 4).to(memory_format=torch.channels_last))
    there = Residence(torch.device("cuda", 0))
    rows, part = GpuRows(data, there), np.arange(7, 900, 3)
    for _ in range(3):
        there.begin_step()
        for found, tensor in zip(rows.load(part, lambda indices: indices), data.tensors, strict=True):
            assert found.is_cuda
            assert torch.equal(found.cpu(), tensor[part])
            assert found.stride() == tensor[part].stride()
    eventually(lambda: there.rows(data.tensors, part) is not None, "the copies")
    rows.close()
