"""Locks on files (flock), which end with whoever holds them, however that ends."""

from __future__ import annotations

import fcntl
import time
from typing import IO

SHARED, EXCLUSIVE = fcntl.LOCK_SH, fcntl.LOCK_EX
_GLANCE_S = 20.0
"""Who only looks is waited for as long: it holds a shared lock for an instant, but may be stopped right then."""


def locked(file: IO[str] | int, kind: int, wait_s: float = 0.0) -> bool:
    """Lock `file` (or the file of a descriptor) until it is closed.

    False if somebody has it to himself and does not let it go within `wait_s`, or if it is shared for very long.
    """
    begun_at = time.monotonic()
    while not _is_had(file, kind):
        is_shared = _is_had(file, SHARED)
        if is_shared:
            fcntl.flock(file, fcntl.LOCK_UN)
        if time.monotonic() - begun_at >= (_GLANCE_S if is_shared else wait_s):
            return False
        time.sleep(0.01)
    return True


def _is_had(file: IO[str] | int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
