"""Check that an instance has its GPUs and that its torch can use them. It joins the cluster only then.

It runs on the instance: `python3 -m rubberband.cloud.aws.gpu_check GPUS`. If the NVIDIA driver is late, a build of
torch without CUDA is installed silently, and trials would train on the CPU at the price of GPUs.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

from rubberband.units import counted, error_line

WAIT_S = 120.0
"""Longest delay of the driver."""
_LOOK_S = 5.0
_HUNG_S = 120.0
_TORCH = """
try:
    import torch
except ModuleNotFoundError:
    raise SystemExit(0)  # trials use something else
if not torch.backends.cuda.is_built():
    raise SystemExit(f"torch {torch.__version__} is a build without CUDA")
for index in range(torch.cuda.device_count()):
    if torch.ones(8, device=f"cuda:{index}").sum().item() != 8.0:
        raise SystemExit(f"GPU {index} calculates wrongly")
if torch.cuda.device_count() < GPUS:
    torch.cuda.init()  # says why, if it can
    raise SystemExit(f"torch {torch.__version__} sees {torch.cuda.device_count()} of GPUS GPUs")
"""


_CUDA_BUILD = "run again, or give an index with a CUDA build (resources.aws.index_url)"
_FIXES = {
    "driver on your system is too old": "give a newer image (resources.aws.image), or an index of an older CUDA "
    "(resources.aws.index_url)",
    "no kernel image": "give an index of an older CUDA (resources.aws.index_url), or another type",
}
"""By what an error says."""
_FINAL = ("without CUDA", *_FIXES)
"""These do not pass by themselves."""


Run = Callable[[list[str]], tuple[bool, str]]
"""Runs a command: whether it succeeded, and its output."""


def amiss(
    gpus: int,
    *,
    run: Run | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Return the problem with its remedy, in one line; empty if `gpus` GPUs can be used.

    Missing or failing GPUs may still appear within `WAIT_S`.
    """
    run = run or _run
    deadline = clock() + WAIT_S
    while trouble := _trouble(gpus, run):
        if clock() >= deadline or any(sign in trouble for sign in _FINAL):
            return trouble
        sleep(_LOOK_S)
    return ""


def _trouble(gpus: int, run: Run) -> str:
    ok, listed = run(["nvidia-smi", "-L"])
    found = sum(line.startswith("GPU ") for line in listed.splitlines())
    if found < gpus:
        why = "" if ok else f" ({_what_failed(listed)})"
        return (
            f"{found} of {counted(gpus, 'GPU')} found within {WAIT_S:.0f} s{why}; give an image with a driver for them "
            "(resources.aws.image), or another type"
        )
    ok, text = run([sys.executable, "-c", _TORCH.replace("GPUS", str(gpus))])
    if ok:
        return ""
    line = _what_failed(text)[:110]
    remedy = next((fix for sign, fix in _FIXES.items() if sign in line), _CUDA_BUILD)
    return f"{line}; {remedy}"


def _run(command: list[str]) -> tuple[bool, str]:
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=_HUNG_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, f"{command[0]}: {getattr(error, 'strerror', None) or 'no answer'}"
    return ran.returncode == 0, ran.stdout or ran.stderr


def _what_failed(text: str) -> str:
    return error_line(text) or "it said nothing"


def main(gpus: int) -> int:
    """Return the exit status: 1, after one line on the console, if GPUs cannot be used."""
    trouble = amiss(gpus)
    if trouble:
        print(trouble, flush=True)
    return 1 if trouble else 0


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1])))
