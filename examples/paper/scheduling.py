"""Scheduling of §IV to §VI on asynchronous SGD: policies on 100 nodes, and Figures 1 and 12 to 14."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import numpy as np
from parameter_server import hybrid
from rows import Found, Statement, Table, listed, percent, series, verdict

from rubberband.planner.queueing import Network
from rubberband.planner.sharing import Capacity, Counting, Policy, make_policy
from rubberband.planner.sharing.demand import Ints
from rubberband.planner.sharing.demand import Table as Demands
from rubberband.planner.sharing.jobs import CurveJob
from rubberband.planner.sharing.policies import filled
from rubberband.planner.sharing.simulation import simulate

NODES = 100
GPU_TFLOPS = 1.229
"""NVIDIA Grid K520."""
MB_PER_S = 125.0
"""1 Gbps."""
EXAMPLES_PER_STEP = 1024
EPOCHS_VARIANCE = 2.0
LOADS = (0.1, 0.3, 0.5, 0.7)
NUM_JOBS = 400
"""Jobs of a point; all policies get the same ones."""
ALPHA_LOW, ALPHA_HIGH = 0.01, 0.05
"""Range of alpha of the moldable KNEE (§IV-C)."""
HOUR_S = 3600.0
UNFINISHED = 0.05
"""A policy is called unstable if more of the jobs than this are unfinished when the last one arrives."""


class Dnn(NamedTuple):
    """A row of Table III."""

    examples: float
    megabytes: float
    tflops: float
    """Per step of 1024 examples."""
    epochs: int


DNNS = {
    "NiN": Dnn(50e3, 30, 6.7, 200),
    "GoogLeNet": Dnn(1.2e6, 54, 9.7, 200),
    "AlexNet": Dnn(1.2e6, 249, 7.0, 90),
    "VGG19": Dnn(1.2e6, 575, 120, 74),
}
WORKLOADS = {"four DNNs": tuple(DNNS), "two large DNNs": ("AlexNet", "VGG19")}
Kinds = tuple[str, ...]


@cache
def seconds(name: str) -> np.ndarray:
    """Return S(1), …, S(100): seconds of a training of the mean number of epochs."""
    dnn = DNNS[name]
    link_s = dnn.megabytes / MB_PER_S
    station = Network(delay_s=dnn.tflops / GPU_TFLOPS, up_s=link_s, server_s=0.0, down_s=link_s)
    steps = dnn.examples * dnn.epochs / EXAMPLES_PER_STEP
    found: np.ndarray = np.minimum.accumulate(steps / hybrid(station, NODES))
    return found


@dataclass(slots=True, kw_only=True)
class Job(CurveJob):
    """Job that notes when 40 % of it are done (Figure 14)."""

    early_at: float | None = None

    def advance(self, seconds: float, now_s: float) -> None:
        before, rest_s = self.left, self.ends_in_s()
        CurveJob.advance(self, seconds, now_s)
        if self.early_at is None and self.left <= 0.6:
            self.early_at = now_s + (before - 0.6) / before * rest_s


def workload(load: float, num_jobs: int, kinds: Kinds) -> list[Job]:
    """Return jobs of random kinds that arrive as a Poisson process with this load."""
    random = np.random.default_rng(7)
    mean_s = float(np.mean([seconds(kind)[0] for kind in kinds]))
    arrivals_s = np.cumsum(random.exponential(mean_s / (load * NODES), num_jobs))
    jobs = []
    for number, at in enumerate(arrivals_s.tolist()):
        kind = kinds[int(random.integers(len(kinds)))]
        epochs = max(1.0, random.normal(DNNS[kind].epochs, EPOCHS_VARIANCE**0.5))
        scaled = seconds(kind) * epochs / DNNS[kind].epochs
        jobs.append(Job(name=f"job-{number}", submitted_at=at, kind=kind, seconds=scaled.tolist()))
    return jobs


class Point(NamedTuple):
    """Policy at one load."""

    mean_h: float
    """Mean response time; the first tenth of the jobs fills the empty pool and does not count."""
    is_stable: bool
    size: int = 0
    """Nodes of a chunk."""


def measure(jobs: Sequence[CurveJob], size: int = 0) -> Point:
    """Return the mean response of jobs that ended, in order of arrival."""
    ends_s = [job.done_at or 0.0 for job in jobs]
    hours = [(end_s - job.submitted_at) / HOUR_S for end_s, job in zip(ends_s, jobs, strict=True)]
    unfinished = sum(end_s > jobs[-1].submitted_at for end_s in ends_s)
    return Point(float(np.mean(hours[len(jobs) // 10 :])), unfinished <= UNFINISHED * len(jobs), size)


def run(policy: Policy, load: float, num_jobs: int, kinds: Kinds) -> list[Job]:
    """Simulate a policy on the nodes; it decides at every arrival and every end, and resizing is free."""
    jobs = workload(load, num_jobs, kinds)
    simulate(jobs, Capacity(instances=NODES, gpus_per_instance=1), policy, interval_s=None)
    return jobs


def one_each(demands: Demands) -> Ints:
    """Give one node to each job, in order of arrival, and then fill by eq. 5 (Waterfill, §V-B)."""
    gpus = demands.floor.copy()
    gpus[demands.by_arrival()[: demands.gpus]] = 1
    return filled(demands, gpus, demands.gpus - int(gpus.sum()))


@cache
def jsq_chunk(load: float, num_jobs: int, kinds: Kinds) -> Point:
    """Return the result of JSQ-Chunk with its best chunk: a job joins the shortest queue, and stays (Berg et al.)."""
    jobs = workload(load, num_jobs, kinds)
    return min((chunked(size, jobs) for size in range(7, 41)), key=lambda each: each.mean_h)


def chunked(size: int, jobs: Sequence[CurveJob]) -> Point:
    """Return the result with chunks of `size` nodes, which serve their jobs in order of arrival."""
    queues = [deque[float]() for _ in range(NODES // size)]
    for job in jobs:
        for queue in queues:
            while queue and queue[0] <= job.submitted_at:
                queue.popleft()
        shortest = min(queues, key=len)
        job.done_at = max(job.submitted_at, shortest[-1] if shortest else 0.0) + job.seconds[size - 1]
        shortest.append(job.done_at)
    return measure(jobs, size)


def figure_1(small: bool) -> Found:
    """Mean response time of AlexNet, HELL and JSQ-Chunk with its best chunk."""
    loads, num_jobs = ((0.3, 0.6), 60) if small else ((0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.66), NUM_JOBS)
    hells = [measure(run(make_policy("hell"), load, num_jobs, ("AlexNet",))).mean_h for load in loads]
    chunks = [jsq_chunk(load, num_jobs, ("AlexNet",)) for load in loads]
    over = [chunk.mean_h / hell for hell, chunk in zip(hells, chunks, strict=True)]
    speedups, days = seconds("AlexNet")[0] / seconds("AlexNet"), float(seconds("AlexNet")[0]) / 86400.0
    yield Statement(
        "E[S(1)] = 12 days, and the speed-up is almost linear for 2-4 workers, saturates gradually for 5-9 workers, "
        "and then converges to 4.8.",
        verdict(abs(days - 12.0) < 0.5, speedups[3] > 3.2, abs(speedups[-1] - 4.8) < 0.1),
        f"{days:.1f} days; speed-ups of 2, 3, … nodes: {listed(speedups[1:10])}; at last {speedups[-1]:.2f}.",
    )
    yield Statement(
        "Where job sizes are not exponentially distributed, better heuristics than JSQ-Chunk can be constructed.",
        verdict(*(each > 1.0 for each in over)),
        f"JSQ-Chunk takes {listed(over)} times as long as HELL.",
    )
    hours = {"HELL, hours": hells, "JSQ-Chunk, hours": [chunk.mean_h for chunk in chunks]}
    yield series("load", loads, hours | {"nodes of its chunk": [chunk.size for chunk in chunks]}, digits=1)


class Sweep(NamedTuple):
    loads: Sequence[float]
    points: Mapping[str, Sequence[Point]]

    def over(self, one: str, other: str) -> list[float]:
        """Return the mean of one policy over that of another, by load."""
        return [a.mean_h / b.mean_h for a, b in zip(self.points[one], self.points[other], strict=True)]

    def table(self, name: str) -> Table:
        """Return the hours; a star marks an unstable policy."""
        hours = {
            policy: [f"{each.mean_h:.1f}{'' if each.is_stable else '*'}" for each in points]
            for policy, points in self.points.items()
        }
        return series(f"load, {name}", self.loads, hours)


MALLEABLE = {
    "srpt": partial(make_policy, "srpt"),
    "knee": partial(make_policy, "knee", alpha=ALPHA_LOW),
    "hell": partial(make_policy, "hell"),
    "waterfill": partial(Counting, count=one_each),
    "default": partial(make_policy, "default"),
}
MOLDABLE = {
    "knee": partial(make_policy, "knee", alpha=(ALPHA_LOW, ALPHA_HIGH), resizing="moldable"),
    "knee, one alpha": partial(make_policy, "knee", alpha=ALPHA_LOW, resizing="moldable"),
    "hell": partial(make_policy, "hell", resizing="moldable"),
}


@cache
def sweep(kinds: Kinds, moldable: bool, small: bool) -> Sweep:
    """Simulate the policies of Figures 12 and 13."""
    loads, num_jobs = ((0.2, 0.7), 40) if small else (LOADS, NUM_JOBS)
    policies: dict[str, Callable[[], Policy]] = MOLDABLE if moldable else MALLEABLE
    found = {
        name: [measure(run(policy(), load, num_jobs, kinds)) for load in loads] for name, policy in policies.items()
    }
    return Sweep(loads, {**found, "jsq-chunk": [jsq_chunk(load, num_jobs, kinds) for load in loads]})


SCHEDULING = (
    "Times of an update: Table III's sizes over 1 Gbit/s each way, TFLOPS over the K520's 1.229; the server's own time "
    "is 0, and its node does not count. Throughput by hybrid MVA. Resizing is free. 400 jobs a point (the paper runs "
    "until its confidence intervals are below 5 %), the first tenth left out; *: more than 5 % are unfinished when "
    "the last one arrives, so that the mean grows with their number."
)


def against_chunks(says: str, four: Sweep, large: Sweep) -> Statement:
    """Compare KNEE and HELL with JSQ-Chunk on both workloads."""
    knee, hell = four.over("jsq-chunk", "knee"), four.over("jsq-chunk", "hell")
    others = large.over("jsq-chunk", "knee"), large.over("jsq-chunk", "hell")
    return Statement(
        says,
        verdict(*(min(each) > 1.0 for each in (knee, hell, *others))),
        f"JSQ-Chunk over KNEE: {listed(knee)}; over HELL: {listed(hell)}.",
    )


def figure_12(small: bool) -> Found:
    """Malleable scheduling of 100 nodes."""
    four, large = (sweep(kinds, False, small) for kinds in WORKLOADS.values())
    papers = zip(*(four.points[name] for name in ("srpt", "waterfill", "knee", "hell")), strict=True)
    worst = [points[0] == max(points) for points in papers]
    unstable = [load for load, each in zip(four.loads, four.points["srpt"], strict=True) if not each.is_stable]
    water, knees = four.over("waterfill", "hell"), four.over("knee", "hell")
    yield Statement(
        "SRPT produces the worst performance since it wastes resources for small marginal gains.",
        verdict(*worst),
        f"It is the worst at {sum(worst)} of {len(worst)} loads, and unstable at "
        f"{', '.join(map(str, unstable)) or 'no load'}.",
    )
    yield Statement(
        "Waterfill also performs poorly, since it runs too many jobs simultaneously.",
        verdict(*(each > 1.1 for each in water)),
        f"It takes {listed(water)} times as long as HELL, from the lowest load to the highest.",
    )
    yield Statement(
        "KNEE and HELL achieve similar performance when the system load is low; when it is high, KNEE performs worse.",
        verdict(0.85 <= knees[0] <= 1.15, knees[-1] > 1.05),
        f"KNEE over HELL: {listed(knees)}.",
    )
    yield against_chunks("Both policies perform better than JSQ-Chunk with multiple speedup functions.", four, large)
    yield from (each.table(name) for name, each in zip(WORKLOADS, (four, large), strict=True))
    yield SCHEDULING
    yield f"'default' is the product's: its mean over HELL's is {listed(four.over('default', 'hell'))}."


def figure_13(small: bool) -> Found:
    """Moldable scheduling of 100 nodes."""
    four, large = (sweep(kinds, True, small) for kinds in WORKLOADS.values())
    knees, single = four.over("knee", "hell"), four.over("knee, one alpha", "knee")
    yield Statement(
        "Moldable HELL and KNEE perform similarly when the system utilization is low, but the KNEE mechanism "
        "outperforms the HELL mechanism at higher loads.",
        verdict(0.8 <= knees[0] <= 1.25, knees[-1] < 1.0),
        f"KNEE over HELL: {listed(knees)}.",
    )
    yield Statement(
        "This is due to the load-dependent alpha.",
        verdict(single[-1] > 1.05),
        f"With alpha = {ALPHA_LOW:g} at every load KNEE takes {listed(single)} times as long as with one that "
        "follows the load.",
    )
    yield against_chunks("Both heuristics perform better than JSQ-Chunk with multiple speedup functions.", four, large)
    yield from (each.table(name) for name, each in zip(WORKLOADS, (four, large), strict=True))
    yield SCHEDULING
    yield (
        f"The paper does not print its range of alpha: {ALPHA_LOW:g} to {ALPHA_HIGH:g}. Its alpha knows the load; here "
        "the policy observes it, as the speed-ups of the other jobs over the nodes."
    )


def figure_14(small: bool) -> Found:
    """Early termination: hours until 40 % of a job is done."""
    load, num_jobs, found = 0.7, 40 if small else NUM_JOBS, {}
    for gamma in (0.0, 1.0, 1.05, 1.5):
        kept = run(make_policy("hell", gamma=gamma), load, num_jobs, tuple(DNNS))[num_jobs // 10 :]
        ends_s = [(job.early_at - job.submitted_at, job.done_at - job.submitted_at) for job in kept]
        found[gamma] = tuple(float(np.mean(each)) / HOUR_S for each in zip(*ends_s, strict=True))
    (early_0, whole_0), (early_1, whole_1) = found[0.0], found[1.05]
    yield Statement(
        "Without the extension, the mean time to complete 40 % of the job requires around 41 hours, with gamma = 1.05 "
        "only about 26.8 hours.",
        verdict(early_1 < 0.9 * early_0, abs(early_0 / 41.0 - 1.0) < 0.25),
        f"At a load of {load:g} (theirs is not given): {early_0:.1f} and {early_1:.1f} hours, "
        f"{percent(1.0 - early_1 / early_0)} less (theirs: 35 %).",
    )
    yield Statement(
        "This comes at the cost of increasing the mean response time for completing the entire job.",
        verdict(whole_1 > whole_0),
        f"It takes {whole_0:.1f} and {whole_1:.1f} hours.",
    )
    rows = [(f"{gamma:g}", *hours) for gamma, hours in found.items()]
    yield Table(("gamma", "hours to 40 %", "hours to all"), rows, digits=1)
