"""Virtual runs that lie in a home as if somebody ran them: whole, cut off, or growing while a test looks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rubberband.executor import (
    Controller,
    Event,
    ExperimentFolder,
    Faults,
    Job,
    Journal,
    RunSpec,
    VirtualBackend,
    drive,
    sqlite_url,
)
from rubberband.executor import begin_journal as begin
from rubberband.spec.experiment import Experiment
from rubberband.values.plan import Spent
from tests.builders.memory import MemoryJournal
from tests.builders.plans import plan_job

WORDS: Mapping[str, Any] = {
    "name": "digits-sha",
    "search": {
        "space": {
            "lr": {"type": "loguniform", "lower": 1e-4, "upper": 1e-1},
            "momentum": {"type": "uniform", "lower": 0.5, "upper": 0.99},
            "hidden": {"type": "choice", "values": [32, 64, 128]},
            "optimizer": {"type": "choice", "values": ["sgd", "adam"]},
        },
        "scheduler": {"type": "sha", "num_samples": 27, "grace_period": 2, "max_t": 54, "reduction_factor": 3},
        "metric": "accuracy",
        "mode": "max",
    },
    "constraints": {"deadline": "25m", "max_cost": 4},
    "resources": {
        "provider": "virtual",
        "instance_type": "p3.8xlarge",
        "max_instances": 8,
        "gpus_per_trial": {"min": 1, "max": 8},
        "provision_delay": "20s",
        "init_delay": "15s",
        "price_per_hour": 1.2,
    },
    "profile": {"seconds_per_iteration": {1: 60, 2: 32, 4: 18, 8: 12}, "trial_startup": "2s"},
}


def words(**changes: Any) -> dict[str, Any]:
    """The words of a small experiment, some of them others: a mapping is laid over the one that is there."""
    made = {key: dict(value) if isinstance(value, Mapping) else value for key, value in WORDS.items()}
    for key, value in changes.items():
        made[key] = made[key] | value if isinstance(value, dict) else value
    return made


def quality(configuration: Mapping[str, Any]) -> float:
    off = math.log10(configuration.get("lr", 0.01)) + 2.0
    best = 0.97 - 0.09 * off * off - 0.2 * abs(configuration.get("momentum", 0.9) - 0.9)
    return float(
        best - (0.02 if configuration.get("optimizer") == "sgd" else 0.0) - 0.5 / configuration.get("hidden", 64)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    name: str
    job: Job
    setup: Mapping[str, Any]
    events: Sequence[Event]
    created_at: float = field(default_factory=time.time)

    def put(self, home: Path, upto: int | None = None) -> ExperimentFolder:
        """Lay it into a home, its first events or all."""
        folder = ExperimentFolder(home=home, name=self.name)
        folder.make()
        begin(folder.journal, self.name, created_at=self.created_at, job=self.job, setup=self.setup)
        self.grow(folder, 0, len(self.events) if upto is None else upto)
        return folder

    def named(self, name: str) -> Recorded:
        return replace(self, name=name, job=replace(self.job, name=name))

    def grow(self, folder: ExperimentFolder, since: int, upto: int) -> None:
        journal = Journal(sqlite_url(folder.journal), self.name)
        try:
            journal.append(self.events[since:upto])
        finally:
            journal.close()


def recorded(
    said: Mapping[str, Any] | None = None,
    *,
    faults: Faults | None = None,
    slowdown: float = 1.0,
    pace_of: Callable[[int], float] = lambda trial: 1.0,
) -> Recorded:
    """An experiment on the virtual clock, which counts as trained: trials learn as their configurations allow."""
    experiment = Experiment(**(said or words()))
    profiles = experiment.loaded_profiles()
    assert profiles is not None, "the words have a profile"
    job = replace(plan_job(experiment, profiles), trains=True)
    folder = ExperimentFolder(home=Path("/nowhere"), name=experiment.name)
    spec = RunSpec.of(experiment, None, folder, Spent())
    ends = [quality(configuration) for configuration in spec.configurations]
    backend = VirtualBackend(
        job.name,
        job.offer,
        job.profile,
        metric=job.metric,
        metric_of=lambda trial, done: ends[trial] - 0.6 * math.exp(-done / 9.0) - 0.01 * math.cos(3.1 * done + trial),
        faults=faults,
        slowdown=slowdown,
        pace_of=pace_of,
    )
    log = MemoryJournal()
    drive(Controller(job), backend, log)
    return Recorded(name=job.name, job=job, setup=spec.to_json(), events=[event for _, event in log.events()])
