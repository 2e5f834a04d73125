"""A stand-in for a CUDA context that is lost: from `lose` on, each use of the GPU in this process fails as on CUDA."""

from __future__ import annotations

from typing import Any

import torch

ADVICE = """
Search for `cudaErrorAssert' in https://docs.nvidia.com/cuda for more information.
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""
_lost: list[BaseException] = []


def cuda_error(text: str, code: int) -> RuntimeError:
    error: Any = getattr(torch, "AcceleratorError", RuntimeError)(f"CUDA error: {text}{ADVICE}")
    error.error_code = code
    return error  # type: ignore[no-any-return]


def use_gpu(*_: Any, **__: Any) -> None:
    """Do what a kernel does: fail if the context is lost."""
    if _lost:
        raise _lost[0]


def lose(error: BaseException) -> None:
    """Raise the error, now and at every later use of the GPU."""
    _lost.append(error)
    torch.cuda.is_initialized = lambda: True
    torch.cuda.current_stream = torch.cuda.synchronize = torch.cuda.empty_cache = use_gpu  # type: ignore[assignment]
    use_gpu()
