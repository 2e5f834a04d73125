"""Benchmarks of training: ours and a peer in one run, in turn. `python tests/bench/bench_training.py NAME`.

Without a name, all of them run. Figures are medians over the rounds; `--rounds 5` is the default. On a CPU, resnet and
gpt are small and not compiled, and their seconds are those that the process computes.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2]))

import rubberband
from rubberband.executor.checkpoints import open_store
from rubberband.executor.training.entrypoint import Entrypoint
from rubberband.executor.training.run import run_segment
from rubberband.executor.training.segment import SegmentReport
from tests.bench.training_models import ImagesTrial, TextTrial, ours, plain
from tests.builders.segments import SEGMENT

BENCHMARKS: dict[str, Callable[[int], None]] = {}


def benchmark(run: Callable[[int], None]) -> Callable[[int], None]:
    """Add a benchmark, which gets the rounds and prints its figures, under the name of its function."""
    BENCHMARKS[run.__name__.replace("_", "-")] = run
    return run


def entrypoint(name: str) -> Entrypoint:
    return Entrypoint.parse(f"{Path(__file__).stem}:{name}", [Path(__file__).parent])


TIMES: list[float] = []
"""Beginnings of training steps in this process."""


class Sleeping(rubberband.TorchTrial):
    """A model whose steps and evaluations take the time that they are given, with `bytes` of state beside it."""

    batch_size = 1
    eval_batch_size = 1
    eval_on_all_ranks = True

    def build_model(self, config: Any) -> torch.nn.Module:
        self.config, self.trained_at, self.wait_s = config, 0.0, 0.0
        model = torch.nn.Linear(1, 1)
        model.register_buffer("state", torch.randn(config.get("bytes", 4) // 4))
        return model

    def build_optimizer(self, config: Any, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01)

    def train_dataset(self, config: Any) -> TensorDataset:
        inputs = torch.ones(config["steps"], 1)
        return TensorDataset(inputs, inputs)

    def eval_dataset(self, config: Any) -> TensorDataset:
        inputs = torch.ones(config.get("eval_batches", 1), 1)
        return TensorDataset(inputs, inputs)

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        if model.training:
            now = time.perf_counter()
            TIMES.append(now)
            self.wait_s = now - self.trained_at
        time.sleep(self.config["step_s"] if model.training else self.config.get("eval_s", 0.0))
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

    def evaluate(self, model: torch.nn.Module, loader: Any) -> dict[str, Any]:
        began_at = time.perf_counter()
        metrics = {**super().evaluate(model, loader), "wait_s": rubberband.Mean(self.wait_s, 1)}
        self.trained_at = began_at
        return metrics


class Seldom(Sleeping):
    """Writes a checkpoint at the end only."""

    checkpoint_every = 1000


# A 200 MB checkpoint every iteration of 2 s


STEPS, STEP_S, STATE_BYTES, ITERATIONS = 20, 0.1, 200_000_000, 3


def _intervals(steps: int) -> list[float]:
    """Seconds from the first step of each iteration to that of the next."""
    return [after - before for before, after in itertools.pairwise(TIMES[::steps])]


def _ours(trial: str) -> float:
    config = {"steps": STEPS, "step_s": STEP_S, "bytes": STATE_BYTES}
    segment = replace(SEGMENT, config=config, until_iterations=ITERATIONS + 1)
    TIMES.clear()
    with tempfile.TemporaryDirectory(prefix="rubberband-bench-") as folder:
        for _ in run_segment(entrypoint(trial), segment, open_store(folder)):
            pass
    return sum(_intervals(STEPS)) / ITERATIONS


def _before(folder: Path, state: dict[str, torch.Tensor], iteration: int) -> None:
    """Save as this project did before, and as most loops do: pickled in memory, with its digest, and synced."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    hashlib.sha256(buffer.getvalue()).hexdigest()
    with open(folder / f"{iteration}.ckpt", "wb") as file:
        file.write(buffer.getvalue())
        file.flush()
        os.fsync(file.fileno())


def _plain() -> float:
    """Return the share of the time that saving takes in a plain loop."""
    state, saving_s = {"state": torch.randn(STATE_BYTES // 4)}, 0.0
    began_at = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="rubberband-bench-") as folder:
        for iteration in range(ITERATIONS):
            for _ in range(STEPS):
                time.sleep(STEP_S)
            stopped_at = time.perf_counter()
            _before(Path(folder), state, iteration)
            saving_s += time.perf_counter() - stopped_at
        return saving_s / (time.perf_counter() - began_at - saving_s)


@benchmark
def checkpoints(rounds: int) -> None:
    """Cost of a 200 MB checkpoint every iteration of 2 s; the first round warms the memory up."""
    found: dict[str, list[float]] = {"behind": [], "plain": []}
    for _ in range(rounds + 1):
        without, behind = _ours("Seldom"), _ours("Sleeping")
        found["behind"].append(100.0 * (behind / without - 1.0))
        found["plain"].append(100.0 * _plain())
        print(f"  without {without:.3f} s, behind training {behind:.3f} s", flush=True)
    for name, label in (("behind", "ours, written behind training"), ("plain", "plain loop, saved in between")):
        costs = sorted(found[name][1:])
        print(f"{label:32}{median(costs):+.1f} % ({costs[0]:+.1f} to {costs[-1]:+.1f})")


# Evaluation on four workers

EVAL_BATCHES, EVAL_S, EVALUATIONS = 160, 0.0125, 6


@benchmark
def evaluation(rounds: int) -> None:
    """Evaluation of a sleeping model on four workers and on one: from its begin to the next training step."""
    from tests.integration.segment_worker import Worker, run_gang

    config = {"steps": 1, "step_s": 0.0, "eval_batches": EVAL_BATCHES, "eval_s": EVAL_S}
    segment = replace(SEGMENT, config=config, until_iterations=3)
    found: dict[int, list[float]] = {1: [], 4: []}
    workers = [Worker() for _ in range(4)]
    try:
        with tempfile.TemporaryDirectory(prefix="rubberband-bench-") as folder:
            for count in (1, 4, *[1, 4] * rounds):
                items = run_gang(workers[:count], entrypoint("Sleeping"), segment, open_store(folder))[0]
                waits = [item.metrics["wait_s"] for item in items if isinstance(item, SegmentReport)]
                found[count].append(waits[-1])
    finally:
        for worker in workers:
            worker.stop()
    one, four = (median(seconds[1:]) for seconds in found.values())
    print(f"on one worker {one:.3f} s, on four {four:.3f} s: {one / four:.2f} times as fast")


# Steps of usual models, one worker, with the data in memory

FAST = {"precision": "bf16", "compile": True}
SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "cuda": {
        "images": {"width": 64, "batch": 512, "steps": 100, "words": {**FAST, "channels_last": True}},
        "text": {"width": 384, "layers": 6, "length": 256, "batch": 64, "steps": 50, "words": FAST},
    },
    "cpu": {
        "images": {"width": 8, "batch": 32, "steps": 8, "words": {"precision": "bf16", "channels_last": True}},
        "text": {"width": 64, "layers": 2, "length": 64, "batch": 16, "steps": 8, "words": {"precision": "bf16"}},
    },
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _compare(kind: type[ImagesTrial], config: dict[str, Any], rounds: int) -> None:
    """Train iterations of ours and of a plain loop in turn; the first ones, which compile, do not count."""
    torch.set_num_threads(1 if DEVICE == "cpu" else torch.get_num_threads())
    print(f"on {DEVICE}: " + ", ".join(f"{name} {value}" for name, value in config.items()))
    loops = [make(kind, config, DEVICE, rounds + 2) for make in (ours, plain)]
    seconds = [[loop() for loop in loops] for _ in range(rounds + 2)][2:]
    rates = [median(config["batch"] * config["steps"] / each[at] for each in seconds) for at in (0, 1)]
    shares = sorted(theirs / mine for mine, theirs in seconds)
    print(f"samples/s: ours {rates[0]:,.0f}, plain PyTorch {rates[1]:,.0f}")
    print(f"ours / plain, round by round: {median(shares):.3f} ({shares[0]:.3f} to {shares[-1]:.3f})")


@benchmark
def resnet(rounds: int) -> None:
    """ResNet-18 on 32 x 32 images: bf16, channels_last, on a GPU compiled; ours beside plain PyTorch."""
    _compare(ImagesTrial, SIZES[DEVICE]["images"], rounds)


@benchmark
def gpt(rounds: int) -> None:
    """A small GPT with AdamW, OneCycle and clipping: bf16, on a GPU compiled; ours beside plain PyTorch."""
    config = SIZES[DEVICE]["text"]
    _compare(TextTrial, {**config, "words": {**config["words"], "gradient_clip_norm": 1.0}}, rounds)


@benchmark
def throughput(rounds: int) -> None:
    """Samples per second against the same model in a plain DDP loop with DataLoader."""
    from training_data import throughput

    throughput(rounds)


@benchmark
def pipeline(rounds: int) -> None:
    """Samples per second of 4 ms each, in two loader workers, against DataLoader's own rate."""
    from training_data import pipeline

    pipeline(rounds)


def main() -> None:
    global DEVICE
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="*", choices=[[], *BENCHMARKS], default=[])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=["cuda", "cpu"], default=DEVICE, help="of resnet and gpt")
    arguments = parser.parse_args()
    DEVICE = arguments.device
    for name in arguments.name or BENCHMARKS:
        print(f"{name}: {BENCHMARKS[name].__doc__}")
        BENCHMARKS[name](arguments.rounds)


if __name__ == "__main__":
    # From the module that the trials are imported from, so that their times are found.
    from bench_training import main as run

    run()
