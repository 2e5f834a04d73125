"""How well a profile of few trials tells the noise: estimates, intervals, and deadlines that are told from it.

Times are drawn with known components, on 1, 2 and 4 GPUs with half as many trials at every step, 3 iterations each.
Prints figures, asserts none.

Run: python tests/bench/bench_profile_noise.py [--profiles N]
"""

from __future__ import annotations

import argparse
import math
import time

import numpy as np

from rubberband.executor import Cell, Fit, cell_of
from rubberband.executor.profiling.points import fit
from rubberband.values.offer import Offer
from rubberband.values.plan import Plan, Stage, StagePlan
from rubberband.values.profile import Profile
from tests.builders.plans import sample

TRUE_CVS = (0.0, 0.05, 0.1, 0.2, 0.4)
ITERATION_CV = 0.05
TRIALS = (1, 2, 4, 8, 16)
SPEEDUP = {1: 1.0, 2: 0.6, 4: 0.36}
STAGES = (Stage(trials=16, iterations=1), Stage(trials=4, iterations=4), Stage(trials=1, iterations=16))
PLAN = Plan(
    stages=(
        StagePlan(instances=4, gpus_per_trial=1),
        StagePlan(instances=4, gpus_per_trial=4),
        StagePlan(instances=1, gpus_per_trial=4),
    )
)
OFFER = Offer(instance_type="bench", gpus=4, price_usd_per_hour=12.0, max_instances=4)


def drawn(numbers: np.random.Generator, trial_cv: float, trials: int) -> list[Cell]:
    """What is measured of `trials` trials."""
    deviation = math.sqrt(math.log1p(trial_cv**2))
    speeds = numbers.lognormal(-(deviation**2) / 2.0, deviation, trials)
    noise = math.sqrt(math.log1p(ITERATION_CV**2))
    return [
        cell_of(trial, gpus, (share * speeds[trial] * numbers.lognormal(-(noise**2) / 2.0, noise, 3)).tolist())
        for gpus, share in SPEEDUP.items()
        for trial in range(max(1, trials // gpus))
    ]


def anova_cv(cells: list[Cell]) -> float:
    """The classical estimate, from the trials on 1 GPU."""
    first = [cell for cell in cells if cell.gpus == 1]
    if len(first) == 1:
        return 0.0
    within = sum(cell.scatter for cell in first) / (2.0 * len(first))
    return math.sqrt(max(0.0, float(np.var([cell.log_s for cell in first], ddof=1)) - within / 3.0))


def kept(found: Fit, cells: list[Cell], trial_cv: float, profiled_cv: float, mean_cv: float) -> float:
    """How often a deadline is kept that the measured profile tells to be kept in 95 of 100 runs."""
    seconds = found.seconds_per_iteration(cells)
    expected = Profile(
        seconds_per_iteration=seconds, trial_cv=profiled_cv, iteration_cv=found.iteration.cv, mean_cv=mean_cv
    )
    true = Profile(seconds_per_iteration=SPEEDUP, trial_cv=trial_cv, iteration_cv=ITERATION_CV)
    deadline_s = float(np.quantile(sample(STAGES, PLAN, expected, OFFER, num_samples=4000, seed=1).jct_s, 0.95))
    return float((sample(STAGES, PLAN, true, OFFER, num_samples=4000, seed=2).jct_s <= deadline_s).mean())


def main() -> None:
    """Print a line for every truth and number of trials."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--profiles", type=int, default=100)
    profiles = parser.parse_args().profiles
    print("of each: estimates of trial_cv, mean (p10 to p90); how often its 90 % interval holds the truth;")
    print("deadlines told to be kept in 95 % of the runs, kept: with the profile, without the error of the mean that")
    print("few trials leave (mean_cv), and with the classical estimate (analysis of variance) alone")
    print("trials  true cv  estimate             holds  classical  kept  without mean_cv  classical")
    began_s, fits = time.process_time(), 0
    for trials in TRIALS:
        for trial_cv in TRUE_CVS:
            numbers = np.random.default_rng(trials)
            measured = [drawn(numbers, trial_cv, trials) for _ in range(profiles)]
            found = [fit(cells) for cells in measured]
            fits += len(found)
            cvs, classical = [one.trial.cv for one in found], [anova_cv(cells) for cells in measured]
            holds = np.mean([one.trial.low_cv <= trial_cv <= one.trial.high_cv for one in found])
            both = list(zip(found, measured, classical, strict=True))
            seen = np.mean([kept(one, cells, trial_cv, one.trial.cv, one.mean_error) for one, cells, _ in both])
            sure = np.mean([kept(one, cells, trial_cv, one.trial.cv, 0.0) for one, cells, _ in both])
            usual = np.mean([kept(one, cells, trial_cv, cv, 0.0) for one, cells, cv in both])
            low, high = np.quantile(cvs, [0.1, 0.9])
            estimate = f"{np.mean(cvs):.3f} ({low:.3f} to {high:.3f})"
            print(
                f"{trials:6} {trial_cv:8.2f}  {estimate}  {holds:5.0%}  {np.mean(classical):9.3f}  {seen:4.0%}"
                f"  {sure:15.0%}  {usual:9.0%}",
                flush=True,
            )
    print(f"{fits} fits and what was sampled with them took {time.process_time() - began_s:.1f} CPU s")
    began_s = time.process_time()
    for _ in range(20):
        fit(measured[0])
    print(f"a fit of {TRIALS[-1]} trials takes {1000.0 * (time.process_time() - began_s) / 20.0:.1f} ms of CPU")


if __name__ == "__main__":
    main()
