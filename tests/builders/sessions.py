"""What a session needs beside its job, and a driver that dies after some events."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from rubberband.executor import Controller, Entrypoint, Event, Job, Observer, RunSpec
from rubberband.spec.experiment import Experiment
from tests.builders.virtual_runs import Killed


def run_spec(
    configurations: Sequence[Mapping[str, Any]] = tuple({"x": trial} for trial in range(4)),
    *,
    entrypoint: Entrypoint | None = None,
    checkpoints: str = "",
    code: Mapping[str, str] | None = None,
    metric: str = "loss",
    batch: Mapping[str, Any] | None = None,
    **resources: Any,
) -> RunSpec:
    """Trials with these configurations, each of two stages; virtual ones, or (with a trial) on this machine."""
    stages = [{"trials": max(1, len(configurations)), "iterations": 1}, {"trials": 1, "iterations": 2}]
    experiment = Experiment(
        name="test",
        search={
            "space": {"x": {"type": "uniform", "lower": 0, "upper": 1}},
            "scheduler": {"type": "stages", "stages": stages},
            "metric": metric,
            "mode": "min",
        },
        resources={"provider": "virtual" if entrypoint is None else "local", "gpus_per_instance": 1} | resources,
        batch=batch or {},
    )
    return RunSpec(
        experiment=experiment,
        configurations=configurations,
        seeds=list(range(len(configurations))),
        data_seed=0,
        entrypoint=entrypoint,
        checkpoints=checkpoints,
        run="",
        code=code,
    )


def dying_after(num_events: int) -> Callable[[Job, Callable[[], float], ExitStack], Sequence[Observer]]:
    left = [num_events]

    def observe(_event: Event, _controller: Controller) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Killed

    return lambda *_: [observe]
