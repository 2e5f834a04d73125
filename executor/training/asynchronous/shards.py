"""Which parameter server holds which tensors, how they lie in one buffer, and how a server applies updates to them."""

from __future__ import annotations

import copy
import heapq
import io
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from rubberband.executor.training.failures import LacksMemory
from rubberband.executor.training.options import Group, build_optimizer
from rubberband.executor.training.runner import positive
from rubberband.executor.training.sampler import reseed
from rubberband.executor.training.schedule import build_scheduler
from rubberband.executor.training.segment import Segment
from rubberband.executor.training.torch_trial import TorchTrial

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
    """Return the bytes of a tensor's values."""
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
        self.whole = torch.zeros(end, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        self.tensors = [
            self.whole[offset : offset + size_bytes(tensor)].view(tensor.dtype).view(tensor.shape)
            for offset, tensor in zip(offsets, like, strict=True)
        ]
        self.memory = memory_of(self.whole)

    @property
    def size_bytes(self) -> int:
        return self.whole.numel()


# A shard on its server: its tensors, and the trial's own optimizer and LR schedule over them.


_OWN_COPIES = 6
"""Times that a shard is in memory: its parameters, two states of an optimizer such as Adam, and a snapshot of them."""
_COPIES_PER_WORKER = 2
"""A gradient that comes in, and parameters that go out."""


@dataclass(frozen=True, slots=True)
class GradientPart:
    """A gradient in an update, with its factor; `absent` are the tensors, by number, that it has nothing for."""

    factor: float
    gradients: Sequence[Tensor]
    absent: Collection[int]


class ServedShard:
    """Shard `index` of a trial's model; not thread-safe."""

    def __init__(self, trial: TorchTrial, segment: Segment, index: int) -> None:
        """Build model and optimizer as the workers do, and keep the shard.

        Raises LacksMemory if its memory does not suffice.
        """
        assert segment.training is not None
        self._trial = trial
        self._config = segment.config
        trial.max_iterations = max(segment.max_iterations or 0, segment.until_iterations)
        reseed("setup", segment.seed)
        positive("global_batch_size()", trial.global_batch_size(segment.config))
        reseed("setup", segment.seed)
        module = trial.build_model(segment.config)
        reseed("setup", segment.seed)
        self._optimizers = build_optimizer(trial, segment.config, module)
        self._optimizer = self._optimizers.members[0]
        self._schedules: Group[Any] | None = None
        trained = trained_parameters(module)
        names = Shard.all(trained, segment.training.servers)[index].names
        self._parameters = [trained[name] for name in names]
        check_memory(sum(map(size_bytes, self._parameters)), segment.num_workers, psutil.virtual_memory().available)
        self.buffer = Buffer([each.detach() for each in self._parameters])
        for parameter, view in zip(self._parameters, self.buffer.tensors, strict=True):
            parameter.data = view.copy_(parameter.detach())
        self._drop_others()

    def _drop_others(self) -> None:
        """Give back the memory of the parameters of other shards; they stay in the optimizer, and have no gradient."""
        own = set(map(id, self._parameters))
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in own:
                    self._optimizer.state.pop(parameter, None)
                    parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)

    def another_buffer(self) -> Buffer:
        """Return memory for a gradient, or for a copy of the parameters."""
        return Buffer([each.detach() for each in self._parameters])

    def load(self, content: bytearray, total_steps: int) -> None:
        """Load the state that rank 0 sends, and build the LR schedule, which steps `total_steps` times in all."""
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=False)  # a server has no GPU
        self.buffer.whole.copy_(state["parameters"])
        if state["optimizer"] is not None:
            self._optimizer.load_state_dict(state["optimizer"])
        self._schedules = build_scheduler(self._trial, self._config, self._optimizers, total_steps)
        if self._schedules is not None and state["scheduler"] is not None:
            self._schedules.load_state_dict(state["scheduler"])

    def update(self, parts: Sequence[GradientPart]) -> None:
        """Step with the sum of the gradients, each times its factor; a tensor for which no part has one stays."""
        for number, parameter in enumerate(self._parameters):
            found = [(part.factor, part.gradients[number]) for part in parts if number not in part.absent]
            parameter.grad = _sum(found)
        self._optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None
        if self._trial.scheduler_step == "batch":
            self._step_schedules()

    def end_iteration(self) -> None:
        if self._trial.scheduler_step == "iteration":
            self._step_schedules()

    def step_plateau(self, value: float) -> None:
        for schedule in [] if self._schedules is None else self._schedules.members:
            if isinstance(schedule, ReduceLROnPlateau):
                schedule.step(value)

    def _step_schedules(self) -> None:
        for schedule in [] if self._schedules is None else self._schedules.members:
            if not isinstance(schedule, ReduceLROnPlateau):
                schedule.step()

    def states(self, *, with_tensors: bool) -> dict[str, Any]:
        """Return a copy of the states of optimizer and schedule; of the optimizer without its tensors if asked."""
        optimizer = self._optimizer.state_dict()
        if not with_tensors:
            optimizer = {**optimizer, "state": {}}
        schedule = None if self._schedules is None else self._schedules.state_dict()
        return copy.deepcopy({"optimizer": optimizer, "scheduler": schedule})


def _sum(found: Sequence[tuple[float, Tensor]]) -> Tensor | None:
    """Return the sum of tensors, each times its factor; the first one is overwritten."""
    if not found:
        return None
    factor, total = found[0]
    if factor != 1.0:
        total.mul_(factor)
    for factor, tensor in found[1:]:
        total.add_(tensor, alpha=factor)
    return total


def check_memory(shard_bytes: int, workers: int, available_bytes: int) -> None:
    """Raise LacksMemory if a server has too little memory for its shard, its optimizer and its workers' gradients."""
    needed_bytes = shard_bytes * (_OWN_COPIES + _COPIES_PER_WORKER * workers)
    if needed_bytes > available_bytes:
        raise LacksMemory(
            "raised",
            f"a parameter server needs {needed_bytes / 1e9:.1f} GB for its shard of {shard_bytes / 1e9:.2f} GB and "
            f"{workers} workers, and {available_bytes / 1e9:.1f} GB are free on its machine; raise training.servers, "
            "or use instances with more memory",
        )
