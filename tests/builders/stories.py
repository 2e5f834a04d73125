"""A controller that is told a story: an event in, commands out, every invariant checked; no backend."""

from __future__ import annotations

import dataclasses

from rubberband.executor import (
    CheckpointRef,
    Command,
    Controller,
    InstanceReady,
    InstanceReleased,
    InstanceRunning,
    Job,
    Started,
    TrialFailed,
    TrialReported,
)
from tests.builders.invariants import validate
from tests.builders.jobs import JOB, SPOT


def checkpoint(trial: int, iterations: int) -> CheckpointRef:
    return CheckpointRef(url=f"{trial}/{iterations}", digest="", size_bytes=0)


class Story:
    """A controller and a clock that moves one second an event."""

    def __init__(self, job: Job = JOB) -> None:
        self.controller = Controller(job)
        self.state = self.controller.state
        self.at = 100.0

    def tell(self, event: type, **facts: object) -> list[Command]:
        self.at += 1.0
        commands = self.controller.handle(event(occurred_at=self.at, **facts))
        validate(self.controller)
        return commands

    def ready(self, *instances: str) -> list[Command]:
        commands: list[Command] = []
        for instance in instances:
            commands += self.tell(InstanceRunning, instance=instance, running_at=self.at)
            commands += self.tell(InstanceReady, instance=instance)
        return commands

    def released(self, *instances: str) -> list[Command]:
        """They are given back at once; what the controller orders then."""
        return [order for one in instances for order in self.tell(InstanceReleased, instance=one, ended_at=self.at)]

    def report(self, trial: int, score: float, **metrics: float) -> list[Command]:
        state = self.state.trials[trial]
        return self.tell(
            TrialReported,
            trial=trial,
            attempt=state.attempt,
            iterations=state.iterations + 1,
            metrics={"score": score, **metrics},
            checkpoint=checkpoint(trial, state.iterations + 1),
        )

    def fail(self, trial: int, kind: str = "raised") -> list[Command]:
        attempt = self.state.trials[trial].attempt
        return self.tell(TrialFailed, trial=trial, attempt=attempt, kind=kind, message="boom")


def kinds(commands: list[Command]) -> list[str]:
    return [type(command).__name__ for command in commands]


def begun(job: Job = JOB) -> Story:
    story = Story(job)
    story.tell(Started)
    story.ready("i-001", "i-002")
    return story


LEASE_S = 600.0


LEASED = dataclasses.replace(SPOT, lease_s=LEASE_S)
"""An instance costs 0.6 USD at most in the time of a lease; the second stage replaces two by one on another market."""


def at_its_sync(max_cost_usd: float) -> tuple[Story, list[Command]]:
    story = begun(dataclasses.replace(LEASED, max_cost_usd=max_cost_usd))
    for trial in range(3):
        story.report(trial, trial / 10)
    return story, story.report(3, 0.9)
