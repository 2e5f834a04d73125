"""Batches on their way to the device: every tensor in them is moved, whatever holds it, and nothing else changes."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from rubberband.executor.training.loading import pinned, to_device

META = torch.device("meta")
Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Boxes:
    boxes: torch.Tensor
    size: int = field(default=3, init=False)

    def __post_init__(self):
        self.size += 1


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    inner: Boxes


class Encoding(UserDict):
    """As a tokenizer's: a mapping with a method of its own, and an attribute."""

    def __init__(self, data: Any, form: str) -> None:
        super().__init__(data)
        self.form = form

    def to(self, device):
        return Encoding({name: value.to(device) for name, value in self.items()}, self.form)


class Plain(UserDict):
    pass


def tensor() -> torch.Tensor:
    return torch.ones(2, 3)


@pytest.mark.parametrize(
    ("batch", "leaves"),
    [
        (tensor(), lambda found: [found]),
        ([tensor(), (tensor(), "a", 1, None)], lambda found: [found[0], found[1][0]]),
        (Pair(tensor(), 2), lambda found: [found.x]),
        ({"a": {"b": tensor()}}, lambda found: [found["a"]["b"]]),
        (OrderedDict(a=tensor()), lambda found: [found["a"]]),
        (defaultdict(list, a=tensor()), lambda found: [found["a"], *found["none"]]),
        (Plain(a=tensor()), lambda found: [found["a"]]),
        (MappingProxyType({"a": tensor()}), lambda found: [found["a"]]),
        (Encoding({"ids": tensor()}, "pt"), lambda found: [found["ids"]]),
        (Boxes(tensor()), lambda found: [found.boxes]),
        (Frozen(tensor(), Boxes(tensor())), lambda found: [found.x, found.inner.boxes]),
        (pack_sequence([tensor(), tensor()]), lambda found: [found.data]),
        (
            [pack_sequence([tensor()]), {"n": Pair(Boxes(tensor()), 1)}],
            lambda found: [found[0].data, found[1]["n"].x.boxes],
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_tensors_are_moved_wherever_they_are(batch, leaves):
    found = to_device(batch, META)
    assert [leaf.device for leaf in leaves(found)] == [META] * len(leaves(batch))
    assert [leaf.device.type for leaf in leaves(batch)] == ["cpu"] * len(leaves(batch)), "the batch itself stays"
    assert isinstance(found, type(batch)) or isinstance(batch, MappingProxyType)
    assert to_device(batch, torch.device("cpu")) is batch


def test_other_content_of_a_batch_is_kept():
    moved = to_device([Encoding({"ids": tensor()}, "pt"), Boxes(tensor()), "text", 4, None, int], META)
    assert (moved[0].form, moved[1].size, moved[2:]) == ("pt", 4, ["text", 4, None, int])


def test_the_same_things_are_pinned(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self + 1)
    found = pinned({"a": Plain(a=tensor()), "b": Frozen(tensor(), Boxes(tensor())), "c": "text"})
    assert [part.mean().item() for part in (found["a"]["a"], found["b"].x, found["b"].inner.boxes)] == [2.0] * 3
    assert isinstance(pinned(pack_sequence([tensor()])), PackedSequence)


@pytest.mark.gpu
def test_a_gpu_gets_batches_from_pinned_memory():
    found = pinned([tensor(), Boxes(tensor()), pack_sequence([tensor()])])
    assert all(part.is_pinned() for part in (found[0], found[1].boxes, found[2].data))
    moved = to_device(found, torch.device("cuda", 0))
    assert all(part.is_cuda for part in (moved[0], moved[1].boxes, moved[2].data))
