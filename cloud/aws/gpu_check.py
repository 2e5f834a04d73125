"""Whether an instance has the GPUs that it is paid for, and whether its torch can use them; it joins only then.

It runs on the instance: `python3 -m rubberband.cloud.aws.gpu_check GPUS`. Where the NVIDIA driver is late, a build of
torch without CUDA is installed silently, and trials would train on the CPU at the price of GPUs.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

WAIT_S = 120.0
"""The driver may be this late."""
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
    raise SystemExit(f"torch {torch.__version__} sees {torch.cuda.device_count()} of GPUS GPUs")
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What a command answered."""

    ok: bool
    text: str


Run = Callable[[list[str]], Said]


def amiss(
    gpus: int,
    *,
    run: Run | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """What is wrong, what is expected and the remedy, in one line; empty if `gpus` GPUs can be used.

    GPUs that are missing, or do not work, may come within `WAIT_S`.
    """
    run = run or _run
    deadline = clock() + WAIT_S
    while trouble := _trouble(gpus, run):
        if clock() >= deadline or "without CUDA" in trouble:
            return trouble
        sleep(_LOOK_S)
    return ""


def _trouble(gpus: int, run: Run) -> str:
    listed = run(["nvidia-smi", "-L"])
    found = sum(line.startswith("GPU ") for line in listed.text.splitlines())
    if found < gpus:
        why = "" if listed.ok else f" ({_last_line(listed.text)})"
        return (
            f"{found} of {gpus} GPUs found within {WAIT_S:.0f} s{why}; give an image with a driver for them "
            "(resources.aws.image), or another type"
        )
    used = run([sys.executable, "-c", _TORCH.replace("GPUS", str(gpus))])
    if used.ok:
        return ""
    remedy = "run again, or give an index with a CUDA build (resources.aws.index_url)"
    return f"{_last_line(used.text)[:110]}; {remedy}"


def _run(command: list[str]) -> Said:
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=_HUNG_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Said(ok=False, text=f"{command[0]}: {getattr(error, 'strerror', None) or 'no answer'}")
    return Said(ok=ran.returncode == 0, text=ran.stdout or ran.stderr)


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it said nothing")


def main(gpus: int) -> int:
    """The exit status: 1, and one line on the console, if GPUs cannot be used."""
    trouble = amiss(gpus)
    if trouble:
        print(trouble, flush=True)
    return 1 if trouble else 0


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1])))
