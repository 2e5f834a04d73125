"""GPUs that are paid and idle within stages, with `constraints.resize_in_stage` and without.

Virtual runs: random searches by successive halving on random instances, planned within a deadline, whose trials vary in
speed and end by themselves by chance; each is run twice, with the same noise. Real runs (`--real`): trials on this
machine that sleep, some of which end early, on instances with logical GPUs. Prints figures, asserts none.

Run: python -m tests.bench.bench_idle [--runs N] [--objective min_cost|min_time] [--real N]
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import tempfile
from pathlib import Path
from random import Random
from statistics import fmean, geometric_mean, median

import rubberband
from rubberband.cloud.virtual import VirtualClock
from rubberband.errors import InfeasibleError
from rubberband.executor import Controller, Job, Noise, VirtualBackend, bill_usd, drive, paid_time
from rubberband.executor.core.bill import PaidTime
from rubberband.spec.schedulers import sha
from rubberband.values.offer import Offer
from rubberband.values.profile import Profile
from tests.builders.memory import MemoryJournal
from tests.builders.planned_jobs import planned_job
from tests.builders.virtual_runs import jct_s

Figures = tuple[float, float, PaidTime]
"""Seconds, US dollars, and the use of the paid time."""


def random_job(source: Random) -> tuple[Job, float]:
    """Draw a planned search and the chance of an end after each iteration."""
    gpus = source.choice([1, 4, 8])
    offer = Offer(
        instance_type="bench",
        gpus=gpus,
        price_usd_per_hour=gpus * source.choice([0.5, 3.06]),
        max_instances=source.choice([4, 8, 16]),
        provision_delay_s=source.choice([15.0, 40.0]),
        init_delay_s=source.choice([20.0, 90.0]),
        minimum_billed_s=60.0,
    )
    single, efficiency = source.uniform(20.0, 200.0), source.uniform(0.6, 0.95)
    profile = Profile(
        seconds_per_iteration={count: single / count**efficiency for count in (1, 2, 4, 8)},
        trial_startup_s=source.uniform(2.0, 20.0),
    )
    stages = sha(source.randint(8, 48), 1, source.choice([9, 27, 31]), source.choice([2, 3, 4]))
    job = planned_job(tuple(stages), profile, offer, source.choice([0.0, 0.2, 0.5, 1.0, 2.0]), 3.0)
    noisy = dataclasses.replace(profile, trial_cv=0.15, iteration_cv=0.1)
    deadline_s = None if job.deadline_s is None else 1.3 * job.deadline_s
    return dataclasses.replace(job, profile=noisy, deadline_s=deadline_s), source.choice([0.01, 0.03, 0.1, 0.2])


def run(job: Job, seed: int, end_chance: float) -> Figures:
    """Run a job on the virtual clock."""
    clock = VirtualClock()
    noise = Noise(job.profile, job.offer, seed=seed, now=clock.now, end_chance=end_chance)
    backend = VirtualBackend(job.name, job.offer, job.profile, metric=job.metric, faults=noise, clock=clock)
    controller = Controller(job)
    finish = drive(controller, backend, MemoryJournal())
    assert finish.outcome == "done", finish
    state = controller.state
    return jct_s(state), bill_usd(state, state.now), paid_time(state, state.now)


def virtual(runs: int, objective: str) -> None:
    """Run random searches with and without, and print the figures."""
    pairs, late = list[tuple[Figures, Figures]](), [0, 0]
    seed = 0
    while len(pairs) < runs:
        seed += 1
        try:
            job, end_chance = random_job(Random(seed))
        except InfeasibleError:
            continue
        job = dataclasses.replace(job, objective=objective)
        without = run(job, seed, end_chance)
        with_it = run(dataclasses.replace(job, resize_in_stage=True), seed, end_chance)
        pairs.append((without, with_it))
        for at, one in enumerate((without, with_it)):
            late[at] += job.deadline_s is not None and one[0] > job.deadline_s
    show(f"{runs} virtual runs, {objective}", pairs)
    print(f"  after the deadline: {late[0]} without, {late[1]} with")


def show(title: str, pairs: list[tuple[Figures, Figures]]) -> None:
    """Print what runs without (first) and with it (second) cost and took."""
    print(title)
    for name, part in (("idle", "idle_gpu_s"), ("idle within stages", "idle_in_stage_gpu_s")):
        before, after = (fmean(getattr(one[at][2], part) / one[at][2].total_gpu_s for one in pairs) for at in (0, 1))
        print(f"  {name}: {100 * before:.1f} % of the paid GPU-seconds without, {100 * after:.1f} % with (mean)")
    for name, at in (("time", 0), ("cost", 1)):
        ratios = [with_it[at] / without[at] for without, with_it in pairs]
        print(
            f"  {name}: {geometric_mean(ratios):.3f} of that without (geometric mean; median {median(ratios):.3f}, "
            f"least {min(ratios):.3f}, most {max(ratios):.3f})"
        )
    later = [with_it[0] > without[0] * 1.0001 for without, with_it in pairs]
    dearer = [with_it[1] > without[1] * 1.0001 for without, with_it in pairs]
    both = sum(one and other for one, other in zip(later, dearer, strict=True))
    print(f"  of {len(pairs)} runs: later {sum(later)}, dearer {sum(dearer)}, both {both}")


@rubberband.distributed
def train(config: dict[str, float]) -> None:
    """Sleep for each iteration, the shorter the more workers there are; end early where the configuration says so."""
    done = rubberband.get_checkpoint() or 0
    for iteration in range(done + 1, 17):
        sleep_s(config["seconds"])
        rubberband.report({"loss": config["loss"] / iteration}, checkpoint=iteration)
        if iteration >= config["ends"]:
            return


def sleep_s(seconds: float) -> None:
    """Sleep for a part of the time that one worker takes."""
    import time

    time.sleep(seconds / int(os.environ.get("WORLD_SIZE", "1")) ** 0.4)


def real(runs: int) -> None:
    """Run small searches for real, with and without, and print the figures."""
    from tests.bench.bench_idle import train as as_imported

    pairs = list[tuple[Figures, Figures]]()
    for seed in range(runs):
        found = list[Figures]()
        for on in (False, True):
            with tempfile.TemporaryDirectory() as home:
                result = rubberband.tune(
                    as_imported,
                    name=f"idle-{seed}",
                    home=Path(home),
                    check=False,
                    verbose=0,
                    search={
                        "space": {
                            "seconds": 1.5,
                            "loss": rubberband.uniform(0.1, 1.0),
                            "ends": rubberband.choice([4, 16]),
                        },
                        "scheduler": {"type": "stages", "stages": [{"trials": 5, "iterations": 16}]},
                        "sampler": {"type": "random", "seed": seed},
                        "metric": "loss",
                        "mode": "min",
                    },
                    constraints={"deadline": "10m", "max_cost": 10, "resize_in_stage": on},
                    resources={
                        "provider": "local",
                        "gpus_per_instance": 2,
                        "price_per_hour": 36,
                        "max_instances": 2,
                        "minimum_billed": 0,
                        "gpus_per_trial": {"min": 1, "max": 2},
                    },
                    profile={"seconds_per_iteration": {1: 1.5, 2: 1.14}, "trial_startup": 0.5},
                )
            found.append((result.actual_jct_s, result.actual_cost_usd, result.paid))
            print(f"  seed {seed}, {'with' if on else 'without'}: {found[-1]}", flush=True)
        pairs.append((found[0], found[1]))
    show(f"{runs} real runs", pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--objective", choices=["min_cost", "min_time"])
    parser.add_argument("--real", type=int, default=0, help="real runs instead of virtual ones")
    chosen = parser.parse_args()
    if chosen.real:
        real(chosen.real)
        return
    for objective in [chosen.objective] if chosen.objective else ("min_cost", "min_time"):
        virtual(chosen.runs, objective)


if __name__ == "__main__":
    main()
