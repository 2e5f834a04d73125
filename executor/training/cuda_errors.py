"""Errors of CUDA: whether the trial or its machine is at fault, the fix, and whether the process can still use its GPU.

Most of them are final for a process: every later call fails with the same error, so only a new process can use the GPU.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from typing import Any

MACHINE = "; the GPU is at fault, not the trial, which is tried again: an instance whose GPU fails twice is replaced"
_OF_MACHINES = {
    46: "device(s) is/are busy or unavailable",
    214: "uncorrectable ECC error",
    802: "system not yet initialized",
}
"""CUDA's numbers, and their texts (cudaGetErrorString), which is all that torch has before 2.8."""
_OF_EITHER = {719: "unspecified launch failure", 999: "unknown error"}
"""These are a machine's if the driver has an Xid of hardware for them."""
_OUT_OF_MEMORY = 2
_XIDS = frozenset({48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 110, 119, 120, 140, 143})
"""Xid numbers of hardware and its firmware, not of the application (13, 31, 43, 45).
Source: NVIDIA, "XID Errors" (GPU deployment and management)."""
_XID = re.compile(r"\[\s*(\d+\.\d+)\].*NVRM: Xid \(.*?\): (\d+)")
_RECENT_S = 600.0
_DMESG_S = 5.0
_DONE_S = 5.0
"""The longest wait for kernels that are under way."""
_LOOK_S = 0.002


def is_of_cuda(error: BaseException) -> bool:
    """Whether it comes from CUDA, other than for lack of memory."""
    if not isinstance(error, RuntimeError) or getattr(error, "error_code", None) == _OUT_OF_MEMORY:
        return False
    line = _line(error)
    return line != "" and not line.startswith("out of memory")


def _line(error: BaseException) -> str:
    """Return the text of CUDA, without the general advice on device-side assertions and more that torch adds."""
    return str(error).partition("CUDA error: ")[2].partition("\n")[0]


def is_of_machine(error: BaseException) -> bool:
    """Whether it is a fault of the GPU or its driver, so that the trial may train well on another one."""
    if not is_of_cuda(error):
        return False
    return _is(error, _OF_MACHINES) or (_is(error, _OF_EITHER) and _hardware_failed())


def _is(error: BaseException, known: dict[int, str]) -> bool:
    return getattr(error, "error_code", None) in known or any(each in _line(error) for each in known.values())


def _hardware_failed() -> bool:
    """Whether the kernel's log, where it can be read, has a recent Xid of hardware."""
    try:
        log = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=_DMESG_S, check=False).stdout
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return False
    since = time.monotonic() - _RECENT_S
    return any(float(at) >= since and int(number) in _XIDS for at, number in _XID.findall(log))


def remedy(error: BaseException) -> str:
    """Return the fix for an error of CUDA, to follow the message."""
    line = _line(error)
    if "no kernel image" in line:
        return "; this build of torch has no code for the GPU: install one for it, or use another instance_type"
    if "device-side assert" in line:
        return (
            "; a label or index is probably out of range: train it on the CPU, or with CUDA_LAUNCH_BLOCKING=1, to see "
            "the line"
        )
    return "; CUDA reports errors late: train it on the CPU, or with CUDA_LAUNCH_BLOCKING=1, to see the line"


def context_is_lost() -> bool:
    """Whether this process can use its GPU no more; False as well if the GPU is still busy after a few seconds."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        deadline = time.monotonic() + _DONE_S
        while not torch.cuda.current_stream().query():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOOK_S)
        torch.zeros(1, device="cuda").add_(1).item()
        torch.cuda.synchronize()
    except RuntimeError as error:
        return is_of_cuda(error)
    return False
