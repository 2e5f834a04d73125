"""An attempt on an instance that is gone: the workers that are left stay warm if they end by themselves."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rubberband.executor import (
    Attempt,
    Entrypoint,
    Event,
    Gathered,
    SegmentFailure,
    SegmentStarted,
    Slot,
    StartTrial,
    TrialFailed,
    TrialReported,
    TrialStarted,
    Workers,
    attempt,
    connection,
    open_store,
)
from tests.builders.ray_actors import DEATH, Actor, Stream, ray, report  # noqa: F401 - the stand-in for Ray is a fixture
from tests.builders.segments import SEGMENT


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
        slots_on_machine=1,
        timeout_s=1.0,
        on_sick=lambda *_: None,
    )


def abandoned(workers: Workers, script: list[Any], *, stops: bool = True) -> tuple[Actor, list[Event]]:
    """Abandon an attempt while it runs, and stop it; the worker that is left follows the script."""
    runs = threading.Event()
    survivor = Actor([lambda: runs.set() or True, *script])  # type: ignore[func-returns-value]
    other = Actor([lambda: "gone" not in places and workers.worker(0).done(), DEATH])
    survivor.rendezvous = type("Method", (), {"remote": lambda self: "tcp://h:1"})()  # type: ignore[attr-defined]
    workers.worker(0).set_result(survivor)
    gone: Any = type("Gone", (), {"worker": lambda self, gpu: done(other), "hold": lambda *_: None})()
    places: dict[str, Any] = {"left": workers, "gone": gone}
    gang = (Slot(instance="left", gpu=0), Slot(instance="gone", gpu=0))
    start = StartTrial(trial=4, attempt=1, gang=gang, from_iterations=0, until_iterations=4, checkpoint=None)
    events: list[Event] = []
    found = Attempt(start, replace(SEGMENT, num_workers=2), None, places.get, lambda make: events.append(make(0.0)))
    found.begin()
    assert runs.wait(10.0)
    found.abandon()
    places.pop("gone")
    if stops:
        found.stop()
    found.wait(10.0)
    return survivor, events


def done(actor: Actor) -> Future[Actor]:
    future: Future[Actor] = Future()
    future.set_result(actor)
    return future


def test_a_worker_that_ends_by_itself_stays_warm_and_is_given_to_no_trial_before(workers, replaced, monkeypatch):
    monkeypatch.setattr(attempt, "GRACE_S", 5.0)
    was_held: list[bool] = []

    def ends() -> bool:
        if not workers.worker(0).done():
            was_held.append(True)
        return len(was_held) > 10  # by then a pool that does not hold it has given it away

    survivor, events = abandoned(workers, [ends])
    assert workers.worker(0).result(0.0) is survivor
    assert was_held
    assert (replaced, events) == ([], [])


def test_a_worker_that_does_not_end_is_replaced(workers, replaced, monkeypatch):
    monkeypatch.setattr(attempt, "GRACE_S", 0.1)
    _, events = abandoned(workers, [lambda: False], stops=False)
    assert not workers.worker(0).done()
    assert (replaced, events) == (["replace-0"], [])


def test_a_gang_that_ran_out_of_memory_begins_again_from_its_latest_report(monkeypatch):
    echo = SegmentFailure(kind="raised", message="worker 1 failed", details="", secondary=True)
    ran_out = SegmentFailure(kind="raised", message="out of memory", details="", secondary=False, most_per_gpu=8)
    over = replace(ran_out, most_per_gpu=None)
    unsaved = replace(report(2), checkpoint=None)
    first = Actor([SegmentStarted(), report(1), echo], [SegmentStarted(), unsaved, echo], [echo])
    second = Actor([ran_out], [replace(ran_out, most_per_gpu=4)], [over])
    for each in (first, second):
        each.rendezvous = SimpleNamespace(remote=lambda: "tcp://h:1")  # type: ignore[attr-defined]
    place: Any = SimpleNamespace(worker=lambda gpu: done([first, second][gpu]), replace=lambda *_: None)
    gang = (Slot(instance="i", gpu=0), Slot(instance="i", gpu=1))
    start = StartTrial(trial=4, attempt=1, gang=gang, from_iterations=0, until_iterations=4, checkpoint=None)
    events: list[Event] = []
    found = Attempt(
        start, replace(SEGMENT, num_workers=2), None, lambda _: place, lambda make: events.append(make(0.0))
    )
    found.begin()
    found.wait(10.0)
    assert [(order.most_per_gpu, order.from_iterations) for order in second.orders] == [(None, 0), (8, 1), (4, 2)]
    assert [order.checkpoint for order in second.orders[1:]] == [report(1).checkpoint] * 2, "the latest that there is"
    assert [type(event) for event in events] == [TrialStarted, TrialReported, TrialReported, TrialFailed]


def test_a_gang_of_which_a_worker_died_does_not_begin_again():
    ran_out = SegmentFailure(kind="raised", message="out of memory", details="", secondary=False, most_per_gpu=8)
    assert Gathered(failures=[ran_out]).most_per_gpu == 8
    assert Gathered(failures=[ran_out, replace(ran_out, most_per_gpu=4)]).most_per_gpu == 4
    assert Gathered(failures=[ran_out], deaths=["rank 1"]).most_per_gpu is None
    assert Gathered(failures=[ran_out, replace(ran_out, most_per_gpu=None)]).most_per_gpu is None


@pytest.mark.parametrize("has_died", [True, False])
def test_workers_that_do_not_end_are_not_waited_for_after_another_has(monkeypatch, has_died):
    """However often they are looked at."""
    now = [0.0]

    def wait(streams: list[Any], **_: Any) -> Any:
        now[0] += attempt.LOOK_S
        assert now[0] < 60.0
        return ([each for each in streams if each.is_ready][:1], streams)

    failure = SegmentFailure(kind="raised", message="ValueError: no", details="", secondary=False)
    monkeypatch.setattr(attempt.ray, "wait", wait)
    monkeypatch.setattr(attempt, "time", SimpleNamespace(monotonic=lambda: now[0]))
    start = StartTrial(trial=4, attempt=1, gang=(), from_iterations=0, until_iterations=4, checkpoint=None)
    found = Attempt(start, SEGMENT, None, lambda _: None, lambda _: None)
    monkeypatch.setattr(found, "_loses_gpu", lambda *_: False)
    ended, hanging = Stream([DEATH if has_died else failure]), Stream([lambda: False])
    found._follow({ended: 0, hanging: 1}, gathered := Gathered())
    assert gathered.over


def test_a_slot_has_one_worker_whoever_gives_up_or_back_which(workers, replaced):
    first: Any = Actor()
    workers.worker(0).set_result(first)
    workers.hold(0, first)
    workers.give_back(0, Actor())
    assert not workers.worker(0).done(), "another one than that which is held"
    workers.replace(0, first)
    workers.replace(0, first)
    workers.give_back(0, first)
    assert not workers.worker(0).done(), "it ends"
    assert replaced == ["replace-0"]
