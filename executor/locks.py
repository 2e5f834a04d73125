"""Locks on files (flock), which end with whoever holds them, however that ends."""

from __future__ import annotations

import fcntl
import time
from typing import IO

SHARED, EXCLUSIVE = fcntl.LOCK_SH, fcntl.LOCK_EX


def locked(file: IO[str] | int, kind: int, wait_s: float = 0.0) -> bool:
    """Lock `file` (or the file of a descriptor) until it is closed; False if that cannot be had within `wait_s`."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)
        else:
            return True
