"""What measuring the use of machines costs: the CPU of the looks, and the bytes that a journal grows by in an hour.

Run: python -m tests.bench.bench_machine_use [SECONDS [CHILDREN]]

A process trains in Python on one core beside CHILDREN processes of its own, with a meter and without in turns, five
times SECONDS each. The thread's CPU is that of its looks alone, over the time: a ratio that other work on the machine
changes little. `beside` is the part by which a loop with a meter does less than without, per second of its CPU.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from statistics import median
from typing import Any

import psutil

from rubberband.executor.core.events import TrialReported
from rubberband.executor.journal.journal import encode_event
from rubberband.executor.training.metering import Gpu, Meter
from rubberband.values.machine_use import MachineUse


class Counted(Meter):
    """Adds up the CPU seconds of its looks."""

    spent_s = 0.0
    looks = 0

    def _look(self, gpu: Gpu | None = None, *, is_last: bool = False) -> float:
        spent_s = super()._look(gpu, is_last=is_last)
        self.spent_s, self.looks = self.spent_s + spent_s, self.looks + 1
        return spent_s


def loops(seconds: float) -> float:
    """Return the rounds of a loop in Python per second of this thread's CPU."""
    done, began_s, until = 0, time.thread_time(), time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(1000))
        done += 1
    return done / (time.thread_time() - began_s)


def main(seconds: float = 60.0, children: int = 4) -> None:
    sleepers = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(36000)"]) for _ in range(children)]
    try:
        shares, beside, looks = [], [], 0
        for _ in range(5):
            alone = loops(seconds)
            meter = Counted({})
            began = time.monotonic()
            metered = loops(seconds)
            rows = meter.take(is_last=True)
            shares.append(meter.spent_s / (time.monotonic() - began))
            beside.append(1.0 - metered / alone)
            looks += meter.looks
    finally:
        for each in sleepers:
            each.kill()
            each.wait()
    print(f"{len(psutil.pids())} processes on the machine, {children} children, {looks} looks in {5 * seconds:.0f} s")
    print(f"CPU of the looks: {1e2 * median(shares):.3f} % of one CPU (each: {[f'{1e2 * one:.3f}' for one in shares]})")
    print(f"beside: the loop does {1e2 * median(beside):.2f} % less per second of its CPU (noise of the same size)")
    print(f"journal: {growth_bytes(rows[-1]) / 1e3:.1f} kB for an hour of a trial, a row a minute")


def growth_bytes(row: MachineUse) -> int:
    """Return the bytes that an hour of rows like this one, with a GPU, adds to a journal."""
    full = replace(row, gpu=0.634, gpu_memory_bytes=41_234_567_890, watts=231.4, data_s=12.613, peers_s=1.912)
    event: dict[str, Any] = {"occurred_at": 1.0, "trial": 0, "attempt": 1, "iterations": 1, "metrics": {}}
    with_rows = TrialReported(**event, checkpoint=None, use=(full,) * 60)
    return len(encode_event(with_rows)[1]) - len(encode_event(replace(with_rows, use=()))[1])


if __name__ == "__main__":
    main(*map(float, sys.argv[1:2]), *map(int, sys.argv[2:3]))
