"""Equal and balanced shares of a batch on unequal workers: the same trial twice, side by side.

    python examples/balancing.py                  # the digits model on four workers; a minute or two on 2 cores
    python examples/balancing.py --paces 1 1 1 8

Each worker waits in proportion to its samples, which stands for a slower processor. By default the last two need two
and four times as long for a sample as the others. Only `batch.balance` of the experiment differs.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from digits import DigitsTrial
from side_by_side import Course, courses, show, train, versus
from torch import nn
from torch.utils.data import TensorDataset

from rubberband.values.balance import even_shares

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


def steps_s(course: Course) -> float:
    """Return the median time of a step in the second half of the training, evaluation included."""
    taken = [end - start for start, end in pairwise(course.seconds)]
    return median(taken[len(taken) // 2 :]) / STEPS


def show_steps(kinds: Mapping[str, Course], shares: Mapping[str, Sequence[int]]) -> None:
    """Print the shares of the last steps, and what a step takes with them."""
    least_s = SAMPLE_S * UnequalDigits.batch_size / sum(1.0 / pace for pace in UnequalDigits.paces)
    texts = [f"{' / '.join(map(str, each))} {name}" for name, each in shares.items()]
    print(f"{'samples per step':<18}{'; '.join(texts)}")
    print(versus("time per step", {name: 1e3 * steps_s(course) for name, course in kinds.items()}, "ms"))
    print(f"{'lower bound':<18}{1e3 * least_s:.1f} ms: the best shares, if workers only waited and computed nothing")


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
    kinds, shares, workers = {}, {}, len(asked.paces)
    for name, policy in {"equal shares": "equal", "balanced": "auto"}.items():
        balance = {"balance": {"policy": policy}}
        result = train(UnequalDigits, workers=workers, iterations=asked.iterations, batch=balance)
        kinds[name], (trial,) = courses(result), result.trials
        shares[name] = trial.balance[-1].shares if trial.balance else even_shares(UnequalDigits.batch_size, workers)
    show(kinds)
    show_steps({name: found[0] for name, found in kinds.items()}, shares)


if __name__ == "__main__":
    main()
