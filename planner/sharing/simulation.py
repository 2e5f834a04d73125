"""A workload on a pool under one policy, on a virtual clock."""

from __future__ import annotations

import math
import time
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from rubberband.planner.sharing.autoscaling import Autoscaling, within
from rubberband.planner.sharing.demand import Allocations, Capacity, Demand, Policy

INTERVAL_S = 60.0
"""Seconds between two decisions (Pollux §5.1)."""
_MOST_IDLE = 60
"""Decisions without an allocation after which the rest of the jobs counts as unfinished."""


class SimulatedJob(Protocol):
    """Job of a workload; changes as it trains."""

    name: str
    submitted_at: float
    weight: float
    done_at: float | None
    moves: int
    attained_gpu_s: float
    speed: float
    """Share of its speed that interference leaves it: 1 without any."""

    @property
    def kind(self) -> str:
        """Name of the model that it trains."""

    def alone_s(self, gpus: int) -> float:
        """Return the seconds from its start to its end with at most `gpus` GPUs of its own; inf if it cannot run."""

    def demand(self, now_s: float, gpus: int) -> Demand:
        """Return its demand on a pool of `gpus` GPUs."""

    def resize(self, placement: tuple[int, ...]) -> None:
        """Give it other GPUs, as counts of instance after instance; none at all stops it."""

    def advance(self, seconds: float, now_s: float) -> None:
        """Train for `seconds`, from `now_s` on."""

    def ends_in_s(self) -> float:
        """Return the seconds until its end if nothing changes; inf if it is not known or has no GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutcome:
    """Result of one job."""

    name: str
    kind: str
    submitted_at: float
    started_at: float | None
    done_at: float | None
    moves: int
    gpu_s: float
    fair_s: float
    """Completion time alone on its fair share of the pool; inf if it cannot run there, or did not end."""

    @property
    def jct_s(self) -> float:
        """Job completion time; inf if it did not end."""
        return math.inf if self.done_at is None else self.done_at - self.submitted_at

    @property
    def fairness(self) -> float:
        """Finish-time fairness rho: `jct_s` over `fair_s`, so that below 1 the pool served it better than a fair share
        (Themis, NSDI '20, §4; Pollux §5.3.1)."""
        return self.jct_s / self.fair_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a workload under one policy."""

    jobs: Sequence[JobOutcome]
    capacity: Capacity
    ended_at: float
    allocated: Sequence[tuple[float, dict[str, int]]]
    """Instants at which the allocations changed, and the GPUs of every job from then on."""
    sizes: Sequence[tuple[float, int]]
    """Instants at which the number of instances changed, and the number from then on."""
    cpu_s: float
    """CPU seconds of the whole simulation."""

    @property
    def jcts_s(self) -> list[float]:
        """Job completion times of those that ended."""
        return [job.jct_s for job in self.jobs if job.done_at is not None]

    @property
    def makespan_s(self) -> float:
        """From the first submission to the last end."""
        return self.ended_at - self.began_at

    @property
    def began_at(self) -> float:
        """Instant of the first submission."""
        return min((job.submitted_at for job in self.jobs), default=0.0)

    @property
    def utilisation(self) -> float:
        """Share of the pool's GPU seconds that were allocated, over the makespan."""
        whole = self.capacity.gpus_per_instance * self.instance_s
        return sum(job.gpu_s for job in self.jobs) / whole if whole else 0.0

    @property
    def instance_s(self) -> float:
        """Seconds of all instances, from the first submission to the last end."""
        ends = [*(at for at, _ in self.sizes[1:]), self.ended_at]
        return sum(instances * (end - at) for (at, instances), end in zip(self.sizes, ends, strict=True))

    @property
    def fairness(self) -> list[float]:
        """Finish-time fairness of the jobs that ended and can run on their fair shares."""
        return [job.fairness for job in self.jobs if math.isfinite(job.fair_s)]

    def summary(self, usd_per_hour: float = 0.0) -> dict[str, float | None]:
        """Return the figures of the workload; `usd_per_hour` is the price of an instance."""
        jcts_s, rhos = self.jcts_s, self.fairness
        mean, median, p99 = (None, None, None)
        if jcts_s:
            mean, median, p99 = float(np.mean(jcts_s)), float(np.median(jcts_s)), float(np.percentile(jcts_s, 99))
        return {
            "mean_jct_s": mean,
            "median_jct_s": median,
            "p99_jct_s": p99,
            "makespan_s": self.makespan_s,
            "utilisation": self.utilisation,
            "mean_finish_time_fairness": float(np.mean(rhos)) if rhos else None,
            "max_finish_time_fairness": max(rhos, default=None),
            "moves_per_job": float(np.mean([job.moves for job in self.jobs])) if self.jobs else 0.0,
            "mean_instances": self.instance_s / self.makespan_s if self.makespan_s else 0.0,
            "cost_usd": usd_per_hour * self.instance_s / 3600.0,
            "unfinished": len(self.jobs) - len(jcts_s),
            "cpu_s": self.cpu_s,
        }


def simulate(
    jobs: Sequence[SimulatedJob],
    capacity: Capacity,
    policy: Policy,
    *,
    interval_s: float | None = INTERVAL_S,
    autoscaling: Autoscaling | None = None,
    interference: float = 0.0,
    after: Callable[[SimulatedJob], Iterable[SimulatedJob]] = lambda ended: (),
) -> Outcome:
    """Run the jobs, which change, to their ends.

    The policy decides at every multiple of `interval_s`; with None, at every arrival and end. With `autoscaling` the
    pool has no instances at first, and those of `capacity` at most. `interference` is the share of its speed that a
    gang loses while it is `interfering`; at least 0 and below 1. `after` returns the jobs that follow one that has
    ended, such as the next trial of a search; they are submitted at its end or later, and have names of their own.
    """
    assert 0.0 <= interference < 1.0, f"interference={interference} is not a share that leaves some speed"
    run = _Simulation(
        jobs=sorted(jobs, key=_submitted_at),
        capacity=capacity,
        policy=policy,
        autoscaling=autoscaling,
        interference=interference,
        after=after,
    )
    began_s = time.process_time()
    while run.waiting or run.active:
        if not run.active:
            run.rest()
            at = run.waiting[0].submitted_at
            run.now_s = max(run.now_s, at if interval_s is None else math.ceil(at / interval_s) * interval_s)
        run.admit()
        run.decide()
        step_s = run.next_event_s() if interval_s is None else interval_s
        if not step_s < math.inf or step_s <= 0.0 or run.idle >= _MOST_IDLE:  # no job runs and none comes
            break
        run.advance(step_s)
    return run.outcome(time.process_time() - began_s)


def interfering(allocations: Allocations) -> set[str]:
    """Return the gangs that span instances and share one of these with another such gang (Pollux §4.2, §5.3.2)."""
    spanning = {name: where for name, where in allocations.items() if len(where) > 1}
    gangs = Counter(number for where in spanning.values() for number in where)
    return {name for name, where in spanning.items() if any(gangs[number] > 1 for number in where)}


def fair_gpus(jobs: Sequence[SimulatedJob], gpus: int, now_s: float) -> list[int]:
    """Return each job's fair share of `gpus` GPUs, at least 1.

    The share is by weight, among the jobs that were there while it was, each for as long as it was there. Jobs without
    an end are there until `now_s`.
    """
    begins = np.asarray([job.submitted_at for job in jobs])
    ends = np.asarray([now_s if job.done_at is None else job.done_at for job in jobs])
    weights = np.asarray([job.weight for job in jobs])
    found = []
    for begin, end, weight in zip(begins, ends, weights, strict=True):
        overlaps_s = np.maximum(0.0, np.minimum(end, ends) - np.maximum(begin, begins))
        present = float(overlaps_s @ weights) / (end - begin) if end > begin else 0.0
        found.append(max(1, round(gpus * weight / max(weight, present))))
    return found


def _submitted_at(job: SimulatedJob) -> float:
    return job.submitted_at


@dataclass(slots=True, kw_only=True)
class _Simulation:
    """State of a simulation."""

    jobs: list[SimulatedJob]
    capacity: Capacity
    policy: Policy
    autoscaling: Autoscaling | None
    interference: float
    after: Callable[[SimulatedJob], Iterable[SimulatedJob]]
    now_s: float = 0.0
    waiting: list[SimulatedJob] = field(default_factory=list)
    active: dict[str, SimulatedJob] = field(default_factory=dict)
    named: set[str] = field(default_factory=set)
    """Names of all jobs so far: a job that follows another needs one of its own."""
    allocations: Allocations = field(default_factory=dict)
    allocated: list[tuple[float, dict[str, int]]] = field(default_factory=list)
    sizes: list[tuple[float, int]] = field(default_factory=list)
    started_at: dict[str, float] = field(default_factory=dict)
    idle: int = 0
    """Decisions in a row that gave no GPUs to any job while none was to come."""

    def __post_init__(self) -> None:
        self.waiting = list(self.jobs)
        if self.autoscaling is None and self.jobs:
            self.sizes = [(self.jobs[0].submitted_at, self.capacity.instances)]

    def admit(self) -> None:
        while self.waiting and self.waiting[0].submitted_at <= self.now_s:
            job = self.waiting.pop(0)
            assert job.name not in self.named, f"two jobs have the name {job.name!r}"
            self.named.add(job.name)
            self.active[job.name] = job

    def decide(self) -> None:
        demands = [job.demand(self.now_s, self.capacity.gpus) for job in self.active.values()]
        current = {name: where for name, where in self.allocations.items() if name in self.active}
        capacity = self._scaled(demands, current)
        kept = within(current, capacity)
        found = self.policy.allocate(demands, capacity, kept, self.now_s)
        for name, job in self.active.items():
            where = found.get(name, {})
            cut = sum(kept.get(name, {}).values()) != sum(current.get(name, {}).values())
            if cut or where != kept.get(name, {}):
                job.resize(tuple(where[number] for number in sorted(where)))
                if where:
                    self.started_at.setdefault(name, self.now_s)
        slowed = interfering(found)
        for name, job in self.active.items():
            job.speed = 1.0 - self.interference if name in slowed else 1.0
        self.allocations = found
        self.idle = 0 if found or self.waiting else self.idle + 1
        counts = {name: sum(where.values()) for name, where in found.items()}
        if not self.allocated or self.allocated[-1][1] != counts:
            self.allocated.append((self.now_s, counts))

    def _scaled(self, demands: Sequence[Demand], current: Allocations) -> Capacity:
        """Return the instances from now on."""
        if self.autoscaling is None:
            return self.capacity
        before = self.sizes[-1][1] if self.sizes else 0
        scale = self.autoscaling.scale(before, demands, self.capacity, self.policy, current, self.now_s)
        self._resize(scale.instances)
        return replace(self.capacity, instances=scale.instances)

    def rest(self) -> None:
        """Release all instances of a pool that scales, as no job is there."""
        if self.autoscaling is not None and self.sizes:
            self._resize(0)

    def _resize(self, instances: int) -> None:
        if not self.sizes or self.sizes[-1][1] != instances:
            self.sizes.append((self.now_s, instances))

    def next_event_s(self) -> float:
        """Return the seconds to the next arrival or end."""
        ends_s = min((job.ends_in_s() for job in self.active.values()), default=math.inf)
        return min(ends_s, self.waiting[0].submitted_at - self.now_s if self.waiting else math.inf)

    def advance(self, seconds: float) -> None:
        for job in self.active.values():
            job.advance(seconds, self.now_s)
        self.now_s += seconds
        ended = [job for job in self.active.values() if job.done_at is not None]
        self.active = {name: job for name, job in self.active.items() if job.done_at is None}
        for job in sorted(ended, key=lambda job: job.done_at or 0.0):
            for following in self.after(job):
                self.jobs.append(following)
                insort(self.waiting, following, key=_submitted_at)

    def outcome(self, cpu_s: float) -> Outcome:
        shares = fair_gpus(self.jobs, self.capacity.gpus, self.now_s)
        jobs = [
            JobOutcome(
                name=job.name,
                kind=job.kind,
                submitted_at=job.submitted_at,
                started_at=self.started_at.get(job.name),
                done_at=job.done_at,
                moves=max(0, job.moves),
                gpu_s=job.attained_gpu_s,
                fair_s=math.inf if job.done_at is None else job.alone_s(share),
            )
            for job, share in zip(self.jobs, shares, strict=True)
        ]
        ends = [job.done_at for job in self.jobs if job.done_at is not None]
        return Outcome(
            jobs=jobs,
            capacity=self.capacity,
            ended_at=self.now_s if len(ends) < len(jobs) else max(ends, default=self.now_s),
            allocated=self.allocated,
            sizes=self.sizes,
            cpu_s=cpu_s,
        )
