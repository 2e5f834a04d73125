"""How fast K asynchronous workers are on a real parameter server, against the queueing model of one worker's times.

    python -m tests.bench.bench_async [--most-workers 8] [--updates 150] [--size-mb 8] [--server-ms 0]

Servers and workers are processes of this machine and talk over its loopback. A worker sleeps in place of computing, so
that K of them need no K processors; the parameters, the optimizer's steps and the transfers are real. On a loopback
transfers are work of the processors: with few of them, or other work, take a small model and let the optimizer sleep.

Aims (design of asynchronous training): mean error of X(K) at most 10 %, the largest at most 15 %, at most 5 % after one
observation at K = 2; the K that the model names best is within 5 % of the best measured.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from torch.utils.data import TensorDataset

import rubberband
from rubberband.executor.checkpoints import open_store
from rubberband.executor.training.entrypoint import Entrypoint
from rubberband.planner.queueing.planning import calibrated, curve
from rubberband.values.asynchronous import AsyncProfile, AsyncTimes
from rubberband.values.training import AsyncTraining, AsyncUse
from tests.builders.segments import SEGMENT
from tests.integration.async_gang import async_gang

WARM_UP = 1
"""Iterations that are not counted."""


class Sleeping(rubberband.TorchTrial):
    """A model of `size_mb` that is not used: its gradient is there after `compute_s`."""

    batch_size = 1

    def build_model(self, config: Mapping[str, Any]) -> torch.nn.Module:
        rows = int(config["size_mb"] * 1e6 / 4 / config["tensors"])
        return torch.nn.ParameterList([torch.zeros(rows) for _ in range(config["tensors"])])

    def build_optimizer(self, config: Mapping[str, Any], model: torch.nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if config["server_s"]:
            optimizer.register_step_post_hook(lambda *_: time.sleep(config["server_s"]))
        return optimizer

    def train_dataset(self, config: Mapping[str, Any]) -> TensorDataset:
        self.samples_per_iteration = config["updates"]  # type: ignore[misc]
        self.compute_s = config["compute_s"]
        return TensorDataset(torch.zeros(64, 1))

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        time.sleep(self.compute_s)
        return _Free.apply(*model)  # type: ignore[no-any-return]


class _Free(torch.autograd.Function):
    """A loss whose gradient takes no time to compute: the same zeros, whatever the parameters are."""

    @staticmethod
    def forward(ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.zeros = [torch.empty_like(each) for each in parameters]
        return torch.zeros((), requires_grad=True)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return tuple(ctx.zeros)


def measured(workers: int, config: Mapping[str, Any], servers: int, iterations: int) -> list[AsyncUse]:
    """Return the iterations of `workers` workers."""
    segment = replace(
        SEGMENT, config=config, metric="train_loss", until_iterations=WARM_UP + iterations, num_workers=workers
    )
    entrypoint = Entrypoint.parse("tests.bench.bench_async:Sleeping", (os.getcwd(),))
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(folder)
        with async_gang(entrypoint, segment, store, AsyncTraining(servers=servers), workers) as gang:
            reports = gang.all()
    return [each.batch.updates for each in reports[WARM_UP:] if each.batch.updates is not None]


def throughput(uses: list[AsyncUse]) -> float:
    """Return updates per second."""
    return sum(use.updates for use in uses) / sum(use.duration_s for use in uses)


def profile_of(uses: list[AsyncUse]) -> AsyncProfile:
    """Return the model of a worker that trained alone."""
    times = AsyncTimes(
        compute_s=fmean(use.compute_s for use in uses),
        up_s=fmean(use.up_s for use in uses),
        server_s=fmean(use.server_s + use.wait_s for use in uses),
        down_s=fmean(use.down_s for use in uses),
    )
    return AsyncProfile(
        times=times, updates_per_iteration=1.0, servers=uses[0].servers, largest_shard=uses[0].largest_shard
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--most-workers", type=int, default=8)
    parser.add_argument("--updates", type=int, default=150)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--size-mb", type=float, default=8.0)
    parser.add_argument("--compute-ms", type=float, default=30.0)
    parser.add_argument("--server-ms", type=float, default=0.0, help="beside the optimizer's own step")
    parser.add_argument("--tensors", type=int, default=8)
    parser.add_argument("--servers", type=int, default=1)
    given = parser.parse_args()
    config = {
        "size_mb": given.size_mb,
        "tensors": given.tensors,
        "updates": given.updates,
        "compute_s": given.compute_ms / 1e3,
        "server_s": given.server_ms / 1e3,
    }
    print(f"load of this machine before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    seen: dict[int, float] = {}
    model: AsyncProfile | None = None
    for workers in range(1, given.most_workers + 1):
        uses = measured(workers, config, given.servers, given.iterations)
        seen[workers] = throughput(uses)
        if model is None:
            model = profile_of(uses)
            times = model.times
            print(
                f"one worker: compute {times.compute_s * 1e3:.2f}, up {times.up_s * 1e3:.2f}, server "
                f"{times.server_s * 1e3:.2f}, down {times.down_s * 1e3:.2f} ms; 1 / sum {1 / times.update_s:.1f}/s"
            )
        print(f"K = {workers}: {seen[workers]:.1f} updates/s, staleness {fmean(u.staleness for u in uses):.2f}")
    assert model is not None
    most = given.most_workers
    for name, profile in (("one worker", model), ("and K = 2", calibrated(model, {2: seen[2]}))):
        found = curve(profile, most)
        errors = {k: float(found.point[k - 1]) / seen[k] - 1.0 for k in seen}
        print(f"model of {name}: " + ", ".join(f"{k}: {found.point[k - 1]:.1f} ({errors[k]:+.1%})" for k in seen))
        later = [abs(error) for k, error in errors.items() if k > 2 or name == "one worker"]
        print(f"  mean error {fmean(later):.1%} (aims: 10 %, then 5 %), largest {max(later):.1%} (aim: 15 %)")
        named = max(seen, key=lambda k: float(found.point[k - 1]) / (1.0 + 1e-3 * k))
        print(f"  best K by the model: {named}; measured there {seen[named] / max(seen.values()):.1%} of the best")
    print(f"load after: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
