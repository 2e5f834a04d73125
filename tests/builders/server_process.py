"""`rubberband serve` as a process of its own, for tests: on a free port, its log in a file."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.builders.waiting import eventually

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120.0


class ServerProcess:
    def __init__(self, process: subprocess.Popen[bytes], home: Path, address: str) -> None:
        self.process, self.home, self.address = process, home, address

    @property
    def log(self) -> str:
        return _log_of(self.home).read_text()

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def end(self, by: signal.Signals = signal.SIGTERM) -> int:
        """End it; its exit code."""
        self.process.send_signal(by)
        return self.process.wait(PATIENCE_S)


@contextmanager
def serving(
    home: Path,
    *options: str,
    environment: dict[str, str] | None = None,
    program: tuple[str, ...] = ("-m", "rubberband.cli"),
) -> Iterator[ServerProcess]:
    """Serve `home` for as long as this lasts. The log is `HOME/serve.log`, after what is there already."""
    home.mkdir(parents=True, exist_ok=True)
    log = _log_of(home)
    said = len(log.read_text()) if log.exists() else 0
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with open(log, "ab") as file:
        process = subprocess.Popen(
            [sys.executable, *program, "serve", "--port", "0", *options],
            cwd=home,
            env=os.environ | {"RUBBERBAND_HOME": str(home), "PYTHONPATH": path} | (environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
    try:
        yield ServerProcess(process, home, _address(process, log, said))
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _log_of(home: Path) -> Path:
    return home / "serve.log"


def _address(process: subprocess.Popen[bytes], log: Path, said: int) -> str:
    def look() -> str | None:
        text = log.read_text()[said:]
        if found := re.search(r"serving on +(\S+)\n", text):
            return found[1]
        assert process.poll() is None, f"the server ended: {text}"
        return None

    return eventually(look, "a server that serves")
