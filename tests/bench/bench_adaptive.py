"""What adapting the batch costs and brings: `python tests/bench/bench_adaptive.py [overhead training useless]`.

overhead: the agent at work (noise scale, timings, fits, decisions; the batch is held) beside plain DDP on the digits
model, blocks of both in turn on the same gang. training: the digits model with a fixed and an adaptive batch, five
seeds, on 1, 2 and 4 workers: time and accuracy. useless: the same on one worker whose steps take time in proportion to
the batch, with gradients that are all signal: adapting cannot help there.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Mapping
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import torch  # noqa: E402
from digits import DigitsTrial  # noqa: E402
from goodput import PlainDigits  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

import rubberband  # noqa: E402
from rubberband.executor.training.gang import Gang  # noqa: E402
from rubberband.executor.training.loop import TorchRunner  # noqa: E402
from rubberband.executor.training.segment import Segment  # noqa: E402
from rubberband.values.adaptive import AdaptiveBatch  # noqa: E402

SEEDS, EPOCHS = 5, 15
BLOCKS = 24


class Digits(DigitsTrial):
    """The digits model as examples/digits.py has it, an epoch an iteration; batch 64."""

    samples_per_iteration = 1437

    def build_model(self, config: Mapping[str, Any]) -> torch.nn.Module:
        return super().build_model({"width": 16})

    def build_optimizer(self, config: Mapping[str, Any], model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


class Useless(rubberband.TorchTrial):
    """A regression all of whose samples have nearly the same gradient; each takes 50 microseconds."""

    batch_size = 32
    samples_per_iteration = 2048

    def build_model(self, config: Mapping[str, Any]) -> torch.nn.Module:
        return torch.nn.Linear(64, 1)

    def build_optimizer(self, config: Mapping[str, Any], model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-4)

    def train_dataset(self, config: Mapping[str, Any]) -> TensorDataset:
        inputs = 1.0 + 0.1 * torch.randn(4096, 64)
        return TensorDataset(inputs, inputs.sum(1, keepdim=True) + 100.0)

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        ends = time.perf_counter() + 50e-6 * len(inputs)
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        while time.perf_counter() < ends:
            pass
        return loss

    def evaluate(self, model: torch.nn.Module, loader: Any) -> dict[str, float]:
        return {"accuracy": 0.0}


def segment_of(seed: int, rank: int, num_workers: int, **more: Any) -> Segment:
    """A segment of one worker of a gang on this machine."""
    return Segment(
        trial=0,
        attempt=1,
        config={},
        seed=seed,
        metric="train_loss",
        rank=rank,
        num_workers=num_workers,
        rendezvous=None,
        device="cpu",
        from_iterations=0,
        until_iterations=EPOCHS,
        checkpoint=None,
        **more,
    )


def on_gang(num_workers: int, work: Any, *arguments: Any) -> Any:
    """`work(gang, *arguments)` on every worker of a gang of processes; what rank 0 returned."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        rendezvous = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    context = get_context("spawn")
    results = context.Queue()
    workers = [
        context.Process(target=_join, args=(rank, num_workers, rendezvous, results, work, arguments))
        for rank in range(num_workers)
    ]
    for worker in workers:
        worker.start()
    found = results.get()
    for worker in workers:
        worker.join()
    return found


def _join(rank: int, num_workers: int, rendezvous: str, results: Any, work: Any, arguments: Any) -> None:
    torch.set_num_threads(1)
    gang = Gang.join(rank=rank, num_workers=num_workers, rendezvous=rendezvous, device="cpu")
    found = work(gang, *arguments)
    if rank == 0:
        results.put(found)
    gang.part()


def overhead(gang: Gang) -> tuple[float, float]:
    """Seconds per step of plain training, and the median over pairs of blocks of what the agent adds."""
    plain = TorchRunner(Digits(), segment_of(1, gang.rank, gang.num_workers), gang)
    more = {"batch": AdaptiveBatch(), "batch_mode": "hold"}
    watched = TorchRunner(Digits(), segment_of(1, gang.rank, gang.num_workers, **more), gang)
    times: dict[str, list[float]] = {"plain": [], "watched": []}
    for block in range(1, BLOCKS + 1):
        for name, runner in (("plain", plain), ("watched", watched)):
            began = time.perf_counter()
            list(runner._train(3 * block))
            times[name].append((time.perf_counter() - began) / (3 * 1437 / 64))
    plain.close()
    watched.close()
    pairs = list(zip(times["plain"], times["watched"], strict=True))[2:]
    return median(before for before, _ in pairs), median(after - before for before, after in pairs)


Trained = tuple[float, float, int]
"""(seconds in training steps, mean accuracy of the last three iterations, largest batch)"""


def train(gang: Gang, trial: type[rubberband.TorchTrial], batch: AdaptiveBatch | None, seed: int) -> Trained:
    """One trial. A single iteration's accuracy jumps by points between equal trials, hence the mean of three."""
    runner = TorchRunner(trial(), segment_of(seed, gang.rank, gang.num_workers, batch=batch), gang)
    seconds, accuracy, largest = 0.0, [], 0
    for iterations in range(1, EPOCHS + 1):
        began = time.perf_counter()
        list(runner._train(iterations))
        seconds += time.perf_counter() - began
        largest = max([largest, *(use.batch_size for use in runner.batch_report().batches)])
        accuracy.append(runner._evaluation.metrics(runner._module, 1).get("accuracy", 0.0))
        gang.agree(0.0)
    runner.close()
    return seconds, fmean(accuracy[-3:]), largest


def alternating(gang: Gang, trial: type[rubberband.TorchTrial]) -> list[list[Trained]]:
    """Fixed and adaptive in turn, for every seed."""
    train(gang, trial, AdaptiveBatch(), 0)
    return [[train(gang, trial, batch, seed) for batch in (None, AdaptiveBatch())] for seed in range(1, SEEDS + 1)]


def show(name: str, found: list[list[Trained]]) -> None:
    """A line: means over the seeds, and the median of the ratios of their times."""
    fixed, adaptive = (list(column) for column in zip(*found, strict=True))
    ratio = median(before[0] / after[0] for before, after in found)
    points = 100 * (fmean(after[1] for after in adaptive) - fmean(before[1] for before in fixed))
    print(
        f"{name:24} {fmean(s for s, _, _ in fixed):8.2f} s {fmean(s for s, _, _ in adaptive):8.2f} s {ratio:8.2f}x "
        f"{fmean(a for _, a, _ in fixed):9.4f} {fmean(a for _, a, _ in adaptive):9.4f} {points:+7.2f} "
        f"{max(size for _, _, size in adaptive):8}"
    )


def main() -> None:
    """The sections that are named, or all."""
    asked = sys.argv[1:] or ["overhead", "training", "useless"]
    if "overhead" in asked:
        for workers in (2, 1):
            plain_s, added_s = on_gang(workers, overhead)
            print(
                f"overhead, {workers} workers: {1e3 * plain_s:.2f} ms a step, the agent adds {1e3 * added_s:.3f} ms "
                f"({added_s / plain_s:.1%}); {added_s / 0.1:.2%} of a step of 100 ms"
            )
    if {"training", "useless"} & set(asked):
        names = ("fixed", "adaptive", "faster", "accuracy", "adaptive", "points", "largest")
        print(" " * 24, *(f"{name:>9}" for name in names))
    if "training" in asked:
        for workers in (1, 2, 4):
            show(f"digits, {workers} workers", on_gang(workers, alternating, PlainDigits))
    if "useless" in asked:
        show("where it cannot help", on_gang(1, alternating, Useless))


if __name__ == "__main__":
    main()
