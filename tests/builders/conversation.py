"""Helpers for tests that talk to a real backend or provider."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from rubberband.cloud.local.provider import LocalProvider
from rubberband.cloud.ray_head.instance import tagged
from rubberband.executor import (
    CheckpointRef,
    Event,
    InstanceReady,
    LaunchInstance,
    RayBackend,
    Slot,
    StartTrial,
    TrialReported,
    open_store,
)
from rubberband.executor.core.backend import Backend
from tests.builders import trials
from tests.builders.sessions import run_spec
from tests.builders.waiting import eventually

PATIENCE_S = 180.0
"""How long Ray, or anything, may take to do what is waited for: it ends a test that waits in vain."""
E = TypeVar("E", bound=Event)


class Conversation:
    """Orders a backend about and remembers every event that it brings."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.heard: list[Event] = []
        self._attempts: dict[int, int] = {}

    def until(self, kind: type[E], matches: Callable[[E], bool] = lambda event: True) -> E:
        deadline = self.backend.now() + PATIENCE_S
        while self.backend.now() < deadline:
            events = self.backend.next_events(deadline)
            self.heard += events
            for event in events:
                if isinstance(event, kind) and matches(event):
                    return event
        raise AssertionError(f"no {kind.__name__} came; heard {self.heard[-5:]}")

    def listen(self, seconds: float) -> list[Event]:
        heard: list[Event] = []
        deadline = self.backend.now() + seconds
        while self.backend.now() < deadline:
            heard += self.backend.next_events(deadline)
        self.heard += heard
        return heard

    def launch(self, *instances: str) -> None:
        """Launch instances and wait until all are ready."""
        for instance in instances:
            self.backend.execute(LaunchInstance(instance=instance))
        waiting = set(instances)

        def all_are(event: InstanceReady) -> bool:
            waiting.discard(event.instance)
            return not waiting

        self.until(InstanceReady, all_are)

    def start(
        self, trial: int, *gang: tuple[str, int], done: int = 0, until: int, checkpoint: CheckpointRef | None = None
    ) -> int:
        """Start a trial on slots and return the attempt's number."""
        self._attempts[trial] = attempt = self._attempts.get(trial, 0) + 1
        self.backend.execute(
            StartTrial(
                trial=trial,
                attempt=attempt,
                gang=tuple(Slot(instance=instance, gpu=gpu) for instance, gpu in gang),
                from_iterations=done,
                until_iterations=until,
                checkpoint=checkpoint,
            )
        )
        return attempt

    def report(self, trial: int, iterations: int) -> TrialReported:
        return self.until(TrialReported, lambda event: event.trial == trial and event.iterations == iterations)

    def of_trial(self, trial: int) -> list[Event]:
        return [event for event in self.heard if getattr(event, "trial", None) == trial]


def processes_of(directory: Path, instance: str | None = None) -> list[int]:
    """The running processes of a local provider, or of one of its instances."""
    return sorted(process.pid for process in tagged(str(directory.resolve()), instance))


def nothing_left(directory: Path, instance: str | None = None) -> bool:
    """Whether none of its processes is left, now or soon: before a lease (60 s or more) would have ended it."""
    try:
        eventually(lambda: processes_of(directory, instance) == [], within_s=50.0)
    except AssertionError:
        return False
    return True


def kinds(events: Iterable[Event]) -> list[str]:
    return [type(event).__name__ for event in events]


def make_backend(directory: Path) -> RayBackend:
    """A backend of one-slot instances below `directory`."""
    return RayBackend(
        LocalProvider("resume", directory, 1, lease_s=60.0),
        run_spec([{"sleep_s": 0.02}], entrypoint=trials.entrypoint("ray_trials:Counter")),
        store=open_store(str(directory / "checkpoints")),
        gpus_per_instance=1,
    )
