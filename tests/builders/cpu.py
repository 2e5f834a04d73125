"""CPU seconds of a test run by kind and by file: `pytest --cpu`.

A process counts itself and the children that it waited for. What nothing waited for (Ray's daemons, detached hosts)
is in the machine's seconds only, which are right on a machine that does nothing else.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[1]
FILES_SHOWN = 40


def spent_s() -> float:
    """Return the CPU seconds of this process and of the children that it waited for."""
    return sum(os.times()[:4])


def machine_s() -> float:
    """Return the CPU seconds of all processes since the machine started, without the idle ones."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


class CpuSeconds:
    """Plugin that sums CPU seconds over the processes of a run. `by_file`: seconds of each file's tests."""

    def __init__(self) -> None:
        self.by_file: Counter[str] = Counter()
        self._began = time.monotonic()
        self._machine_s = machine_s()

    @pytest.hookimpl
    def pytest_collection_finish(self) -> None:
        """Count everything until here as collection: imports are most of it."""
        self.by_file["collection"] += spent_s()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Count a test with its fixtures."""
        before = spent_s()
        result = yield
        self.by_file[str(item.path.relative_to(TESTS))] += spent_s() - before
        return result

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Send the seconds of a worker of pytest-xdist to the process that prints them."""
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["cpu"] = dict(self.by_file)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.by_file.update(getattr(node, "workeroutput", {}).get("cpu", {}))

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print seconds by kind, then the files that take most."""
        kinds: Counter[str] = Counter()
        for file, seconds in self.by_file.items():
            kinds[kind(file)] += seconds
        write = terminalreporter.write_line
        terminalreporter.section("CPU seconds")
        write(f"{machine_s() - self._machine_s:8.1f} all processes of the machine")
        write(f"{sum(self.by_file.values()):8.1f} this run's processes and children they waited for, of which")
        for name, seconds in kinds.most_common():
            write(f"{seconds:8.1f}   {name}")
        write(f"{time.monotonic() - self._began:8.1f} by the wall")
        for file, seconds in self.by_file.most_common(FILES_SHOWN):
            write(f"{seconds:8.1f}   {file}")


def kind(file: str) -> str:
    """Return the folder of a file; for tests with real parts, the part: Ray, a gang, a browser, EC2."""
    folder, _, name = file.partition("/")
    if folder != "integration":
        return folder
    words = name.removesuffix(".py").split("_")[1:]
    parts = {"dashboard": "browser", "site": "browser", "ec2": "EC2", "fake": "EC2", "ray": "Ray", "pool": "pool"}
    parts |= dict.fromkeys(("gang", "gangs", "distributed", "idioms", "trainers"), "gangs")
    parts |= dict.fromkeys(("documents", "examples", "points"), "documents")
    return f"integration: {next((parts[word] for word in words if word in parts), 'others')}"
