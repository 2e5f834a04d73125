"""Signals that ask a process to end. One that comes while a command starts is remembered if an import swallows it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType

ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C; what systemd, Kubernetes, Slurm and `kill` send; and a terminal that closes."""


def heeded() -> tuple[signal.Signals, ...]:
    """Return the signals of ENDS without a SIGHUP that this process was started to ignore (`nohup`)."""
    return tuple(number for number in ENDS if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN)


def uninterrupted(release: Callable[[], None]) -> None:
    """Call `release` while Ctrl-C is ignored: an instance that is left behind costs money until its lease ends."""
    if threading.current_thread() is not threading.main_thread():
        release()
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        release()
    finally:
        signal.signal(signal.SIGINT, before)


class AtOnce:
    """A handler of signals that raises at once, and remembers.

    Compiled modules may swallow an error that is raised while they are imported, so the next handler of the signals
    reads `heard` of this one.
    """

    def __init__(self, error: BaseException) -> None:
        self._error = error
        self.heard = False
        """Whether the signal has come."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Raise the error."""
        self.heard = True
        raise self._error

    def handle(self, numbers: Sequence[int]) -> None:
        """Handle these signals from now on.

        Ignored ones stay ignored (as in a background job). Outside the main thread this does nothing.
        """
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    signal.signal(number, self)
