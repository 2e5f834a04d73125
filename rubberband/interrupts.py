"""Ctrl-C while a command starts: it is remembered if an import swallows it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from types import FrameType


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
