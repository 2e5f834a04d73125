"""`rubberband estimate` and `--help` as processes: wall time, CPU time, peak memory. Prints figures, asserts none.

Run: python tests/bench/bench_estimate.py [rounds]
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMANDS = {
    "--help": ["--help"],
    "--version": ["--version"],
    "estimate -o json": ["estimate", "examples/scaling.yaml", "-o", "json"],
}


def measure(arguments: list[str]) -> tuple[float, float, float]:
    """Seconds, CPU seconds and peak memory (MiB) of one process."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "rubberband.cli", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, f"{arguments} exited with {process.returncode}"
    return time.perf_counter() - began, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    print(f"{'command':<20} {'wall s':>8} {'CPU s':>8} {'peak MiB':>9}   (median of {rounds})")
    for name, arguments in COMMANDS.items():
        measure(arguments)
        wall_s, cpu_s, peak_mib = (
            statistics.median(column) for column in zip(*(measure(arguments) for _ in range(rounds)), strict=True)
        )
        print(f"{name:<20} {wall_s:8.3f} {cpu_s:8.3f} {peak_mib:9.1f}")


if __name__ == "__main__":
    main()
