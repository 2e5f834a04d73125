"""What measuring the gradient noise scale costs per step beside plain DDP: blocks of both in turn, in one run.

Not a program of its own: `bench_noise_scale.py` prints its figures.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.queues import Queue

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from examples.digits import DigitsTrial, load_splits
from rubberband.executor import GradientNoise
from rubberband.executor.training.gang import Gang

STEPS = 20
"""Of a block; a reading ends it, as often as the agent takes one."""
CONFIG = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.0, "width": 16}

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda module: torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9),
    "Adam": lambda module: torch.optim.Adam(module.parameters(), lr=1e-4),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is timed."""

    optimizer: str
    parts: tuple[int, ...]
    """Micro-batches of one worker."""
    extra_s: float = 0.0
    """Sleep per step, in place of a longer computation."""
    blocks: int = 150


def measure(case: Case, num_workers: int) -> tuple[float, float]:
    """Seconds per step of plain training, and the median over pairs of blocks of what measuring adds to a step."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        rendezvous = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    context = get_context("spawn")
    results: Queue[tuple[float, float]] = context.Queue()
    workers = [
        context.Process(target=_work, args=(case, rank, num_workers, rendezvous, results))
        for rank in range(num_workers)
    ]
    for worker in workers:
        worker.start()
    found = results.get(timeout=600)
    for worker in workers:
        worker.join()
    return found


def _work(case: Case, rank: int, num_workers: int, rendezvous: str, results: Queue[tuple[float, float]]) -> None:
    torch.set_num_threads(1)
    gang = Gang.join(rank=rank, num_workers=num_workers, rendezvous=rendezvous, device="cpu")
    plain, observed = _Training(case, gang, is_observed=False), _Training(case, gang, is_observed=True)
    for training in (plain, observed):
        training.block_s()
    pairs = []
    for turn in range(case.blocks):
        # Either goes first in every other pair.
        first, second = (plain, observed) if turn % 2 else (observed, plain)
        times = {first: first.block_s(), second: second.block_s()}
        pairs.append((times[plain], times[observed]))
    if rank == 0:
        results.put((statistics.median(a for a, _ in pairs), statistics.median(b - a for a, b in pairs)))
    for training in (plain, observed):
        training.close()
    del plain, observed, first, second, times, training
    gang.part()


class _Training:
    """The digits model with or without its noise measured; a step is that of the training loop."""

    def __init__(self, case: Case, gang: Gang, *, is_observed: bool) -> None:
        torch.manual_seed(0)
        self._case, self._num_workers = case, gang.num_workers
        self._total = sum(case.parts) * gang.num_workers
        module = DigitsTrial().build_model(CONFIG)
        self._optimizer = OPTIMIZERS[case.optimizer](module)
        self._model: nn.Module = DistributedDataParallel(module) if gang.num_workers > 1 else module
        self._images, self._labels = load_splits()[0].tensors
        self._random = torch.Generator().manual_seed(gang.rank)
        self._noise: GradientNoise | None = None
        if is_observed:
            self._noise = GradientNoise(
                self._optimizer,
                self._model,
                rank=gang.rank,
                num_workers=gang.num_workers,
                initial_batch=self._total,
                total=gang.sum,
            )

    def block_s(self) -> float:
        """Seconds per step of a block."""
        began = time.perf_counter()
        for _ in range(STEPS):
            self._step()
        if self._noise is not None:
            self._noise.reading()
        return (time.perf_counter() - began) / STEPS

    def _step(self) -> None:
        self._optimizer.zero_grad()
        if self._noise is not None:
            self._noise.before_step([sum(self._case.parts)] * self._num_workers, self._case.parts)
        for at, size in enumerate(self._case.parts):
            chosen = torch.randint(len(self._labels), (size,), generator=self._random)
            is_last = at == len(self._case.parts) - 1
            gathers = isinstance(self._model, DistributedDataParallel) and not is_last
            with self._model.no_sync() if gathers else contextlib.nullcontext():
                loss = nn.functional.cross_entropy(self._model(self._images[chosen]), self._labels[chosen])
                (loss * (self._num_workers * size / self._total)).backward()
            if self._noise is not None:
                self._noise.after_part()
        time.sleep(self._case.extra_s)
        if self._noise is not None:
            self._noise.before_update()
        self._optimizer.step()

    def close(self) -> None:
        if self._noise is not None:
            self._noise.close()
        del self._model, self._optimizer
