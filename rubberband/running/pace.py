"""How fast a trial trains on this machine, as the check before a run has seen: the level of a profile in the file.

A profile that was written by hand is often another machine's. Its shape over GPUs is kept, and its level is measured.
Logical GPUs of this machine share its cores, with each other and with other programs.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rubberband.cloud.ray_head.instance import cores
from rubberband.executor.core.job import Job
from rubberband.executor.training.check_findings import TrialCheck
from rubberband.values.profile import Profile

MOST_OFF = 0.15
"""Share by which the measured level may differ from the profile's."""
_LEAST_STARTUP_S = 0.05
_LEAST_WINDOW_S = 0.1
_RUN_CORES = 0.08
"""Cores that the driver and Ray's processes keep busy during a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Measured with one worker, without the time in which other processes had its CPU."""

    iteration_s: float
    """Seconds of an iteration after the first one."""
    cores: float
    """Cores that it kept busy."""
    startup_s: float | None
    """Seconds to start a trial from its checkpoint in a process that has imported it; None: not known."""

    @classmethod
    def of(cls, found: TrialCheck) -> Pace | None:
        """Return the pace of a checked trial; None if no iteration but the first was trained alone.

        None too for what computes in another process, as a distributed function: its start is in its iteration.
        """
        if found.kind not in ("TorchTrial", "Trial", "function") or "continue" not in found.own:
            return None
        if found.first_extra_s is not None:
            return None
        own_s, cpu_s = found.own["continue"]
        if own_s <= 0.0:
            return None
        startup_s = None if found.kind == "function" else found.own["restore"][0]
        return cls(iteration_s=own_s, cores=cpu_s / own_s, startup_s=startup_s)

    def beside(self, workers: int, others: float) -> float:
        """Return how many times longer an iteration takes where `workers` train on this machine's cores.

        `others`: cores that other programs keep busy.
        """
        busy, wanted = min(1.0, self.cores), workers * self.cores + _RUN_CORES
        # A container's quota is its own; others load the processors, of which it may see more.
        shortage = max(1.0, wanted / cores(), (wanted + others) / processors())
        return 1.0 - busy + busy * shortage


def paced(profile: Profile, pace: Pace, job: Job, others: float) -> tuple[Profile, str] | None:
    """Return the profile at the measured level, for a job that was planned with it, and a line that says so.

    None where the level differs by at most `MOST_OFF`, or is not comparable: nothing is known of one GPU, or a model
    gives the times. A start that is shorter here stays as written, as a gang's takes longer than that of one worker.
    """
    is_modelled = profile.goodput is not None or profile.asynchronous is not None
    if profile.source != "inline" or profile.smallest_gpus > 1 or is_modelled:
        return None
    seconds = _workers(job)
    longer = _weighted({workers: pace.beside(workers, others) for workers in seconds}, seconds)
    iteration_s, written_s = pace.iteration_s * longer, profile.iteration_s(1)
    startup_s = profile.trial_startup_s
    here_s = 0.0 if pace.startup_s is None else pace.startup_s * longer
    if here_s - startup_s > max(_LEAST_STARTUP_S, MOST_OFF * startup_s):
        startup_s = here_s
    found = list[str]()
    if abs(iteration_s / written_s - 1.0) > MOST_OFF:
        alone = f" ({pace.iteration_s:.2g} s on a core of its own)" if longer > 1.0 + MOST_OFF else ""
        found.append(f"{iteration_s:.2g} s an iteration{alone}, profile {written_s:.2g} s")
    else:
        iteration_s = written_s
    if startup_s != profile.trial_startup_s:
        found.append(f"{startup_s:.2g} s to start a trial, profile {profile.trial_startup_s:.2g} s")
    if not found:
        return None
    table = {gpus: each_s * iteration_s / written_s for gpus, each_s in profile.seconds_per_iteration.items()}
    changed = replace(profile, seconds_per_iteration=table, trial_startup_s=startup_s)
    return changed, f"this machine: {'; '.join(found)}; planned as measured here"


def _workers(job: Job) -> Mapping[int, float]:
    """Return workers that train at once -> planned seconds."""
    found = dict[int, float]()
    for choice, predicted, stage in zip(job.plan.stages, job.prediction.stages, job.stages, strict=True):
        workers = min(predicted.slots, stage.trials) * choice.gpus_per_trial
        found[workers] = found.get(workers, 0.0) + predicted.duration_s
    return found


def _weighted(values: Mapping[int, float], weights: Mapping[int, float]) -> float:
    return math.fsum(values[key] * weight for key, weight in weights.items()) / math.fsum(weights.values())


def processors() -> int:
    """Return the number of processors that this process may run on, whatever its control group's quota."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class OtherLoad:
    """Load of other programs on this machine's cores since this object was made."""

    def __init__(self) -> None:
        self._begun = self._seen()

    def cores(self) -> float:
        """Return how many of the cores that this process may use others keep busy; 0 where the system cannot say."""
        time.sleep(max(0.0, _LEAST_WINDOW_S - (time.monotonic() - self._begun[0])))
        now_s, busy_s, own_s = (now - then for now, then in zip(self._seen(), self._begun, strict=True))
        return max(0.0, (busy_s - own_s) / now_s)

    @staticmethod
    def _seen() -> tuple[float, float, float]:
        """Return a clock, the seconds that the cores were busy, and those for this process and its ended children."""
        usage = os.times()
        own_s = usage.user + usage.system + usage.children_user + usage.children_system
        try:
            lines = Path("/proc/stat").read_text().splitlines()
        except OSError:
            return time.monotonic(), own_s, own_s
        mine, tick_s = os.sched_getaffinity(0), 1.0 / os.sysconf("SC_CLK_TCK")
        rows = [line.split() for line in lines if line.startswith("cpu") and line[3:4].isdigit()]
        # user and system time; programs of lower priority give way
        busy = sum(int(row[1]) + int(row[3]) for row in rows if int(row[0][3:]) in mine)
        return time.monotonic(), busy * tick_s, own_s
