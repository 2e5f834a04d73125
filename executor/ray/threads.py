"""Threads that call Ray. Ray ends the whole process if one calls it after `ray.shutdown()`: they are waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_mutex = threading.Lock()
_started: set[threading.Thread] = set()


def start(target: Callable[[], None], name: str) -> threading.Thread:
    """Run `target` in a daemon thread that `settle` waits for."""
    thread = threading.Thread(target=target, daemon=True, name=name)
    thread.start()
    with _mutex:
        _started.difference_update([other for other in _started if not other.is_alive()])
        _started.add(thread)
    return thread


def settle(timeout_s: float) -> None:
    """Wait until all of these threads have ended, the caller left out, but no longer than `timeout_s` in all."""
    deadline = time.monotonic() + timeout_s
    with _mutex:
        waited_for = _started - {threading.current_thread()}
    for thread in waited_for:
        thread.join(max(0.0, deadline - time.monotonic()))
