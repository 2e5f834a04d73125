"""Figures and tables of Pollux (OSDI '21) on its public measurements: a row for each.

Run `python examples/paper/pollux.py --data DIR`, or with the names of some parts, as `figure_7 table_2`. DIR has the
published measurements and workloads, as `traces/MODEL/…` and `workloads/workload-N.csv`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial, update_wrapper
from pathlib import Path
from typing import Any

import numpy as np
from rows import Part, Row, Statement, Table, show, verdict
from tuning import table_3, table_3_measured
from tuning_runs import table_3_runs

from rubberband.planner.goodput import gain
from rubberband.planner.goodput.planning import LOWER, UPPER
from rubberband.planner.sharing import Capacity, Counting, make_policy
from rubberband.planner.sharing.jobs import Application
from rubberband.planner.sharing.simulation import INTERVAL_S, Outcome, simulate
from rubberband.planning.simulating import ELASTICITY, read_traces

POOL = Capacity(instances=16, gpus_per_instance=4)
HOUR_S = 3600.0
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
LARGEST = "imagenet"


def workloads(folder: Path, most: int) -> list[Path]:
    """Return at most `most` of the workloads in the folder. Exits with one line if there is none."""
    found = sorted((folder / "workloads").glob("workload-*.csv"))[:most]
    if not found:
        raise SystemExit(f"{folder} has no workloads/workload-N.csv; give the folder of the public data")
    return found


@cache
def outcome(
    file: Path,
    row: str,
    load: float = 1.0,
    interval_s: float = INTERVAL_S,
    interference: float = 0.0,
    share_machines: bool = False,
) -> Outcome:
    """Simulate a row of the table on a workload that is submitted `load` times as fast."""
    made = make_policy(POLICIES[row])
    elasticity = ELASTICITY.get(POLICIES[row], "adaptive")
    first_gpus = made.first_gpus if isinstance(made, Counting) else 1
    jobs = read_traces(file, file.parents[1] / "traces", elasticity, first_gpus)
    for job in jobs:
        job.submitted_at /= load
    if share_machines and isinstance(made, Counting):
        made = replace(made, share_machines=True)
    return simulate(jobs, POOL, made, interval_s=interval_s, interference=interference)


def mean_h(files: Sequence[Path], row: str, figure: str = "mean_jct_s", *varied: float) -> float:
    """Return the mean over workloads of a figure, in hours; `varied` are those of `outcome`."""
    return float(np.mean([outcome(file, row, *varied).summary()[figure] or 0.0 for file in files])) / HOUR_S


WORLD = "The world is that of the published simulation, on its workloads. Printed hours are those of the testbed."
PRINTED = {
    THEIRS: ("0.76", "11", "16"),
    OPTIMUS: ("1.5", "15", "20"),
    TIRESIAS: ("1.2", "15", "24"),
    UNFAIR: ("0.83", "10", "16"),
    FAIRER: ("0.84", "12", "18"),
}
"""Row of Table 2 -> printed hours: mean and 99th percentile of the JCT, makespan; on the testbed, one workload."""


def table_2(folder: Path, small: bool) -> Row:
    """Compare the policies on the whole workload."""
    files = workloads(folder, 1 if small else 4)
    keys = ("mean_jct_s", "p99_jct_s", "makespan_s")
    mean, p99, makespan = ({row: mean_h(files, row, key) for row in POLICIES} for key in keys)
    saved = {row: 100.0 * (1.0 - mean[THEIRS] / mean[row]) for row in (OPTIMUS, TIRESIAS)}
    return Row(
        title=f"job completion times and makespan of 160 jobs on 64 GPUs, mean of {len(files)} workloads",
        statements=[
            Statement(
                says="Our simulator ... Pollux reduces the average JCT by 48% and 32% over Optimus+Oracle+TunedJobs "
                "and Tiresias+TunedJobs.",
                verdict=verdict(abs(saved[OPTIMUS] - 48.0) < 10.0, abs(saved[TIRESIAS] - 32.0) < 10.0),
                found=f"By {saved[OPTIMUS]:.0f} % and {saved[TIRESIAS]:.0f} %.",
            ),
            Statement(
                says="Compared with no fairness (p = 1), introducing a moderate degree of fairness (p = -1) improved "
                "the average job completion time but degraded the tail JCT.",
                verdict=verdict(mean[THEIRS] < mean[UNFAIR], p99[THEIRS] > p99[UNFAIR]),
                found=f"Mean {mean[THEIRS]:.2f} against {mean[UNFAIR]:.2f} h, 99th percentile {p99[THEIRS]:.1f} "
                f"against {p99[UNFAIR]:.1f} h.",
            ),
            Statement(
                says="Further increasing fairness (p = -10) degraded performance in average JCT, tail JCT, and "
                "makespan.",
                verdict=verdict(*(each[FAIRER] > each[THEIRS] for each in (mean, p99, makespan))),
                found=f"Mean {mean[FAIRER]:.2f} h, 99th percentile {p99[FAIRER]:.1f} h, makespan "
                f"{makespan[FAIRER]:.1f} h.",
            ),
            Statement(
                says="(Ours.) The default policy, which uses the work left, is 10 % better than Pollux, which does "
                "not.",
                verdict=verdict(mean[OURS] <= 0.9 * mean[THEIRS], p99[OURS] <= 1.05 * p99[THEIRS]),
                found=f"{mean[OURS] / mean[THEIRS]:.3f}x its mean as simulated here, {p99[OURS] / p99[THEIRS]:.3f}x "
                "its tail. The exact division is itself better than the genetic search of the published results.",
            ),
        ],
        tables=[
            Table(
                columns=("hours", "mean", "p99", "makespan", "printed mean", "p99", "makespan"),
                rows=[
                    (row, *(f"{each[row]:.2f}" for each in (mean, p99, makespan)), *PRINTED.get(row, "---"))
                    for row in POLICIES
                ],
            )
        ],
        assumptions=[
            WORLD,
            "The rows with untuned jobs need the GPUs of Microsoft's trace, which are not in the data.",
        ],
    )


def figure_7(folder: Path, small: bool) -> Row:
    """Compare the policies by finish-time fairness."""
    files = workloads(folder, 1 if small else 4)
    rho = {row: np.sort([each for file in files for each in outcome(file, row).fairness]) for row in POLICIES}
    most = {row: float(each[-1]) for row, each in rho.items()}
    below_2 = float(np.mean(rho[THEIRS] < 2.0))
    return Row(
        title="finish-time fairness",
        statements=[
            Statement(
                says="Pollux with p = -1 provides the best fairness, with 99% of jobs achieving rho < 2.",
                verdict=verdict(below_2 >= 0.97, most[THEIRS] <= min(most[OPTIMUS], most[TIRESIAS])),
                found=f"{100.0 * below_2:.0f} % do; the largest rho is {most[THEIRS]:.1f}, of Optimus "
                f"{most[OPTIMUS]:.1f}, of Tiresias {most[TIRESIAS]:.1f}, of the default {most[OURS]:.1f}.",
            ),
        ],
        tables=[
            Table(
                columns=("rho", "median", "p90", "p99", "largest"),
                rows=[
                    (row, *(f"{np.percentile(each, share):.2f}" for share in (50, 90, 99, 100)))
                    for row, each in rho.items()
                ],
            )
        ],
        assumptions=[
            "rho: alone, a job has an equal part of the pool for the jobs that were there, from the start on, and "
            "adapts its batch if it does so under the policy."
        ],
    )


def figure_8a(folder: Path, small: bool) -> Row:
    """Vary the load."""
    files, rows = workloads(folder, 1), (THEIRS, OPTIMUS, TIRESIAS, OURS)
    loads = (0.5, 1.0) if small else (0.5, 1.0, 1.5, 2.0)
    means = {row: [mean_h(files, row, "mean_jct_s", load) for load in loads] for row in rows}
    best = [means[THEIRS][at] < min(means[OPTIMUS][at], means[TIRESIAS][at]) for at in range(len(loads))]
    return Row(
        title="mean JCT by the load",
        statements=[
            Statement(
                says="Across all job loads, Pollux maintains similar relative improvements over the baseline "
                "schedulers.",
                verdict=verdict(*best),
                found=f"It is the best of the three at {sum(best)} of {len(loads)} loads.",
            )
        ],
        tables=[
            Table(
                columns=("hours at a load of", *(f"{load:g}" for load in loads)),
                rows=[(row, *(f"{each:.2f}" for each in of)) for row, of in means.items()],
            )
        ],
    )


def figure_8b(folder: Path, small: bool) -> Row:
    """Vary the interval between decisions."""
    files, intervals_s = workloads(folder, 1), (60.0, 120.0, 480.0) if small else (30.0, 60.0, 120.0, 240.0, 480.0)
    means = {row: {each: mean_h(files, row, "mean_jct_s", 1.0, each) for each in intervals_s} for row in (THEIRS, OURS)}
    often, seldom = (means[THEIRS][each] / means[THEIRS][60.0] for each in (120.0, 480.0))
    return Row(
        title="mean JCT by the scheduling interval",
        statements=[
            Statement(
                says="Pollux performs similarly well in terms of average JCT for intervals up to 2 minutes, while "
                "longer intervals result in performance degradation.",
                verdict=verdict(often < 1.1, seldom > 1.05),
                found=f"{often:.2f}x the mean with 2 minutes, {seldom:.2f}x with 8.",
            )
        ],
        tables=[
            Table(
                columns=("hours, decided every", *(f"{each:g} s" for each in intervals_s)),
                rows=[(row, *(f"{each:.2f}" for each in of.values())) for row, of in means.items()],
            )
        ],
    )


def figure_8c(folder: Path, small: bool) -> Row:
    """Vary the interference of gangs that span instances, with its avoidance and without."""
    files, slowdowns = workloads(folder, 1), (0.0, 0.5) if small else (0.0, 0.25, 0.5)
    without = {each: mean_h(files, THEIRS, "mean_jct_s", 1.0, INTERVAL_S, each, True) for each in slowdowns}
    avoiding = {each: mean_h(files, THEIRS, "mean_jct_s", 1.0, INTERVAL_S, each) for each in (0.0, 0.5)}
    ideal, longer = (without[each] / avoiding[each] for each in (0.0, 0.5))
    return Row(
        title="mean JCT by the slowdown of distributed jobs that share an instance",
        statements=[
            Statement(
                says="With interference avoidance enabled, the average JCT is unaffected by even severe slowdowns.",
                verdict=verdict(avoiding[0.5] == avoiding[0.0]),
                found=f"{avoiding[0.0]:.2f} h without a slowdown, {avoiding[0.5]:.2f} h with one of 50 %.",
            ),
            Statement(
                says="Without interference avoidance, the average JCT is 1.4x longer when the interference slowdown "
                "is 50%.",
                verdict=verdict(longer > 1.1, abs(longer - 1.4) < 0.2),
                found=f"{longer:.2f}x. Gangs take 1, 2, 4, … GPUs of an instance or whole ones here: fewer meet.",
            ),
            Statement(
                says="When there is zero slowdown due to interference, PolluxSched performs similarly whether or not "
                "interference avoidance is enabled.",
                verdict=verdict(0.95 < ideal < 1.05),
                found=f"{ideal:.3f}x without avoidance.",
            ),
        ],
        tables=[
            Table(
                columns=("slowdown", "hours without avoidance", "of those with it"),
                rows=[
                    (f"{100.0 * each:.0f} %", f"{hours:.2f}", f"{hours / avoiding[0.0]:.2f}")
                    for each, hours in without.items()
                ],
            )
        ],
        assumptions=["A slowdown of 50 % leaves a job half of its speed, as in the published simulation."],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One training that scales its instances (Figure 9)."""

    hours: float
    instance_hours: float
    instances: Sequence[int]
    """In every epoch."""
    efficiencies: Sequence[float]


def scaled(application: Application, by_goodput: bool) -> Training:
    """Train with the instances that scale well enough: by goodput, or by throughput alone (Or et al.)."""
    sizes = list(range(1, POOL.instances + 1))
    instances, seconds, held_s = 1, 0.0, 0.0
    counts, efficiencies = [], []
    for epoch in range(application.max_epochs):
        rates = {count: best(application, (POOL.gpus_per_instance,) * count, epoch, by_goodput) for count in sizes}
        single = best(application, (1,), epoch, by_goodput)[0]
        share = {count: rates[count][0] / (count * POOL.gpus_per_instance) / single for count in sizes}
        if share[instances] > UPPER:
            instances = max([instances, *(count for count in sizes if share[count] >= LOWER)])
        _, progress_per_s, efficiency = rates[instances]
        epoch_s = (application.work[epoch + 1] - application.work[epoch]) / progress_per_s
        seconds += epoch_s
        held_s += instances * epoch_s
        counts.append(instances)
        efficiencies.append(efficiency)
    return Training(hours=seconds / HOUR_S, instance_hours=held_s / HOUR_S, instances=counts, efficiencies=efficiencies)


def best(
    application: Application, placement: tuple[int, ...], epoch: int, by_goodput: bool
) -> tuple[float, float, float]:
    """Return the highest rate over all measured batches, and the progress per second and the efficiency at it."""
    gpus, found = sum(placement), []
    for batch_size in application.epochs:
        per_gpu, accumulation = application.passes(batch_size, gpus)
        if per_gpu < application.min_per_gpu:
            continue
        first_s, sync_s = application.step_s(placement, per_gpu)
        step_s = first_s + accumulation * (first_s - sync_s)
        sqr, var = application.statistics(batch_size, epoch)
        initial = application.limits.initial
        worth = float(gain(initial * var / sqr, initial, batch_size))
        rate = worth / step_s if by_goodput else batch_size / step_s
        found.append((rate, worth / step_s, worth * initial / batch_size))
    return max(found, default=(0.0, 1e-9, 0.0))


def applications(folder: Path) -> Mapping[str, Application]:
    """Return the models of the first workload."""
    jobs = read_traces(workloads(folder, 1)[0], folder / "traces", "adaptive")
    return {job.kind: job.application for job in jobs}


def figure_9(folder: Path, small: bool) -> Row:
    """Scale the instances of one large training."""
    models = applications(folder)
    application = models.get(LARGEST) or next(iter(models.values()))
    trained = [scaled(application, by_goodput) for by_goodput in (True, False)]
    cheaper = 100.0 * (1.0 - trained[0].instance_hours / trained[1].instance_hours)
    longer = 100.0 * (trained[0].hours / trained[1].hours - 1.0)
    return Row(
        title=f"scaling the instances of {application.name}",
        statements=[
            Statement(
                says="Compared to Or et al.'s throughput-based auto-scaling, Pollux trains ImageNet with 25% cheaper "
                "cost, with only a 6% longer completion time.",
                verdict=verdict(cheaper > 10.0, longer < 15.0),
                found=f"{cheaper:.0f} % cheaper and {longer:.0f} % longer.",
            )
        ],
        tables=[
            Table(
                columns=("rule", "hours", "instance hours", "first epoch", "last epoch", "mean efficiency"),
                rows=[
                    (
                        name,
                        f"{each.hours:.1f}",
                        f"{each.instance_hours:.0f}",
                        *(str(each.instances[at]) for at in (0, -1)),
                        f"{np.mean(each.efficiencies):.2f}",
                    )
                    for name, each in zip(("goodput", "throughput"), trained, strict=True)
                ],
            )
        ],
        assumptions=["Figure 9 chooses among the measured batches by the measured step times; an instance is 4 GPUs."],
    )


ON_DATA: Sequence[Callable[[Path, bool], Row]] = (
    table_2,
    figure_7,
    figure_8a,
    figure_8b,
    figure_8c,
    figure_9,
    table_3_measured,
)
"""Parts that need the measurements."""
PARTS: Sequence[Part] = (table_3, table_3_runs)
"""Parts that need none."""


def parts(folder: Path | None) -> list[Part]:
    """Return the parts that can run with this folder of data, or without any."""
    given: list[Any] = [] if folder is None else [update_wrapper(partial(part, folder), part) for part in ON_DATA]
    return [*given, *PARTS]


def main(argv: Sequence[str] | None = None) -> None:
    """Take the folder out of the arguments, and show the parts that are asked for."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--data", metavar="DIR", type=Path)
    asked, others = parser.parse_known_args(argv)
    if asked.data is None:
        names = ", ".join(part.__name__ for part in ON_DATA)
        print(f"{names} need the public measurements; give their folder with --data DIR", file=sys.stderr)
    show(parts(asked.data), "Figures and tables of Pollux. --data DIR is the folder of the public data.", others)


if __name__ == "__main__":
    main()
