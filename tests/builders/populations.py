"""Population based training on the virtual clock: experiments in words, at random or of your choice, and their runs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any

from rubberband.errors import RubberbandError
from rubberband.executor import Controller, Event, EventLog, Faults, Finish, Job, TrialForked, VirtualBackend, sampling
from rubberband.executor.run.driver import Explore
from rubberband.spec.experiment import Experiment
from tests.builders.memory import MemoryJournal
from tests.builders.plans import plan_job
from tests.builders.virtual_runs import run_virtual

SPACE: Mapping[str, Any] = {
    "lr": {"type": "loguniform", "lower": 1e-4, "upper": 1e-1},
    "layers": {"type": "randint", "lower": 1, "upper": 5},
    "optimizer": {
        "type": "choice",
        "values": ["adam", {"name": "sgd", "space": {"momentum": {"type": "uniform", "lower": 0.5, "upper": 0.99}}}],
    },
}


def population(resources: Mapping[str, Any] | None = None, *, seed: int = 0, **scheduler: Any) -> Experiment:
    """An experiment of a small population; `scheduler` are words of its scheduler."""
    return Experiment(
        name="population",
        search={
            "space": SPACE,
            "scheduler": {"type": "pbt", "population": 8, "generations": 4, "iterations": 2, **scheduler},
            "sampler": {"type": "random", "seed": seed},
            "metric": "score",
            "mode": "max",
        },
        resources={
            "provider": "virtual",
            "instance_type": "p3.8xlarge",
            "max_instances": 4,
            "gpus_per_trial": {"min": 1, "max": 4},
            **(resources or {}),
        },
        profile={"seconds_per_iteration": {1: 60, 2: 32, 4: 18}, "trial_startup": "2s"},
    )


def random_population(source: Random) -> Experiment:
    """An experiment that the planner may plan in several ways, and which does not resize within a stage."""
    one_s, shrinks = source.uniform(5.0, 400.0), source.uniform(0.5, 1.0)
    experiment = population(
        {
            "instance_type": source.choice(["p3.2xlarge", "p3.8xlarge", "p3.16xlarge"]),
            "max_instances": source.randint(2, 8),
            "provision_delay": source.choice(["0s", "20s", "90s"]),
            "init_delay": source.choice(["0s", "15s"]),
        },
        seed=source.randrange(1000),
        population=source.randint(2, 24),
        generations=source.randint(1, 8),
        iterations=source.randint(1, 6),
        quantile=source.choice([0.1, 0.25, 0.5]),
        explore=source.choice(["perturb", "perturb", "perturb", "gp"]),
    )
    seconds = {gpus: one_s / gpus**shrinks for gpus in (1, 2, 4)}
    words = experiment.to_words() | {
        "constraints": {"resize_in_stage": False},
        "profile": {"seconds_per_iteration": seconds, "trial_startup": source.choice(["0s", "3s"])},
    }
    return Experiment(**words)


def job_of(experiment: Experiment) -> Job:
    """The job as the planner plans it."""
    profile = experiment.loaded_profile()
    assert profile is not None, "the words have a profile"
    return plan_job(experiment, profile)


def job_within(experiment: Experiment, source: Random) -> Job:
    """The job as it is planned within a deadline that is shorter than the cheapest plan, if a plan keeps it."""
    job = job_of(experiment)
    deadline = f"{source.uniform(0.4, 1.0) * job.prediction.jct_s:.0f}s"
    with suppress(RubberbandError):
        return job_of(
            Experiment(**(experiment.to_words() | {"constraints": {"deadline": deadline, "resize_in_stage": False}}))
        )
    return job


class ByTrial(VirtualBackend):
    """Asks `metric_of` for the trial itself, also where it goes on from another one's checkpoint."""

    def _as_report(self, run: Any, done: int, now: float) -> Event:
        run.curve = run.start.trial
        return super()._as_report(run, done, now)


def explorer(experiment: Experiment, controller: Controller) -> Explore:
    """What changes configurations, as a session makes it."""
    began = {"configurations": experiment.configurations()}
    return partial(sampling.explore, experiment.search, sampling.configurations(controller.state, began))


def run(
    experiment: Experiment,
    faults: Faults | None = None,
    journal: EventLog | None = None,
    job: Job | None = None,
    **more: Any,
) -> tuple[Controller, VirtualBackend, Finish]:
    """Run it to its end, every invariant checked after every event."""
    began = {"configurations": experiment.configurations()}
    return run_virtual(
        job or job_of(experiment),
        faults,
        journal,
        explore=lambda lane, now: sampling.explore(
            experiment.search, sampling.configurations(lane.state, began), lane, now
        ),
        **more,
    )


def forks(journal: MemoryJournal) -> list[TrialForked]:
    """The exchanges of a run, in order."""
    return [event for _, event in journal.events() if isinstance(event, TrialForked)]
