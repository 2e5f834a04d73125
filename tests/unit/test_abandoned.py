"""An attempt on an instance that is gone: the workers that are left stay warm if they end by themselves."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rubberband.executor.checkpoints import open_store
from rubberband.executor.core.events import Event, Slot, StartTrial
from rubberband.executor.ray import attempt, connection
from rubberband.executor.ray.attempt import Attempt
from rubberband.executor.ray.workers import Workers
from rubberband.executor.training.entrypoint import Entrypoint
from tests.builders.segments import SEGMENT
from tests.unit.test_async_attempt import Actor, ray  # noqa: F401 - the stand-in for Ray is a fixture


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The threads that replace workers, by name."""
    started: list[str] = []
    real = connection.start

    def start(call: Any, name: str) -> Any:
        if not name.startswith("replace-"):
            return real(call, name)
        started.append(name)
        return None

    monkeypatch.setattr(connection, "start", start)
    return started


@pytest.fixture
def workers(tmp_path: Path) -> Workers:
    """The instance that is left, of one slot."""
    return Workers(
        "left",
        1,
        Entrypoint.parse("m:f"),
        open_store(str(tmp_path)),
        device="cpu",
        gpus_on_machine=1,
        timeout_s=1.0,
        on_sick=lambda *_: None,
    )


def abandoned(workers: Workers, script: list[Any]) -> tuple[Actor, list[Event]]:
    """Abandon an attempt while it runs; the worker that is left follows the script."""
    runs = threading.Event()
    survivor, other = Actor([lambda: runs.set() or True, *script]), Actor([lambda: False])  # type: ignore[func-returns-value]
    survivor.rendezvous = type("Method", (), {"remote": lambda self: "tcp://h:1"})()  # type: ignore[attr-defined]
    workers._slots[0].set_result(survivor)
    gone: Any = type("Gone", (), {"worker": lambda self, gpu: done(other), "hold": lambda *_: None})()
    places = {"left": workers, "gone": gone}
    gang = (Slot(instance="left", gpu=0), Slot(instance="gone", gpu=0))
    start = StartTrial(trial=4, attempt=1, gang=gang, from_iterations=0, until_iterations=4, checkpoint=None)
    events: list[Event] = []
    found = Attempt(start, replace(SEGMENT, num_workers=2), None, places.get, lambda make: events.append(make(0.0)))
    found.begin()
    assert runs.wait(10.0)
    places.pop("gone")
    found.abandon()
    found.stop()
    found.wait(10.0)
    return survivor, events


def done(actor: Actor) -> Future[Actor]:
    future: Future[Actor] = Future()
    future.set_result(actor)
    return future


def test_a_worker_that_ends_by_itself_stays_warm_and_is_given_to_no_trial_before(workers, replaced, monkeypatch):
    monkeypatch.setattr(attempt, "GRACE_S", 5.0)
    was_held: list[float] = []

    def ends() -> bool:
        if not workers.worker(0).done():
            was_held.append(time.monotonic())
        return bool(was_held) and time.monotonic() - was_held[0] > 0.3

    survivor, events = abandoned(workers, [ends])
    assert workers.worker(0).result(0.0) is survivor
    assert was_held
    assert (replaced, events) == ([], [])


def test_a_worker_that_does_not_end_is_replaced(workers, replaced, monkeypatch):
    monkeypatch.setattr(attempt, "GRACE_S", 0.1)
    _, events = abandoned(workers, [lambda: False])
    assert not workers.worker(0).done()
    assert (replaced, events) == (["replace-0"], [])
