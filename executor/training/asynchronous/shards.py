"""Which parameter server holds which tensors, and how the tensors of a server lie in one buffer."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_ALIGNMENT = 64
"""Bytes; every tensor of a buffer begins at a multiple of it."""


def shards_of(sizes_bytes: Sequence[int], servers: int) -> tuple[tuple[int, ...], ...]:
    """Return the tensors of each server, by their numbers in order; balanced by bytes.

    The largest tensor comes first, each to the server with the fewest bytes so far (Graham 1969, longest processing
    time first). A tensor is never divided, since an optimizer needs it whole.
    """
    heap = [(0, server) for server in range(servers)]
    found: list[list[int]] = [[] for _ in range(servers)]
    for number in sorted(range(len(sizes_bytes)), key=lambda each: (-sizes_bytes[each], each)):
        held, server = heapq.heappop(heap)
        found[server].append(number)
        heapq.heappush(heap, (held + sizes_bytes[number], server))
    return tuple(tuple(sorted(numbers)) for numbers in found)


def largest_share(sizes_bytes: Sequence[int], servers: int) -> float:
    """Return the share of all bytes on the server that holds most."""
    total = sum(sizes_bytes)
    most = max(sum(sizes_bytes[number] for number in shard) for shard in shards_of(sizes_bytes, servers))
    return most / total if total else 1.0


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return name -> parameter of those that are trained; the same order in every process."""
    return {name: each for name, each in module.named_parameters() if each.requires_grad}


def size_bytes(tensor: Tensor) -> int:
    """Return the bytes of its elements."""
    return tensor.numel() * tensor.element_size()


@dataclass(frozen=True, slots=True)
class Shard:
    """Tensors of one server, by name."""

    names: tuple[str, ...]

    @classmethod
    def all(cls, parameters: Mapping[str, Tensor], servers: int) -> tuple[Shard, ...]:
        """Return the shards of a model, one for each server; the same in every process."""
        names = list(parameters)
        numbers = shards_of([size_bytes(each) for each in parameters.values()], servers)
        return tuple(cls(tuple(names[number] for number in shard)) for shard in numbers)


def memory_of(whole: Tensor) -> memoryview:
    """Return a tensor of bytes as memory for a socket."""
    array: Any = whole.numpy()
    return memoryview(array) if whole.numel() else memoryview(bytearray())


class Buffer:
    """The tensors of a shard in one piece of memory of this process, so that a socket can take them at once."""

    def __init__(self, like: Sequence[Tensor], *, pinned: bool = False) -> None:
        offsets, end = [], 0
        for tensor in like:
            offsets.append(end)
            end += -(-size_bytes(tensor) // _ALIGNMENT) * _ALIGNMENT
        self.whole = torch.zeros(end, dtype=torch.uint8, pin_memory=pinned)
        """All bytes."""
        self.tensors = [
            self.whole[offset : offset + size_bytes(tensor)].view(tensor.dtype).view(tensor.shape)
            for offset, tensor in zip(offsets, like, strict=True)
        ]
        """The tensors, as views; contiguous."""
        self.memory = memory_of(self.whole)
        """All bytes, for a socket."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the buffer."""
        return self.whole.numel()
