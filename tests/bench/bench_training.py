"""Benchmarks of training: ours and a peer in one run, in turn. `python tests/bench/bench_training.py NAME`.

Without a name, all of them run. Figures are medians over the rounds; `--rounds 5` is the default. On a CPU, resnet and
gpt are small and not compiled, and their seconds are those that the process computes.
"""

from __future__ import annotations

import argparse
import functools
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
sys.path.insert(1, str(Path(__file__).parent))

import rubberband
from rubberband.executor import Entrypoint, TorchRunner, open_store, own_time, run_segment, warm_up
from rubberband.executor import WorkerGang as Gang
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
"""Beginnings of training steps in this process, by the clock that leaves out the time in which others had its CPU."""


class Sleeping(rubberband.TorchTrial):
    """A model whose steps take the time that they are given, with `bytes` of state beside it."""

    batch_size = 1

    def build_model(self, config: Any) -> torch.nn.Module:
        self.config = config
        model = torch.nn.Linear(1, 1)
        model.register_buffer("state", torch.randn(config.get("bytes", 4) // 4))
        return model

    def build_optimizer(self, config: Any, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01)

    def train_dataset(self, config: Any) -> TensorDataset:
        inputs = torch.ones(config["steps"], 1)
        return TensorDataset(inputs, inputs)

    def eval_dataset(self, config: Any) -> TensorDataset:
        return TensorDataset(torch.ones(1, 1), torch.ones(1, 1))

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        if model.training:
            TIMES.append(own_time())
            time.sleep(self.config["step_s"])
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


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
    began_at = own_time()
    with tempfile.TemporaryDirectory(prefix="rubberband-bench-") as folder:
        for iteration in range(ITERATIONS):
            for _ in range(STEPS):
                time.sleep(STEP_S)
            stopped_at = own_time()
            _before(Path(folder), state, iteration)
            saving_s += own_time() - stopped_at
        return saving_s / (own_time() - began_at - saving_s)


@benchmark
def checkpoints(rounds: int) -> None:
    """Cost of a 200 MB checkpoint every iteration of 2 s; the first round also fills fresh memory."""
    found: dict[str, list[float]] = {"behind": [], "plain": []}
    for _ in range(rounds):
        without, behind = _ours("Seldom"), _ours("Sleeping")
        found["behind"].append(100.0 * (behind / without - 1.0))
        found["plain"].append(100.0 * _plain())
        times = f"without {without:.3f} s, behind training {behind:.3f} s"
        print(f"  {times}; a plain loop saves for {found['plain'][-1]:.1f} % of the time", flush=True)
    for name, label in (("behind", "ours, written behind training"), ("plain", "plain loop, saved in between")):
        costs = sorted(found[name])
        print(f"{label:32}{median(costs):+.1f} % ({costs[0]:+.1f} to {costs[-1]:+.1f})")


# Steps of usual models, one worker, with the data in memory

FAST = {"precision": "bf16", "compile": True}
SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "cuda": {
        "images": {"width": 64, "batch": 512, "steps": 100, "words": {**FAST, "channels_last": True}},
        "text": {"width": 384, "layers": 6, "length": 256, "batch": 64, "steps": 50, "words": FAST},
    },
    "cpu": {
        "images": {"width": 8, "batch": 32, "steps": 8, "words": {"precision": "bf16", "channels_last": True}},
        "text": {"width": 64, "layers": 2, "length": 64, "batch": 16, "steps": 40, "words": {"precision": "bf16"}},
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


def _runner(trial: type[rubberband.TorchTrial], epochs: int, **changes: Any) -> TorchRunner:
    segment = replace(SEGMENT, metric="train_loss", config={}, until_iterations=epochs, **changes)
    return TorchRunner(trial(), segment, Gang(0, 1, None))


class Recalled(rubberband.TorchTrial):
    """A model of wide layers; on a CPU it pretends to have no memory for more than `most` samples."""

    batch_size = 32
    num_workers = 0
    most = 10**9

    def build_model(self, config: Any) -> torch.nn.Module:
        layers = [layer for _ in range(4) for layer in (torch.nn.Linear(1024, 1024), torch.nn.Tanh())]
        return torch.nn.Sequential(*layers)

    def build_optimizer(self, config: Any, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01)

    def train_dataset(self, config: Any) -> TensorDataset:
        return TensorDataset(torch.randn(32, 1024))

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        (rows,) = batch
        rows = rows[:, None, :].expand(-1, 512 if DEVICE == "cuda" else 8, -1)
        loss = model(rows).square().mean()
        if len(rows) > self.most:
            raise torch.OutOfMemoryError("pretended")
        return loss


@benchmark
def out_of_memory(rounds: int) -> None:
    """A step that runs out of memory: its time, and that of the steps after it, beside steps that never do."""
    torch.set_num_threads(1 if DEVICE == "cpu" else torch.get_num_threads())
    usual, first, later = [], [], []
    for _ in range(rounds):
        for runs_out in (False, True):
            runner = _runner(Recalled, 8, device=DEVICE)
            seconds = []
            for step in range(1, 9):
                if step == 4:
                    _lend_memory(runner, little=runs_out)
                began = time.perf_counter()
                runner.iterate(step)
                seconds.append(time.perf_counter() - began)
            _lend_memory(runner, little=False)
            runner.close()
            if runs_out:
                first.append(seconds[3])
                later.append(median(seconds[4:]))
            else:
                usual.append(median(seconds[4:]))
    print(
        f"on {DEVICE}: a step takes {1e3 * median(usual):.1f} ms, one that runs out {1e3 * median(first):.1f} ms, and"
    )
    print(f"the next ones, in two passes or more, {1e3 * median(later):.1f} ms")


def _lend_memory(runner: TorchRunner, *, little: bool) -> None:
    """Let a step of 32 samples run out of memory: on a GPU really, with half of what it took before."""
    if DEVICE == "cuda":
        peak, whole = torch.cuda.max_memory_allocated(), torch.cuda.get_device_properties(0).total_memory
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(0.6 * peak / whole if little else 1.0)
    else:
        runner.trial.most = 16 if little else 10**9  # type: ignore[attr-defined]


@benchmark
def change_of_trial(rounds: int) -> None:
    """What a warm worker takes for another trial: a segment of examples/digits.py less its iterations and its data."""
    torch.set_num_threads(1)
    digits = Entrypoint.parse("digits:DigitsTrial", [Path(__file__).parents[2] / "examples"])
    module = sys.modules[digits.load().__module__]
    module.load_splits = functools.cache(module.load_splits)  # type: ignore[attr-defined]
    config, seconds = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0}, []
    with tempfile.TemporaryDirectory(prefix="rubberband-bench-") as folder:
        store, checkpoints = open_store(folder), dict[int, Any]()

        def segment_s(trial: int, iterations: int) -> float:
            """Return the seconds of a segment of a trial, from its checkpoint on."""
            done, checkpoint = checkpoints.get(trial, (0, None))
            ends = done + iterations
            segment = replace(SEGMENT, trial=trial, config=config, checkpoint=checkpoint)
            segment = replace(segment, from_iterations=done, until_iterations=ends, max_iterations=ends)
            began = own_time()
            *_, last = run_segment(digits, segment, store)
            checkpoints[trial] = ends, last.checkpoint
            return own_time() - began

        warm_up(digits, "cpu")
        segment_s(1, 1), segment_s(2, 1)
        for _ in range(rounds):
            one_s, three_s = segment_s(1, 1), segment_s(2, 3)
            seconds.append(one_s - (three_s - one_s) / 2)
    least, usual, most = (1e3 * of(seconds) for of in (min, median, max))
    print(f"a change of trial takes {usual:.0f} ms (from {least:.0f} to {most:.0f})")


def main() -> None:
    global DEVICE
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="*", choices=[[], *BENCHMARKS], default=[])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=["cuda", "cpu"], default=DEVICE, help="of resnet, gpt and out-of-memory")
    arguments = parser.parse_args()
    DEVICE = arguments.device
    for name in arguments.name or BENCHMARKS:
        print(f"{name}: {BENCHMARKS[name].__doc__}")
        BENCHMARKS[name](arguments.rounds)


if __name__ == "__main__":
    # From the module that the trials are imported from, so that their times are found.
    from bench_training import main as run

    run()
