"""A watch for a secret: in files of folders and in command lines, while a run lasts."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

_LOOK_EVERY_S = 2.0


@contextmanager
def watched(secrets: Sequence[str], folder: Path) -> Iterator[list[str]]:
    """Yield the places where one of these texts was seen while this lasts, and at its end."""
    seen, over = list[str](), threading.Event()

    def watch() -> None:
        while not over.wait(_LOOK_EVERY_S):
            seen.extend(places_of(secrets, folder))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()
    seen += places_of(secrets, folder)


def places_of(secrets: Sequence[str], folder: Path) -> list[str]:
    """The files below a folder, and the command lines, that have one of these texts."""
    found = [f"the command line {line}" for line in _command_lines() if any(secret in line for secret in secrets)]
    for top, _, names in os.walk(folder):
        for path in (Path(top, name) for name in names):
            try:
                content = path.read_bytes() if path.is_file() else b""
            except OSError:  # it is gone
                continue
            if any(secret.encode() in content for secret in secrets):
                found.append(str(path))
    return found


def _command_lines() -> Iterator[str]:
    for process in psutil.process_iter():
        try:
            yield " ".join(process.cmdline())
        except psutil.Error:
            continue
