"""What a dataset was when its loader workers got their copies, so that a change by a hook is seen."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch

from rubberband.executor.training.torch_trial import TorchTrial

_MOST = 2000
"""Values that are looked at; the rest counts as unchanged."""
_MOST_BYTES = 1 << 20
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class Snapshot:
    """The attributes of an object, of its parts, and of those; large arrays and long lists by their identity."""

    def __init__(self, made: Any) -> None:
        self._made = made
        self._values = list(_values(made))

    def holds(self) -> bool:
        """Return whether everything is as it was."""
        now = list(_values(self._made))
        return len(now) == len(self._values) and all(
            one is other and mark == before for (one, mark), (other, before) in zip(now, self._values, strict=True)
        )


def _values(made: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each object that is looked at, and what shows a change of it; plain values as the second alone."""
    found, seen = [made], set[int]()
    while found and len(seen) < _MOST:
        each = found.pop()
        if isinstance(each, _PLAIN):
            yield None, repr(each)
            continue
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each, _mark(each)
        found.extend(_parts(each))


def _mark(each: Any) -> Any:
    if isinstance(each, torch.Tensor):
        return None if each.requires_grad or each.is_inference() else each._version
    if isinstance(each, np.ndarray) and each.nbytes <= _MOST_BYTES and not each.dtype.hasobject:
        return zlib.crc32(each.tobytes())
    return len(each) if isinstance(each, (list, tuple, set, frozenset, Mapping)) else None


def _parts(each: Any) -> list[Any]:
    if isinstance(each, Mapping):
        return [part for pair in each.items() for part in pair] if len(each) <= _MOST else []
    if isinstance(each, (list, tuple, set, frozenset)):
        return list(each) if len(each) <= _MOST else []
    if isinstance(each, (type, ModuleType, torch.Tensor, np.ndarray, TorchTrial)):  # a trial changes all the time
        return []
    return list(getattr(each, "__dict__", {}).values())
