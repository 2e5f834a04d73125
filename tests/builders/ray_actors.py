"""Actors that follow a script, and a stand-in for Ray that asks them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayError

from rubberband.executor import CheckpointRef, Segment, SegmentReport, attempt
from rubberband.executor.ray import async_attempt
from tests.builders.waiting import eventually

DEATH = RayError("The actor is dead because its process was killed")


def report(iterations: int) -> SegmentReport:
    ref = CheckpointRef(url=f"memory:{iterations}", digest="", size_bytes=1)
    return SegmentReport(iterations=iterations, metrics={"loss": 1.0}, checkpoint=ref)


class Stream:
    """Items of an actor; the last one is its end. It waits at a function until that is true."""

    def __init__(self, script: list[Any]) -> None:
        self._script = script

    @property
    def is_ready(self) -> bool:
        while self._script and callable(self._script[0]):
            if not self._script[0]():
                return False
            self._script.pop(0)
        return True

    def __next__(self) -> Any:
        eventually(lambda: self.is_ready, "the next item")
        if not self._script:
            raise StopIteration
        return self._script.pop(0)


class Actor:
    """A worker or server, with the script of each of its runs; it notes its orders."""

    def __init__(self, *scripts: list[Any]) -> None:
        self.scripts, self.orders, self.is_dropped = list(scripts), list[Segment](), False
        self.vitals = SimpleNamespace(remote=lambda log: (0, 0))
        self.death_cause = SimpleNamespace(remote=lambda before, log: "")
        self.run = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._run))

    def _run(self, segment: Segment, _: Any) -> Stream:
        self.orders.append(segment)
        return Stream(self.scripts.pop(0))


@pytest.fixture(autouse=True)
def ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(item: Any, timeout: float | None = None) -> Any:
        if isinstance(item, BaseException):
            raise item
        return item

    def wait(streams: list[Stream], num_returns: int, timeout: float) -> tuple[list[Stream], list[Stream]]:
        try:
            return eventually(lambda: [each for each in streams if each.is_ready][:1], within_s=0.05), []
        except AssertionError:
            return [], streams

    fake = SimpleNamespace(get=get, wait=wait)
    for module in (attempt, async_attempt):
        monkeypatch.setattr(module, "ray", fake)
        monkeypatch.setattr(module, "GRACE_S", 0.2)
