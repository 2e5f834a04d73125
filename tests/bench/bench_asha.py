"""Asha: how often virtual runs stay within the predicted interval, and sha against asha on local instances.

    python tests/bench/bench_asha.py [--runs 200] [--real]

`--real` runs examples/scaling.yaml under both schedulers, with the same configurations and the same deadline: about
three minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import tempfile
import time
from pathlib import Path

import numpy as np

from rubberband.cloud.virtual import VirtualClock
from rubberband.executor import Controller, Job, Noise, VirtualBackend, bill_usd, drive, jct_s, open_folder
from rubberband.executor.virtual.backend import shuffled
from rubberband.planner.asha_samples import Simulations
from rubberband.planner.exact.table import Floats
from rubberband.running.run import run_experiment
from rubberband.running.starting import RunOptions
from rubberband.spec.experiment import Experiment
from rubberband.spec.loading import load_experiment
from rubberband.values.profile import Profile, Spread
from tests.builders.experiment_words import words
from tests.builders.memory import MemoryJournal
from tests.builders.plans import plan_job

ROOT = Path(__file__).parents[2]
SHARES = (0.05, 0.95)
STEADY = Profile(seconds_per_iteration={1: 40.0, 2: 22.0, 4: 13.0}, trial_startup_s=5.0)
PROFILES = {
    "nothing but the order": STEADY,
    "trials 10 %, iterations 20 %": Profile(
        seconds_per_iteration=STEADY.seconds_per_iteration,
        trial_startup_s=5.0,
        trial_cv=0.1,
        iteration_cv=0.2,
        startup_cv=0.3,
    ),
    "trials 30 %, starts 50 %": Profile(
        seconds_per_iteration=STEADY.seconds_per_iteration,
        trial_startup_s=5.0,
        trial_cv=0.3,
        iteration_cv=0.1,
        provision_delay_s=30.0,
        provision_spread=Spread(cv=0.5),
        init_delay_s=20.0,
        init_spread=Spread(cv=0.5),
    ),
}


def job_of(profile: Profile, num_samples: int) -> Job:
    """Plan an asha job of an hour or two."""
    scheduler = {"type": "asha", "num_samples": num_samples, "max_t": 40, "reduction_factor": 3}
    resources = {"provider": "virtual", "instance_type": "p3.8xlarge", "max_instances": 8}
    gangs = {**resources, "gpus_per_trial": {"min": 1, "max": 4}, "provision_delay": "30s", "init_delay": "20s"}
    written = words(search__scheduler=scheduler, constraints__deadline="2h", resources=gangs)
    return plan_job(Experiment(**written), profile)


def one_run(job: Job, seed: int) -> tuple[float, float]:
    clock = VirtualClock()
    noise = Noise(job.profile, job.offer, seed=seed, now=clock.now)
    by = shuffled(job.num_trials, seed)
    backend = VirtualBackend(
        job.name, job.offer, job.profile, metric=job.metric, metric_of=by, clock=clock, faults=noise
    )
    controller = Controller(job)
    drive(controller, backend, MemoryJournal())
    state = controller.state
    return jct_s(state, state.now), bill_usd(state, state.now)


Figures = tuple[Floats, Floats]


def figures(job: Job, runs: int) -> tuple[Figures, Figures]:
    """Return times and costs of the simulated runs that predict a job, and of virtual ones."""
    simulated = Simulations(job.stages[0], job.profile, job.offer, 0)
    actual = np.array([one_run(job, seed) for seed in range(runs)]).T
    (found,) = simulated.figures(job.plan.stages, simulated.most)
    return (found.jct_s, found.cost_usd), (actual[0], actual[1])


def shares_within(predicted: Figures, actual: Figures) -> list[float]:
    """Return the shares of times and of costs within the interval in which 90 % of the predicted ones are."""
    shares = []
    for expected, found in zip(predicted, actual, strict=True):
        low, high = np.quantile(expected, SHARES)
        shares.append(float(np.mean((found >= low - 1e-6) & (found <= high + 1e-6))))
    return shares


def spread(runs: int) -> None:
    """Print the share of virtual runs within the predicted 90 % interval."""
    print(f"virtual runs within the interval that 90 % of {runs} runs are predicted in")
    print(f"{'noise':32}{'trials':>8}{'time':>8}{'cost':>8}{'mean time':>22}{'mean cost':>24}")
    for name, profile in PROFILES.items():
        for num_samples in (27, 81):
            job = job_of(profile, num_samples)
            predicted, actual = figures(job, runs)
            shares = shares_within(predicted, actual)
            times = f"{predicted[0].mean():.0f} / {actual[0].mean():.0f} s"
            costs = f"{predicted[1].mean():.2f} / {actual[1].mean():.2f} USD"
            print(f"{name:32}{num_samples:>8}{shares[0]:>8.0%}{shares[1]:>8.0%}{times:>22}{costs:>24}", flush=True)


def real() -> None:
    """Print predicted and actual time and cost of both schedulers on local instances."""
    os.chdir(ROOT)
    print(f"\n{'scheduler':12}{'predicted':>24}{'actual':>24}{'winner':>12}{'its loss':>12}{'iterations':>12}")
    for scheduler in ("sha", "asha"):
        settings = [f"search.scheduler.type={scheduler}", "constraints.deadline=80s", f"name=bench-{scheduler}"]
        experiment = load_experiment(ROOT / "examples/scaling.yaml", settings)
        with tempfile.TemporaryDirectory() as home, contextlib.redirect_stderr(io.StringIO()):
            folder = open_folder(experiment.name, Path(home))
            result = run_experiment(experiment, folder, RunOptions(search_path=(str(ROOT),), check=False))
        planned = f"{result.planned_jct_s:.1f} s, {result.planned_cost_usd:.3f} USD"
        actual = f"{result.actual_jct_s:.1f} s, {result.actual_cost_usd:.3f} USD"
        best = "-" if result.best is None else f"{result.best.metrics[result.metric]:.4f}"
        winner = "-" if result.best is None else f"trial {result.best.trial}"
        done = sum(trial.iterations for trial in result.trials)
        print(f"{scheduler:12}{planned:>24}{actual:>24}{winner:>12}{best:>12}{done:>12}", flush=True)
        reached = " > ".join(str(rung.trials) for rung in result.rungs)
        print(f"{'':12}{result.outcome}{'; trials in each rung: ' * bool(reached)}{reached}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--real", action="store_true")
    asked = parser.parse_args()
    began_s = time.perf_counter()
    if asked.runs:
        spread(asked.runs)
    if asked.real:
        real()
    print(f"\n{time.perf_counter() - began_s:.0f} s")


if __name__ == "__main__":
    main()
