"""Workloads of Pollux on a simulated pool, with the state of each job at each decision."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from measured_models import HOUR_S, POOL, models, worth
from rows import ELSEWHERE_S

from rubberband.planner.sharing import Allocations, Capacity, Counting, Demand, Policy, make_policy
from rubberband.planner.sharing.jobs import TracedJob
from rubberband.planner.sharing.simulation import INTERVAL_S, Outcome, simulate
from rubberband.planning.simulating import ELASTICITY, read_traces

OURS, THEIRS, OPTIMUS, TIRESIAS = "default", "Pollux (p = -1)", "Optimus+Oracle+TunedJobs", "Tiresias+TunedJobs"
UNFAIR, FAIRER = "Pollux (p = +1)", "Pollux (p = -10)"
POLICIES = {
    THEIRS: "fitness:p=-1",
    OPTIMUS: "optimus",
    TIRESIAS: "tiresias",
    UNFAIR: "fitness:p=1",
    FAIRER: "fitness:p=-10",
    OURS: "default",
}
"""Row of Table 2 -> policy; the last one is ours."""


def workloads(folder: Path, most: int) -> list[Path]:
    """Return at most `most` of the workloads in the folder. Exits with one line if there is none."""
    found = sorted((folder / "workloads").glob("workload-*.csv"))[:most]
    if not found:
        raise SystemExit(f"{folder} has no workloads/workload-N.csv; give the folder of the public data")
    return found


@dataclass(frozen=True, slots=True)
class Note:
    """A job that trains, as a decision finds it."""

    gpus: int
    batch_size: int
    efficiency: float

    @property
    def log_batch(self) -> float:
        """Logarithm of its batch, whose mean compares batches of unlike models."""
        return math.log(self.batch_size)


@dataclass(frozen=True, slots=True)
class Decision:
    """Pool at a decision."""

    at: float
    jobs: int
    """Running and waiting ones."""
    notes: Mapping[str, Note]
    took_s: float

    def mean(self, name: str) -> float:
        """Return the mean over the training jobs; nan without any."""
        return mean(getattr(each, name) for each in self.notes.values())


@dataclass(slots=True, kw_only=True)
class Watched:
    """Policy whose decisions are noted."""

    policy: Policy
    jobs: Mapping[str, TracedJob]
    decisions: list[Decision] = field(default_factory=list)

    def allocate(
        self, demands: Sequence[Demand], capacity: Capacity, current: Allocations, now_s: float
    ) -> dict[str, dict[int, int]]:
        """Return the GPUs of the policy."""
        notes = {name: self._note(self.jobs[name]) for name in current}
        began_s = time.perf_counter()
        found = self.policy.allocate(demands, capacity, current, now_s)
        self.decisions.append(Decision(now_s, len(demands), notes, time.perf_counter() - began_s))
        return found

    def _note(self, job: TracedJob) -> Note:
        return Note(sum(job.placement), job.batch_size, worth(job.application, job.batch_size, job.epoch))


Call = tuple[Path, str, float, float, float, bool, bool]
Watch = tuple[Outcome, Sequence[Decision]]
_AHEAD: dict[Call, Future[tuple[Watch, float]]] = {}
"""Simulations that other processes do, with their CPU seconds."""


def call(
    file: Path,
    row: str,
    load: float = 1.0,
    interval_s: float = INTERVAL_S,
    interference: float = 0.0,
    share_machines: bool = False,
    seeded: bool = False,
) -> Call:
    """Name a row of the table on a workload, submitted `load` times as fast; `seeded` jobs have a history."""
    return file, row, load, interval_s, interference, share_machines, seeded


def ahead(calls: Iterable[Call]) -> None:
    """Let a process for each core begin with these simulations, in order."""
    with_cores = ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn"))
    _AHEAD.update({each: with_cores.submit(_timed, each) for each in dict.fromkeys(calls)})
    with_cores.shutdown(wait=False)


def _timed(asked: Call) -> tuple[Watch, float]:
    began_s = time.process_time()
    return _simulated(*asked), time.process_time() - began_s


def outcome(*row: Any, **varied: Any) -> Watch:
    """Simulate what `call` names with the same arguments."""
    return _outcome(call(*row, **varied))


@cache
def _outcome(asked: Call) -> Watch:
    if asked not in _AHEAD:
        return _simulated(*asked)
    found, cpu_s = _AHEAD[asked].result()
    ELSEWHERE_S.append(cpu_s)
    return found


def _simulated(
    file: Path, row: str, load: float, interval_s: float, interference: float, share_machines: bool, seeded: bool
) -> Watch:
    made = make_policy(POLICIES[row])
    first_gpus = made.first_gpus if isinstance(made, Counting) else 1
    folder = file.parents[1]
    elasticity = ELASTICITY.get(POLICIES[row], "adaptive")
    jobs = read_traces(file, folder / "traces", elasticity, first_gpus, models(folder))
    for job in jobs:
        job.submitted_at /= load
        if seeded:
            remember(job)
    if share_machines and isinstance(made, Counting):
        made = replace(made, share_machines=True)
    watched = Watched(policy=made, jobs={job.name: job for job in jobs})
    found = simulate(jobs, POOL, watched, interval_s=interval_s, interference=interference)
    return found, watched.decisions


def remember(job: TracedJob) -> None:
    """Let the job know some steps beforehand: three batches on 1, 2, 4, … GPUs of few instances."""
    app = job.application
    for gpus in (each for each in (1, 2, 4, 8, 16, 32, 64) if each <= app.most_gpus):
        for per_gpu in np.geomspace(app.min_per_gpu, app.max_per_gpu, 3).astype(int).tolist():
            job.time_step(app.packed(gpus), per_gpu)


def mean_h(files: Sequence[Path], row: str, figure: str = "mean_jct_s", *varied: float) -> float:
    """Return the mean over workloads of a figure, in hours; `varied` are those of `outcome`."""
    return mean(outcome(file, row, *varied)[0].summary()[figure] or 0.0 for file in files) / HOUR_S


def mean(values: Iterable[float]) -> float:
    """Return the mean; nan without values."""
    found = list(values)
    return float(np.mean(found)) if found else math.nan


def contended(decisions: Sequence[Decision]) -> tuple[list[Decision], list[Decision]]:
    """Return the third of the decisions with the fewest jobs, and that with the most."""
    low, high = np.quantile([each.jobs for each in decisions], (1 / 3, 2 / 3)) if decisions else (0.0, 0.0)
    return [each for each in decisions if each.jobs <= low], [each for each in decisions if each.jobs >= high]


def lives(file: Path, kind: str, most: int) -> list[list[tuple[Decision, Note]]]:
    """Return the decisions during the first jobs of a model under Pollux, in order of submission."""
    found, decisions = outcome(file, THEIRS)
    names = [job.name for job in found.jobs if job.kind == kind][:most]
    return [[(each, each.notes[name]) for each in decisions if name in each.notes] for name in names]


def phases(life: Sequence[tuple[Decision, Note]]) -> list[list[float]]:
    """Return the means before, at and after the contention of a job: jobs, GPUs, batch, batch a GPU, efficiency."""
    low, high = contended([each for each, _ in life])
    middle = float(np.median([each.at for each in high])) if high else 0.0
    found = []
    for part in ([each for each in low if each.at < middle], high, [each for each in low if each.at > middle]):
        times = {each.at for each in part}
        notes = [note for each, note in life if each.at in times]
        found.append(
            [
                mean(each.jobs for each in part),
                mean(each.gpus for each in notes),
                mean(each.batch_size for each in notes),
                mean(each.batch_size / each.gpus for each in notes),
                mean(each.efficiency for each in notes),
            ]
        )
    return found
