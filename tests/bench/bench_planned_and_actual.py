"""Planned against actual seconds and cost of small runs on this machine, each from a fresh home with a fresh profile.

Four experiments: the two examples, a plain script as a function, and a job of one report. A row for each run: what was
planned and what happened, the profile's spread (that of a single iteration), and the difference in percent; the last
row of each has the mean difference and the largest. `--parts` also says where the seconds went: the start of instances,
start-ups, first iterations of an attempt, later ones, and what was planned for each. Prints figures, asserts none.

Run: python -m tests.bench.bench_planned_and_actual [digits|scaling|function|one ...] [--runs N] [--busy] [--parts]

With `--busy` a process with an endless loop runs beside them. They need a machine on which nothing else runs.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rubberband.executor import Controller, ExperimentFolder, GangRun, Job, Journal, Result, State, replay, sqlite_url
from rubberband.executor import read_journal as read

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

WORDS = """
version: 1
name: {name}
entrypoint: script:{function}
search:
  space: {{lr: {{type: loguniform, lower: 1.0e-3, upper: 1.0}}}}
  {scheduler}
  metric: accuracy
  mode: max
constraints: {{deadline: 10m, max_cost: 5, objective: min_time}}
resources: {{provider: local, instance_type: p3.2xlarge, max_instances: 2}}
"""

FILES = {
    "digits": "examples/digits.yaml",
    "scaling": "examples/scaling.yaml",
    "function": "function.yaml",
    "one": "one.yaml",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A run, and its state at the end."""

    result: Result
    job: Job
    state: State


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="*", choices=[*FILES, []], default=[])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--busy", action="store_true", help="run beside an endless loop")
    parser.add_argument("--parts", action="store_true", help="say where the seconds went")
    chosen = parser.parse_args()
    print("experiment  run  planned s  actual s  difference  planned USD  actual USD  difference  spread")
    with _busy_loop(chosen.busy):
        for name in chosen.experiments or FILES:
            off = [print_run(name, number + 1, parts=chosen.parts) for number in range(chosen.runs)]
            seconds, usd = zip(*off, strict=True)
            print(f"{name:<10} mean {_mean(seconds):>+31.1f} %{_mean(usd):>+37.1f} %")
            print(f"{name:<10}  max {max(seconds, key=abs):>+31.1f} %{max(usd, key=abs):>+37.1f} %", flush=True)


def _mean(values: tuple[float, ...]) -> float:
    return fmean(values)


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


def print_run(name: str, number: int, *, parts: bool) -> tuple[float, float]:
    """Run an experiment once, print its row, and return how far seconds and cost were off, in percent of the plan."""
    with tempfile.TemporaryDirectory() as place:
        seen = run(name, Path(place))
    result = seen.result
    off_s = _off(result.actual_jct_s, result.planned_jct_s)
    off_usd = _off(result.actual_cost_usd, result.planned_cost_usd)
    print(
        f"{name:<10} {number:>4} {result.planned_jct_s:>10.1f} {result.actual_jct_s:>9.1f} {off_s:>+9.1f} %"
        f" {result.planned_cost_usd:>12.4f} {result.actual_cost_usd:>11.4f} {off_usd:>+9.1f} %"
        f" {seen.job.profile.iteration_cv:>6.0%}",
        flush=True,
    )
    if parts:
        print_parts(seen)
    return off_s, off_usd


def _off(actual: float, planned: float) -> float:
    return 100.0 * (actual / planned - 1.0)


def run(name: str, place: Path) -> Seen:
    """Run the experiment from a copy of its files in a fresh home."""
    shutil.copytree(ROOT / "examples", place / "examples", ignore=shutil.ignore_patterns("*.profile.json"))
    (place / "script.py").write_text(FUNCTION)
    trains = "scheduler: {type: sha, num_samples: 12, grace_period: 3, max_t: 27, reduction_factor: 3}"
    scores = "scheduler: {type: stages, stages: [{trials: 12, iterations: 1}]}"
    (place / "function.yaml").write_text(WORDS.format(name="function", function="train", scheduler=trains))
    (place / "one.yaml").write_text(WORDS.format(name="one", function="score", scheduler=scores))
    home, found = place / "home", place / "told"
    environment = os.environ | {"RUBBERBAND_HOME": str(home), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "rubberband.cli", "run", FILES[name]]
    if name == "digits":  # it has the time on a busy machine too: the plan, the fastest one, is the same
        command += ["-s", "profile=", "-s", "constraints.deadline=30m"]
    with open(found, "w") as output:
        code = subprocess.run(command, cwd=place, env=environment, stdout=output, stderr=output).returncode
    if code:
        raise SystemExit(f"{' '.join(command)} ended with {code}:\n{found.read_text()}")
    folder = ExperimentFolder(home=home, name=name)
    journal = Journal(sqlite_url(folder.journal), folder.name)
    header = journal.header()
    assert header is not None
    controller = Controller(header.job)
    replay(controller, journal)
    journal.close()
    return Seen(result=read(folder), job=header.job, state=controller.state)


def print_parts(seen: Seen) -> None:
    """Print the parts of the time, planned and seen: instances, then for each stage, start-ups and iterations."""
    job, state, profile = seen.job, seen.state, seen.job.profile
    offer = job.offer
    for name, record in state.instances.items():
        assert record.running_at is not None
        ready_s = float("nan") if record.ready_at is None else record.ready_at - record.running_at
        print(
            f"    {name}: runs {record.running_at - record.requested_at:.2f} s after the order "
            f"(planned {offer.provision_delay_s:.2f}), ready {ready_s:.2f} s later (planned {offer.init_delay_s:.2f})"
        )
    for stage, text in zip(seen.state.stages, seen.result.stages, strict=True):
        took_s = float("nan") if stage.ended_at is None else stage.ended_at - stage.started_at
        uses = [use for use in state.allocations if use.stage == stage.stage]
        starts_s = [use.training_at - use.started_at for use in uses if use.training_at is not None]
        firsts_s, laters_s = list[float](), list[float]()
        for use in uses:
            times = _iterations(state, use)
            firsts_s += times[:1]
            laters_s += times[1:]
        gpus = len(uses[0].gang) if uses else 1
        print(
            f"    stage {stage.stage}: {took_s:.2f} s (planned {text.planned_s:.2f}); {len(uses)} starts of "
            f"{_seconds(starts_s)} s (planned {profile.trial_startup_s:.3f}), first iterations {_seconds(firsts_s)} s, "
            f"{len(laters_s)} later {_seconds(laters_s)} s (planned {profile.iteration_s(gpus):.3f})"
        )


def _iterations(state: State, use: GangRun) -> list[float]:
    if use.training_at is None:
        return []
    until = float("inf") if use.ended_at is None else use.ended_at
    at = [use.training_at]
    at += [
        report.reported_at
        for report in state.trials[use.trial].reports
        if use.training_at < report.reported_at <= until
    ]
    return [after - before for before, after in itertools.pairwise(at)]


def _seconds(values_s: list[float]) -> str:
    if not values_s:
        return "-"
    return f"{fmean(values_s):.3f} ({min(values_s):.3f} to {max(values_s):.3f})"


if __name__ == "__main__":
    main()
