"""The CPUs and the memory that a machine has for a worker at the moment (Linux).

CPUs are limited by the quota of the worker's control groups, which is read anew each time. Without one, they are
limited by other processes: by how long the worker's thread stood in the queue while it wanted to run. psutil's figures
would count the worker itself as busy, and all other processes as if they came first.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path

WINDOW_S = 0.2
"""The time in the queue is measured over at least this long."""
MEMORY_S = 1.0
"""The memory is looked at no more often."""
LEAST_CPUS = 0.01


class Availability:
    """What this process can use."""

    def __init__(
        self, num_threads: int, *, root: Path = Path("/"), clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`num_threads`: it uses no more CPUs at once. `root` holds `proc` and `sys`."""
        self._num_threads = num_threads
        self._clock = clock
        self._queue, self._meminfo = root / "proc/thread-self/schedstat", root / "proc/meminfo"
        self._quotas = _quota_files(root)
        affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._most = float(min(affinity, num_threads))
        self._contended = 1.0
        self._read_at, self._queued = self._clock(), self._times()
        self._memory, self._memory_until = 1.0, -math.inf

    def cpus(self) -> float:
        """Return the CPUs that this process could use now, at most one for each of its threads."""
        quota = min(map(_quota, self._quotas), default=math.inf)
        if quota < self._most:
            return max(LEAST_CPUS, quota)
        now = self._clock()
        if now - self._read_at >= WINDOW_S:
            before, self._queued = self._queued, self._times()
            self._read_at = now
            ran_s, waited_s = self._queued[0] - before[0], self._queued[1] - before[1]
            if ran_s > 0.0 and waited_s >= 0.0:
                self._contended = ran_s / (ran_s + waited_s)
        return max(LEAST_CPUS, self._most * self._contended)

    def memory(self) -> float:
        """Return the fraction of the machine's memory that is available; 1 if that is not known."""
        if self._clock() >= self._memory_until:
            self._memory_until = self._clock() + MEMORY_S
            try:
                lines = (line.split() for line in self._meminfo.read_text().splitlines())
                sizes = {words[0]: float(words[1]) for words in lines if len(words) > 1}
                self._memory = sizes["MemAvailable:"] / sizes["MemTotal:"]
            except (OSError, ValueError, KeyError, ZeroDivisionError):
                self._memory = 1.0
        return self._memory

    def _times(self) -> tuple[float, float]:
        """Return the seconds that this thread ran, and stood in the queue; zeros if the system does not count them."""
        try:
            ran_ns, waited_ns, *_ = self._queue.read_text().split()
            return int(ran_ns) / 1e9, int(waited_ns) / 1e9
        except (OSError, ValueError):
            return 0.0, 0.0


def _quota_files(root: Path) -> list[Path]:
    """Return the files with the CPU quotas of this process's control groups, of version 1 or 2."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mounts, name = ["sys/fs/cgroup", "sys/fs/cgroup/unified"], "cpu.max"
        elif "cpu" in controllers.split(","):
            mounts, name = [f"sys/fs/cgroup/{controllers}", "sys/fs/cgroup/cpu"], "cpu.cfs_quota_us"
        else:
            continue
        group = Path(path.lstrip("/"))
        for mount in mounts:
            found += [file for each in (group, *group.parents) if (file := root / mount / each / name).exists()]
    return list(dict.fromkeys(found))


def _quota(file: Path) -> float:
    """Return the CPUs that a control group allows; infinite without a limit."""
    try:
        words = file.read_text().split()
        if len(words) == 1:
            words.append((file.parent / "cpu.cfs_period_us").read_text())
        quota_us, period_us = float(words[0].replace("max", "inf")), float(words[1])
    except (OSError, ValueError, IndexError):
        return math.inf
    return quota_us / period_us if quota_us > 0 else math.inf
