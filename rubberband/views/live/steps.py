"""Steps of a command until it has something to show: a spinner on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any, Self


class Steps:
    """Shows on stderr what is done now. A context manager, which shows nothing once it is left."""

    def __init__(self) -> None:
        self._status = ExitStack()
        self._console: Any = None
        if sys.stderr.isatty():
            from rich.console import Console

            console = Console(file=sys.stderr)
            self._console = None if console.is_dumb_terminal else console

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._status.close()

    def __call__(self, step: str) -> None:
        """Show `step` until the next one; empty: nothing, as a question or a view follows."""
        self._status.close()
        if self._console is None:
            if step:
                print(step, file=sys.stderr, flush=True)
        elif step:
            from rich.markup import escape

            self._status.enter_context(self._console.status(escape(step)))
