"""How good a configuration each sampler finds with the same trials: hyperband on the virtual clock, Branin's function.

    python tests/bench/bench_samplers.py [--digits] [--seeds 20] [--samplers random tpe …] [--max-t 27]

The figure is the regret of the best trial that was trained to the end: its value above the known optimum (0.397887),
over the seeds. In the second case low budgets mislead: how fast a trial learns depends on its configuration. With
`--digits` it is the loss on held-out digits of scikit-learn; a seed takes some seconds. With one instance
(`--instances 1`) the brackets follow each other, so that all but the first learn from the ones before. The last
columns count the seeds with a better and a worse configuration than random (the same where the first bracket has the
best one), and seconds per run.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from tests.builders.sampled_runs import Objective, SampledRun, an_experiment, branin

Run = Callable[..., float]
OPTIMUM = 0.397887
FOREVER = 10**9


def misleading(configuration: Mapping[str, Any], iterations: int) -> float:
    """Branin's function, reached at a speed that depends on the configuration."""
    delay = 0.5 + abs(math.sin(3.0 * configuration["x"] + configuration["y"]))
    return branin(configuration, FOREVER) + 60.0 * delay / (iterations + 1)


OBJECTIVES: Mapping[str, Objective] = {"low budgets rank alike": branin, "low budgets mislead": misleading}


class Digits:
    """Loss of a small network on held-out digits; a configuration is trained once, one epoch for an iteration."""

    SPACE: Mapping[str, Any] = {
        "lr": {"type": "loguniform", "lower": 1e-5, "upper": 1.0},
        "alpha": {"type": "loguniform", "lower": 1e-6, "upper": 10.0},
        "width": {"type": "lograndint", "lower": 4, "upper": 129},
        "solver": {
            "type": "choice",
            "values": [
                "adam",
                {"name": "sgd", "space": {"momentum": {"type": "uniform", "lower": 0.0, "upper": 0.99}}},
            ],
        },
    }

    def __init__(self) -> None:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        images, labels = load_digits(return_X_y=True)
        self._data = train_test_split(images / 16.0, labels, test_size=0.4, random_state=0)
        self._trained: dict[str, tuple[Any, list[float]]] = {}

    def __call__(self, configuration: Mapping[str, Any], iterations: int) -> float:
        """Return the loss after `iterations` epochs; a loss that is not a number counts as 1000."""
        from sklearn.metrics import log_loss

        images, held_out, labels, held_out_labels = self._data
        model, losses = self._trained.setdefault(repr(configuration), (self._model(configuration), []))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            while len(losses) < iterations:
                try:
                    model.partial_fit(images, labels, classes=range(10))
                    losses.append(float(log_loss(held_out_labels, model.predict_proba(held_out))))
                except ValueError:  # it diverged
                    losses.append(1000.0)
        return losses[iterations - 1]

    @staticmethod
    def _model(configuration: Mapping[str, Any]) -> Any:
        from sklearn.neural_network import MLPClassifier

        return MLPClassifier(
            (configuration["width"],),
            solver=configuration["solver"],
            alpha=configuration["alpha"],
            batch_size=64,
            learning_rate_init=configuration["lr"],
            momentum=configuration.get("momentum", 0.9),
            random_state=0,
        )


def on_digits(sampler: str, seed: int, max_t: int, instances: int) -> float:
    """Return the loss of the best fully trained configuration of one run."""
    run = searched(sampler, seed, Digits(), max_t, instances, space=Digits.SPACE)
    return run.best(max_t)


def regret(sampler: str, seed: int, objective: Objective, max_t: int, instances: int) -> float:
    """Return how far the best fully trained configuration of one run is from the optimum."""
    run = searched(sampler, seed, objective, max_t, instances)
    trained = [trial.trial for trial in run.controller.state.trials if trial.iterations == max_t]
    return min(branin(run.configurations()[trial], FOREVER) for trial in trained) - OPTIMUM


def searched(sampler: str, seed: int, objective: Objective, max_t: int, instances: int, **search: Any) -> SampledRun:
    """Return a finished run of hyperband."""
    kind = {"type": sampler} if sampler in ("random", "quasi") else {"sampler": sampler}
    scheduler = {"type": "hyperband", "max_t": max_t, "reduction_factor": 3}
    resources = {"max_instances": instances}
    experiment = an_experiment(seed, scheduler=scheduler, sampler=kind, resources=resources, **search)
    return SampledRun(experiment, objective).drive()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--samplers", nargs="+", default=["random", "quasi", "tpe", "cmaes", "nsgaii"])
    parser.add_argument("--max-t", type=int, default=27)
    parser.add_argument("--instances", type=int, default=1)
    parser.add_argument("--digits", action="store_true")
    asked = parser.parse_args()
    print(f"hyperband, max_t={asked.max_t}, {asked.instances} instance(s), {asked.seeds} seeds; lower is better")
    print(f"{'case':24} {'sampler':8} {'median':>8} {'quartiles':>17} {'mean':>8} {'better/worse':>13} {'s/run':>6}")
    cases: dict[str, Run] = {case: partial(regret, objective=objective) for case, objective in OBJECTIVES.items()}
    for case, run in ({"digits": on_digits} if asked.digits else cases).items():
        random: list[float] = []
        for sampler in asked.samplers:
            began_s = time.perf_counter()
            found = [run(sampler, seed, max_t=asked.max_t, instances=asked.instances) for seed in range(asked.seeds)]
            spent_s = (time.perf_counter() - began_s) / asked.seeds
            random = random or found
            low, middle, high = statistics.quantiles(found, n=4)
            pairs = list(zip(found, random, strict=True))
            better, worse = sum(mine < theirs for mine, theirs in pairs), sum(mine > theirs for mine, theirs in pairs)
            print(
                f"{case:24} {sampler:8} {middle:8.3f} {low:8.3f} {high:8.3f} {statistics.mean(found):8.3f} "
                f"{f'{better}/{worse}':>13} {spent_s:6.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
