"""The most memory that a trial has taken in its process: on its GPU as torch has allocated it, else resident here.

Only the standard library is imported, as a program's process imports this.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any


class Peak:
    """The most memory of this process from now on."""

    def __init__(self) -> None:
        with suppress(OSError), open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # resets VmHWM. Source: Linux, Documentation/filesystems/proc.rst
        self.begun_bytes = _status("VmRSS")
        """Resident memory at the beginning: the imports."""
        self.takes_parts = False
        """Whether the trial goes on in smaller parts of its batches where it runs out of memory."""

    def read(self) -> tuple[int, int, bool]:
        """Return the bytes at the beginning and the most since then, or 0 and those on the GPU; and `takes_parts`."""
        torch: Any = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            return 0, int(torch.cuda.max_memory_allocated()), self.takes_parts
        return self.begun_bytes, _status("VmHWM"), self.takes_parts


def _status(name: str) -> int:
    """Return a value of /proc/self/status in bytes; 0 where there is none."""
    with suppress(OSError), open("/proc/self/status") as file:
        for line in file:
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return 0


current: Peak | None = None
"""That of this process's trial, where a check measures it."""


def begin() -> Peak:
    """Measure from now on."""
    global current
    current = Peak()
    return current
