"""Training of one trial in several ways, shown side by side: for `goodput.py`, `balancing.py` and `async_digits.py`."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import rubberband


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """Training time, without start-up, and accuracy of a trial after each iteration."""

    seconds: Sequence[float]
    accuracy: Sequence[float]

    def seconds_to(self, accuracy: float) -> float:
        """Return the time at which it first reached `accuracy`."""
        return next(s for s, found in zip(self.seconds, self.accuracy, strict=True) if found >= accuracy)


def train(
    trial: type[rubberband.TorchTrial],
    *,
    workers: int,
    iterations: int,
    trials: int = 1,
    space: Mapping[str, Any] | None = None,
    **words: Any,
) -> rubberband.Result:
    """Train trials, which differ in their seeds only, one after another on gangs of `workers` workers."""
    with tempfile.TemporaryDirectory() as home:
        result = rubberband.tune(
            trial,
            home=home,
            name="side-by-side",
            search={
                "space": space or {"constant": 0},
                "scheduler": {"type": "stages", "stages": [{"trials": trials, "iterations": iterations}]},
                "metric": "accuracy",
                "mode": "max",
            },
            resources={
                "provider": "local",
                "gpus_per_instance": workers,
                "price_per_hour": 0,
                "max_instances": 1,
                "gpus_per_trial": {"min": workers, "max": workers},
            },
            profile={"seconds_per_iteration": {workers: 1.0}},
            **words,
        )
    if result.outcome != "done":
        raise SystemExit(f"{result.outcome}: {result.reason}")
    return result


def courses(result: rubberband.Result) -> list[Course]:
    """Return the courses of the trials that were trained."""
    found = []
    for trial in result.trials:
        begins_s = [use.training_s for use in result.busy if use.trial == trial.trial and use.training_s is not None]
        seconds = [at_s - min(begins_s) for at_s, _, _ in trial.curve]
        if seconds:
            found.append(Course(seconds=seconds, accuracy=[metrics["accuracy"] for _, _, metrics in trial.curve]))
    return found


def show(kinds: Mapping[str, Sequence[Course]]) -> None:
    """Print courses (means over the seeds), and their times to the accuracy that all reach."""
    every = [course for found in kinds.values() for course in found]
    print("iteration", *(f"{name:>20}" for name in kinds), sep=" | ")
    for at in range(min(len(course.seconds) for course in every)):
        means = (
            (fmean(c.seconds[at] for c in found), fmean(c.accuracy[at] for c in found)) for found in kinds.values()
        )
        print(f"{at + 1:9}", *(f"{seconds:9.2f} s {accuracy:8.4f}" for seconds, accuracy in means), sep=" | ")
    ends = {name: fmean(course.accuracy[-1] for course in found) for name, found in kinds.items()}
    print(f"{'final accuracy':<18}" + "; ".join(f"{accuracy:.4f} {name}" for name, accuracy in ends.items()))
    print(versus("whole training", {name: fmean(c.seconds[-1] for c in found) for name, found in kinds.items()}))
    target = 0.995 * min(max(course.accuracy) for course in every)
    reached_s = {name: median(c.seconds_to(target) for c in found) for name, found in kinds.items()}
    print(versus(f"to {target:.3f} accuracy", reached_s))


def versus(label: str, times: Mapping[str, float], unit: str = "s") -> str:
    """Return times as a phrase, with how much faster than the first the others are."""
    first, *others = times.items()
    faster = (f"{time:.2f} {unit} {name} ({first[1] / time:.2f} times as fast)" for name, time in others)
    return f"{label:<18}" + "; ".join((f"{first[1]:.2f} {unit} {first[0]}", *faster))
