"""Equal and balanced shares of a batch on unequal workers: the same trial twice, side by side.

    python examples/balancing.py                  # the digits model on four workers; a minute or two on 2 cores
    python examples/balancing.py --paces 1 1 1 8

Each worker waits in proportion to its samples, which stands for a slower processor. By default the last two need two
and four times as long for a sample as the others. Only `batch.balance` of the experiment differs.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from digits import DigitsTrial
from torch import nn
from torch.utils.data import TensorDataset

import rubberband
from rubberband.planner.balancing import even_shares

STEPS = 40
"""Optimizer steps of an iteration."""
SAMPLE_S = 0.0006
"""Seconds that the fastest worker waits for a sample."""


class UnequalDigits(DigitsTrial):
    """The digits model on workers that need different times for a sample."""

    batch_size = 128
    samples_per_iteration = STEPS * batch_size
    paces: Sequence[float] = (1.0, 1.0, 2.0, 4.0)
    """How many times longer each worker needs for a sample."""

    def build_model(self, config: Mapping[str, Any]) -> nn.Module:
        return super().build_model({"width": 8}).double()

    def train_dataset(self, config: Mapping[str, Any]) -> TensorDataset:
        return doubled(super().train_dataset(config))

    def eval_dataset(self, config: Mapping[str, Any]) -> TensorDataset:
        return doubled(super().eval_dataset(config))

    def build_optimizer(self, config: Mapping[str, Any], model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        if model.training:
            rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
            time.sleep(SAMPLE_S * self.paces[rank] * len(batch[1]))
        return super().loss(model, batch)


def doubled(split: TensorDataset) -> TensorDataset:
    """Return images in double precision: in single precision, rounding alone sets trainings apart after 80 steps."""
    images, labels = split.tensors
    return TensorDataset(images.double(), labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """A trial's training."""

    ends_s: Sequence[float]
    """Training time after each iteration."""
    accuracy: Sequence[float]
    shares: Sequence[int]
    """Samples of each worker in the last steps."""

    @property
    def step_s(self) -> float:
        """Median time of a step in the second half of the training, evaluation included."""
        taken = [end - start for start, end in zip(self.ends_s, self.ends_s[1:], strict=False)]
        return median(taken[len(taken) // 2 :]) / STEPS


def train(policy: str, iterations: int) -> Course:
    """Train one trial on a gang with a worker for each pace."""
    workers = len(UnequalDigits.paces)
    with tempfile.TemporaryDirectory() as home:
        result = rubberband.tune(
            UnequalDigits,
            home=home,
            name=f"shares-{policy}",
            search={
                "space": {"constant": 0},
                "scheduler": {"type": "stages", "stages": [{"trials": 1, "iterations": iterations}]},
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
            batch={"balance": {"policy": policy}},
        )
    trial = result.trials[0]
    began_s = min(use.training_s for use in result.busy if use.training_s is not None)
    return Course(
        ends_s=[at_s - began_s for at_s, _, _ in trial.curve],
        accuracy=[metrics["accuracy"] for _, _, metrics in trial.curve],
        shares=trial.balance[-1].shares if trial.balance else even_shares(UnequalDigits.batch_size, workers),
    )


def show(equal: Course, balanced: Course) -> None:
    """Print both courses side by side, and what balancing gained."""
    courses = {"equal shares": equal, "balanced": balanced}
    print(" " * 9, *(f"{name:>22}" for name in courses), sep=" | ")
    print("iteration", *[f"{'seconds':>10} {'accuracy':>11}"] * 2, sep=" | ")
    for at in range(len(equal.ends_s)):
        figures = (f"{course.ends_s[at]:10.2f} {course.accuracy[at]:11.4f}" for course in courses.values())
        print(f"{at + 1:9}", *figures, sep=" | ")
    shares = [" / ".join(map(str, course.shares)) for course in courses.values()]
    least_s = SAMPLE_S * UnequalDigits.batch_size / sum(1.0 / pace for pace in UnequalDigits.paces)
    gap = 100.0 * (balanced.accuracy[-1] - equal.accuracy[-1])
    print(f"samples per step  {shares[0]} equal, {shares[1]} balanced")
    print(f"time per step     {versus(1e3 * equal.step_s, 1e3 * balanced.step_s, 'ms')}")
    print(f"lower bound       {1e3 * least_s:.1f} ms: the best shares, if workers only waited and computed nothing")
    print(f"{f'{len(equal.ends_s)} iterations':<18}{versus(equal.ends_s[-1], balanced.ends_s[-1], 's')}")
    print(f"final accuracy    {equal.accuracy[-1]:.4f} equal, {balanced.accuracy[-1]:.4f} balanced ({gap:+.2f} points)")


def versus(equal: float, balanced: float, unit: str) -> str:
    """Return two times and their ratio as a phrase."""
    return f"{equal:.1f} {unit} equal, {balanced:.1f} {unit} balanced ({equal / balanced:.2f} times as fast)"


def main() -> None:
    """Read the command line, train twice, and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--paces", type=float, nargs="+", default=UnequalDigits.paces, help="of each worker, 1: fastest"
    )
    parser.add_argument("--iterations", type=int, default=5, help=f"of {STEPS} steps")
    asked = parser.parse_args()
    if len(asked.paces) < 2 or not all(0.0 < pace < math.inf for pace in asked.paces):
        parser.error(
            f"--paces {' '.join(map(str, asked.paces))}: give two or more numbers above 0, one for each worker"
        )
    if asked.iterations < 2:
        parser.error(
            f"--iterations {asked.iterations}: give 2 or more; the time of a step is taken from the later ones"
        )
    UnequalDigits.paces = tuple(asked.paces)
    show(train("equal", asked.iterations), train("auto", asked.iterations))


if __name__ == "__main__":
    main()
