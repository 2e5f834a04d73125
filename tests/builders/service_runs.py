"""A service's runs over processes that stand in for those of experiments: they journal what another run journalled."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rubberband.api.experiments import ExperimentRuns
from rubberband.api.experiments.extending import Wanted
from rubberband.api.plans.process import RestAnswer, RestQuestion, answered, read_answer
from rubberband.api.problems import problem_of
from rubberband.api.settings import ServiceLimits, Settings
from rubberband.api.store import Store, open_store
from rubberband.api.store.schema import FeedEvent
from rubberband.errors import InputError
from rubberband.executor import ExperimentFolder, Extension, Inbox, read_mark
from rubberband.running.run import run_experiment
from rubberband.spec.experiment import Experiment
from rubberband.states import ExperimentState
from rubberband.values.submission import Submission
from tests.builders import processes
from tests.builders.clocks import MID_MONTH, Clock
from tests.builders.trained import trained
from tests.builders.waiting import eventually

STAND_IN = (sys.executable, "-S", str(processes.FOLDER / "stand_in.py"))
QUEUED, STARTING, RUNNING = ExperimentState.QUEUED, ExperimentState.STARTING, ExperimentState.RUNNING
INTERRUPTED, REFUSED, CANCELLED = ExperimentState.INTERRUPTED, ExperimentState.REFUSED, ExperimentState.CANCELLED
DONE, UNREADABLE = ExperimentState.DONE, ExperimentState.UNREADABLE


def experiment(name: str = "one", *, profile: dict[str, Any] | None = None, **constraints: Any) -> Experiment:
    """Eight trials in three stages on a virtual clock: 10 s an iteration, an instance for 3.06 USD an hour."""
    return Experiment(
        name=name,
        search={
            "space": {"x": {"type": "uniform", "lower": 0, "upper": 1}},
            "scheduler": {"type": "sha", "num_samples": 8, "grace_period": 1, "max_t": 4, "reduction_factor": 2},
            "metric": "loss",
            "mode": "min",
        },
        constraints={"deadline": "1h", **constraints},
        resources={"provider": "virtual", "instance_type": "p3.2xlarge", "max_instances": 4},
        profile=profile or {"seconds_per_iteration": {1: 10}},
    )


def template(home: Path) -> Path:
    """The journal of a whole run, of the time that a house begins with."""
    folder = ExperimentFolder(home=home, name="template")
    with trained():
        run_experiment(experiment("template"), folder)
    with closing(sqlite3.connect(folder.journal)) as journal, journal:
        journal.execute("UPDATE experiments SET created_at = ?", (MID_MONTH,))
    return folder.journal


def count_of(journal: Path) -> int:
    with closing(sqlite3.connect(journal)) as connection:
        return int(connection.execute("SELECT count(*) FROM events").fetchone()[0])


def cut_off(journal: Path, *, at: int) -> None:
    """Cut a SQLite journal off after its first `at` events, as if its driver was killed then."""
    with closing(sqlite3.connect(journal)) as connection, connection:
        connection.execute("DELETE FROM events WHERE seq >= ?", (at,))


class House:
    def __init__(self, home: Path, journal: Path, *, max_running: int = 4, pause_s: float = 0.0) -> None:
        self.home, self.journal, self.pause_s = home, journal, pause_s
        self.ways: dict[str, str] = {}
        self.clock = Clock()
        self.set(limits=ServiceLimits(max_running=max_running))
        self.store: Store = open_store(None, home)
        self.tell()

    def set(self, **settings: Any) -> None:
        """Choose the settings of the service, from the next `open` on; others have their defaults."""
        self.settings = Settings(home=self.home, clock=self.clock, **settings)

    def tell(self, **ways: str) -> None:
        """Say how processes of these experiments go."""
        self.ways |= {name.replace("_", "-"): way for name, way in ways.items()}
        words = {"template": str(self.journal), "pause_s": self.pause_s, "ways": self.ways, "now": self.clock()}
        (self.home / "stand-in.json").write_text(json.dumps(words))

    def allow(self, max_running: int) -> None:
        """Say how many may run at once, from the next `open` on."""
        self.settings = replace(self.settings, limits=ServiceLimits(max_running=max_running))

    def kill(self, name: str = "one", what: signal.Signals = signal.SIGKILL) -> None:
        mark = read_mark(self.folder(name))
        assert mark is not None
        os.kill(mark.pid, what)

    def go(self) -> None:
        """Let those go on that hold."""
        (self.home / "go").touch()

    @contextmanager
    def open(self, command: tuple[str, ...] = STAND_IN) -> Iterator[ExperimentRuns]:
        """The runs, watched."""
        runs = ExperimentRuns(self.settings, self.store, lambda: None, command=command)
        runs.start()
        try:
            yield runs
        finally:
            runs.close()

    def folder(self, name: str = "one") -> ExperimentFolder:
        return ExperimentFolder(home=self.home, name=name)

    def inbox(self, name: str = "one") -> Inbox:
        return Inbox(self.folder(name).inbox)

    def pending(self, name: str = "one") -> list[str]:
        """The kinds of what its driver is asked and has not taken."""
        return [asked.kind for asked in self.inbox(name).pending()]

    def cut_template(self, at: int = 3) -> Path:
        """A run `template` that was begun by hand and killed after its first events; its journal."""
        journal = template(self.home)
        cut_off(journal, at=at)
        return journal

    def row(self, name: str) -> Submission:
        found = self.store.submission(name)
        assert found is not None, name
        return found

    def wait(self, name: str, *states: ExperimentState) -> Submission:
        """Its row once it is in one of the states."""
        return eventually(lambda: row if (row := self.store.submission(name)) and row.state in states else None)

    def starts(self) -> list[list[str]]:
        """[name, pid, attempt] of every process that began."""
        path = self.home / "starts.log"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def seqs(self, name: str) -> list[int]:
        """The places in its journal that the feed tells, in the feed's order."""
        return [event.seq for event in self.feed(name) if event.seq is not None]

    def feed(self, name: str) -> list[FeedEvent]:
        return list(self.store.feed(experiment=name, limit=100_000))

    def states(self, name: str) -> list[str]:
        return [event.data["state"] for event in self.feed(name) if event.kind == "state"]


def extension(runs: ExperimentRuns, home: Path, name: str, **limits: Any) -> Extension:
    """What other limits bring, planned as a process of its own would."""
    asked = runs.extensions.question(name, Wanted(**limits))
    assert isinstance(asked, RestQuestion)
    return _planned(asked, home).extension


def extend(runs: ExperimentRuns, home: Path, name: str, *, request: str, **limits: Any) -> Extension:
    """Other limits, in force: planned as a process of its own would, until nothing changes meanwhile."""

    def granted() -> Extension | None:
        asked = runs.extensions.question(name, Wanted(**limits), request=request)
        if isinstance(asked, Extension):
            return asked
        return runs.extensions.grant(asked, _planned(asked, home), request)

    return eventually(granted)


def _planned(asked: RestQuestion, home: Path) -> RestAnswer:
    try:
        return read_answer(json.loads(json.dumps(answered(asdict(asked), home))))
    except InputError as error:
        raise problem_of(error) from None
