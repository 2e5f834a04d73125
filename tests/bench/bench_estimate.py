"""Commands as processes: wall time, CPU time, peak memory, each against the bare imports. Prints figures, asserts none.

What is run has been compiled before, as an installation has it; "not compiled" is a copy of the package that Python
compiles each time. The commands take turns, so that a machine that gets busy is busy for all of them. `ps`,
`status` and `report` read one finished run of 27 trials. "modules" counts what was imported: ours, and all.

Run: python tests/bench/bench_estimate.py [rounds]
"""

from __future__ import annotations

import os
import shutil
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
NOT_COMPILED = ("--help", "estimate examples/scaling.yaml")
Figures = tuple[float, float, float]
"""Seconds, CPU seconds and peak memory (MiB) of one process."""


def measure(arguments: list[str], environment: Mapping[str, str]) -> Figures:
    """Run Python once, in the home: in the checkout, its own package would be imported."""
    began = time.perf_counter()
    command = [sys.executable, *arguments]
    with subprocess.Popen(
        command, cwd=environment["RUBBERBAND_HOME"], env=environment, stdout=subprocess.DEVNULL
    ) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, f"{arguments} exited with {process.returncode}"
    return time.perf_counter() - began, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def imported(arguments: list[str], environment: Mapping[str, str]) -> str:
    """Return how many modules a command imports: ours, and all."""
    command = [sys.executable, "-X", "importtime", *arguments]
    where = environment["RUBBERBAND_HOME"]
    lines = subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True, check=True).stderr
    names = [line.split("|")[-1].strip() for line in lines.splitlines() if line.startswith("import time:")]
    return f"{sum(name.startswith('rubberband') for name in names)}, {len(names)}"


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    programs = {BASE: ["-c", BASE]} | {line: ["-m", "rubberband.cli", *line.split()] for line in COMMANDS}
    with tempfile.TemporaryDirectory() as folder:
        user = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        user |= {"PYTHONPATH": str(ROOT), "RUBBERBAND_HOME": f"{folder}/home"}
        Path(folder, "home").mkdir()
        Path(folder, "home", "examples").symlink_to(ROOT / "examples")
        compiled = user | {"PYTHONPYCACHEPREFIX": folder}
        measure(["-c", RUN, f"{folder}/home"], compiled)
        modules = {name: imported(arguments, compiled) for name, arguments in programs.items()}
        shutil.copytree(ROOT / "rubberband", f"{folder}/copy/rubberband", ignore=shutil.ignore_patterns("__pycache__"))
        uncompiled = user | {"PYTHONPATH": f"{folder}/copy", "PYTHONDONTWRITEBYTECODE": "1"}
        processes = [(line, arguments, compiled) for line, arguments in programs.items()]
        for line in NOT_COMPILED:
            processes.append((f"{line}, not compiled", programs[line], uncompiled))
        taken = [[measure(arguments, environment) for _, arguments, environment in processes] for _ in range(rounds)]
    print(
        f"{'process':<50} {'wall s':>8} {'CPU s':>8} {'least':>8} {'x base':>7} {'peak MiB':>9} {'modules':>10}"
        f"   ({rounds} rounds)"
    )
    base_s = None
    for at, (name, _, _) in enumerate(processes):
        wall_s, cpu_s, peak_mib = zip(*(figures[at] for figures in taken), strict=True)
        base_s = base_s or min(cpu_s)
        print(
            f"{name:<50} {statistics.median(wall_s):8.3f} {statistics.median(cpu_s):8.3f} {min(cpu_s):8.3f} "
            f"{min(cpu_s) / base_s:7.2f} {statistics.median(peak_mib):9.1f} {modules.get(name, ''):>10}"
        )


if __name__ == "__main__":
    main()
