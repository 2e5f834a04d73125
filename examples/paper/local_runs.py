"""Tables 1 and 2 of the RubberBand paper for real: trials that sleep, on instances that are processes here."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from cases import PLACED, POLICIES, SCATTERED, resnet101
from rows import Row, Statement, Table, percent, verdict

from rubberband import Experiment, Result
from rubberband.executor.journal.folder import open_folder
from rubberband.running.run import RunOptions, run_experiment
from rubberband.values.plan import Policy


def run(name: str, policy: Policy, **words: Any) -> Result:
    """Run sleeping trials on local instances."""
    with tempfile.TemporaryDirectory() as home:
        experiment = Experiment(version=1, name=name, **words)
        options = RunOptions(search_path=(str(Path(__file__).parent),), check=False, policy=policy)
        result = run_experiment(experiment, open_folder(name, Path(home)), options)
    if result.outcome != "done":
        failures = {trial.failure for trial in result.trials if trial.failure}
        raise SystemExit(f"{name}: {result.outcome}, {result.reason}; {'; '.join(sorted(failures))}")
    return result


def step_times(gpus_per_instance: int) -> dict[int, tuple[float, int]]:
    """Return the least mean seconds of a step of gangs of 1, 2 and 4 GPUs, and how many instances they were on."""
    result = run(
        f"placed-on-{gpus_per_instance}",
        "static",
        entrypoint="sleeping:Placed",
        search={
            "space": {"number": {"type": "uniform", "lower": 0.0, "upper": 1.0}},
            "scheduler": {
                "type": "stages",
                "stages": [{"trials": trials, "iterations": 3} for trials in (4, 2, 1)],
            },
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
        profile={"seconds_per_iteration": {1: 1.0, 2: 0.6, 4: 0.4}},
    )
    rows = [metrics for trial in result.trials for _, _, metrics in trial.curve]
    sizes = sorted({int(row["gpus"]) for row in rows})
    return {
        gpus: (
            min(row["step_s"] for row in rows if row["gpus"] == gpus),
            int(max(row["instances"] for row in rows if row["gpus"] == gpus)),
        )
        for gpus in sizes
    }


def table_1(small: bool) -> Row:
    """Measure gangs within one instance, and with each worker on an instance of its own."""
    placed, scattered = step_times(4), step_times(1)
    batch, sizes = 1024, (1, 2, 4)
    speeds = {gpus: (batch / placed[gpus][0], batch / scattered[gpus][0]) for gpus in sizes}
    gains = [speeds[4][at] / speeds[1][at] for at in range(2)]
    return Row(
        title="measured samples per second of a gang within one instance, and across instances",
        statements=[
            Statement(
                says="Placement allows throughput to scale almost linearly across resources (~3.8x), while the "
                "placement-unaware baseline achieves only a ~1.8x speedup.",
                verdict=verdict(gains[0] > 3.4, gains[1] < 2.4),
                found=f"Measured with 4 workers: {gains[0]:.2f}x within an instance, {gains[1]:.2f}x across instances.",
            ),
            Statement(
                says="Without placement control sample throughput scales poorly, and is over 2x slower (4 GPUs).",
                verdict=verdict(speeds[4][0] > 2.0 * speeds[4][1]),
                found=f"It is {speeds[4][0] / speeds[4][1]:.2f}x slower; with 2 GPUs "
                f"{speeds[2][0] / speeds[2][1]:.2f}x (theirs: {PLACED[4] / SCATTERED[4]:.2f}x and "
                f"{PLACED[2] / SCATTERED[2]:.2f}x).",
            ),
        ],
        tables=[
            Table(
                columns=("GPUs", "placed", "instances", "scattered", "instances", "paper's placed", "not placed"),
                rows=[
                    (
                        *(str(gpus), f"{speeds[gpus][0]:.0f}", str(placed[gpus][1])),
                        *(f"{speeds[gpus][1]:.0f}", str(scattered[gpus][1])),
                        *(f"{curve[gpus]:.0f}" for curve in (PLACED, SCATTERED)),
                    )
                    for gpus in sizes
                ],
            )
        ],
        assumptions=[
            "Workers are processes on local instances, which sleep for a step and then send around a ring, as an "
            "all-reduce of ResNet-50's gradients does, all at a quarter. A connection that leaves an instance is "
            "slowed to 2.4 Gbit/s, at which 4 scattered GPUs are as in the paper; 2 GPUs follow. A busy machine makes "
            "all of them slower.",
            "The planner packs a gang on as few instances as hold it; those of one GPU each cannot hold more.",
        ],
    )


RUN_SCALE = 20.0
"""A minute of the paper is three seconds of a real run."""
RUN_DEADLINE_S = 40.0
RUN_DELAY_S = 4.0


def epochs_run(policy: Policy, deadline_s: float) -> Result:
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
        constraints={"deadline": f"{deadline_s}s", "max_cost": 5},
        resources={
            "provider": "local",
            "gpus_per_instance": 4,
            "price_per_hour": 12.24,
            "max_instances": 4,
            "gpus_per_trial": {"min": 1, "max": 8},
            "minimum_billed": "0s",
            "provision_delay": f"{RUN_DELAY_S}s",
            "init_delay": f"{RUN_DELAY_S}s",
        },
        profile={"seconds_per_iteration": seconds, "trial_startup": "0.2s"},
    )


def table_2_runs(small: bool) -> Row:
    """Run a static and an elastic plan for real, with trials that sleep."""
    found = {name: epochs_run(policy, RUN_DEADLINE_S) for name, policy in POLICIES.items()}
    off = {
        name: (each.actual_jct_s / each.planned_jct_s - 1.0, each.actual_cost_usd / each.planned_cost_usd - 1.0)
        for name, each in found.items()
    }
    fixed, elastic = (found[name].actual_cost_usd for name in POLICIES)
    later = [
        sum(stage.actual_s or 0.0 for stage in each.stages[1:]) / sum(stage.planned_s for stage in each.stages[1:])
        - 1.0
        for each in found.values()
    ]
    winners = {name: each.best.trial if each.best else None for name, each in found.items()}
    return Row(
        title="real runs of sleeping trials on local instances",
        statements=[
            Statement(
                says="The error rate in both JCT and cost is low, showing high fidelity between simulation and "
                "reality.",
                verdict=verdict(*(abs(each) < 0.15 for both in off.values() for each in both)),
                found="; ".join(
                    f"{name}: JCT off by {percent(jct)}, cost by {percent(cost)}" for name, (jct, cost) in off.items()
                )
                + ". Instances start on the processors of this machine, later where it is busy; stages after the first "
                f"took {', '.join(percent(each) for each in later)} longer than planned.",
            ),
            Statement(
                says="RubberBand is able to reduce costs (on the real runs, too).",
                verdict=verdict(elastic < fixed),
                found=f"{percent(1.0 - elastic / fixed)} less than the fixed cluster.",
            ),
            Statement(
                says="Across all deadlines, all baselines demonstrated a statistically insignificant difference in "
                "accuracy.",
                verdict=verdict(winners["fixed"] == winners["elastic"]),
                found="The same trial wins."
                if winners["fixed"] == winners["elastic"]
                else f"Winners differ: {winners}.",
            ),
        ],
        tables=[
            Table(
                columns=("policy", "planned JCT (s)", "JCT (s)", "planned USD", "USD", "instances x GPUs per trial"),
                rows=[
                    (
                        *(name, f"{each.planned_jct_s:.1f}", f"{each.actual_jct_s:.1f}"),
                        *(f"{each.planned_cost_usd:.3f}", f"{each.actual_cost_usd:.3f}"),
                        ", ".join(f"{stage.planned_instances}x{stage.gpus_per_trial}" for stage in each.stages),
                    )
                    for name, each in found.items()
                ],
            )
        ],
        assumptions=[
            "SHA(16, 1, 25, 3) with ResNet-101's epochs, a minute in three seconds, within 40 s on at most 4 local "
            "instances of 4 logical GPUs. Prices are metered, and nothing is charged."
        ],
    )
