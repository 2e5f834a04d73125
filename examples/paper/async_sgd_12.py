"""Figures 12, 13 and 14 on asynchronous SGD: scheduling heuristics on 100 nodes, from a load of 0.1 to 0.8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import common
import numpy as np
from common import COLOURS, Finding, Report, Table, line, verdict
from page import Figure, panels

from rubberband.planner.queueing import Network, exact
from rubberband.planner.sharing import Capacity, make_policy
from rubberband.planner.sharing.jobs import CurveJob
from rubberband.planner.sharing.simulation import simulate

NODES = 100
GPU_TFLOPS = 1.229
"""NVIDIA Grid K520."""
MB_PER_S = 125.0
"""1 Gbps."""
EXAMPLES_PER_STEP = 1024
EPOCHS_VARIANCE = 2.0
LOADS = (0.1, 0.2, 0.3, 0.5, 0.6, 0.7)
ALPHA_LOW, ALPHA_HIGH = 0.01, 0.05
"""Range of alpha of the moldable KNEE (§IV-C)."""
HOUR_S = 3600.0
UNFINISHED = 0.05
"""A policy is called unstable if more of the jobs than this are unfinished when the last one arrives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dnn:
    """A row of Table III."""

    examples: float
    megabytes: float
    tflops: float
    """Per step of 1024 examples."""
    epochs: int


DNNS = {
    "NiN": Dnn(examples=50e3, megabytes=30, tflops=6.7, epochs=200),
    "GoogLeNet": Dnn(examples=1.2e6, megabytes=54, tflops=9.7, epochs=200),
    "AlexNet": Dnn(examples=1.2e6, megabytes=249, tflops=7.0, epochs=90),
    "VGG19": Dnn(examples=1.2e6, megabytes=575, tflops=120, epochs=74),
}
LARGE = ("AlexNet", "VGG19")


@lru_cache
def seconds(name: str) -> np.ndarray:
    """Return S(1), …, S(100): seconds of a training of the mean number of epochs."""
    dnn = DNNS[name]
    link_s = dnn.megabytes / MB_PER_S
    station = Network(delay_s=dnn.tflops / GPU_TFLOPS, up_s=link_s, server_s=0.0, down_s=link_s)
    steps = dnn.examples * dnn.epochs / EXAMPLES_PER_STEP
    found: np.ndarray = np.minimum.accumulate(steps / exact(station, NODES))
    return found


def workload(load: float, num_jobs: int, kinds: Sequence[str], seed: int = 7) -> list[CurveJob]:
    """Return jobs of random kinds that arrive as a Poisson process with this load."""
    random = np.random.default_rng(seed)
    mean_s = float(np.mean([seconds(kind)[0] for kind in kinds]))
    arrivals_s = np.cumsum(random.exponential(mean_s / (load * NODES), num_jobs))
    jobs = []
    for number, at in enumerate(arrivals_s.tolist()):
        kind = kinds[int(random.integers(len(kinds)))]
        epochs = max(1.0, random.normal(DNNS[kind].epochs, EPOCHS_VARIANCE**0.5))
        scaled = seconds(kind) * epochs / DNNS[kind].epochs
        jobs.append(CurveJob(name=f"job-{number}", submitted_at=at, kind=kind, seconds=scaled.tolist()))
    return jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A policy at one load."""

    mean_h: float
    """Mean response time; the first tenth of the jobs fills the empty pool and does not count."""
    is_stable: bool
    """Whether at most 5 % of the jobs are unfinished when the last one arrives."""
    responses_h: Sequence[float]


@cache
def point(policy: str, load: float, num_jobs: int, kinds: tuple[str, ...], **options: Any) -> Point:
    """Simulate a policy; it decides at every arrival and every end, and resizing is free."""
    jobs = workload(load, num_jobs, kinds)
    pool = Capacity(instances=NODES, gpus_per_instance=1)
    outcome = simulate(jobs, pool, make_policy(policy, **options), interval_s=None)
    responses_h = [job.jct_s / HOUR_S for job in outcome.jobs]
    kept_h = responses_h[num_jobs // 10 :]
    last_at = outcome.jobs[-1].submitted_at
    unfinished = sum((job.done_at or 0.0) > last_at for job in outcome.jobs)
    return Point(mean_h=float(np.mean(kept_h)), is_stable=unfinished <= UNFINISHED * num_jobs, responses_h=kept_h)


def alpha(load: float) -> float:
    """Return alpha(x) = alpha_L + x (alpha_H - alpha_L), so that a busy pool gives each job fewer nodes."""
    return ALPHA_LOW + load * (ALPHA_HIGH - ALPHA_LOW)


Curves = Mapping[str, Sequence[Point]]


def malleable(loads: Sequence[float], num_jobs: int, kinds: tuple[str, ...]) -> Curves:
    """Return the policies of Figure 12, and the default."""
    options: dict[str, dict[str, Any]] = {
        "srpt": {},
        "equal": {},
        "knee": {"alpha": ALPHA_LOW},
        "hell": {},
        "default": {},
    }
    return {name: [point(name, load, num_jobs, kinds, **more) for load in loads] for name, more in options.items()}


def moldable(loads: Sequence[float], num_jobs: int, kinds: tuple[str, ...]) -> Curves:
    """Return the policies of Figure 13."""
    return {
        "knee": [point("knee", load, num_jobs, kinds, alpha=alpha(load), resizing="moldable") for load in loads],
        "hell": [point("hell", load, num_jobs, kinds, resizing="moldable") for load in loads],
    }


@dataclass(slots=True, kw_only=True)
class WatchedJob(CurveJob):
    """Job that notes when a share of it is done."""

    share: float
    reached_at: float | None = None

    def advance(self, seconds: float, now_s: float) -> None:
        """Train for `seconds`, from `now_s` on."""
        before, rest_s = self.left, self.ends_in_s()
        CurveJob.advance(self, seconds, now_s)
        if self.reached_at is None and self.left <= 1.0 - self.share:
            self.reached_at = now_s + (before - (1.0 - self.share)) / before * rest_s


@lru_cache
def early_h(gamma: float, load: float, num_jobs: int, share: float = 0.4) -> tuple[float, float]:
    """Return the mean hours until `share` of a job is done, and until all of it is, under HELL(gamma) (Figure 14)."""
    jobs = [
        WatchedJob(name=job.name, submitted_at=job.submitted_at, kind=job.kind, seconds=job.seconds, share=share)
        for job in workload(load, num_jobs, tuple(DNNS))
    ]
    pool = Capacity(instances=NODES, gpus_per_instance=1)
    simulate(jobs, pool, make_policy("hell", gamma=gamma), interval_s=None)
    kept = jobs[num_jobs // 10 :]
    early = [(job.reached_at - job.submitted_at) / HOUR_S for job in kept if job.reached_at is not None]
    whole = [(job.done_at - job.submitted_at) / HOUR_S for job in kept if job.done_at is not None]
    return float(np.mean(early)), float(np.mean(whole))


GAMMAS = (0.0, 1.0, 1.05, 1.5)
EARLY_LOAD = 0.7


def findings(elastic: Curves, fixed: Curves, loads: Sequence[float], num_jobs: int) -> list[Finding]:
    """Return the statements of sections V-B and VI-B."""
    low, high = 0, len(loads) - 1
    mean = {name: [each.mean_h for each in points] for name, points in elastic.items()}
    rigid = {name: [each.mean_h for each in points] for name, points in fixed.items()}
    worst = [max(mean, key=lambda name: mean[name][at]) == "srpt" for at in range(len(loads))]
    unstable = [f"{load:g}" for load, each in zip(loads, elastic["srpt"], strict=True) if not each.is_stable]
    near = mean["knee"][low] / mean["hell"][low]
    (early_0, whole_0), (early_1, whole_1) = (early_h(gamma, EARLY_LOAD, num_jobs) for gamma in (0.0, 1.05))
    ours = [mean["default"][at] / mean["hell"][at] for at in range(len(loads))]
    return [
        Finding(
            says="SRPT produces the worst performance since it wastes resources for small marginal gains.",
            verdict=verdict(*worst),
            found=f"It is the worst at {sum(worst)} of {len(loads)} loads, and unstable at "
            f"{', '.join(unstable) or 'no load'}.",
        ),
        Finding(
            says="The KNEE and HELL heuristics achieve similar performance when the system load is low.",
            verdict=verdict(0.85 <= near <= 1.15),
            found=f"At a load of {loads[low]:g} KNEE's mean is {near:.2f}x HELL's.",
        ),
        Finding(
            says="When the system load is high, the KNEE heuristic performs worse than the HELL heuristic.",
            verdict=verdict(mean["knee"][high] > 1.05 * mean["hell"][high]),
            found=f"At {loads[high]:g} it takes {mean['knee'][high] / mean['hell'][high]:.1f}x as long.",
        ),
        Finding(
            says="Moldable HELL and KNEE perform similarly when the system utilization is low, but the KNEE mechanism "
            "outperforms the HELL mechanism at higher loads.",
            verdict=verdict(
                0.8 <= rigid["knee"][low] / rigid["hell"][low] <= 1.25, rigid["knee"][high] < rigid["hell"][high]
            ),
            found=f"KNEE's mean is {rigid['knee'][low] / rigid['hell'][low]:.2f}x HELL's at {loads[low]:g} and "
            f"{rigid['knee'][high] / rigid['hell'][high]:.2f}x at {loads[high]:g}.",
        ),
        Finding(
            says="Without the extension, the mean time to complete 40% of the job requires around 41 hours, while our "
            "extension with gamma = 1.05 results in only about 26.8 hours. However, this type of improvement comes at "
            "the cost of increasing the mean response time for completing the entire job.",
            verdict=verdict(early_1 < 0.9 * early_0, whole_1 > whole_0),
            found=f"At a load of {EARLY_LOAD:g} (theirs is not given): {early_0:.1f} and {early_1:.1f} hours; the "
            f"whole job takes {whole_0:.1f} and {whole_1:.1f}.",
        ),
        Finding(
            says="(Ours.) The default policy is better than HELL.",
            verdict=verdict(*(ratio < 1.0 for ratio in ours)),
            found="Its mean over HELL's: "
            + ", ".join(f"{ratio:.2f} at {load:g}" for load, ratio in zip(loads, ours, strict=True))
            + ".",
        ),
    ]


def compute(loads: Sequence[float] = LOADS, num_jobs: int = 1000) -> Report:
    """Compute both workloads of Figures 12 and 13, and Figure 14."""
    workloads = {"four DNNs": tuple(DNNS), "two large DNNs": LARGE}
    elastic = {name: malleable(loads, num_jobs, kinds) for name, kinds in workloads.items()}
    fixed = {name: moldable(loads, num_jobs, kinds) for name, kinds in workloads.items()}
    tables = [
        Table(
            title=f"Mean response time in hours, {what} jobs, {name} (*: unstable)",
            columns=("load", *curves),
            rows=[(f"{load:g}", *(shown(points[at]) for points in curves.values())) for at, load in enumerate(loads)],
        )
        for what, every in (("malleable", elastic), ("moldable", fixed))
        for name, curves in every.items()
    ]
    rows = [(f"{gamma:g}", *(f"{hours:.1f}" for hours in early_h(gamma, EARLY_LOAD, num_jobs))) for gamma in GAMMAS]
    early = "HELL(gamma): mean hours to 40 % and to the end"
    tables.append(Table(title=early, columns=("gamma", "40 %", "all"), rows=rows))
    return Report(
        title="Figures 12 to 14 (asynchronous SGD): policies on 100 nodes",
        tables=tables,
        figure=figure([*elastic.values(), *fixed.values()], loads),
        findings=findings(elastic["four DNNs"], fixed["four DNNs"], loads, num_jobs),
        assumptions=[
            "Times of an update: Table III's sizes over 1 Gbps each way, TFLOPS over the K520's 1.229; the server's "
            "own time is 0. Throughput by exact MVA (eq. 1); the hybrid model has sharper "
            "knees, and then all policies are nearer to each other (default over HELL at a load of 0.7: 0.99).",
            "The workers are GPUs of single-GPU nodes; the parameter server's node does not count. Resizing is free, "
            "and policies decide at every arrival and end.",
            "'equal' stands for Waterfill. JSQ-Chunk is left out: it divides a pool of equal jobs.",
            f"{num_jobs} jobs for each point, the first tenth left out. The paper runs until its confidence intervals "
            "are below 5 %; for an unstable policy the mean grows with the number of jobs.",
        ],
    )


def shown(each: Point) -> str:
    """Return a mean, marked where it still grows."""
    return f"{each.mean_h:.1f}{'' if each.is_stable else '*'}"


def figure(panels_of: Sequence[Curves], loads: Sequence[float]) -> Figure:
    """Return four panels: both workloads, malleable and moldable."""
    names = ("hell", "knee", "equal", "srpt", "default")
    colours = dict(zip(names, (*COLOURS, "#c8553d"), strict=True))
    lines = [
        line(name, loads, [each.mean_h for each in points], colours[name], axis)
        for axis, curves in enumerate(panels_of, start=1)
        for name, points in curves.items()
    ]
    titles = ["malleable, four DNNs", "malleable, two large", "moldable, four DNNs", "moldable, two large"]
    return panels(lines, titles, x="load", y="mean response (hours)", every_y={"type": "log"})


if __name__ == "__main__":
    common.show(compute)
