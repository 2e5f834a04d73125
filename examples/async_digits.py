"""Comparison of synchronous and asynchronous training with one slow worker: times to the same accuracy.

    python examples/async_digits.py                # the digits model, two workers; about a minute
    python examples/async_digits.py --slower 8

A worker takes 0.3 ms for each sample and one of them a multiple of that, as if other work kept its core busy. Only
`training` and `batch` of the experiment differ; the user code is the same. Other work on the machine slows all three
down, most of all those that wait for every worker.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import torch
from digits import DigitsTrial
from torch import nn
from torch.utils.data import TensorDataset

import rubberband

SAMPLE_S = 0.0003
KINDS: dict[str, dict[str, Any]] = {
    "sync, equal shares": {"batch": {"balance": {"policy": "equal"}}},
    "sync, balanced": {},
    "async": {"training": {"mode": "async"}},
}


class UnequalDigits(DigitsTrial):
    """Digits model with one fixed configuration; an iteration is one epoch. The first worker to come is slow."""

    batch_size = 32
    samples_per_iteration = 1437

    def build_model(self, config: Mapping[str, Any]) -> nn.Module:
        return super().build_model({"width": 8})

    def build_optimizer(self, config: Mapping[str, Any], model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.5, weight_decay=1e-4)

    def train_dataset(self, config: Mapping[str, Any]) -> TensorDataset:
        self.sample_s = SAMPLE_S
        try:
            os.close(os.open(config["slow"], os.O_CREAT | os.O_EXCL))
            self.sample_s *= config["slower"]
        except FileExistsError:
            pass
        return super().train_dataset(config)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        if model.training:
            time.sleep(self.sample_s * len(batch[0]))
        return super().loss(model, batch)


def train(words: Mapping[str, Any], *, workers: int, slower: float, epochs: int) -> rubberband.Result:
    """Train one trial on a gang of `workers` workers."""
    with tempfile.TemporaryDirectory() as home:
        return rubberband.tune(
            UnequalDigits,
            home=home,
            name="async-digits",
            search={
                "space": {"slow": os.path.join(home, "slow"), "slower": slower},
                "scheduler": {"type": "stages", "stages": [{"trials": 1, "iterations": epochs}]},
                "metric": "accuracy",
                "mode": "max",
            },
            resources={
                "provider": "local",
                "gpus_per_instance": workers,
                "price_per_hour": 0,
                "max_instances": 1,
                "gpus_per_trial": {"min": workers, "max": workers},
            },
            profile={"seconds_per_iteration": {workers: 1.0}},
            check=False,
            verbose=0,
            **words,
        )


def curve(result: rubberband.Result) -> list[tuple[float, float]]:
    """Return (seconds of training, accuracy) after each iteration, without start-up."""
    began_s = min(use.training_s for use in result.busy if use.training_s is not None)
    return [(at_s - began_s, metrics["accuracy"]) for at_s, _, metrics in result.trials[0].curve]


def show(curves: Mapping[str, list[tuple[float, float]]]) -> None:
    """Print the curves side by side, and the time of each to the accuracy that all reach."""
    print("iteration", *(f"{name:>20}" for name in curves), sep=" | ")
    for at in range(min(map(len, curves.values()))):
        cells = [f"{seconds:9.2f} s {accuracy:8.4f}" for seconds, accuracy in (found[at] for found in curves.values())]
        print(f"{at + 1:9}", *cells, sep=" | ")
    target = 0.995 * min(max(accuracy for _, accuracy in found) for found in curves.values())
    reached_s = {name: next(s for s, accuracy in found if accuracy >= target) for name, found in curves.items()}
    slowest_s = max(reached_s.values())
    print(f"time to an accuracy of {target:.3f}, which all reach:")
    for name, seconds in reached_s.items():
        print(
            f"  {name:20} {seconds:6.2f} s" + (f", {slowest_s / seconds:.2f}x as fast" if seconds < slowest_s else "")
        )


def main() -> None:
    """Read the command line, train, and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="workers of the trial")
    parser.add_argument("--slower", type=float, default=4.0, help="how much slower the first worker is")
    parser.add_argument("--epochs", type=int, default=12)
    asked = parser.parse_args()
    curves = {}
    print(f"{asked.workers} workers, one of them {asked.slower:g} times slower; {asked.epochs} epochs", flush=True)
    for name, words in KINDS.items():
        print(f"training: {name} ...", flush=True)
        result = train(words, workers=asked.workers, slower=asked.slower, epochs=asked.epochs)
        curves[name] = curve(result)
        if updates := result.trials[0].updates:
            last = updates[-1]
            staleness = f"{last.staleness:.1f} in the mean, at most {last.max_staleness}"
            print(f"  {last.updates_per_s:.0f} updates/s; staleness {staleness}")
    show(curves)


if __name__ == "__main__":
    main()
