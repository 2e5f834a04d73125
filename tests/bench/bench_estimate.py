"""Commands as processes: wall time, CPU time, peak memory, each against the bare imports. Prints figures, asserts none.

What is run has been compiled before, as an installation has it. The commands take turns, so that a machine that gets
busy is busy for all of them. `ps`, `status` and `report` read one finished run of 27 trials.

Run: python tests/bench/bench_estimate.py [rounds]
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUN = "import sys, pathlib, tests.builders.journalled_runs as runs; runs.recorded().put(pathlib.Path(sys.argv[1]))"
BASE = "import numpy, yaml, pydantic, typer"
COMMANDS = (
    "--help",
    "--version",
    "estimate --help",
    "estimate examples/scaling.yaml -o json",
    "estimate examples/scaling.yaml",
    "estimate --live examples/scaling.yaml -o json",
    "ps",
    "status digits-sha",
    "report digits-sha",
)
Figures = tuple[float, float, float]
"""Seconds, CPU seconds and peak memory (MiB) of one process."""


def measure(arguments: list[str], environment: Mapping[str, str]) -> Figures:
    """Run Python once."""
    began = time.perf_counter()
    command = [sys.executable, *arguments]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, f"{arguments} exited with {process.returncode}"
    return time.perf_counter() - began, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    programs = {BASE: ["-c", BASE]} | {line: ["-m", "rubberband.cli", *line.split()] for line in COMMANDS}
    with tempfile.TemporaryDirectory() as folder:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment |= {"PYTHONPATH": str(ROOT), "PYTHONPYCACHEPREFIX": folder, "RUBBERBAND_HOME": f"{folder}/home"}
        measure(["-c", RUN, f"{folder}/home"], environment)
        for arguments in programs.values():
            measure(arguments, environment)
        taken = [[measure(arguments, environment) for arguments in programs.values()] for _ in range(rounds)]
    print(f"{'process':<40} {'wall s':>8} {'CPU s':>8} {'least':>8} {'x base':>7} {'peak MiB':>9}   ({rounds} rounds)")
    base_s = None
    for at, name in enumerate(programs):
        wall_s, cpu_s, peak_mib = zip(*(figures[at] for figures in taken), strict=True)
        base_s = base_s or min(cpu_s)
        print(
            f"{name:<40} {statistics.median(wall_s):8.3f} {statistics.median(cpu_s):8.3f} {min(cpu_s):8.3f} "
            f"{min(cpu_s) / base_s:7.2f} {statistics.median(peak_mib):9.1f}"
        )


if __name__ == "__main__":
    main()
