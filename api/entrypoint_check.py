"""Whether what may be run can be imported: asked of a process of its own, as the service imports no such code."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

_ASKED_S = 120.0
_SCRIPT = """\
import importlib, sys
from rubberband.errors import RubberbandError
name, *folders = sys.argv[1:]
module, _, attribute = name.partition(":")
try:
    if attribute == "*":
        sys.path[:0] = folders
        importlib.import_module(module)
    else:
        from rubberband.executor.training.entrypoint import Entrypoint
        Entrypoint.parse(name, folders).load()
except RubberbandError as error:
    sys.exit(" ".join(str(error).split()))
except Exception as error:
    sys.exit(f"entrypoint {name} cannot be imported: {type(error).__name__}: {' '.join(str(error).split())}")
"""


class EntrypointCheck:
    """Imports one after the other, while the service starts, and tells what fails."""

    def __init__(self, entrypoints: Sequence[str], code: Sequence[Path]) -> None:
        self._entrypoints, self._code = tuple(entrypoints), tuple(str(folder) for folder in code)
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self, tell: Callable[[str], None]) -> None:
        """Begin; `tell` is given a line for each that cannot be imported, from another thread."""
        self._thread = threading.Thread(target=self._check, args=(tell,), name="entrypoint-check", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Give up what is still asked. Idempotent."""
        with self._lock:
            self._closed = True
            if self._child is not None:
                self._child.kill()
        if self._thread is not None:
            self._thread.join()

    def _check(self, tell: Callable[[str], None]) -> None:
        for name in self._entrypoints:
            fault = self._fault(name)
            if self._closed:
                return
            if fault:
                tell(f"note: --allow {name}: {fault}; submissions of it fail until this is fixed (see --code)")

    def _fault(self, name: str) -> str:
        child = self._begin(name)
        if child is None:
            return ""
        with child:
            try:
                _, told = child.communicate(timeout=_ASKED_S)
            except subprocess.TimeoutExpired:
                child.kill()
                return f"its import timed out after {_ASKED_S:g} s"
        lines = told.strip().splitlines()
        return (
            ""
            if child.returncode == 0
            else (lines[-1] if lines else f"its import exited with status {child.returncode}")
        )

    def _begin(self, name: str) -> subprocess.Popen[str] | None:
        with self._lock:
            if self._closed:
                return None
            self._child = subprocess.Popen(
                [sys.executable, "-c", _SCRIPT, name, *self._code],
                cwd=self._code[0] if self._code else None,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )
            return self._child
