"""One worker of a gang that trains a small model with its gradient noise measured, beside a plain one."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.queues import Queue

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rubberband.cloud.ray_head.ray_node import free_port
from rubberband.executor import GradientNoise, NoiseReading
from rubberband.executor import WorkerGang as Gang
from rubberband.executor.training.wrapping import compress
from tests.builders.forked import CONTEXT, start

NUM_INPUTS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    shares: Sequence[int]
    steps: int
    limit: int = 100
    """Samples of a micro-batch."""
    optimizer: str = "SGD"
    are_views: bool = False
    has_unused: bool = False
    is_compressed: bool = False
    """Whether the workers exchange gradients in bfloat16."""
    scale: float = 1.0
    """The loss is multiplied by it, as for half precision."""
    counts: Sequence[int] = ()
    """What the samples of each worker count together, if not one each; with one micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    weights: list[float]
    plain_weights: list[float]
    reading: NoiseReading


class Model(nn.Module):
    """Linear, in double precision, with a part that no one needs and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(NUM_INPUTS, 3).double()
        self.last = nn.Linear(3, 2).double()
        self.frozen = nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Shape (m, 6) to (m, 2)."""
        return self.last(torch.tanh(self.linear(inputs))) * self.frozen


def batch_of(step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for whoever asks."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(size, NUM_INPUTS, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(size, 2, generator=generator, dtype=torch.float64)


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(inputs), targets)


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "SGD":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.Adam(model.parameters(), lr=0.01)


def run_gang(scenarios: Sequence[Scenario]) -> list[list[Outcome]]:
    """What each worker saw of each scenario, in the order of their ranks; all are of as many workers."""
    rendezvous = f"tcp://127.0.0.1:{free_port()}"
    results: Queue[tuple[int, list[Outcome]]] = CONTEXT.Queue()
    num_workers = len(scenarios[0].shares)
    workers = [start(_work, scenarios, rank, rendezvous, results) for rank in range(num_workers)]
    found = dict(results.get(timeout=240) for _ in workers)
    for worker in workers:
        worker.join()
    return [[found[rank][at] for rank in range(num_workers)] for at in range(len(scenarios))]


def _work(scenarios: Sequence[Scenario], rank: int, rendezvous: str, results: Queue[tuple[int, list[Outcome]]]) -> None:
    torch.set_num_threads(1)
    gang = Gang.join(rank=rank, num_workers=len(scenarios[0].shares), rendezvous=rendezvous, device="cpu")
    results.put((rank, [_outcome(scenario, gang) for scenario in scenarios]))
    gang.part()


def _outcome(scenario: Scenario, gang: Gang) -> Outcome:
    weights, reading = _train(scenario, gang, is_observed=True)
    plain_weights, _ = _train(scenario, gang, is_observed=False)
    assert reading is not None
    return Outcome(weights=weights, plain_weights=plain_weights, reading=reading)


def _train(scenario: Scenario, gang: Gang, *, is_observed: bool) -> tuple[list[float], NoiseReading | None]:
    module = Model()
    if not scenario.has_unused:
        module.unused.requires_grad_(False)
    optimizer = make_optimizer(scenario.optimizer, module)
    model = DistributedDataParallel(
        module, find_unused_parameters=scenario.has_unused, gradient_as_bucket_view=scenario.are_views
    )
    if scenario.is_compressed:
        compress(model)
    batch_size = sum(scenario.shares)
    noise = None
    if is_observed:
        noise = GradientNoise(
            optimizer,
            model,
            rank=gang.rank,
            num_workers=gang.num_workers,
            initial_batch=batch_size,
            total=gang.sum,
            gradient_scale=lambda: None if scenario.scale == 1.0 else torch.tensor(scenario.scale),
        )
    for step in range(scenario.steps):
        optimizer.zero_grad()
        _pass(scenario, gang, model, noise, step)
        if noise is not None:
            noise.before_update()
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad /= scenario.scale
        optimizer.step()
    reading = None
    if noise is not None:
        reading = noise.reading()
        noise.close()
    return torch.cat([weight.detach().flatten() for weight in module.parameters()]).tolist(), reading


def _pass(
    scenario: Scenario, gang: Gang, model: DistributedDataParallel, noise: GradientNoise | None, step: int
) -> None:
    batch_size, share = sum(scenario.shares), scenario.shares[gang.rank]
    inputs, targets = batch_of(step, batch_size)
    first = sum(scenario.shares[: gang.rank])
    chunks = torch.arange(first, first + share).split(scenario.limit) if share else ()
    weights = [len(chunk) for chunk in chunks] or [0]
    if noise is not None:
        noise.before_step(scenario.shares, weights)
    if scenario.counts:
        weights, batch_size = [scenario.counts[gang.rank]], sum(scenario.counts)
        if noise is not None:
            noise.weigh(torch.tensor(weights, dtype=torch.float64) / batch_size)
    for at, weight in enumerate(weights):
        chunk = chunks[at] if chunks else torch.arange(2)
        with contextlib.nullcontext() if at == len(weights) - 1 else model.no_sync():
            loss = loss_of(model, inputs[chunk], targets[chunk])
            (loss * (scenario.scale * gang.num_workers * weight / batch_size)).backward()
        if noise is not None:
            noise.after_part()
