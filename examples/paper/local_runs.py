"""Tables 1 and 2 of the RubberBand paper for real: trials that sleep, on instances that are processes here."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from cases import PLACED, POLICIES, SCATTERED, resnet101
from rows import Found, Statement, Table, percent, verdict

from rubberband import Experiment, Result
from rubberband.errors import RubberbandError
from rubberband.executor.journal.folder import open_folder
from rubberband.running.run import run_experiment
from rubberband.running.starting import RunOptions
from rubberband.values.plan import Policy


def ran(experiment: Experiment, home: Path, policy: Policy = "optimal") -> Result:
    """Run an experiment on this machine, whose trials are beside this file. Raises RubberbandError if it fails."""
    options = RunOptions(search_path=(str(Path(__file__).parent),), check=False, policy=policy)
    result = run_experiment(experiment, open_folder(experiment.name, home), options)
    if result.outcome != "done":
        raise RubberbandError(f"{experiment.name}: {result.outcome}, {result.reason}")
    return result


def run(name: str, policy: Policy, **words: Any) -> Result:
    with tempfile.TemporaryDirectory() as home:
        return ran(Experiment(version=1, name=name, **words), Path(home), policy)


SIZES = (1, 2, 4)
"""Workers of a gang."""


class Gang(NamedTuple):
    """Fastest step of gangs of one size."""

    samples_per_s: float
    instances: int


def measured(gpus_per_instance: int) -> dict[int, Gang]:
    """Return gangs of 1, 2 and 4 GPUs on such instances, 4 GPUs in all."""
    name = f"placed-on-{gpus_per_instance}"
    result = run(
        name,
        "static",
        entrypoint="sleeping:Placed",
        search={
            "space": {"number": {"type": "uniform", "lower": 0.0, "upper": 1.0}},
            "scheduler": {"type": "stages", "stages": [{"trials": 4 // gpus, "iterations": 3} for gpus in SIZES]},
            "metric": "step_s",
            "mode": "min",
        },
        constraints={"deadline": "1h", "objective": "min_time", "max_cost": 1},
        resources={
            "provider": "local",
            "gpus_per_instance": gpus_per_instance,
            "price_per_hour": 1,
            "max_instances": 4 // gpus_per_instance,
            "gpus_per_trial": {"min": 1, "max": 4},
        },
        # So near to linear that plans which are made again with measured times have larger gangs all the same.
        profile={"seconds_per_iteration": {1: 1.0, 2: 0.52, 4: 0.27}},
    )
    rows = [metrics for trial in result.trials for _, _, metrics in trial.curve]
    steps = {gpus: [(row["step_s"], row["instances"]) for row in rows if row["gpus"] == gpus] for gpus in SIZES}
    if missing := [str(gpus) for gpus, found in steps.items() if not found]:
        raise RubberbandError(
            f"{name}: no gang of {' or '.join(missing)} workers ran, as measured times changed the plan at a SYNC; run "
            "it again on a machine that is less busy"
        )
    return {gpus: Gang(1024 / min(found)[0], int(min(found)[1])) for gpus, found in steps.items()}


def table_1(small: bool) -> Found:
    """Measured samples per second of a gang within one instance, and across instances."""
    placed, scattered = measured(4), measured(1)
    gains = [gangs[4].samples_per_s / gangs[1].samples_per_s for gangs in (placed, scattered)]
    slower = {gpus: placed[gpus].samples_per_s / scattered[gpus].samples_per_s for gpus in SIZES}
    yield Statement(
        "Placement allows throughput to scale almost linearly across resources (~3.8x), while the placement-unaware "
        "baseline achieves only a ~1.8x speedup.",
        verdict(gains[0] > 3.4, gains[1] < 2.4),
        f"Measured with 4 workers: {gains[0]:.2f}x within an instance, {gains[1]:.2f}x across instances.",
    )
    yield Statement(
        "Without placement control sample throughput scales poorly, and is over 2x slower (4 GPUs).",
        verdict(slower[4] > 2.0),
        f"It is {slower[4]:.2f}x slower; with 2 GPUs {slower[2]:.2f}x (theirs: {PLACED[4] / SCATTERED[4]:.2f}x and "
        f"{PLACED[2] / SCATTERED[2]:.2f}x).",
    )
    yield Table(
        ("GPUs", "placed", "instances", "scattered", "instances", "paper's placed", "not placed"),
        [(gpus, *placed[gpus], *scattered[gpus], PLACED[gpus], SCATTERED[gpus]) for gpus in SIZES],
        digits=0,
    )
    yield (
        "Workers are processes on local instances, which sleep for a step and then send around a ring, as an "
        "all-reduce of ResNet-50's gradients does, all at a quarter. A connection that leaves an instance is slowed to "
        "2.4 Gbit/s, at which 4 scattered GPUs are as in the paper; 2 GPUs follow. A busy machine makes all of them "
        "slower."
    )
    yield "The planner packs a gang on as few instances as hold it; those of one GPU each cannot hold more."


RUN_SCALE = 20.0
"""A minute of the paper is three seconds of a real run."""


def epochs_run(policy: Policy) -> Result:
    """Run a search of sleeping trials with ResNet-101's scaling on local instances of four logical GPUs."""
    seconds = {gpus: resnet101().iteration_s(gpus) / RUN_SCALE for gpus in (1, 2, 4, 8)}
    return run(
        f"epochs-{policy}",
        policy,
        entrypoint="sleeping:Epochs",
        search={
            "space": {
                "quality": {"type": "uniform", "lower": 0.1, "upper": 0.9},
                **{f"epoch_s_{gpus}": each for gpus, each in seconds.items()},
            },
            "scheduler": {"type": "sha", "num_samples": 16, "grace_period": 1, "max_t": 25, "reduction_factor": 3},
            "sampler": {"type": "random", "seed": 7},
            "metric": "accuracy",
            "mode": "max",
        },
        constraints={"deadline": "40s", "max_cost": 5},
        resources={
            "provider": "local",
            "gpus_per_instance": 4,
            "price_per_hour": 12.24,
            "max_instances": 4,
            "gpus_per_trial": {"min": 1, "max": 8},
            "minimum_billed": "0s",
            "provision_delay": "4s",
            "init_delay": "4s",
        },
        profile={"seconds_per_iteration": seconds, "trial_startup": "0.2s"},
    )


def table_2_runs(small: bool) -> Found:
    """Real runs of sleeping trials on local instances."""
    found = {name: epochs_run(policy) for name, policy in POLICIES.items()}
    off = {
        name: (each.actual_jct_s / each.planned_jct_s - 1.0, each.actual_cost_usd / each.planned_cost_usd - 1.0)
        for name, each in found.items()
    }
    rest = [each.stages[1:] for each in found.values()]
    later = [percent(sum(s.actual_s or 0.0 for s in of) / sum(s.planned_s for s in of) - 1.0) for of in rest]
    saved = 1.0 - found["elastic"].actual_cost_usd / found["fixed"].actual_cost_usd
    winners = {name: each.best.trial if each.best else None for name, each in found.items()}
    is_one = len(set(winners.values())) == 1
    yield Statement(
        "The error rate in both JCT and cost is low, showing high fidelity between simulation and reality.",
        verdict(*(abs(each) < 0.15 for both in off.values() for each in both)),
        "; ".join(f"{name}: JCT off by {percent(jct)}, cost by {percent(cost)}" for name, (jct, cost) in off.items())
        + ". Instances start on the processors of this machine, later where it is busy; stages after the first took "
        f"{', '.join(later)} longer than planned.",
    )
    yield Statement(
        "RubberBand is able to reduce costs (on the real runs, too).",
        verdict(saved > 0.0),
        f"{percent(saved)} less than the fixed cluster.",
    )
    yield Statement(
        "Across all deadlines, all baselines demonstrated a statistically insignificant difference in accuracy.",
        verdict(is_one),
        "The same trial wins." if is_one else f"Winners differ: {winners}.",
    )
    yield Table(
        ("policy", "planned JCT (s)", "JCT (s)", "planned USD", "USD", "instances x GPUs per trial"),
        [
            (
                *(name, f"{each.planned_jct_s:.1f}", f"{each.actual_jct_s:.1f}"),
                *(each.planned_cost_usd, each.actual_cost_usd),
                ", ".join(f"{stage.planned_instances}x{stage.gpus_per_trial}" for stage in each.stages),
            )
            for name, each in found.items()
        ],
        digits=3,
    )
    yield (
        "SHA(16, 1, 25, 3) with ResNet-101's epochs, a minute in three seconds, within 40 s on at most 4 local "
        "instances of 4 logical GPUs. Prices are metered, and nothing is charged."
    )
