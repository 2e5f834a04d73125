"""Table 3 of Pollux in small, for real: TPE on a pool of this machine, with fixed and with adaptive batches."""

from __future__ import annotations

import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from rows import Found, Table
from tuning import statements

from rubberband import Experiment, Result
from rubberband.errors import RubberbandError
from rubberband.executor.journal.folder import open_folder
from rubberband.running.pool import bring_up, take_down
from rubberband.running.run import RunOptions, run_experiment
from rubberband.spec.pool import PoolFile, on_pool

TRIALS, AT_ONCE, GANG, ITERATIONS = 14, 4, 2, 5
BATCH = 64
"""That of the trial, where it is fixed."""
SPACE = {
    "lr": {"type": "loguniform", "lower": 1e-3, "upper": 0.3},
    "momentum": {"type": "uniform", "lower": 0.0, "upper": 0.95},
    "weight_decay": {"type": "loguniform", "lower": 1e-5, "upper": 1e-2},
    "width": {"type": "choice", "values": [16, 32, 64]},
}


def searched(home: Path, pool: str, policy: str, trials: int) -> Result:
    """Run a search on a pool: four trials at once, two GPUs of one instance each."""
    words = {
        "name": policy,
        "entrypoint": "sleeping_torch:SleepingTrial",
        "search": {
            "space": SPACE,
            "scheduler": {"type": "none", "num_samples": trials, "max_t": ITERATIONS},
            "sampler": {"type": "optuna", "sampler": "tpe", "seed": 7},
            "metric": "accuracy",
            "mode": "max",
        },
        "constraints": {"objective": "min_time", "max_cost": 5},
        "resources": {"pool": pool, "max_instances": 2, "gpus_per_trial": {"min": GANG, "max": GANG}},
        "batch": {"policy": policy},
        "profile": {"seconds_per_iteration": {GANG: 1.0}},
    }
    options = RunOptions(search_path=(str(Path(__file__).parent),), check=False)
    result = run_experiment(Experiment(**on_pool(words, home)), open_folder(policy, home), options)
    if result.outcome != "done":
        raise RubberbandError(f"{policy}: {result.outcome}, {result.reason}")
    return result


def both(trials: int) -> dict[str, Result]:
    """Run the search with fixed and with adaptive batches at the same time, each on half of one pool.

    So what else the machine does slows both.
    """
    policies = {"Baseline": "fixed", "Pollux": "goodput"}
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        file = PoolFile(name="tuning", instances=4, gpus_per_instance=AT_ONCE * GANG // 2, price_per_hour=1)
        pool = bring_up(file, home)
        try:
            with ProcessPoolExecutor(len(policies), get_context("spawn")) as processes:
                runs = {
                    name: processes.submit(searched, home, file.name, policy, trials)
                    for name, policy in policies.items()
                }
            return {name: run.result() for name, run in runs.items()}
        finally:
            take_down(pool)


def jcts_s(result: Result) -> list[float]:
    """Return the seconds from the start of each trial's processes to its end."""
    held = [[use for use in result.busy if use.trial == trial.trial] for trial in result.trials]
    return [max(use.end_s for use in uses) - min(use.start_s for use in uses) for uses in held]


def makespan_s(result: Result) -> float:
    """Return the seconds from the start of the first trial, on instances that are ready, to the end of the last."""
    return max(use.end_s for use in result.busy) - min(use.start_s for use in result.busy)


def top(result: Result) -> tuple[float, float]:
    """Return the mean of the five best accuracies in percent, and their standard deviation."""
    best = sorted(100.0 * trial.metrics["accuracy"] for trial in result.trials)[-5:]
    return float(np.mean(best)), float(np.std(best))


def table_3_runs(small: bool) -> Found:
    """Real searches by TPE with four trials at once, on a pool of local instances."""
    found = both(AT_ONCE if small else TRIALS)
    tops = {name: top(result) for name, result in found.items()}
    jct_s = {name: float(np.mean(jcts_s(result))) for name, result in found.items()}
    makespans_s = {name: makespan_s(result) for name, result in found.items()}
    yield from statements({name: mean for name, (mean, _) in tops.items()}, jct_s, makespans_s)
    yield Table(
        ("policy", "top 5", "JCT (s)", "makespan (s)", "largest batch"),
        [
            (
                name,
                "{:.2f}±{:.2f}".format(*tops[name]),
                jct_s[name],
                makespans_s[name],
                max((use.batch_size for trial in result.trials for use in trial.batches), default=BATCH),
            )
            for name, result in found.items()
        ],
        digits=1,
    )
    yield (
        "A real trial trains a small network with two workers of one instance, and sleeps 40 ms in each pass and .2 ms "
        "for each sample, as a GPU would compute: two CPUs cannot show that a GPU is idle. Gradients and their noise "
        "are real. Both searches run at the same time. Figures differ from run to run."
    )
    yield (
        "Only batches adapt in the real runs: a search gives all of its trials gangs of one size. GPUs adapt between "
        "experiments that share the pool of a service."
    )
