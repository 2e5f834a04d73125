"""Copies of a training state in host memory, so that training can go on while a checkpoint is written."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from typing import Any, ClassVar

import torch

_ATOMS = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.Size)


_Buffers = dict[tuple[int, bool], list[torch.Tensor]]
"""(Bytes, whether pinned) -> buffers."""


class HostCopy:
    """Copies states, one at a time in a process: the next copy overwrites the one before.

    The buffers stay with the process, also for its next trials: to fill fresh memory takes ten times as long. For a GPU
    they are pinned, and the copy runs beside the host's work, in the order of the device's stream.
    """

    _buffers: ClassVar[_Buffers] = {}

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copied: torch.cuda.Event | None = None

    def take(self, state: Any) -> Any:
        """Return a copy of `state`, complete after `wait`; containers and other objects are copied as well."""
        take = _Take(self._device, HostCopy._buffers)
        copied = take.copied(state)
        HostCopy._buffers = take.used
        if self._device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
        return copied

    def wait(self) -> None:
        """Wait until the latest copy is complete; any thread may call it."""
        if self._copied is not None:
            self._copied.synchronize()


class _Take:
    """One copy. Tensors that share memory share it in the copy too, and an object that occurs twice is one object."""

    def __init__(self, device: torch.device, spare: _Buffers) -> None:
        self._device = device
        self._spare = spare
        self.used: _Buffers = {}
        self._storages: dict[int, torch.Tensor] = {}
        self._memo: dict[int, Any] = {}
        """By identity, as `copy.deepcopy` keeps it: what was copied, and under its own identity what is kept alive."""

    def copied(self, value: Any) -> Any:
        if isinstance(value, _ATOMS):
            return value
        if id(value) in self._memo:
            return self._memo[id(value)]
        kind = type(value)
        made: Any
        if kind in (torch.Tensor, torch.nn.Parameter) and self._is_plain(value):
            made = self._tensor(value)
            if kind is torch.nn.Parameter:
                made = torch.nn.Parameter(made.detach(), requires_grad=value.requires_grad)
        elif kind in (dict, OrderedDict, defaultdict):
            made = copy.copy(value)  # with attributes such as a state_dict's _metadata
            self._memo[id(value)] = made
            for name, item in value.items():
                made[name] = self.copied(item)
        elif kind is list:
            made = self._memo[id(value)] = []
            made.extend(map(self.copied, value))
        elif kind is tuple:
            made = tuple(map(self.copied, value))
        else:
            return copy.deepcopy(value, self._memo)
        self._memo[id(value)] = made
        return made

    def _is_plain(self, tensor: torch.Tensor) -> bool:
        usual = tensor.layout is torch.strided and tensor.device.type in ("cpu", self._device.type)
        return usual and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        key = storage.data_ptr() or id(tensor)
        if key not in self._storages:
            source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self._storages[key] = self._buffer(storage.nbytes()).copy_(source, non_blocking=True)
        made = torch.empty(0, dtype=tensor.dtype)
        made.set_(self._storages[key].untyped_storage(), tensor.storage_offset(), tuple(tensor.size()), tensor.stride())
        return made.requires_grad_(tensor.requires_grad)

    def _buffer(self, size_bytes: int) -> torch.Tensor:
        pinned = self._device.type == "cuda"
        spare = self._spare.get((size_bytes, pinned))
        buffer = spare.pop() if spare else torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pinned)
        self.used.setdefault((size_bytes, pinned), []).append(buffer)
        return buffer
