"""Prints what a program as a trial costs: the start of a segment, also of a function, and reports through the line.

python -m tests.bench.bench_programs [SEGMENTS] [REPORTS]
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from rubberband.cloud.ray_head.instance import DIRECTORY_TAG
from rubberband.executor import Entrypoint, ForkServer, open_store, run_segment, worker_settings
from rubberband.values.command import Metrics, ProgramCommand, words_of
from tests.builders.segments import SEGMENT

_PROGRAM = """
import os, sys, rubberband
for number in range(int(sys.argv[1])):
    rubberband.report({"loss": 1.0 / (number + 1)})
"""
_FUNCTION = """
import rubberband, torch
@rubberband.distributed
def train(config):
    rubberband.report({"loss": 1.0})
"""


def function_s(folder: Path, segments: int) -> float:
    """Return the seconds of a segment of a function, the median; the first one is left out."""
    entrypoint = Entrypoint.parse("bench_function:train", search_path=[folder])
    segment = replace(SEGMENT, until_iterations=1, max_iterations=1)
    store, found = open_store(str(folder / "store")), []
    for _ in range(segments + 1):
        began = time.perf_counter()
        items = list(run_segment(entrypoint, segment, store))
        found.append(time.perf_counter() - began)
        assert items[-1].iterations == 1, items
    return statistics.median(found[1:])


def segment_s(folder: Path, words: str, iterations: int, metrics: Metrics) -> float:
    """Return the seconds of a segment of a program."""
    command = ProgramCommand(words=words_of(words), metrics=metrics)
    entrypoint = Entrypoint(module="", attribute="", search_path=(str(folder),), command=command)
    segment = replace(SEGMENT, until_iterations=iterations, max_iterations=iterations)
    began = time.perf_counter()
    found = list(run_segment(entrypoint, segment, open_store(str(folder / "store"))))
    seconds = time.perf_counter() - began
    assert found[-1].iterations == iterations, found
    return seconds


def alone_s(folder: Path, words: list[str]) -> float:
    """Return the seconds of the program on its own."""
    began = time.perf_counter()
    subprocess.run(words, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def main() -> None:
    segments, reports = (int(number) for number in (*sys.argv[1:], "9", "2000")[:2])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(_PROGRAM)
        words = [sys.executable, "train.py", "1"]
        pairs = [
            (alone_s(folder, words), segment_s(folder, " ".join([*words, "$${args}"]), 1, Metrics()))
            for _ in range(segments)
        ]
        alone, in_segment = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"a segment of one report: {in_segment:.3f} s; the program on its own: {alone:.3f} s; more by")
        print(f"{in_segment - alone:.3f} s (medians of {segments}, in turn; load {os.getloadavg()[0]:.1f})")
        seconds = segment_s(folder, f"{sys.executable} train.py {reports} $${{args}}", reports, Metrics())
        print(f"{reports} reports in {seconds:.2f} s: {reports / seconds:.0f} a second; none saves files")
        (folder / "bench_function.py").write_text(_FUNCTION)
        os.environ[DIRECTORY_TAG] = name
        os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", **worker_settings(os.environ, "cpu", 1)}
        fresh = function_s(folder, segments)
        server = ForkServer("bench", folder, Entrypoint.parse("bench_function:train", search_path=[folder]))
        forked = function_s(folder, segments)
        server.close()
        print(f"a segment of a function that needs torch: {fresh:.3f} s; forked: {forked:.3f} s")


if __name__ == "__main__":
    main()
