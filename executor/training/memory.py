"""Lack of memory in a step on real data: the step, or the gang's segment, begins again in smaller passes.

Memory that suffices for one batch may not do for the next, if samples are of different lengths. A gradient is a sum
over samples, so smaller passes come to the same one. A worker by itself puts back what the failed passes changed, and
does the step again. In a gang, DistributedDataParallel may have summed some of its gradients with the others' already,
so the gang's segment ends and begins again from its checkpoint, with half as many samples in a pass at most (`RanOut`).
How many samples fit is agreed afterwards (`Batching.end`).
"""

from __future__ import annotations

import gc

import torch
from torch import Tensor, nn

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
