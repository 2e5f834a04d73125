"""What the planner takes and reaches, as tables: `python tests/bench/bench_planner.py [SECTION …]` from the checkout.

Sections: speed (the planning calls that the aims name), size (CPU seconds of planning with noise, of very many trials
and of hyperband), cases (more of them), planning and saving (against the paper's
literal algorithms), risk (noisy plans simulated again), exhaustive (against the enumeration of every plan).
Without one, all are run (some minutes). Figures are printed, none is asserted.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).parents[2]))

from rubberband.errors import InfeasibleError
from rubberband.planner.dag import simulate
from rubberband.planner.exact.solver import Objective
from rubberband.planner.exact.table import Floats
from rubberband.spec.search import hyperband, sha
from rubberband.values.offer import Billing
from rubberband.values.plan import Planned, PlanningConstraints, Policy, Stage
from rubberband.values.profile import Profile
from tests.bench import bench_paper
from tests.bench.jobs import BenchJob, cost_usd, p3_8xlarge, paper_job, profile, random_job, small_job
from tests.builders.enumeration import best, every_plan
from tests.builders.plans import frontier, plan, plan_brackets, sample

NUM_RUNS = 7
THOUSAND = tuple(Stage(trials=count, iterations=2 * 3**index) for index, count in enumerate((1000, 250, 62, 15)))

CASES: list[tuple[str, tuple[Stage, ...], int, list[tuple[float, float | None]]]] = [
    ("SHA(32,1,50,3)", sha(32, 1, 50, 3), 16, [(1.0, 1200.0), (1.0, None)]),
    ("SHA(64,4,508,2)", sha(64, 4, 508, 2), 32, [(1.0, 10 * 3600.0), (27.5, 1200.0), (100.0, 300.0), (20.0, None)]),
    (
        "SHA(512,4,4096,2)",
        sha(512, 4, 4096, 2),
        256,
        [(1.0, 24 * 3600.0), (20.0, 2 * 3600.0), (20.0, 3600.0), (100.0, 1800.0), (20.0, None)],
    ),
    ("1000 trials", THOUSAND, 256, [(1.0, 7200.0), (20.0, 600.0), (100.0, 180.0), (20.0, None)]),
]


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
    many = replace(large, stages=THOUSAND, limits=replace(large.limits, deadline_s=600.0))
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


def cases() -> None:
    """Every case with stages that outlast the billing minimum, and with stages that do not."""
    sys.stdout.write(f"\n{'job':<18} {'k <=':>4} {'billing':<12} {'speed':>6} {'deadline':>9} {'planning':>10}  plan\n")
    for name, stages, max_instances, variants in CASES:
        for billing in get_args(Billing):
            for speed_up, deadline_s in variants:
                _case(name, stages, max_instances, billing, speed_up, deadline_s)


def _case(
    name: str,
    stages: tuple[Stage, ...],
    max_instances: int,
    billing: Billing,
    speed_up: float,
    deadline_s: float | None,
) -> None:
    job = BenchJob(
        stages=stages,
        profile=profile(speed_up),
        offer=p3_8xlarge(max_instances, billing),
        limits=PlanningConstraints(deadline_s=deadline_s, max_gpus_per_trial=16),
    )
    seconds, outcome = best_s(partial(outcome_of, job))
    deadline = "none" if deadline_s is None else f"{deadline_s:.0f} s"
    sys.stdout.write(f"{name:<18} {max_instances:>4} {billing:<12} {speed_up:>5}x {deadline:>9} ")
    sys.stdout.write(f"{seconds * 1e3:>7.1f} ms  {outcome}\n")


def risk(num_jobs: int = 200, num_literal: int = 8) -> None:
    """Random noisy jobs planned at confidence 0.95: P(miss) with fresh samples, some of them by Algorithm 1 too."""
    source = random.Random(2)
    misses: list[float] = []
    seconds: list[float] = []
    notes: list[str] = []
    infeasible = 0
    while len(misses) < num_jobs:
        job = random_job(source, noisy=True)
        began_s = time.perf_counter()
        try:
            chosen = planned(job).plan
        except InfeasibleError:
            infeasible += 1
            continue
        seconds.append(time.perf_counter() - began_s)
        drawn = (job.stages, chosen, job.profile, job.offer)
        misses.append(p_miss(sample(*drawn, num_samples=20_000, seed=987_654_321).jct_s, job))
        number = len(misses) + infeasible - 1
        if misses[-1] > 0.055:
            notes.append(f"  job {number}: P(miss) {misses[-1]:.4f} of {chosen}\n")
        if len(misses) <= num_literal:
            again = p_miss(simulate(*drawn, num_samples=2000, seed=5).jct_s, job)
            notes.append(f"  job {number}: P(miss) {misses[-1]:.4f}, and {again:.4f} by Algorithm 1, 2,000 samples\n")
    sys.stdout.write(f"\n{num_jobs} random noisy jobs at confidence 0.95, plans simulated with 20,000 fresh samples\n")
    sys.stdout.write(
        f"P(miss): mean {statistics.mean(misses):.4f}, median {statistics.median(misses):.4f}, "
        f"largest {', '.join(f'{miss:.4f}' for miss in sorted(misses)[-5:])}; "
        f"above 0.055 in {sum(miss > 0.055 for miss in misses)} (aim 0); no plan for {infeasible} more jobs\n"
        f"planning: mean {statistics.mean(seconds) * 1e3:.0f} ms, longest {max(seconds) * 1e3:.0f} ms\n"
        + "".join(notes)
    )


def p_miss(jct_s: Floats, job: BenchJob) -> float:
    assert job.limits.deadline_s is not None
    return float((jct_s > job.limits.deadline_s + 1e-6).mean())


def exhaustive(num_jobs: int = 500) -> None:
    """Random deterministic jobs: `optimal` against the enumeration of every plan."""
    source = random.Random(3)
    examined = infeasible = 0
    wrong: list[str] = []
    for number in range(num_jobs):
        job = small_job(source)
        plans = every_plan(job.stages, job.profile, job.offer, job.limits)
        near_s = source.choice(plans)[0] * source.choice([0.97, 1.0, 1.0, 1.05])
        job = replace(job, limits=replace(job.limits, deadline_s=source.choice([None, near_s, near_s, near_s])))
        expected = best(plans, job.limits)
        found_usd = cost_usd(job, "optimal")
        examined += len(plans)
        infeasible += expected is None
        if not same_cost(found_usd, None if expected is None else expected[1]):
            wrong.append(f"  job {number}: {found_usd} against {expected}\n")
    sys.stdout.write(
        f"\n{num_jobs} random deterministic jobs against all their plans ({examined} in all): "
        f"equal in {num_jobs - len(wrong)} (of all {infeasible} without a plan in time)\n{''.join(wrong)}"
    )


def same_cost(found_usd: float | None, expected_usd: float | None) -> bool:
    if found_usd is None or expected_usd is None:
        return found_usd is expected_usd
    return abs(found_usd - expected_usd) <= 1e-8 + 1e-9 * expected_usd


SECTIONS: dict[str, Callable[[], None]] = {
    "speed": speed,
    "size": size,
    "planning": bench_paper.planning,
    "saving": bench_paper.saving,
    "risk": risk,
    "exhaustive": exhaustive,
    "cases": cases,
}


def main() -> None:
    """Run the sections that are named, or all."""
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
