"""Population based training by RubberBand and by Ray Tune on the same toy problem, side by side: asserts nothing.

    python -m tests.bench.bench_pbt [--runs 3] [--only NAME ...] [--keep FILE] [--table FILE] [--limit 600]

A trial sleeps a second an iteration. Its accuracy grows fastest where `lr` suits the accuracy that it has, so that a
schedule is better than any constant. Each run has another seed, and its contenders have the same first population, on
local instances of eight logical GPUs in all. Time is from the command to its end; an instance is billed from when its
node has joined to its end, at the same price. FILE has a line of JSON for each run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import rubberband
from rubberband.cloud.ray_head.ray_node import end_all
from rubberband.executor import ExperimentFolder
from rubberband.spec.experiment import Experiment
from rubberband.values.offer import Offer
from tests.bench.bench_ray_tune import arguments, finished, held_s, in_turn, markdown, report, spread
from tests.builders.plans import plan_job

TITLES = {
    "rubberband": "RubberBand, pbt",
    "synchronous": "PopulationBasedTraining(synch=True)",
    "asynchronous": "PopulationBasedTraining(), the default",
}
ITERATION_S, POPULATION, GENERATIONS, ITERATIONS = 1.0, 8, 6, 4
LEAST, MOST = 1e-4, 1e-1


def gain(lr: float, accuracy: float) -> float:
    """The accuracy that an iteration adds: most where `lr` is what suits the present accuracy."""
    suits = 0.05 / (1.0 + accuracy)
    return max(0.0, 1.0 - abs(lr - suits) / suits)


class Follower(rubberband.Trial):
    """The trial in RubberBand's words."""

    def setup(self, config: Any, context: Any) -> None:
        self.lr, self.accuracy = config["lr"], 0.0

    def iterate(self) -> dict[str, float]:
        time.sleep(ITERATION_S)
        self.accuracy += gain(self.lr, self.accuracy)
        return {"accuracy": self.accuracy}

    def save(self) -> float:
        return self.accuracy

    def load(self, state: float) -> None:
        self.accuracy = state


def words(seed: int) -> dict[str, Any]:
    """The experiment of RubberBand."""
    return {
        "version": 1,
        "name": "population",
        "entrypoint": "tests.bench.bench_pbt:Follower",
        "search": {
            "space": {"lr": {"type": "loguniform", "lower": LEAST, "upper": MOST}},
            "scheduler": {
                "type": "pbt",
                "population": POPULATION,
                "generations": GENERATIONS,
                "iterations": ITERATIONS,
            },
            "sampler": {"type": "random", "seed": seed},
            "metric": "accuracy",
            "mode": "max",
        },
        "constraints": {"deadline": "10m", "objective": "min_time"},
        "resources": {
            "provider": "local",
            "gpus_per_instance": 4,
            "gpus_per_trial": {"min": 1, "max": 1},
            "price_per_hour": 12.24,
            "max_instances": 2,
            "minimum_billed": "0s",
        },
        "profile": {"seconds_per_iteration": {1: ITERATION_S}, "trial_startup": "0.2s"},
    }


def planned(seed: int) -> tuple[Experiment, Offer, int]:
    """The experiment, its offer, and the most instances of its plan, which Ray Tune gets too."""
    experiment = Experiment(**words(seed))
    profile = experiment.loaded_profile()
    assert profile is not None, "the words have a profile"
    job = plan_job(experiment, profile)
    return experiment, job.offer, max(stage.instances for stage in job.plan.stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one contender took, once."""

    contender: str
    seed: int
    outcome: str
    time_s: float
    cost_usd: float
    best: float
    iterations: int


def run(contender: str, seed: int, limit_s: float) -> Run:
    """Run a contender in a process and a home of its own, and end whatever it leaves."""
    _, offer, _ = planned(seed)
    with tempfile.TemporaryDirectory(prefix="pbt-", dir="/tmp", ignore_cleanup_errors=True) as place:
        folder = Path(place)
        if contender == "rubberband":
            cluster = ExperimentFolder(home=folder, name="population").instances
            (folder / "population.yaml").write_text(yaml.safe_dump(words(seed)))
            command = ["-m", "rubberband.cli", "run", str(folder / "population.yaml")]
        else:
            cluster = folder / "cluster"
            command = ["-m", "tests.bench.bench_pbt", "--peer", contender, str(folder), str(seed), str(limit_s)]
        outcome, time_s = finished(command, folder, limit_s)
        for kind in ("instances", "heads"):
            end_all(cluster / kind)
        if contender == "rubberband":
            found = report("population", folder)
            curves = [(trial["iterations"], trial["metrics"]["accuracy"]) for trial in found["trials"]]
            iterations, best = sum(len(trial["curve"]) for trial in found["trials"]), max(top for _, top in curves)
        else:
            lines = [json.loads(line) for line in (folder / "iterations.jsonl").read_text().splitlines()]
            iterations, best = len(lines), max(line["accuracy"] for line in lines)
        cost_usd = sum(offer.instance_cost_usd(seconds) for seconds in held_s(cluster))
    return Run(
        contender=contender,
        seed=seed,
        outcome=outcome,
        time_s=time_s,
        cost_usd=cost_usd,
        best=best,
        iterations=iterations,
    )


def peer(name: str, folder: Path, seed: int, limit_s: float) -> None:
    """Run the search of Ray Tune on a fixed cluster of its own."""
    from ray import tune
    from ray.tune.schedulers import PopulationBasedTraining

    from rubberband.cloud.local.provider import LocalProvider
    from rubberband.executor import Connection
    from tests.bench.ray_tune_peers import _without_runtime_environment

    log = str(folder / "iterations.jsonl")

    class Sleeper(tune.Trainable):
        """The same trial in Ray Tune's words."""

        def setup(self, config: Any) -> None:
            self.lr, self.accuracy = config["lr"], 0.0

        def reset_config(self, new_config: Any) -> bool:
            self.setup(new_config)
            return True

        def step(self) -> dict[str, float]:
            time.sleep(ITERATION_S)
            self.accuracy += gain(self.lr, self.accuracy)
            with open(log, "a") as file:
                file.write(json.dumps({"accuracy": self.accuracy}) + "\n")
            return {"accuracy": self.accuracy}

        def save_checkpoint(self, checkpoint_dir: str) -> None:
            Path(checkpoint_dir, "accuracy").write_text(repr(self.accuracy))

        def load_checkpoint(self, checkpoint: Any) -> None:
            self.accuracy = float(Path(checkpoint, "accuracy").read_text())

    experiment, offer, instances = planned(seed)
    provider = LocalProvider("ray-tune", folder / "cluster", offer.gpus, lease_s=2.0 * limit_s)
    connection = Connection()
    _without_runtime_environment()
    random.seed(seed)
    scheduler = PopulationBasedTraining(
        time_attr="training_iteration",
        metric="accuracy",
        mode="max",
        perturbation_interval=ITERATIONS,
        hyperparam_mutations={"lr": tune.loguniform(LEAST, MOST)},
        synch=name == "synchronous",
    )
    try:
        for number in range(instances):
            provider.launch(f"i-{number + 1:03}")
        connection.open(provider.ensure_head())
        while sum(instance.state == "running" for instance in provider.describe()) < instances:
            time.sleep(0.05)
        tune.Tuner(
            tune.with_resources(Sleeper, {"CPU": 1, "GPU": 1}),
            param_space={"lr": tune.grid_search([each["lr"] for each in experiment.configurations()])},
            tune_config=tune.TuneConfig(scheduler=scheduler, reuse_actors=True),
            run_config=tune.RunConfig(
                name="search",
                storage_path=str(folder / "storage"),
                stop={"training_iteration": GENERATIONS * ITERATIONS},
                checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=ITERATIONS),
                verbose=0,
            ),
        ).fit()
    finally:
        end_all(folder / "cluster" / "instances")
        connection.close()
        provider.close()


def table(runs: list[Run]) -> str:
    """A Markdown table: a row for each contender, with medians of its runs and their extremes."""
    rows = [["", "seeds", "time (s)", "cost (USD)", "best accuracy", "iterations"]]
    for contender, title in TITLES.items():
        mine = [each for each in runs if each.contender == contender]
        if mine:
            failed = [each.outcome for each in mine if each.outcome != "done"]
            rows.append(
                [
                    f"{title} ({failed[0]} in {len(failed)})" if failed else title,
                    str(len(mine)),
                    spread([each.time_s for each in mine], "{:.1f}"),
                    spread([each.cost_usd for each in mine], "{:.3f}"),
                    spread([each.best for each in mine], "{:.2f}"),
                    spread([each.iterations for each in mine], "{:.0f}"),
                ]
            )
    return markdown(rows)


def main() -> None:
    if sys.argv[1:2] == ["--peer"]:
        os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"
        peer(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
        return
    parser: argparse.ArgumentParser = arguments(__doc__, TITLES)
    asked = parser.parse_args()
    if asked.table:
        runs = [Run(**json.loads(line)) for line in asked.table.read_text().splitlines()]
    else:
        turns = itertools.count()
        each = len(asked.only or TITLES)
        runs = list(in_turn(asked, TITLES, lambda name: run(name, next(turns) // each, asked.limit)))
    print(table(runs))


if __name__ == "__main__":
    main()
