"""Writes of a hook to a divided weight that PyTorch does not keep: those to a copy of its rows, and to its `data`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from rubberband.executor.training.failures import refused

_VIEWS = frozenset({"__getitem__", "select", "narrow", "split", "chunk", "unbind", "tensor_split", "diagonal"})
"""Functions that return a part of the same memory where a tensor is whole; of a divided one, it may be a copy."""


class Writes(TorchFunctionMode):
    """Refuses them, while a hook is called."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {_memory(each): name for name, each in model.named_parameters() if _memory(each)}
        self._copies: dict[int, tuple[Tensor, str]] = {}
        """Memory of a copy of a weight's part -> that, which keeps the memory, and the weight's name."""

    def __torch_function__(
        self, function: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        words = dict(kwargs or {})
        called, first = getattr(function, "__name__", ""), next(iter((*args, *words.values())), None)
        memory = _memory(first)
        if called == "__set__" and memory in self._names:
            raise refused(
                f"a hook assigns to .data of {self._names[memory]}, which PyTorch does not keep for a divided weight; "
                "use copy_()"
            )
        if memory in self._copies and (called in _ASSIGNMENTS or (called.endswith("_") and called[-2:] != "__")):
            raise refused(
                f"a hook writes to a part of {self._copies[memory][1]}, which is a copy where weights are divided; "
                "change the weight as a whole, as by mul_() or masked_fill_()"
            )
        found = function(*args, **words)
        if called in _VIEWS and memory in self._names:
            for part in found if isinstance(found, (tuple, list)) else (found,):
                if _memory(part) not in (0, *self._names):
                    self._copies[_memory(part)] = part, self._names[memory]
        return found


_ASSIGNMENTS = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"})


def _memory(value: Any) -> int:
    """Return the address of what this worker has of a divided tensor; 0 if it has nothing, or for anything else."""
    return value._local_tensor.untyped_storage().data_ptr() if isinstance(value, DTensor) else 0
