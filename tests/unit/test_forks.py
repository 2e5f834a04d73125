"""Processes that user code forks in a worker die of SIGTERM, whenever it comes."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

WORKER = """
import os, signal, sys

def handler(number, frame):
    raise SystemExit(1)

when, module = sys.argv[1:]
handler.__module__ = module
signal.signal(signal.SIGTERM, handler)
if when == "at once":  # as a pool does that ends, while threading's own hook runs in the child
    os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))

from rubberband.executor.ray.slot_worker import end_forks_by_sigterm

end_forks_by_sigterm()
child = os.fork()
if not child:
    try:
        if when == "later":
            os.kill(os.getpid(), signal.SIGTERM)
    except SystemExit:
        os._exit(3)
    os._exit(0)
_, status = os.waitpid(child, 0)
assert signal.getsignal(signal.SIGTERM) is handler
assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
print(os.waitstatus_to_exitcode(status))
"""


def _ended(when: str, module: str) -> int:
    """Return the exit code of a process that a worker forked, which was sent SIGTERM."""
    command = [sys.executable, "-c", WORKER, when, module]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return int(done.stdout)


@pytest.mark.parametrize("when", ["later", "at once"])
def test_a_fork_dies_of_sigterm_where_the_handler_is_ray_s(when: str) -> None:
    assert _ended(when, "ray._private.worker") == -signal.SIGTERM


def test_a_fork_keeps_a_handler_of_the_user() -> None:
    assert _ended("later", "my_trial") == 3
