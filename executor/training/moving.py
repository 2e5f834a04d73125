"""Batches on their way to the device: every tensor in them is pinned, or moved, wherever it is.

A batch is what `collate` made: tensors in lists, tuples, mappings and dataclasses, nested, or objects that move
themselves by a method of their own (`PackedSequence`, a graph, a `BatchEncoding`).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch on `device`; from pinned memory, the copy does not wait for the device."""
    if device.type == "cpu":
        return batch
    return _changed(batch, lambda part: _moved(part, device), "to")


def pinned(batch: Any) -> Any:
    """Return the batch in page-locked memory, from which a GPU copies while the CPU goes on."""
    return _changed(batch, lambda part: part.pin_memory(), "pin_memory")


def _moved(part: Any, device: torch.device) -> Any:
    if isinstance(part, torch.Tensor):
        return part.to(device, non_blocking=True)
    try:
        return part.to(device, non_blocking=True)
    except TypeError:  # its own method knows no such argument
        return part.to(device)


def _changed(batch: Any, change: Callable[[Any], Any], method: str) -> Any:
    """Apply `change` to every part that has the `method`; what has neither that nor parts stays as it is."""
    if isinstance(batch, torch.Tensor) or (not isinstance(batch, type) and callable(getattr(batch, method, None))):
        return change(batch)
    if isinstance(batch, Mapping):
        return _mapping(batch, {name: _changed(value, change, method) for name, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_changed(value, change, method) for value in batch))
    if isinstance(batch, (list, tuple)):
        return _sequence(batch, [_changed(value, change, method) for value in batch])
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        # Not dataclasses.replace: it runs __init__ and __post_init__ again, and refuses fields without init.
        found = copy.copy(batch)
        for field in dataclasses.fields(batch):
            if hasattr(batch, field.name):
                object.__setattr__(found, field.name, _changed(getattr(batch, field.name), change, method))
        return found
    return batch


def _mapping(batch: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    if isinstance(batch, MutableMapping):
        found = copy.copy(batch)  # keeps a default factory, and attributes of a subclass
        found.update(values)
        return found
    try:
        return type(batch)(values)  # type: ignore[call-arg]
    except TypeError:  # such as a read-only view, whose class cannot be called
        return values


def _sequence(batch: Sequence[Any], values: list[Any]) -> Any:
    try:
        return type(batch)(values)  # type: ignore[call-arg]
    except TypeError:
        return values
