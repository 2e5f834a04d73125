"""The first two submissions after the start of a service, of README's job: seconds until each is answered.

Medians of some rounds, each with a service in a home of its own that has idled for a while: seconds until it serves,
until `rubberband submit` ends, and CPU seconds of all processes of the service from the submission to its answer (which
count where other programs run). Then what the idle service holds before the first submission: MB of memory that no
other process shares (PSS), and CPU seconds in the last `--idle` seconds.

Run: python -m tests.bench.bench_service_start [--rounds N] [--idle SECONDS] [--provider local|virtual]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import psutil

from tests.builders.server_process import ROOT, serving

_PARTS = {"rubberband.api.plans.process": "planner", "running.hosted": "run", "multiprocessing": "fork server"}


class Tree:
    """The processes of a service: CPU seconds, also of those that have ended, and memory, by kind."""

    def __init__(self, process: int) -> None:
        self._root = psutil.Process(process)
        self._seen: dict[psutil.Process, tuple[str, float]] = {}

    def cpu_s(self) -> dict[str, float]:
        """Kind -> CPU seconds until now."""
        for process in (self._root, *self._root.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                self._seen[process] = self._kind(process), times.user + times.system
        found: defaultdict[str, float] = defaultdict(float)
        for kind, cpu_s in self._seen.values():
            found[kind] += cpu_s
        return found

    def memory_mb(self) -> dict[str, float]:
        """Kind -> MB, shared memory divided among those that share it."""
        found: defaultdict[str, float] = defaultdict(float)
        for process in (self._root, *self._root.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                found[self._kind(process)] += process.memory_full_info().pss / 1e6
        return found

    def _kind(self, process: psutil.Process) -> str:
        if process == self._root:
            return "service"
        words = " ".join(process.cmdline())
        return next((kind for part, kind in _PARTS.items() if part in words), "others")


def submit(url: str, home: str, name: str, provider: str, tree: Tree) -> dict[str, float]:
    """Submit README's job under a name; return seconds and CPU seconds by kind."""
    environment = os.environ | {"RUBBERBAND_HOME": home, "RUBBERBAND_SERVER": url}
    words = ["submit", "examples/digits.yaml", "-s", f"name={name}", "-s", f"resources.provider={provider}"]
    before, began, children = tree.cpu_s(), time.monotonic(), os.times()
    process = subprocess.Popen(
        [sys.executable, "-m", "rubberband.cli", *words], cwd=ROOT, env=environment, stderr=subprocess.DEVNULL
    )
    while process.poll() is None:
        tree.cpu_s()  # of what ends meanwhile
        time.sleep(0.05)
    assert not process.returncode, words
    found, after = {"": time.monotonic() - began}, os.times()
    found["CPU of the command"] = (
        after.children_user + after.children_system - children.children_user - children.children_system
    )
    cpu_s = tree.cpu_s()
    return found | {f"CPU of the {kind}": cpu_s[kind] - before.get(kind, 0.0) for kind in cpu_s}


def round_of(idle_s: float, provider: str) -> dict[str, float]:
    """One service and two submissions; figures by name."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as home, contextlib.ExitStack() as stack:
        began = time.monotonic()
        options = ("--allow", "examples.digits:DigitsTrial", "--code", str(ROOT), "--max-running", "1")
        service = stack.enter_context(serving(Path(home), *options))
        found["until it serves, s"] = time.monotonic() - began
        tree = Tree(service.process.pid)
        time.sleep(idle_s)
        if idle_s:
            before = sum(tree.cpu_s().values())
            time.sleep(idle_s)
            found["idle: CPU s"] = sum(tree.cpu_s().values()) - before
            found |= {f"idle: MB of the {kind}": mb for kind, mb in tree.memory_mb().items()}
        for name in ("first", "second"):
            for part, seconds in submit(service.address, home, name, provider, tree).items():
                found[f"{name} submit, s" if not part else f"  {name}: {part}, s"] = seconds
        for name in ("second", "first"):
            words = [sys.executable, "-m", "rubberband.cli", "cancel", name, "--server", service.address]
            subprocess.run(words, check=False, capture_output=True)
        for child in psutil.Process(service.process.pid).children():
            with contextlib.suppress(psutil.Error):
                if "running.hosted" in " ".join(child.cmdline()):
                    child.wait(60.0)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--idle", type=float, default=10.0, help="seconds, twice, before the first submission")
    parser.add_argument("--provider", choices=("local", "virtual"), default="local")
    chosen = parser.parse_args()
    taken: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(chosen.rounds):
        for name, each in round_of(chosen.idle, chosen.provider).items():
            taken[name].append(each)
    for name, figures in taken.items():
        print(f"{name:<40} median {statistics.median(figures):7.2f}   least {min(figures):7.2f}   ({len(figures)})")
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
