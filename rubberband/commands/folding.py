"""Output of a program on a terminal: its last lines while it runs, and none afterwards."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Self

_SHOWN = 6
_KEPT = 200
_CHUNK = 2**16
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f]")


class Folded:
    """Shows the last lines below a title, dimmed, as long as it is entered; where there is no terminal, nothing."""

    def __init__(self, title: str) -> None:
        self._title, self._lines = title, deque[str](maxlen=_KEPT)
        self._live: Any = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            console = Console(stderr=True, highlight=False)
            self._live = Live(console=console, get_renderable=self._drawn, refresh_per_second=8, transient=True)
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def add(self, line: str) -> None:
        """Take in a line."""
        self._lines.append(_ESCAPES.sub("", line.rstrip()))

    @contextmanager
    def pipe(self) -> Iterator[int]:
        """Provide a file descriptor whose lines are taken in."""
        output, theirs = os.pipe()
        reader = threading.Thread(target=self._read, args=(output,), name="rubberband folded output", daemon=True)
        reader.start()
        try:
            yield theirs
        finally:
            os.close(theirs)
            reader.join(1.0)

    def show_last(self, most: int) -> None:
        """Print the last lines on stderr."""
        for line in list(self._lines)[-most:]:
            print(line, file=sys.stderr)

    def _read(self, output: int) -> None:
        rest = b""
        with suppress(OSError):
            while content := os.read(output, _CHUNK):
                *lines, rest = (rest + content).split(b"\n")
                for line in lines:
                    self.add(line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2])
        os.close(output)

    def _drawn(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        lines = [line for line in self._lines if line.strip()][-_SHOWN:]
        texts = [Text(f"  {line}", style="dim", no_wrap=True, overflow="ellipsis") for line in lines]
        return Group(Text(self._title, no_wrap=True, overflow="ellipsis"), *texts)
