"""A worker's environment for CUDA, torch and OpenMP. Values of the user stay.

torch and CUDA read it once. So the process that workers are forked from gets it as well, and nothing here imports
torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

_BEGAN_WITH = Path("/proc/self/environ")
"""The environment at this process's start: Ray sets OMP_NUM_THREADS to 1 later, where it is not set."""


def cpus_per_gpu(gpus: int) -> int:
    """Return the CPUs that this process may use, divided by the GPUs of its machine."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cpus // gpus


def worker_settings(environment: Mapping[str, str], device: Literal["cpu", "cuda"], gpus: int) -> dict[str, str]:
    """Return variables to set in the `environment` of a worker on a machine of `gpus` GPUs.

    Trials on the CPU see no GPU: Ray gives logical GPUs the ids of real ones.
    """
    chosen = {}
    if device == "cpu":
        chosen["CUDA_VISIBLE_DEVICES"] = ""
    elif not environment.keys() & {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}:
        # Trials of other widths, and shares that change, fragment fixed segments. Every torch reads this name, and
        # before the other one.
        chosen["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    if "TORCHINDUCTOR_COMPILE_THREADS" not in environment:  # by default one per CPU of the machine, up to 32
        chosen["TORCHINDUCTOR_COMPILE_THREADS"] = str(max(1, cpus_per_gpu(gpus)))
    return chosen


def compute_with(cpus: int) -> None:
    """Let torch compute with `cpus` threads on the CPU, now or once it is imported, unless OMP_NUM_THREADS is set."""
    if _names_threads():
        return
    os.environ["OMP_NUM_THREADS"] = str(max(1, cpus))
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(max(1, cpus))


def _names_threads() -> bool:
    """Whether the user, or the machine, has set OMP_NUM_THREADS."""
    try:
        return any(line.startswith(b"OMP_NUM_THREADS=") for line in _BEGAN_WITH.read_bytes().split(b"\0"))
    except OSError:
        return "OMP_NUM_THREADS" in os.environ
