"""How many events a second a run takes in, and what its report and its page cost: at 100, 1,000, … trials.

An experiment on the virtual clock goes through the same door as a user's: planned, journalled in a SQLite file, told in
lines, driven by the controller, with a replan at every SYNC. Trials differ in speed, so that nearly every event has an
instant, and a commit, of its own; with `--alike` they do not. With `--hyperband` it is the largest Hyperband of at most
as many trials, whose brackets run in lanes. Each size is a process of its own. Prints figures, asserts none.

Run: python -m tests.bench.bench_events [--alike] [--hyperband] [TRIALS ...]
"""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO
from unittest.mock import patch

from rubberband.api.app import create_app
from rubberband.api.settings import Settings
from rubberband.api.store import open_store
from rubberband.cloud.virtual import VirtualClock
from rubberband.executor import Controller, Event, ExperimentFolder, Header, Job, Observer, RunSpec, VirtualBackend
from rubberband.executor.core.backend import Backend
from rubberband.executor.run import session
from rubberband.spec.experiment import Experiment
from rubberband.spec.search import hyperband
from rubberband.values.plan import Spent
from rubberband.views.live.view import open_view
from tests.builders.plans import plan_job
from tests.builders.service_client import served

SIZES = (100, 1_000, 10_000, 100_000)
ETA, GRACE, MOST = 4, 1, 64
PARTS = ("", "/trials?limit=1000", "/allocations", "/costs", "/decisions")
"""Of `/v1/experiments/NAME`."""
PATIENCE_S = 3600.0


def experiment(trials: int, brackets: bool) -> Experiment:
    """Return successive halving of `trials` trials on instances of eight GPUs, an eighth of them at once."""
    scheduler = {"type": "sha", "num_samples": trials, "grace_period": GRACE, "max_t": MOST, "reduction_factor": ETA}
    if brackets:
        fitting = [3**power for power in range(1, 12) if sum(b[0].trials for b in hyperband(3**power, 3)) <= trials]
        scheduler = {"type": "hyperband", "max_t": max(fitting), "reduction_factor": 3}
    return Experiment(
        name=f"events-{trials}",
        search={
            "space": {"lr": {"type": "loguniform", "lower": 1e-4, "upper": 1.0}},
            "scheduler": scheduler,
            "metric": "score",
            "mode": "max",
        },
        constraints={"deadline": "40h", "max_cost": 50.0 * trials}
        if brackets
        else {"deadline": "10h", "max_cost": 5.0 * trials},
        resources={
            "provider": "virtual",
            "instance_type": "p3.16xlarge",
            "max_instances": max(2, trials // 64),
            "gpus_per_trial": {"min": 1, "max": 8},
        },
        profile={"seconds_per_iteration": {1: 60.0, 2: 32.0, 4: 17.0, 8: 10.0}, "trial_startup": "2s"},
    )


def uneven(folder: ExperimentFolder, spec: RunSpec, job: Job, last_event_at: float | None, _: object) -> Backend:
    """A virtual backend whose trials are 5 % apart in speed."""
    source = random.Random(0)
    paces = [source.lognormvariate(0.0, 0.05) for _ in range(job.num_trials)]
    clock = VirtualClock(last_event_at or 0.0)
    return VirtualBackend(
        job.name, job.offer, job.profile, metric=job.metric, clock=clock, pace_of=lambda trial: paces[trial]
    )


class Count:
    """An observer that counts events, and instants with any."""

    def __init__(self) -> None:
        self.events = self.instants = 0
        self._now = -1.0

    def __call__(self, event: Event, controller: Controller) -> None:
        self.events += 1
        self.instants += event.occurred_at != self._now
        self._now = event.occurred_at


def cpu_s() -> float:
    """Seconds of processor time of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def timed(act: Callable[[], Any]) -> tuple[Any, float]:
    """What `act` returns, and the CPU seconds that it took."""
    began_s = cpu_s()
    return act(), cpu_s() - began_s


def most_mib() -> float:
    """The most memory that this process held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0


def show(name: str, value: float) -> None:
    """Print a figure."""
    print(f"  {name:<28}{value:>12,.{2 if isinstance(value, float) else 0}f}", flush=True)


def measure(trials: int, alike: bool, brackets: bool) -> None:
    """Print the figures of one size."""
    with tempfile.TemporaryDirectory() as home, open(Path(home) / "said.txt", "w", encoding="utf-8") as said:
        written = experiment(trials, brackets)
        job, plan_s = timed(lambda: plan_job(written, written.loaded_profiles()))
        show("planning, s", plan_s)
        folder = ExperimentFolder(home=Path(home), name=written.name)
        session.create(folder, job, RunSpec.of(written, None, folder, Spent()))
        drive(folder, alike, said)
        command = [sys.executable, "-m", "rubberband.cli", "report", written.name]
        environment = os.environ | {"RUBBERBAND_HOME": home}
        for more in ((), ("-o", "json"), ("--html", f"{home}/report.html")):
            _, report_s = timed(lambda more=more: report([*command, *more], environment))
            show(f"report {' '.join(more[:1])} as a process, s".replace("  ", " "), report_s)
        page(Path(home), written.name)


def drive(folder: ExperimentFolder, alike: bool, said: TextIO) -> None:
    """Run it, and print what it took."""
    count = Count()

    def view(header: Header, clock: Callable[[], float], stack: ExitStack) -> Sequence[Observer]:
        return [count, stack.enter_context(open_view(header.job, clock, said, is_terminal=False))]

    with ExitStack() as stack:
        if not alike:
            stack.enter_context(patch.object(session, "make_backend", uneven))
        began_s = time.monotonic()
        result, run_s = timed(lambda: session.run(folder, view=view))
    show("run, s", run_s)
    show("run, seconds on the clock", time.monotonic() - began_s)
    show("events", count.events)
    show("instants with any (commits)", count.instants)
    show("events a second", round(count.events / run_s))
    show("most memory, MiB", round(most_mib()))
    assert result.outcome == "done", result.reason


def report(command: Sequence[str], environment: dict[str, str]) -> None:
    """Print a report to nobody."""
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)


def page(home: Path, name: str) -> None:
    """The page of an experiment as a service gives it: its charts, and its parts as JSON, the first time and again."""
    settings, began_s = Settings(home=home), cpu_s()
    with served(create_app(settings, store=open_store(None, home)), PATIENCE_S) as client:
        while (seen := client.get(f"/v1/experiments/{name}")).status_code != 200 or seen.json()["state"] != "done":
            time.sleep(0.1)
        show("taken in by a service, s", cpu_s() - began_s)
        for what, address in (
            ("page", f"/experiments/{name}"),
            ("the page's charts", f"/experiments/{name}/figures"),
            *((f"JSON{part.partition('?')[0]}", f"/v1/experiments/{name}{part}") for part in PARTS),
        ):
            answer, took_s = timed(lambda address=address: client.get(address))
            assert answer.status_code == 200, answer.text
            show(f"{what}, s", took_s)
            show(f"{what}, kB", round(len(answer.content) / 1000))
    show("most memory, MiB", round(most_mib()))


def main() -> None:
    given = sys.argv[1:]
    alike, brackets = "--alike" in given, "--hyperband" in given
    sizes = [int(size.replace(",", "")) for size in given if not size.startswith("--")] or SIZES
    if "--one" in given:
        measure(sizes[0], alike, brackets)
        return
    for trials in sizes:
        kind = f"{', all as fast' if alike else ''}{', hyperband' if brackets else ''}"
        print(f"{trials:,} trials{kind} (seconds are of one processor)", flush=True)
        options = [*["--alike"] * alike, *["--hyperband"] * brackets]
        command = [sys.executable, "-m", "tests.bench.bench_events", "--one", *options, str(trials)]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
