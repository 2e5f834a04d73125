"""The checkpoint of a `TorchTrial`: the states of its components by name, their copy in host memory, and its file.

The content is a dictionary: `format`, `kind`, `iterations`, `seed`, `data_seed` and `metrics`; the `state_dict()` of
each component that has one (`TorchRunner` lists them); and of a trial with a `state_dict()` of its own, that as
`trial`, and as `trial_on_host` the numbers of its tensors that were in host memory.
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import mmap
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from rubberband.errors import CheckpointError
from rubberband.executor.checkpoints.folders import is_archive
from rubberband.executor.training.components import Component
from rubberband.executor.training.failures import one_line
from rubberband.executor.training.options import Group
from rubberband.features import part

MOST_KEPT_BYTES = 2 << 30
"""The most memory that a process keeps from one segment to the next."""
_ALIGNED_BYTES = 64
_PORTABLE = 1
"""CUDA's flag for memory that is page-locked for all devices."""
_ATOMS = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.Size)


class HostCopy:
    """Copies states, one at a time in a process: the next copy overwrites the one before.

    The memory stays with the process, also for its next trials: to fill fresh memory takes ten times as long. For a GPU
    it is page-locked, and the copy runs beside the host's work, in the order of the device's stream.
    """

    _memory: ClassVar[_Memory | None] = None

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copied: torch.cuda.Event | None = None

    def take(self, state: Any) -> Any:
        """Return a copy of `state`, complete after `wait`; containers and other objects are copied as well."""
        take = _Take(self._device)
        copied = take.copied(state)
        take.fill(self._room(take.size_bytes))
        if self._device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
        return copied

    def wait(self) -> None:
        """Wait until the latest copy is complete; any thread may call it."""
        if self._copied is not None:
            self._copied.synchronize()

    def close(self) -> None:
        """Give memory back that is too large to keep."""
        if HostCopy._memory is not None and HostCopy._memory.size_bytes > MOST_KEPT_BYTES:
            with contextlib.suppress(RuntimeError):  # after an error of CUDA, which is reported elsewhere
                self.wait()
            HostCopy._memory.unlock()
            HostCopy._memory = None

    def _room(self, size_bytes: int) -> _Memory:
        """Return memory of that size: what is there, or as much as is needed."""
        memory, is_cuda = HostCopy._memory, self._device.type == "cuda"
        if memory is None or memory.size_bytes < size_bytes or memory.is_for_cuda != is_cuda:
            grows = memory is not None
            if memory is not None:
                memory.unlock()
                HostCopy._memory = memory = None  # before there is another
            # A state that grows would need another one for every checkpoint.
            memory = HostCopy._memory = _Memory(size_bytes + size_bytes // 16 if grows else size_bytes, is_cuda)
        return memory


class _Memory:
    """One stretch of host memory; torch's own page-locked memory has sizes of powers of two, and is kept for good."""

    def __init__(self, size_bytes: int, is_for_cuda: bool) -> None:
        self.size_bytes = size_bytes
        self.is_for_cuda = is_for_cuda
        self._mapped = mmap.mmap(-1, max(1, size_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._locked: int | None = None
        if is_for_cuda:
            self._lock()

    def part(self, offset: int, size_bytes: int) -> torch.Tensor:
        """Return some of its bytes, as a tensor with a storage of its own."""
        if not size_bytes:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return torch.frombuffer(self._mapped, dtype=torch.uint8, count=size_bytes, offset=offset)

    def _lock(self) -> None:
        """Page-lock it, where the system allows that."""
        # A fork would otherwise share its pages until they are written, and the device write to those of the child.
        self._mapped.madvise(mmap.MADV_DONTFORK)
        address = self.part(0, 1).data_ptr()
        if not int(_cuda().cudaHostRegister(address, len(self._mapped), _PORTABLE)):
            self._locked = address
            return
        print(
            f"rubberband: {self.size_bytes / 1e9:.1f} GB of host memory cannot be page-locked, so training waits while "
            "a checkpoint is copied there; use an instance with more memory",
            file=sys.stderr,
        )
        with contextlib.suppress(RuntimeError):  # CUDA gives the error to the kernel that is launched next
            torch.zeros(1, device="cuda")

    def unlock(self) -> None:
        """Page-lock it no more; it is given back when nothing uses it."""
        if self._locked is not None:
            _cuda().cudaHostUnregister(self._locked)
            self._locked = None


def _cuda() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class _Take:
    """One copy. Tensors that share memory share it in the copy too, and an object that occurs twice is one object."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.size_bytes = 0
        self._places: dict[int, tuple[int, torch.Tensor]] = {}
        """Places of storages: where the copy begins, and a tensor of it."""
        self._made: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Tensors of the copy, which get their content in the end, and those that they are copies of."""
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

    def fill(self, memory: _Memory) -> None:
        """Copy the tensors' content to the memory."""
        parts: dict[int, torch.UntypedStorage] = {}
        for key, (offset, tensor) in self._places.items():
            storage = tensor.untyped_storage()
            source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            part = memory.part(offset, storage.nbytes()).copy_(source, non_blocking=True)
            parts[key] = part.untyped_storage()
        for made, tensor in self._made:
            own = torch.empty(0, dtype=tensor.dtype, device="cpu")
            own.set_(parts[_key(tensor)], tensor.storage_offset(), tuple(tensor.size()), tensor.stride())
            made.data = own

    def _is_plain(self, tensor: torch.Tensor) -> bool:
        usual = tensor.layout is torch.strided and tensor.device.type in ("cpu", self._device.type)
        return usual and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if _key(tensor) not in self._places:
            self._places[_key(tensor)] = self.size_bytes, tensor
            self.size_bytes += -(-tensor.untyped_storage().nbytes() // _ALIGNED_BYTES) * _ALIGNED_BYTES
        made = torch.empty(0, dtype=tensor.dtype, device="cpu").requires_grad_(tensor.requires_grad)
        if type(tensor) is torch.nn.Parameter:
            made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
        self._made.append((made, tensor))
        return made


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() or id(tensor)


# The components.


@dataclass(frozen=True, slots=True)
class Model(Component):
    """The model, without DistributedDataParallel's prefix."""

    module: nn.Module
    device: str | torch.device

    def state_dict(self) -> dict[str, Any]:
        return self.module.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.module.load_state_dict(state)
        self.module.to(self.device)  # a module with a load_state_dict of its own may have kept what it was given


@dataclass(frozen=True, slots=True)
class TrainedParameters(Component):
    """The names of the model's trained parameters, and of those of each group of each optimizer, which hooks change."""

    module: nn.Module
    optimizers: Sequence[Optimizer] = ()

    def state_dict(self) -> dict[str, Any]:
        named = dict(self.module.named_parameters())
        names = {id(each): name for name, each in named.items()}
        groups = [
            [[names.get(id(each)) for each in group["params"]] for group in one.param_groups] for one in self.optimizers
        ]
        return {"trained": [name for name, each in named.items() if each.requires_grad], "groups": groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Freeze and thaw the parameters, and give the optimizers their groups."""
        named, trained = dict(self.module.named_parameters()), set(state["trained"])
        for name, each in named.items():
            if each.requires_grad != (name in trained):
                each.requires_grad_(name in trained)
        for optimizer, groups in zip(self.optimizers, state["groups"], strict=False):
            for at, names in enumerate(groups):
                if not all(name in named for name in names):  # those of the trial itself
                    continue
                parameters = [named[name] for name in names]
                if at == len(optimizer.param_groups):
                    optimizer.add_param_group({"params": parameters})
                elif at < len(optimizer.param_groups):
                    optimizer.param_groups[at]["params"] = parameters


@dataclass(frozen=True, slots=True)
class Optimizers(Component):
    """The optimizers of a trial."""

    optimizers: Group[Optimizer]

    def state_dict(self) -> Any:
        return self.optimizers.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Load states from host memory: learning rates that are tensors stay on their devices.

        torch moves what belongs to a parameter there, and leaves Adam's `step` in host memory, where the next step
        reads it without waiting for the GPU.
        """
        groups = [group for one in self.optimizers.members for group in one.param_groups]
        places = [{name: each.device for name, each in group.items() if isinstance(each, Tensor)} for group in groups]
        self.optimizers.load_state_dict(state)
        groups = [group for one in self.optimizers.members for group in one.param_groups]
        for group, device_of in zip(groups, places, strict=True):
            group.update(
                {name: group[name].to(at) for name, at in device_of.items() if isinstance(group[name], Tensor)}
            )


def on_host(state: Any) -> list[int]:
    """Return which of the tensors in what a trial's `state_dict` returned are in host memory, by their number."""
    tensors = [each for each in pytree.tree_leaves(state) if isinstance(each, Tensor)]
    return [number for number, each in enumerate(tensors) if each.device.type == "cpu"]


def on_device(state: Any, host: Collection[int], device: str | torch.device) -> Any:
    """Return such a state with its tensors on `device`, but those numbered in `host`: the states of generators."""
    if torch.device(device).type == "cpu":
        return state
    content = io.BytesIO()  # so, objects of the user's own move too, and what shares memory shares it there
    torch.save(state, content)
    content.seek(0)
    leaves, form = pytree.tree_flatten(torch.load(content, map_location=device, weights_only=False))
    numbers = itertools.count()
    for place, each in enumerate(pytree.tree_leaves(state)):
        if isinstance(each, Tensor) and next(numbers) in host:
            leaves[place] = each
    return pytree.tree_unflatten(leaves, form)


# Files.


def read(payload: bytes | Path, parts: Sequence[bytes | Path] = ()) -> Any:
    """Return the content of a checkpoint, in host memory; a file is mapped. Raises CheckpointError.

    `parts`: files that other workers of its gang have saved.
    """
    if is_archive(payload):
        return part("divided checkpoint")(payload, parts)
    # Not weights_only: LR schedules and extra states may hold objects of the user's own classes, and the store has
    # compared the bytes with the digest in the journal.
    # In host memory: what belongs on the GPU is copied there, and all that was not there must stay.
    try:
        source = payload if isinstance(payload, Path) else io.BytesIO(payload)
        return torch.load(source, map_location="cpu", weights_only=False, mmap=source is payload)
    except Exception as error:
        raise CheckpointError(f"the checkpoint cannot be read: {one_line(error)}") from error


def write(content: Mapping[str, Any], host_copy: HostCopy, path: Path) -> None:
    """Write a checkpoint. By the file's name, torch writes it without Python's global lock; training goes on."""
    host_copy.wait()
    try:
        torch.save(content, str(path))
    except (RuntimeError, OSError) as error:  # torch's writer has an error of its own for a full disk
        raise OSError(f"{type(error).__name__}: {' '.join(str(error).split())}") from error
    except Exception as error:
        raise CheckpointError(f"the checkpoint cannot be pickled: {type(error).__name__}: {error}") from error
