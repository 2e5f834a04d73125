"""Virtual runs whose metrics follow from the configurations, under any sampler."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rubberband.executor import Controller, Job, Observer, VirtualBackend, drive, sampling
from rubberband.spec.experiment import Experiment
from tests.builders.memory import MemoryJournal
from tests.builders.plans import plan_job
from tests.builders.virtual_runs import Killed, check

Objective = Callable[[Mapping[str, Any], int], float]
"""(configuration, iterations) -> metric."""

SPACE: Mapping[str, Any] = {
    "x": {"type": "uniform", "lower": -5.0, "upper": 10.0},
    "y": {"type": "uniform", "lower": 0.0, "upper": 15.0},
}
HYPERBAND: Mapping[str, Any] = {"type": "hyperband", "max_t": 27, "reduction_factor": 3}


def branin(configuration: Mapping[str, Any], iterations: int) -> float:
    """Branin's function, whose minimum is 0.397887; the fewer iterations, the more is added to it."""
    x, y = configuration["x"], configuration["y"]
    value = (y - 5.1 / (4 * math.pi**2) * x * x + 5 / math.pi * x - 6) ** 2
    return float(value + 10 * (1 - 1 / (8 * math.pi)) * math.cos(x) + 10 + 30.0 / iterations)


def an_experiment(
    seed: int, resources: Mapping[str, Any] | None = None, constraints: Mapping[str, Any] | None = None, **search: Any
) -> Experiment:
    words = {"space": SPACE, "scheduler": HYPERBAND, "metric": "loss", "mode": "min"} | search
    sampler = {"type": "optuna", "seed": seed} | words.pop("sampler", {})
    return Experiment(
        name="sampled",
        search=words | {"sampler": sampler},
        constraints=dict(constraints or {}),
        resources={
            "provider": "virtual",
            "instance_type": "p3.8xlarge",
            "max_instances": 2,
            "gpus_per_trial": {"min": 1, "max": 4},
            "price_per_hour": 12.0,
            **(resources or {}),
        },
        profile={"seconds_per_iteration": {1: 60, 2: 32, 4: 18}, "trial_startup": "2s"},
    )


class SampledRun:
    """One experiment on the virtual clock, with its journal; it may be killed and driven again."""

    def __init__(self, experiment: Experiment, objective: Objective = branin) -> None:
        self.experiment, self.objective = experiment, objective
        profile = experiment.loaded_profile()
        assert profile is not None, "the words have a profile"
        self.job: Job = replace(plan_job(experiment, profile), trains=True)
        self.journal = MemoryJournal()
        self.controller = Controller(self.job)
        self.backend = VirtualBackend(
            self.job.name, self.job.offer, self.job.profile, metric=self.job.metric, metric_of=self._metric
        )

    def _metric(self, trial: int, iterations: int) -> float:
        return self.objective(self.configurations()[trial], iterations)

    def configurations(self) -> Mapping[int, Mapping[str, Any]]:
        """Trial -> its configuration, of those that are drawn."""
        drawn = self.controller.state.sampled_configs
        return drawn if self.job.draws else dict(enumerate(self.experiment.configurations()))

    def drive(self, kill_after: int | None = None, observers: Sequence[Observer] = ()) -> SampledRun:
        """Drive it to its end, or until a new driver has seen `kill_after` events; the next call goes on."""
        count = itertools.count(1)

        def kill(*_: object) -> None:
            if next(count) == kill_after:
                raise Killed

        draw = partial(sampling.draw, self.experiment.search) if self.job.draws else None
        self.controller = Controller(self.job)
        try:
            drive(self.controller, self.backend, self.journal, observers=[check, *observers, kill], draw=draw)
        except Killed:
            self.backend.forget()
        return self

    def best(self, max_t: int = 27) -> float:
        """The lowest metric of a trial that was trained to the end."""
        values = [trial.metric(self.job.metric) for trial in self.controller.state.trials if trial.iterations == max_t]
        return min(value for value in values if value is not None)
