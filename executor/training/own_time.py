"""The time of a thread, without that in which another one has its CPU."""

from __future__ import annotations

import time

_TRIES, _AT_ONCE_S = 10, 1e-3
_QUEUED = "/proc/thread-self/schedstat"
"""Nanoseconds of this thread on a CPU, and in its queue (Linux)."""


def own_time() -> float:
    """Return a time in seconds that stands still while this thread could run and another one has its CPU.

    It goes on while the thread waits for data, a GPU or other workers: those are costs of the trial. Where the system
    does not count the time in the queue, nothing is left out.
    """
    for _ in range(_TRIES):
        began = time.perf_counter()
        queued_s, now = _queued_s(), time.perf_counter()
        if now - began < _AT_ONCE_S:  # else another thread had the CPU in between, and the two do not belong together
            break
    return now - queued_s


def _queued_s() -> float:
    try:
        with open(_QUEUED, "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
