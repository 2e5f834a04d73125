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
from side_by_side import courses, show, train
from torch import nn
from torch.utils.data import TensorDataset

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


def main() -> None:
    """Read the command line, train, and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="workers of the trial")
    parser.add_argument("--slower", type=float, default=4.0, help="how much slower the first worker is")
    parser.add_argument("--epochs", type=int, default=12)
    asked = parser.parse_args()
    kinds = {}
    print(f"{asked.workers} workers, one of them {asked.slower:g} times slower; {asked.epochs} epochs", flush=True)
    for name, words in KINDS.items():
        print(f"training: {name} ...", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            space = {"slow": os.path.join(folder, "slow"), "slower": asked.slower}
            numbers = {"workers": asked.workers, "iterations": asked.epochs}
            result = train(UnequalDigits, space=space, check=False, verbose=0, **numbers, **words)
        kinds[name] = courses(result)
        if updates := result.trials[0].updates:
            last = updates[-1]
            staleness = f"{last.staleness:.1f} in the mean, at most {last.max_staleness}"
            print(f"  {last.updates_per_s:.0f} updates/s; staleness {staleness}")
    show(kinds)


if __name__ == "__main__":
    main()
