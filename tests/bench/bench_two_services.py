"""Two services on one PostgreSQL that is restarted at random, while each runs experiments in a home of its own.

Both try again and again to serve the store, as a supervisor lets them. The one that gets the lock submits and starts
its experiments; the one that loses it stands still until it has it again. Experiments are real processes on a slowed
virtual clock, whose journals are in the same PostgreSQL. At the end each journal must be whole and have had one
driver, no experiment was ever interrupted, and each bill equals that of an undisturbed run.

Prints figures; `story` returns what is wrong. Run: python -m tests.bench.bench_two_services [--restarts 200] [--seed 1]
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rubberband.api.app.serving import only_server
from rubberband.api.experiments import ExperimentRuns
from rubberband.api.problems import HttpProblem
from rubberband.api.settings import ServiceLimits, Settings
from rubberband.api.store import Store, open_store
from rubberband.errors import InputError, JournalError
from rubberband.executor import DriverResumed, ExperimentFolder, VirtualBackend, read_at_once, session
from rubberband.running.hosted import main as hosted
from rubberband.running.run import run_experiment
from rubberband.states import ACTIVE
from tests.builders.databases import Server, database, programs, server
from tests.builders.service_runs import experiment

DRIVER = (sys.executable, "-P", "-m", "tests.bench.bench_two_services", "driver")
EVENT_S = 0.15
"""A driver waits for so long before each event."""
LONGEST_PAUSE_S = 1.5
MOST_RUNNING = 2
DONE_IN_S = 300.0


class SlowBackend(VirtualBackend):
    def next_events(self, wake_at: float | None) -> Any:
        time.sleep(EVENT_S)
        return super().next_events(wake_at)


@dataclass(kw_only=True)
class Service:
    """A service that is started again whenever it was refused."""

    home: Path
    url: str
    stop: threading.Event
    """No more is submitted."""
    over: threading.Event
    """All that was submitted has ended, or took too long."""
    refused: int = 0
    began: int = 0
    submitted: list[str] = field(default_factory=list)
    replaced: int = 0
    """How often another service had taken the store."""
    unserved: int = 0
    """Submissions that were refused, as another service had the store, or it was away."""

    def run(self) -> None:
        settings = Settings(home=self.home, store=self.url, limits=ServiceLimits(max_running=MOST_RUNNING))
        while not self.over.is_set():
            with suppress(JournalError), ExitStack() as stack:
                store = open_store(self.url, self.home)
                stack.callback(store.close)
                try:
                    stack.enter_context(only_server(settings, store))
                except InputError:
                    self.refused += 1
                    self.over.wait(0.1)
                    continue
                self.began += 1
                runs = ExperimentRuns(settings, store, lambda: None, command=DRIVER)
                runs.start()
                stack.callback(runs.close)
                self._submit(runs, store)

    def _submit(self, runs: ExperimentRuns, store: Store) -> None:
        """Keep a few experiments queued, until the end."""
        was_taken = False
        while not self.over.is_set():
            self.replaced += store.is_taken and not was_taken
            was_taken = store.is_taken
            try:
                queued = store.count_states(search=self.home.name).get("queued", 0)
                if not self.stop.is_set() and queued < MOST_RUNNING:
                    name = f"{self.home.name}-{len(self.submitted)}"
                    runs.submit(experiment(name), request=name)
                    self.submitted.append(name)
            except (JournalError, HttpProblem):
                self.unserved += 1
            self.over.wait(0.05)


def story(folder: Path, restarts: int, seed: int) -> list[str]:
    """Restart the database this number of times; return what is wrong then, and print figures."""
    bin, chance = programs(), random.Random(seed)
    assert bin is not None, "PostgreSQL is installed"
    undisturbed = run_experiment(experiment("alone"), ExperimentFolder(home=folder, name="alone")).actual_cost_usd
    found = patch.dict(os.environ, PYTHONPATH=str(Path(__file__).parents[2]))
    with found, server(bin) as made, database(made.url) as url:
        stop, over = threading.Event(), threading.Event()
        services = [Service(home=folder / name, url=url, stop=stop, over=over) for name in ("ann", "ben")]
        for service in services:
            service.home.mkdir()
        threads = [threading.Thread(target=service.run) for service in services]
        for thread in threads:
            thread.start()
        try:
            for _ in range(restarts):
                time.sleep(chance.uniform(0.1, LONGEST_PAUSE_S))
                made.restart(chance.choice(["fast", "immediate"]))
            stop.set()
            _wait(made, services)
        finally:
            stop.set()
            over.set()
            for thread in threads:
                thread.join()
        return _wrong(url, services, undisturbed)


def _wait(made: Server, services: list[Service]) -> None:
    """Wait until all have ended; a restart now and then lets the service in that stands still."""
    until = time.monotonic() + DONE_IN_S
    while time.monotonic() < until:
        for _ in range(20):
            time.sleep(0.2)
            if all(not _open(service) for service in services):
                return
        made.restart("fast")


def _open(service: Service) -> list[str]:
    with suppress(JournalError):
        store = open_store(service.url, service.home)
        try:
            rows = {row.name: row.state for row in store.submissions(limit=500).items}
        finally:
            store.close()
        return [name for name in service.submitted if rows.get(name) in ACTIVE]
    return service.submitted


def _wrong(url: str, services: list[Service], undisturbed_usd: float) -> list[str]:
    wrong: list[str] = []
    store = open_store(url, services[0].home)
    rows = {row.name: row for row in store.submissions(limit=500).items}
    for service in services:
        starts = Counter(_starts(service.home))
        for name in service.submitted:
            row = rows[name]
            states = [event.data["state"] for event in store.feed(experiment=name, limit=10_000) if event.seq is None]
            if states != ["queued", "starting", "running", "done"] and states != ["queued", "starting", "done"]:
                wrong.append(f"{name} was {', '.join(states)} ({row.reason})")
                continue
            journal = read_at_once(ExperimentFolder(home=service.home, name=name, store=url))
            resumed = sum(isinstance(event, DriverResumed) for _, event in journal.events)
            if (starts[name], row.attempt, resumed) != (1, 1, 0):
                wrong.append(f"{name} had {starts[name]} drivers, {row.attempt} attempts, {resumed} resumes")
            seqs = [seq for seq, _ in journal.events]
            lines = [event.seq for event in store.feed(experiment=name, limit=10_000) if event.seq is not None]
            if seqs != list(range(len(seqs))) or lines != seqs:
                wrong.append(f"{name} has {len(seqs)} events, and its feed {len(lines)}")
            if row.summary.cost_usd != undisturbed_usd:
                wrong.append(f"{name} cost {row.summary.cost_usd} USD instead of {undisturbed_usd}")
        print(
            f"{service.home.name}: {len(service.submitted)} experiments, served {service.began} times, "
            f"refused {service.refused} times, replaced {service.replaced} times; {service.unserved} requests got 503"
        )
    store.close()
    return wrong


def _starts(home: Path) -> list[str]:
    path = home / "drivers.log"
    return path.read_text().split() if path.exists() else []


def _drive(arguments: list[str]) -> int:
    """Be the driver of an experiment: HOME NAME LOCK."""
    with open(Path(arguments[0]) / "drivers.log", "a") as log:
        log.write(f"{arguments[1]}\n")
    session.VirtualBackend = SlowBackend  # type: ignore[misc]
    return hosted(arguments)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--restarts", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    began_at = time.monotonic()
    logging.disable(logging.CRITICAL)  # every part logs each restart
    with tempfile.TemporaryDirectory() as folder:
        wrong = story(Path(folder), asked.restarts, asked.seed)
    print(f"{asked.restarts} restarts in {time.monotonic() - began_at:.0f} s; wrong: {len(wrong)}")
    print("\n".join(wrong))


if __name__ == "__main__":
    if sys.argv[1:2] == ["driver"]:
        sys.exit(_drive(sys.argv[2:]))
    main()
