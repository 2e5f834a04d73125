"""Defaults of a whole process that a trial may change: put back after it, as the process then trains another trial."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any


class Defaults:
    """The folder of this process and the defaults of PyTorch, as the import of the trial's module left them."""

    def __init__(self) -> None:
        self._folder = os.getcwd()
        self._torch = _of_torch(sys.modules.get("torch"))

    def close(self) -> None:
        """Put them back."""
        with contextlib.suppress(OSError):  # it may be gone
            os.chdir(self._folder)
        torch: Any = sys.modules.get("torch")
        if torch is None or (now := _of_torch(torch)) == self._torch:
            return
        for name, value in self._torch.items():
            if now[name] != value:
                _PUT[name](torch, value)


def _of_torch(torch: Any) -> dict[str, Any]:
    """Return the defaults that matter for what is computed; before its import, those that PyTorch begins with."""
    if torch is None:
        return {"dtype": "float32", "device": "None", "deterministic": (False, False), "matmul": "highest"}
    return {
        "dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "device": str(getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None) and torch.get_default_device()),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "matmul": torch.get_float32_matmul_precision(),
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "threads": torch.get_num_threads(),
    }


def _put_cudnn(torch: Any, value: tuple[bool, bool]) -> None:
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = value


_PUT: dict[str, Callable[[Any, Any], object]] = {
    "dtype": lambda torch, value: torch.set_default_dtype(getattr(torch, value)),
    "device": lambda torch, value: torch.set_default_device(None if value == "None" else value),
    "deterministic": lambda torch, value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    "matmul": lambda torch, value: torch.set_float32_matmul_precision(value),
    "cudnn": _put_cudnn,
    "threads": lambda torch, value: torch.set_num_threads(value),
}
