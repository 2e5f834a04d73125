"""What the planner takes and reaches, as tables: `python tests/bench/bench_planner.py [SECTION …]` from the checkout.

Sections: speed (the planning calls that the aims name), size (CPU seconds of planning with noise, of very many trials
and of hyperband), planning and saving (against the paper's literal algorithms). Without one, all are run.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).parents[2]))

from rubberband.errors import InfeasibleError
from rubberband.planner.exact.solver import Objective
from rubberband.spec.schedulers import hyperband, sha
from rubberband.values.plan import Planned, PlanningConstraints, Policy, Stage
from rubberband.values.profile import Profile
from tests.bench import bench_paper
from tests.bench.jobs import BenchJob, p3_8xlarge, paper_job, profile
from tests.builders.plans import frontier, plan, plan_brackets

NUM_RUNS = 7


def best_s(
    call: Callable[[], str], num_runs: int = NUM_RUNS, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, str]:
    """The shortest of several runs in seconds, and what came out."""
    seconds, outcome = [], ""
    for _ in range(num_runs):
        began_s = clock()
        try:
            outcome = call()
        except InfeasibleError as error:
            outcome = str(error)
        seconds.append(clock() - began_s)
    return min(seconds), outcome


def planned(job: BenchJob, policy: Policy = "optimal") -> Planned:
    return plan(job.stages, job.profile, job.offer, job.limits, policy)


def outcome_of(job: BenchJob, policy: Policy = "optimal") -> str:
    result = planned(job, policy)
    prediction = result.prediction
    met = "" if result.odds is None else f"  P(in time) {result.odds.p_deadline:.4f}"
    return f"{prediction.jct_s:>10.1f} s {prediction.cost_usd:>10.4f} USD{met}"


def row(what: str, aim_ms: float, call: Callable[[], str], num_runs: int = NUM_RUNS) -> None:
    seconds, outcome = best_s(call, num_runs)
    sys.stdout.write(f"{what:<52} {seconds * 1e3:>9.1f} ms {aim_ms:>6.0f} ms  {outcome}\n")
    sys.stdout.flush()


def speed() -> None:
    """The planning calls that have an aim."""
    sys.stdout.write(f"\n{'planning call (best of several)':<52} {'time':>12} {'aim':>9}  outcome\n")
    paper = paper_job()
    unlimited = replace(paper, limits=PlanningConstraints(max_gpus_per_trial=16))
    name = "SHA(64,4,508,2), 20 min"
    for policy in get_args(Policy):
        row(f"{name}, {policy}", 20, partial(outcome_of, paper, policy))
    row(f"{name}, frontier within 20 min", 20, partial(points, paper))
    row("SHA(64,4,508,2), whole frontier", 20, partial(points, unlimited))
    large = BenchJob(
        stages=sha(512, 4, 4096, 2),
        profile=profile(20.0),
        offer=p3_8xlarge(256),
        limits=PlanningConstraints(deadline_s=5400.0, max_gpus_per_trial=16),
    )
    row("SHA(512,4,4096,2), 90 min, k <= 256, optimal", 300, partial(outcome_of, large))
    thousand = tuple(Stage(trials=count, iterations=2 * 3**index) for index, count in enumerate((1000, 250, 62, 15)))
    many = replace(large, stages=thousand, limits=replace(large.limits, deadline_s=600.0))
    row("1,000 trials, four stages, 10 min, optimal", 100, partial(outcome_of, many))
    for cv in (0.1, 0.2, 0.3):
        noisy = replace(paper, profile=replace(paper.profile, trial_cv=cv))
        row(f"{name}, trial_cv {cv}, confidence 0.95", 500, partial(outcome_of, noisy), 3)


NOISE = {"trial_cv": 0.2, "iteration_cv": 0.2}


def size() -> None:
    """Planning with noise, of very many trials, and of hyperband's brackets: CPU seconds of this process."""
    sys.stdout.write(f"\n{'planning call':<58} {'CPU':>9} {'aim':>9}  outcome\n")
    paper = paper_job()
    noisy = replace(paper, profile=replace(paper.profile, **NOISE))
    _cpu_row("SHA(64,4,508,2), 20 min, noise", 0.15, partial(outcome_of, noisy))
    soon = replace(noisy, limits=replace(noisy.limits, deadline_s=300.0))
    _cpu_row("SHA(64,4,508,2), 5 min, noise (infeasible)", 0.15, partial(outcome_of, soon))
    open_ended = replace(paper, limits=PlanningConstraints(max_gpus_per_trial=16))
    _cpu_row("SHA(64,4,508,2), whole frontier", 0.02, partial(points, open_ended))
    for trials, aim_s, deadline_s in ((512, 1.0, 5400.0), (4096, 3.0, 36_000.0), (20_000, 10.0, 144_000.0)):
        job = BenchJob(
            stages=sha(trials, 4, 4096, 2),
            profile=replace(profile(20.0), **NOISE),
            offer=p3_8xlarge(256),
            limits=PlanningConstraints(deadline_s=deadline_s, max_gpus_per_trial=16),
        )
        name = f"SHA({trials},4,4096,2), {deadline_s / 3600:.1f} h, k <= 256, noise"
        _cpu_row(name, aim_s, partial(outcome_of, job), 1)
    for word, noise, aim_s in (("", {}, 0.3), (", noise", NOISE, 2.0)):
        brackets = partial(_hyperband, replace(profile(27.5), **noise))
        for what, goal, limits in (
            ("an hour", "min_cost", PlanningConstraints(deadline_s=3600.0, max_gpus_per_trial=16)),
            ("5 min", "min_cost", PlanningConstraints(deadline_s=300.0, max_gpus_per_trial=16)),
            ("80 s (infeasible)", "min_cost", PlanningConstraints(deadline_s=80.0, max_gpus_per_trial=16)),
            ("min_time", "min_time", PlanningConstraints(max_gpus_per_trial=16)),
            ("min_time, 9 USD", "min_time", PlanningConstraints(max_cost_usd=9.0, max_gpus_per_trial=16)),
        ):
            _cpu_row(f"hyperband(81,3), {what}, k <= 64{word}", aim_s, partial(brackets, limits, goal), 1)


def _hyperband(times: Profile, limits: PlanningConstraints, objective: Objective) -> str:
    job = plan_brackets(hyperband(81, 3), times, p3_8xlarge(64), limits, objective=objective)
    met = "" if job.odds is None else f"  P {job.odds.p_both:.4f}"
    return f"{job.prediction.jct_s:>10.1f} s {job.prediction.cost_usd:>10.4f} USD{met}"


def _cpu_row(what: str, aim_s: float, call: Callable[[], str], num_runs: int = 3) -> None:
    seconds, outcome = best_s(call, num_runs, time.process_time)
    sys.stdout.write(f"{what:<58} {seconds:>7.3f} s {aim_s:>7.2f} s  {outcome}\n")
    sys.stdout.flush()


def points(job: BenchJob) -> str:
    return f"{len(frontier(job.stages, job.profile, job.offer, job.limits)):>10} points"


SECTIONS: dict[str, Callable[[], None]] = {
    "speed": speed,
    "size": size,
    "planning": bench_paper.planning,
    "saving": bench_paper.saving,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    chosen = parser.parse_args().sections or list(SECTIONS)
    unknown = [name for name in chosen if name not in SECTIONS]
    if unknown:
        parser.error(f"no section {unknown[0]}; they are {', '.join(SECTIONS)}")
    for name in chosen:
        SECTIONS[name]()


if __name__ == "__main__":
    main()
