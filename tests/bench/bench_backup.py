"""Backups taken at random instants of runs: whether each restored home is whole, resumes, and finds the same winner.

Run: python -m tests.bench.bench_backup [virtual RUNS | real RUNS] [SEED]
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from rubberband.executor import ExperimentFolder, Observer, Result, folders, read_at_once, session
from rubberband.executor import read_journal as read
from rubberband.running.backup import Manifest, back_up, read_manifest
from rubberband.running.restore import restore
from rubberband.running.run import run_experiment
from rubberband.running.starting import RunOptions
from rubberband.spec.experiment import Experiment
from tests.builders.file_checkpoints import keeping_files

RUNS = 200
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    seed: int
    taken: str
    """before: the run was not in it; at an event; ended: the run was over."""
    events: int
    """Events of the restored journal, and of the whole run."""
    of: int
    checkpoints: int
    """Files of checkpoints in the backup."""
    wrong: str
    """Empty where the restored home was whole, and found the same winner."""


def winner(result: Result) -> tuple[Any, ...]:
    """Return what must be the same after a restore."""
    best = result.best
    return result.outcome, None if best is None else (best.trial, dict(best.configuration), best.metrics[result.metric])


def virtual(seed: int, place: Path) -> Outcome:
    """Back up a virtual run at a random instant, restore it after the run has ended, and resume it."""
    _, folder, _, wanted = _story(seed, place)
    folder.checkpoints.mkdir(parents=True)
    command = [sys.executable, "-m", "tests.bench.bench_backup", "drive", str(seed), str(place)]
    with keeping_files(folder.checkpoints), subprocess.Popen(command, cwd=ROOT) as driver:
        while not folder.journal.exists() and driver.poll() is None:
            time.sleep(0.002)
        while driver.poll() is None and _events(folder) < wanted:
            time.sleep(0.01)
        was_alive = driver.poll() is None
        return _outcome(seed, folder, place / "backup", driver.wait, was_alive, lambda: session.run(folder))


def _story(seed: int, place: Path) -> tuple[Experiment, ExperimentFolder, float, int]:
    """Return an experiment and its folder, the driver's pause after each event, and the events before the backup."""
    source = Random(f"backup {seed}")
    experiment = Experiment(**_experiment(source.randrange(10_000)))
    folder = ExperimentFolder(home=place / "home", name=experiment.name)
    return experiment, folder, source.choice((0.0, 0.0005, 0.002)), source.randrange(300)


def _experiment(index: int) -> dict[str, Any]:
    """A small experiment on the virtual provider that is planned within its limits and has noise."""
    source = Random(f"virtual {index}")
    return {
        "version": 1,
        "name": f"virtual-{index}",
        "search": {
            "space": {"lr": {"type": "loguniform", "lower": 1e-4, "upper": 1e-1}},
            "scheduler": {
                "type": "sha",
                "num_samples": source.randint(9, 40),
                "grace_period": source.choice([1, 2]),
                "max_t": source.choice([27, 54]),
                "reduction_factor": source.choice([2, 3]),
            },
            "metric": "accuracy",
            "mode": source.choice(["max", "min"]),
        },
        "constraints": {"deadline": source.choice(["2h", "5h"]), "max_cost": 400, "confidence": 0.8},
        "resources": {
            "provider": "virtual",
            "instance_type": "p3.8xlarge",  # the catalogue has its spot price
            "max_instances": source.randint(6, 16),
            "market": source.choice(["on_demand", "spot"]),
            "provision_delay": "20s",
            "init_delay": {"mean": "15s", "cv": 0.3},
        },
        "profile": {
            "seconds_per_iteration": {1: 60, 2: 32, 4: 18},
            "trial_startup": "2s",
            "trial_cv": 0.1,
            "iteration_cv": 0.1,
        },
    }


def _drive(seed: int, place: Path) -> None:
    experiment, folder, pause_s, _ = _story(seed, place)

    def view(_job: object, _clock: object, _stack: ExitStack) -> Sequence[Observer]:
        return [lambda *_: time.sleep(pause_s)]

    with keeping_files(folder.checkpoints):
        run_experiment(experiment, folder, RunOptions(view=view))


def real(seed: int, place: Path) -> Outcome:
    """The same with the commands, on Ray, on instances of this machine."""
    home, target = place / "home", place / "backup"
    environment = {**os.environ, "RUBBERBAND_HOME": str(home)}

    def rubberband(*arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "rubberband.cli", *arguments]
        return subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL)

    def take(*_: object) -> Manifest:
        assert rubberband("backup", str(target)).wait() == 0
        return read_manifest(target)

    def resume() -> Result:
        assert rubberband("resume", folder.name).wait() == 0
        return read(folder)

    folder = ExperimentFolder(home=home, name="scaling")
    driver = rubberband("run", "examples/scaling.yaml", "-s", "constraints.deadline=10m", "--no-check")
    wanted = Random(f"backup {seed}").randrange(5, 60)
    while driver.poll() is None and not (folder.journal.exists() and _events(folder) >= wanted):
        time.sleep(0.05)
    was_alive = driver.poll() is None
    return _outcome(seed, folder, target, driver.wait, was_alive, resume, take)


def _outcome(
    seed: int,
    folder: ExperimentFolder,
    target: Path,
    end: Callable[[], object],
    was_alive: bool,
    resume: Callable[[], Result],
    take: Callable[[Path, Path, None, Callable[[str], None]], Manifest] = back_up,
) -> Outcome:
    """Take a backup, let the run end, restore the backup, and resume the run."""
    said: list[str] = []
    made = take(folder.home, target, None, said.append)
    end()
    expected, of = winner(read(folder)), _events(folder)
    shutil.rmtree(folder.home)
    restore(target, folder.home, None, keep_tokens=False, announce=said.append)
    checkpoints = sum(name.endswith(".ckpt") for name in made.files)
    if folder.name not in [found.name for found in folders(folder.home)]:
        return Outcome(seed=seed, taken="before", events=0, of=of, checkpoints=checkpoints, wrong="; ".join(said))
    events = _events(folder)
    found = winner(resume())
    wrong = said if found == expected else [*said, f"{found} instead of {expected}"]
    taken = "running" if was_alive and events < of else "ended"
    return Outcome(seed=seed, taken=taken, events=events, of=of, checkpoints=checkpoints, wrong="; ".join(wrong))


def _events(folder: ExperimentFolder) -> int:
    return len(read_at_once(folder).events)


def main() -> None:
    kind = sys.argv[1] if len(sys.argv) > 1 else "virtual"
    if kind == "drive":
        _drive(int(sys.argv[2]), Path(sys.argv[3]))
        return
    runs = int(sys.argv[2]) if len(sys.argv) > 2 else RUNS
    first = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    began = time.perf_counter()
    outcomes = []
    for seed in range(first, first + runs):
        with tempfile.TemporaryDirectory(prefix="backup-") as place:
            try:
                outcome = virtual(seed, Path(place)) if kind == "virtual" else real(seed, Path(place))
            except Exception as error:
                outcome = Outcome(seed=seed, taken="error", events=0, of=0, checkpoints=0, wrong=repr(error))
            outcomes.append(outcome)
            if outcome.wrong:
                print(f"  seed {seed}: {outcome}", flush=True)
    taken = Counter(outcome.taken for outcome in outcomes)
    shares = sorted(outcome.events / outcome.of for outcome in outcomes if outcome.taken == "running")
    print(f"{len(outcomes)} backups in {time.perf_counter() - began:.0f} s: {dict(taken)}")
    if shares:
        middle = shares[len(shares) // 2]
        print(
            f"  of the running ones, {shares[0]:.0%} to {shares[-1]:.0%} of the events were there (median {middle:.0%})"
        )
    print(f"  {sum(outcome.checkpoints for outcome in outcomes)} checkpoints copied")
    print(
        f"{sum(bool(outcome.wrong) for outcome in outcomes)} of {len(outcomes)} were not whole, or had another winner"
    )


if __name__ == "__main__":
    main()
