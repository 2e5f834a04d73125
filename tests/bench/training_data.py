"""How fast training gets its data: ours, and a plain loop with torch's DataLoader, in turn.

Not a program of its own: `bench_training.py` runs its benchmarks and prints their figures.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset

import rubberband
from rubberband.cloud.ray_head.ray_node import free_port
from rubberband.executor import Entrypoint, SegmentFailure, open_store, run_segment, warm_up
from tests.builders.segments import SEGMENT

PIPELINE_WORKERS = 2
STEPS: list[float] = []
"""When each step of this process began."""
MARKS: list[tuple[float, float]] = []
"""Time, and seconds that CPUs have computed for this process and its loader workers, at the beginning of each epoch."""


class Images(Dataset[Any]):
    """Images in memory; each is decoded and augmented, which takes `sample_s`, asleep or at work."""

    def __init__(self, total: int, sample_s: float = 0.0, burn: bool = False, side: int = 32) -> None:
        self.pixels = np.random.default_rng(1).integers(0, 256, (min(total, 2**22 // side**2), 3, side, side), "uint8")
        self.total, self.sample_s, self.burn = total, sample_s, burn

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        until = time.thread_time() + self.sample_s
        if self.sample_s and not self.burn:
            time.sleep(self.sample_s)
        while self.burn and time.thread_time() < until:
            pass
        image = torch.from_numpy(self.pixels[index % len(self.pixels)]).float() / 255.0
        return (image.flip(2) if torch.rand(()) < 0.5 else image), index % 10


def dataset(config: Mapping[str, Any]) -> Dataset[Any]:
    """Return the training set of a case."""
    if config["kind"] == "memory":
        images = Images(config["total"])
        return TensorDataset(torch.from_numpy(images.pixels).float() / 255.0, torch.arange(len(images)) % 10)
    words = {"burn": config["kind"] == "burn", "side": config.get("side", 32)}
    return Images(config["total"], config.get("sample_s", 0.0), **words)


def network(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, stride=2), nn.ReLU(), nn.Conv2d(width, width, 3, stride=2), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10),
    )  # fmt: skip


def step_loss(model: nn.Module, batch: Any, config: Mapping[str, Any]) -> torch.Tensor:
    """Return the loss of a batch, and note the time."""
    if len(STEPS) % (config["total"] // config["batch"]) == 0:
        MARKS.append((time.perf_counter(), _cpu_s()))
    STEPS.append(time.perf_counter())
    loss: torch.Tensor = nn.functional.cross_entropy(model(batch[0]), batch[1])
    return loss


class Trained(rubberband.TorchTrial):
    drop_last = True

    def build_model(self, config: Mapping[str, Any]) -> nn.Module:
        self.config = config
        return network(config["width"])

    def build_optimizer(self, config: Mapping[str, Any], model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def train_dataset(self, config: Mapping[str, Any]) -> Dataset[Any]:
        self.num_workers = config["num_workers"]
        return dataset(config)

    def global_batch_size(self, config: Mapping[str, Any]) -> int:
        return int(config["batch"])

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return step_loss(model, batch, self.config)


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
        dataset(config),
        config["batch"],
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )


def plain(config: Mapping[str, Any]) -> None:
    """Train by the loop that users write, with DistributedDataParallel around the model."""
    with _group():
        _train(config)  # its DDP is gone before the group, whose end would wait with the interpreter's lock held


def _train(config: Mapping[str, Any]) -> None:
    model: nn.Module = network(config["width"])
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01, momentum=0.9)
    loader, loss_sum = loader_of(config), torch.zeros(())
    for _ in range(config["epochs"]):
        for batch in loader:
            optimizer.zero_grad()
            loss = step_loss(wrapped, batch, config)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            loss_sum += loss.detach()


@contextmanager
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def rate(run: Callable[[Mapping[str, Any]], None], config: Mapping[str, Any]) -> tuple[float, float]:
    """Return samples per second between the second epoch and the last; and per second that a CPU computes."""
    STEPS.clear()
    MARKS.clear()
    run(config)
    samples = (len(MARKS) - 2) * (config["total"] // config["batch"]) * config["batch"]
    (_, first, *_, last) = MARKS
    return samples / (last[0] - first[0]), samples / (last[1] - first[1])


def _cpu_s() -> float:
    """Return the CPU seconds of this process and those it started, to the nanosecond; psutil's are of 10 ms."""
    this = psutil.Process()
    return sum(time.clock_gettime((~each.pid << 3) | 2) for each in (this, *this.children(recursive=True)))


def _keep_memory() -> None:
    """Let glibc keep what a step gives back. Else chance decides, at each start of training, whether its next step
    gets memory with pages or without: one with samples of 4 MB then takes 10 ms a sample or 16, ours as the peer's."""
    libc = ctypes.CDLL(None)
    for limit, value in ((_M_MMAP_THRESHOLD, 32 << 20), (_M_TRIM_THRESHOLD, 2**31 - 1)):
        assert libc.mallopt(limit, value), "glibc refused"


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of malloc.h; 32 MB is the most."""


def compare(label: str, peer: Callable[[Mapping[str, Any]], None], config: Mapping[str, Any], rounds: int) -> None:
    """Print the rates of ours and a peer, which train in turn, three short turns a round.

    Each turn of ours is compared with the peer's before and after it, so that a machine that gets slower, or is shared
    with others, is so for both. Printed is the median of these ratios, and their middle half.
    """
    torch.set_num_threads(1)
    _keep_memory()
    warm_up(OURS, "cpu")  # as slots do: a collection after a segment then looks at nothing that was imported
    rate(ours, config), rate(peer, config)  # the first warm up
    found: dict[Any, list[tuple[float, float]]] = {ours: [], peer: [rate(peer, config)]}
    for _ in range(3 * rounds):
        for run in (ours, peer):
            found[run].append(rate(run, config))
    for unit, at in (("s", 0), ("CPU s", 1)):
        mine, theirs = ([rates[at] for rates in found[run]] for run in (ours, peer))
        beside = [math.sqrt(before * after) for before, after in itertools.pairwise(theirs)]
        low, middle, high = quantiles([one / other for one, other in zip(mine, beside, strict=True)], n=4)
        print(
            f"{label:28} samples/{unit:5} ours {median(mine):7.0f}, peer {median(theirs):7.0f}: {middle:.3f} "
            f"(half of {len(mine)} turns {low:.3f} to {high:.3f})",
            flush=True,
        )


def throughput(rounds: int) -> None:
    """Samples per second against the same model in a plain DDP loop with DataLoader."""
    model = {"width": 32, "epochs": 4, "batch": 64}
    images = {"kind": "cheap", "total": 4096, "num_workers": 1}
    compare("images, one loader worker", plain, {**model, **images}, rounds)
    compare("tensors in memory", plain, {**model, "kind": "memory", "total": 2048, "num_workers": 0}, rounds)


def pipeline(rounds: int) -> None:
    """Samples per second in two loader workers, against the same loop with DataLoader.

    Asleep, the loader workers leave the CPUs to the step; at work, two of them need more than this machine may have.
    """
    case = {"width": 8, "epochs": 3, "num_workers": PIPELINE_WORKERS, "kind": "burn", "batch": 64}
    for milliseconds, total in ((0, 25_600), (1, 5_120), (4, 640), (20, 128)):
        words = {**case, "total": total, "sample_s": milliseconds / 1000}
        compare(f"a sample computes for {milliseconds} ms", plain, words, rounds)
    compare("a sample sleeps for 4 ms", plain, {**case, "kind": "sleep", "total": 640, "sample_s": 0.004}, rounds)
    compare("a sample has 4 MB", plain, {**case, "total": 256, "batch": 4, "side": 592}, rounds)
