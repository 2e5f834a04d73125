"""Planned against actual seconds and cost of small runs on this machine, each from a fresh home with a fresh profile.

Eight experiments: two examples, a plain script as a function, a job of one report, a program without checkpoints, and
the same with those of `rubberband init --patch`; winners of these two are printed. Then the example of a model that
does not fit one GPU, on local instances and on the fake EC2 with the checkpoints' parts in S3; a wait stands for the
computing of its GPUs, as gangs side by side share this machine's cores, and a gang alone would be faster.

A row for each run: what was planned and what happened, the profile's spread (that of a single iteration), and the
difference in percent; the last row of each has the mean difference and the largest. Prints figures, asserts none.

Run: python -m tests.bench.bench_planned_and_actual [NAME ...] [--runs N] [--busy]

With `--busy` a process with an endless loop runs beside them. They need a machine on which nothing else runs.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

from rubberband.executor import ExperimentFolder, Journal, Result, sqlite_url
from rubberband.executor import read_journal as read
from rubberband.running.programs.patches import patch_of
from tests.builders.ec2_runs import SHARDED_ON_EC2, ec2, words

ROOT = Path(__file__).parents[2]

FUNCTION = '''
import numpy as np
import rubberband

def data(seed):
    numbers = np.random.default_rng(seed)
    x = numbers.normal(size=(1000, 60))
    return x, (x @ numbers.normal(size=60) > 0).astype(float)

def train(config):
    """A script as people have it: data, model, loop, and no checkpoint until one is due."""
    import sklearn.linear_model  # a slow import, as most have

    x, y = data(0)
    weights, first = rubberband.get_checkpoint() or (np.zeros(60), 1)
    for iteration in range(first, 28):
        for _ in range(1500):
            weights -= config["lr"] * x.T @ (1 / (1 + np.exp(-x @ weights)) - y) / len(y)
        accuracy = float(((x @ weights > 0) == y).mean())
        rubberband.report({"accuracy": accuracy}, checkpoint=(weights, iteration + 1))

def score(config):
    """A job of one report."""
    x, y = data(0)
    weights = np.zeros(60)
    for _ in range(6000):
        weights -= config["lr"] * x.T @ (1 / (1 + np.exp(-x @ weights)) - y) / len(y)
    rubberband.report({"accuracy": float(((x @ weights > 0) == y).mean())})
'''

PROGRAM = """
import argparse
import time

import numpy as np

time.sleep(1.0)  # slow imports, as most programs have
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--epochs", type=int, default=16)
args = parser.parse_args()
numbers = np.random.default_rng(0)
x = numbers.normal(size=(1000, 60)) / 8
y = x @ numbers.normal(size=60) + 0.3 * numbers.normal(size=1000)
weights = np.zeros(60)
for epoch in range(args.epochs):
    for rows in numbers.permutation(1000).reshape(50, 20):
        weights -= args.lr * x[rows].T @ (x[rows] @ weights - y[rows]) / 20
    time.sleep(0.6)
    loss = float(((x @ weights - y) ** 2).mean())
    print(f"epoch {epoch} accuracy={1 / (1 + loss):.8f}", flush=True)
"""

PACED = """
import time

import torch
from examples.sharded import GPTTrial


class Paced(GPTTrial):
    batch_size = 256

    def loss(self, model, batch):
        time.sleep(0.008 * len(batch[0]) * torch.is_grad_enabled())
        return super().loss(model, batch)
"""

WORDS = """
version: 1
name: {name}
entrypoint: {function}
search:
  space: {{lr: {{type: loguniform, lower: 1.0e-3, upper: 1.0}}}}
  {scheduler}
  metric: accuracy
  mode: max
constraints: {{deadline: 10m, max_cost: 5, objective: min_time}}
resources: {{provider: local, instance_type: p3.2xlarge, max_instances: 2{minimum}}}
"""

FILES = {
    "digits": "examples/digits.yaml",
    "scaling": "examples/scaling.yaml",
    "function": "function.yaml",
    "one": "one.yaml",
    "program": "program.yaml",
    "patched": "patched.yaml",
    "sharded": "examples/sharded.yaml",
    "sharded-ec2": "examples/sharded.yaml",
}
OVERRIDES: Mapping[str, tuple[str, ...]] = {
    "digits": ("profile=", "constraints.deadline=30m"),  # time on a busy machine too: the plan, the fastest, is its
    "sharded": ("entrypoint=paced:Paced", "profile="),
    "sharded-ec2": ("entrypoint=paced:Paced", "profile=", *SHARDED_ON_EC2),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="*", choices=[*FILES, []], default=[])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--busy", action="store_true", help="run beside an endless loop")
    chosen = parser.parse_args()
    print("experiment   run  planned s  actual s  difference  planned USD  actual USD  difference  spread")
    with _busy_loop(chosen.busy):
        for name in chosen.experiments or FILES:
            off = [print_run(name, number + 1) for number in range(chosen.runs)]
            seconds, usd = zip(*off, strict=True)
            print(f"{name:<11} mean {fmean(seconds):>+31.1f} %{fmean(usd):>+37.1f} %")
            print(f"{name:<11}  max {max(seconds, key=abs):>+31.1f} %{max(usd, key=abs):>+37.1f} %", flush=True)


@contextmanager
def _busy_loop(is_wanted: bool) -> Iterator[None]:
    if not is_wanted:
        yield
        return
    process = multiprocessing.get_context("spawn").Process(target=_spin, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()


def _spin() -> None:
    while True:
        pass


def print_run(name: str, number: int) -> tuple[float, float]:
    """Run an experiment once, print its row, and return how far seconds and cost were off, in percent of the plan."""
    with tempfile.TemporaryDirectory() as place:
        result, spread = run(name, Path(place))
    off_s = _off(result.actual_jct_s, result.planned_jct_s)
    off_usd = _off(result.actual_cost_usd, result.planned_cost_usd)
    print(
        f"{name:<11} {number:>4} {result.planned_jct_s:>10.1f} {result.actual_jct_s:>9.1f} {off_s:>+9.1f} %"
        f" {result.planned_cost_usd:>12.4f} {result.actual_cost_usd:>11.4f} {off_usd:>+9.1f} %"
        f" {spread:>6.0%}",
        flush=True,
    )
    if name in ("program", "patched"):
        best = result.best
        print(
            f"{name:<11} {number:>4} winner: trial {best.trial}, lr {best.config['lr']:.6f}: {best.metrics}", flush=True
        )
    return off_s, off_usd


def _off(actual: float, planned: float) -> float:
    return 100.0 * (actual / planned - 1.0)


def run(name: str, place: Path) -> tuple[Result, float]:
    """Run the experiment from a copy of its files in a fresh home: its result, and the spread of its profile."""
    write_files(place)
    if not name.endswith("-ec2"):
        return run_in(name, place, os.environ | {"RUBBERBAND_HOME": str(place / "home"), "PYTHONPATH": str(ROOT)})
    with ec2(place / "cloud") as line:
        return run_in(name, place, line.environment)


def write_files(place: Path) -> None:
    shutil.copytree(ROOT / "examples", place / "examples", ignore=shutil.ignore_patterns("*.profile.json"))
    (place / "script.py").write_text(FUNCTION)
    (place / "paced.py").write_text(PACED)
    trains = "scheduler: {type: sha, num_samples: 12, grace_period: 3, max_t: 27, reduction_factor: 3}"
    scores = "scheduler: {type: stages, stages: [{trials: 12, iterations: 1}]}"
    (place / "function.yaml").write_text(
        WORDS.format(name="function", function="script:train", scheduler=trains, minimum="")
    )
    (place / "one.yaml").write_text(WORDS.format(name="one", function="script:score", scheduler=scores, minimum=""))
    (place / "program.py").write_text(PROGRAM)
    (place / "patched.py").write_text(patch_of(str(place / "program.py")).after)
    halves = "scheduler: {type: sha, num_samples: 8, grace_period: 2, max_t: 16, reduction_factor: 2}"
    for script in ("program", "patched"):
        line = f"{{command: 'python {script}.py --lr ${{lr}} --epochs ${{max_t}}', metrics: stdout}}"
        (place / f"{script}.yaml").write_text(
            WORDS.format(name=script, function=line, scheduler=halves, minimum=", minimum_billed: 0s")
        )


def run_in(name: str, place: Path, environment: Mapping[str, str]) -> tuple[Result, float]:
    command = [sys.executable, "-m", "rubberband.cli", "run", FILES[name], *words(*OVERRIDES.get(name, ()))]
    told = place / "told"
    with open(told, "w") as output:
        code = subprocess.run(command, cwd=place, env=environment, stdout=output, stderr=output).returncode
    if code:
        raise SystemExit(f"{' '.join(command)} ended with {code}:\n{told.read_text()}")
    folder = ExperimentFolder(home=Path(environment["RUBBERBAND_HOME"]), name=name.removesuffix("-ec2"))
    journal = Journal(sqlite_url(folder.journal), folder.name)
    header = journal.header()
    assert header is not None
    journal.close()
    return read(folder), header.job.profile.iteration_cv


if __name__ == "__main__":
    main()
