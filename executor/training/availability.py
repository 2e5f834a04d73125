"""The CPUs and the memory that a machine has for a worker at the moment (Linux).

CPUs are limited by the quota of the worker's control groups, which is read anew each time, and by what other processes
and the hypervisor take, which is measured over a short while. psutil's figures would count the worker itself as busy.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path

WINDOW_S = 0.2
"""Other processes' use of the CPUs is measured over at least this long: the system counts in hundredths of a second."""
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
        self._stat, self._meminfo = root / "proc/stat", root / "proc/meminfo"
        self._quotas = _quota_files(root)
        self._num_cpus = os.cpu_count() or 1
        affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else self._num_cpus
        self._most = float(min(affinity, num_threads))
        self._free = math.inf
        self._read_at, self._others_s = self._clock(), self._others()
        self._memory, self._memory_until = 1.0, -math.inf

    def cpus(self) -> float:
        """Return the CPUs that this process could use now, at most one for each of its threads."""
        now = self._clock()
        if now - self._read_at >= WINDOW_S:
            others_s = self._others()
            if others_s is not None and self._others_s is not None:
                self._free = self._num_cpus - (others_s - self._others_s) / (now - self._read_at)
            self._read_at, self._others_s = now, others_s
        return max(LEAST_CPUS, min([self._most, self._free, *map(_quota, self._quotas)]))

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

    def _others(self) -> float | None:
        """Return the seconds that other processes and the hypervisor used the CPUs since the start; None: unknown."""
        try:
            with open(self._stat, "rb") as file:
                words = file.readline().split()
            user, nice, system, _, _, irq, softirq, steal = map(int, words[1:9])
        except (OSError, ValueError):
            return None
        busy = user + nice + system + irq + softirq + steal
        return busy / os.sysconf("SC_CLK_TCK") - time.process_time()


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
