"""State of a dataset when its loader workers got their copies, so that a change by a hook is seen."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch

from rubberband.executor.training.torch_trial import TorchTrial

_MOST = 1000
"""Values that are looked at, those next to the dataset first; the rest counts as unchanged."""
_MOST_BYTES = 1 << 18
"""Bytes of arrays and texts that are looked at, together. A look before every iteration takes a millisecond."""
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
    found, seen, left = deque([made]), set[int](), _MOST_BYTES
    for _ in range(_MOST):
        if not found:
            return
        each = found.popleft()
        if id(each) in seen:
            continue
        is_seen = _bytes_of(each) <= left
        left -= _bytes_of(each) if is_seen else 0
        if isinstance(each, _PLAIN) and is_seen:
            yield None, repr(each)
            continue
        seen.add(id(each))
        yield each, _mark(each) if is_seen else None
        if len(found) < _MOST:
            found.extend(_parts(each))


def _bytes_of(each: Any) -> int:
    if isinstance(each, np.ndarray):
        return each.nbytes
    return len(each) if isinstance(each, (str, bytes)) else 0


def _mark(each: Any) -> Any:
    if isinstance(each, torch.Tensor):
        return None if each.requires_grad or each.is_inference() else each._version
    if isinstance(each, np.ndarray) and not each.dtype.hasobject:
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
