"""Lack of memory in a step on real data: what the failed passes changed is put back, and the step is done again.

Memory that suffices for one batch may not do for the next, if samples are of different lengths. A gradient is a sum
over samples, so a worker that runs out divides its share into smaller passes and comes to the same gradient. In a gang
it does that alone: the others wait for it in DistributedDataParallel's all-reduce, and notice nothing. So no step needs
an agreement, which would cost time in every one. How many samples fit is agreed afterwards (`Batching.end`).

DDP sums the gradients while the last backward pass computes them. Where that pass runs out of memory half-way, the
others may hold sums of some of this worker's gradients already. Those are complete, since DDP takes a gradient when it
is final; only the rest must be computed again, and given to DDP as if by the pass that failed.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

_SIGNS = (
    "CUDA error: out of memory",  # outside of torch's allocator: page-locked memory, kernels that are loaded
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
)
"""In messages of errors that lack of memory causes, beside torch's own."""
_DOUBTFUL_SIGNS = (
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "Unable to find a valid cuDNN algorithm",
    "FIND was unable to find an engine",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "CUDNN_STATUS_INTERNAL_ERROR",
)
"""In messages of libraries that find no memory for themselves on a full GPU; on others, the cause is another one."""
_NCCL_SIGNS = ("out of memory", "Failed to CUDA calloc", "Failed to CUDA malloc")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error comes from a lack of memory on the device, or of the process.

    A collective that failed for want of memory does not count: it cannot be repeated by one worker.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    if not isinstance(error, RuntimeError) or _is_of_collective(error):
        return False
    text = str(error)
    return any(sign in text for sign in _SIGNS) or (any(sign in text for sign in _DOUBTFUL_SIGNS) and _is_full())


def lacks_memory(error: BaseException) -> bool:
    """Return whether the error comes from a lack of memory, in a collective too."""
    in_collective = _is_of_collective(error) and any(sign in str(error) for sign in _NCCL_SIGNS)
    return in_collective or is_out_of_memory(error)


def _is_of_collective(error: BaseException) -> bool:
    return torch.distributed.is_available() and isinstance(error, torch.distributed.DistError)


def _is_full() -> bool:
    """Return whether the GPU has less than half of its memory free; False if it does not answer any more."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return True
    try:
        free, total = torch.cuda.mem_get_info()
    except RuntimeError:
        return False
    return free < total / 2


def release(device: torch.device) -> None:
    """Give back memory that nothing uses any more, to be called when the error is gone: it holds the failed pass."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


class Undo:
    """Restores the model's buffers (BatchNorm) and torch's random state, which a forward pass changes."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module = module
        self._is_cuda = device.type == "cuda"
        self._buffers: list[tuple[list[Tensor], list[Tensor]]] = []
        """The model's buffers and their copies, by type: on a GPU, those of one type are copied at once."""

    def begin(self) -> None:
        """Look for the model's buffers, before an iteration."""
        alike: dict[torch.dtype, list[Tensor]] = {}
        for buffer in self._module.buffers():
            alike.setdefault(buffer.dtype, []).append(buffer)
        self._buffers = [(each, [torch.empty_like(buffer) for buffer in each]) for each in alike.values()]

    def save(self) -> None:
        """Note the present state, before a step."""
        for buffers, saved in self._buffers:
            torch._foreach_copy_(saved, buffers)
        self._random = torch.get_rng_state()
        if self._is_cuda:
            self._cuda_random = torch.cuda.get_rng_state()

    @torch.no_grad()
    def restore(self) -> None:
        """Return to the state that was noted."""
        for buffers, saved in self._buffers:
            torch._foreach_copy_(buffers, saved)
        torch.set_rng_state(self._random)
        if self._is_cuda:
            torch.cuda.set_rng_state(self._cuda_random)


class Summing:
    """Watches how far DistributedDataParallel has come with summing the gradients of a step; idle without one."""

    def __init__(self, ddp: DistributedDataParallel | None) -> None:
        self._ddp = ddp
        self._parameters = [] if ddp is None else [each for each in ddp.parameters() if each.requires_grad]
        self._before: list[Tensor | None] | None = None
        self._versions: list[int] = []
        self._waits = False
        self._is_first = True
        self._handles: list[RemovableHandle] = [] if ddp is None else [ddp.register_forward_hook(self._leave)]

    def _leave(self, *_: Any) -> None:
        self._waits = self._before is not None

    def begin_step(self) -> None:
        """Note that a step begins, with all gradients None."""
        self._before, self._waits = None, False

    def begin_last(self) -> None:
        """Note that the pass begins whose gradients DDP sums."""
        if self._ddp is not None:
            self._before = [parameter.grad for parameter in self._parameters]
            self._versions = [-1 if grad is None else grad._version for grad in self._before]

    def end_step(self) -> None:
        """Note that the sums are complete."""
        self._before, self._is_first = None, False

    @property
    def cannot_repeat(self) -> bool:
        """Whether a step cannot be done again: DDP learns a static graph in one pass."""
        return self._ddp is not None and self._is_first and bool(self._ddp.static_graph)

    def rest(self) -> list[Tensor] | None:
        """Return the parameters whose gradients DDP waits for; None if it waits for none yet.

        It waits from the end of its last forward pass, whichever backward pass comes next.
        """
        if not self._waits or self._before is None:
            return None
        return [
            parameter
            for parameter, grad, version in zip(self._parameters, self._before, self._versions, strict=True)
            if parameter.grad is grad and (grad is None or grad._version == version)
        ]

    def close(self) -> None:
        """Let go of the model."""
        for handle in self._handles:
            handle.remove()


class Gradients:
    """Sums of gradients of some parameters that DDP does not see until they are complete."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._sums: list[Tensor | None] = [None] * len(parameters)

    def add(self, loss: Tensor) -> None:
        """Add the gradients of `loss`."""
        found = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        self._sums = [
            new if old is None else old if new is None else old + new
            for old, new in zip(self._sums, found, strict=True)
        ]

    def give(self) -> None:
        """Give the sums to DDP, as the gradients of the pass that it waits for."""
        given = [(each, sum_) for each, sum_ in zip(self._parameters, self._sums, strict=True) if sum_ is not None]
        for parameter, _ in given:
            parameter.grad = None
        torch.autograd.backward([each for each, _ in given], [sum_ for _, sum_ in given])
