"""How fast training gets its data: ours, a plain loop with torch's DataLoader, and that loader alone, in turn.

Not a program of its own: `bench_training.py` runs its benchmarks and prints their figures.
"""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset

import rubberband
from rubberband.cloud.ray_head.ray_node import free_port
from rubberband.executor import Entrypoint, SegmentFailure, open_store, run_segment, warm_up
from tests.builders.segments import SEGMENT

BATCH = 64
SAMPLE_S = 0.004
PIPELINE_WORKERS = 2
STEPS: list[float] = []
"""When each step of this process began."""


class Images(Dataset[Any]):
    """Small images in memory; each is decoded and augmented, which takes `sample_s`, asleep or at work."""

    def __init__(self, total: int, sample_s: float = 0.0, burn: bool = False) -> None:
        self.pixels = np.random.default_rng(1).integers(0, 256, (total, 3, 32, 32), dtype=np.uint8)
        self.sample_s, self.burn = sample_s, burn

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        until = time.thread_time() + self.sample_s
        if self.sample_s and not self.burn:
            time.sleep(self.sample_s)
        while self.burn and time.thread_time() < until:
            pass
        image = torch.from_numpy(self.pixels[index]).float() / 255.0
        return (image.flip(2) if torch.rand(()) < 0.5 else image), index % 10


def dataset(config: Mapping[str, Any]) -> Dataset[Any]:
    """Return the training set of a case."""
    if config["kind"] == "memory":
        images = Images(config["total"])
        return TensorDataset(torch.from_numpy(images.pixels).float() / 255.0, torch.arange(len(images)) % 10)
    sample_s = 0.0 if config["kind"] == "cheap" else SAMPLE_S
    return Images(config["total"], sample_s, burn=config["kind"] == "burn")


def network(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, stride=2), nn.ReLU(), nn.Conv2d(width, width, 3, stride=2), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10),
    )  # fmt: skip


def step_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the loss of a batch, and note the time."""
    STEPS.append(time.perf_counter())
    loss: torch.Tensor = nn.functional.cross_entropy(model(batch[0]), batch[1])
    return loss


class Trained(rubberband.TorchTrial):
    batch_size = BATCH
    drop_last = True

    def build_model(self, config: Mapping[str, Any]) -> nn.Module:
        return network(config["width"])

    def build_optimizer(self, config: Mapping[str, Any], model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def train_dataset(self, config: Mapping[str, Any]) -> Dataset[Any]:
        self.num_workers = config["num_workers"]
        return dataset(config)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return step_loss(model, batch)


OURS = Entrypoint.parse("training_data:Trained", [Path(__file__).parent])


def ours(config: Mapping[str, Any]) -> None:
    """Train by our loop, with the checkpoints that it writes."""
    segment = replace(SEGMENT, config=config, metric="train_loss", until_iterations=config["epochs"])
    with tempfile.TemporaryDirectory(prefix="rubberband-bench-") as folder:
        for item in run_segment(OURS, segment, open_store(folder)):
            assert not isinstance(item, SegmentFailure), item


def loader_of(config: Mapping[str, Any]) -> DataLoader[Any]:
    """Return torch's loader as users write it."""
    workers = config["num_workers"]
    return DataLoader(
        dataset(config), BATCH, shuffle=True, drop_last=True, num_workers=workers, persistent_workers=workers > 0
    )


def plain(config: Mapping[str, Any]) -> None:
    """Train by the loop that users write, with DistributedDataParallel around the model."""
    model: nn.Module = network(config["width"])
    with _group():
        wrapped = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01, momentum=0.9)
        loader, loss_sum = loader_of(config), torch.zeros(())
        for _ in range(config["epochs"]):
            for batch in loader:
                optimizer.zero_grad()
                loss = step_loss(wrapped, batch)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                loss_sum += loss.detach()


def loader_alone(config: Mapping[str, Any]) -> None:
    """Iterate over torch's loader, without a model."""
    loader = loader_of(config)
    for _ in range(config["epochs"]):
        for _ in loader:
            STEPS.append(time.perf_counter())


@contextmanager
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def rate(run: Callable[[Mapping[str, Any]], None], config: Mapping[str, Any]) -> tuple[float, float]:
    """Return samples per second after the first epoch; and per second that a CPU computes, loader workers included."""
    STEPS.clear()
    began_s = _cpu_s()
    run(config)
    cpu_s = _cpu_s() - began_s
    per_epoch = len(STEPS) // config["epochs"]
    return (len(STEPS) - per_epoch - 1) * BATCH / (STEPS[-1] - STEPS[per_epoch]), len(STEPS) * BATCH / cpu_s


def _cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def compare(label: str, peer: Callable[[Mapping[str, Any]], None], config: Mapping[str, Any], rounds: int) -> None:
    """Print the rates of ours and a peer, and the median of their ratio in turn."""
    torch.set_num_threads(1)
    warm_up(OURS, "cpu")  # as slots do: a collection after a segment then looks at nothing that was imported
    found = []
    for turn in range(rounds + 1):
        first, second = (ours, peer) if turn % 2 else (peer, ours)
        rates = {run: rate(run, config) for run in (first, second)}
        if turn:  # the first warms up
            found.append((rates[ours], rates[peer]))
    for unit, at in (("s", 0), ("CPU s", 1)):
        pairs = [(one[at], other[at]) for one, other in found]
        ratios = sorted(one / other for one, other in pairs)
        mine, theirs = (median(rates) for rates in zip(*pairs, strict=True))
        print(
            f"{label:28} samples/{unit:5} ours {mine:7.0f}, peer {theirs:7.0f}: {median(ratios):.3f} "
            f"({ratios[0]:.3f} to {ratios[-1]:.3f})",
            flush=True,
        )


def throughput(rounds: int) -> None:
    """Samples per second against the same model in a plain DDP loop with DataLoader."""
    model = {"width": 32, "epochs": 4}
    images = {"kind": "cheap", "total": 4096, "num_workers": 1}
    compare("images, one loader worker", plain, {**model, **images}, rounds)
    compare("tensors in memory", plain, {**model, "kind": "memory", "total": 2048, "num_workers": 0}, rounds)


def pipeline(rounds: int) -> None:
    """Samples per second against DataLoader's own rate: 4 ms a sample in two loader workers.

    Asleep, the loader workers leave the CPUs to the step; at work, two of them need more than this machine may have.
    """
    case = {"width": 8, "epochs": 3, "total": 640, "num_workers": PIPELINE_WORKERS}
    compare("a sample sleeps for 4 ms", loader_alone, {**case, "kind": "sleep"}, rounds)
    compare("a sample computes for 4 ms", loader_alone, {**case, "kind": "burn"}, rounds)
