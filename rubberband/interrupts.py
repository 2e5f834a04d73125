"""Ctrl-C while a command starts, which must not be lost: what an import swallows is remembered."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from types import FrameType


class AtOnce:
    """A handler of signals that raises at once, and remembers.

    Compiled modules may swallow what is raised while they are imported: whoever handles the signals next asks `heard`
    of the handler that was there before.
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
        """Be the handler of these signals from now on.

        What is ignored stays so (as for a background job), and outside the main thread signals are left alone.
        """
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    signal.signal(number, self)
