"""Trials whose samples come from loader workers, and what they have seen."""

from __future__ import annotations

import multiprocessing
import os
import random
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import Dataset

import rubberband
from rubberband.executor import CheckpointStore, Entrypoint, SegmentReport, run_segment
from tests.builders.segments import SEGMENT


class Augmented(Dataset[Any]):
    """Samples with noise from every source of randomness that there is."""

    def __len__(self):
        return 22

    def __getitem__(self, index):
        noise = random.random() + float(np.random.rand()) + float(torch.rand(()))
        x = torch.full((3,), index / 22, dtype=torch.float64) + 0.1 * noise
        return {"index": index, "x": x, "pid": os.getpid()}


class Trained(rubberband.TorchTrial):
    """Remembers the samples of each batch."""

    batch_size = 8
    seen: ClassVar[list[Any]] = []

    def build_model(self, config):
        return torch.nn.Linear(3, 1).double()

    def build_optimizer(self, config, model):
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def train_dataset(self, config):
        return Augmented()

    def eval_dataset(self, config):
        return None

    def loss(self, model, batch):
        loaded_here = (batch["pid"] == os.getpid()).all()
        assert loaded_here == (self.num_workers == 0)
        self.seen.append(batch["index"].tolist())
        return (model(batch["x"]) ** 2).mean()


def made(num_workers: int | None, base: type = Trained, **words: Any) -> type:
    place = {"__module__": __name__, "__qualname__": "made.<locals>.Made"}
    return type("Made", (base,), {**place, "num_workers": num_workers, "seen": [], **words})


def run(trial: type, store: CheckpointStore, **changes: Any) -> list[Any]:
    segment = replace(SEGMENT, **{"until_iterations": 3, "metric": "train_loss", **changes})
    items = list(run_segment(Entrypoint.from_object(trial), segment, store))
    assert multiprocessing.active_children() == [], "its loader workers ended with it"
    return items


def curve(found: list[SegmentReport]) -> list[float]:
    return [report.metrics["train_loss"] for report in found]


def raising(error: type[BaseException], *words: Any) -> Any:
    def act():
        raise error(*words)

    return act
