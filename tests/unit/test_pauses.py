"""A driver that stood still: paused (SIGSTOP), or asleep with its machine."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from rubberband.cloud.provider import LEASE_EXPIRED, ClusterProvider, InstanceDescription
from rubberband.executor import (
    Command,
    Entrypoint,
    Event,
    InstanceLost,
    LaunchInstance,
    RayBackend,
    RayFleet,
    Started,
    Tick,
    Workers,
    open_store,
    summarise,
)
from rubberband.executor.ray.workers import Patience, WorkersError
from rubberband.views.live.narration import Narrator
from rubberband.views.report.page import render_html
from rubberband.views.story import story as story_of
from tests.builders.jobs import JOB
from tests.builders.results import render
from tests.builders.sessions import run_spec
from tests.builders.stories import Story, begun

PAUSE_S = 120.0
SETUP = {"configurations": [{}] * 4}


def test_reports_before_a_pause_cause_no_hang_after_it() -> None:
    story = begun()
    story.at += PAUSE_S
    story.tell(Tick, paused_s=PAUSE_S)
    story.report(0, 0.5)
    assert [trial.failures for trial in story.state.trials] == [0, 0, 0, 0]
    assert [trial.status for trial in story.state.trials[1:]] == ["running"] * 3


CAPPED = dataclasses.replace(JOB, max_cost_usd=0.3, release_margin_s=3.0)


def after_a_long_pause() -> tuple[Story, list[Command]]:
    """Were its instances held so long, far more than the cap would be spent."""
    story = begun(CAPPED)
    story.at += 100 * PAUSE_S
    return story, story.controller.handle(Tick(occurred_at=story.at, paused_s=100 * PAUSE_S))


def test_instances_that_ended_in_a_pause_are_not_billed_to_its_end_and_bought_again() -> None:
    story, orders = after_a_long_pause()
    for instance in ("i-001", "i-002"):
        lost = InstanceLost(occurred_at=story.at, instance=instance, ended_at=125.0, reason="lease expired")
        orders += story.controller.handle(lost)
    orders += story.tell(Tick)
    assert (story.state.outcome, story.state.reason) == (None, "")
    assert [order.instance for order in orders if isinstance(order, LaunchInstance)] == ["i-003", "i-004"]


def test_instances_that_ended_in_a_pause_before_they_were_ready_failed_no_start() -> None:
    story = Story(dataclasses.replace(JOB, start_attempts=1))
    story.tell(Started)
    story.at += 10 * PAUSE_S
    orders = []
    for instance, ended_at in (("i-001", 200.0), ("i-002", 210.0)):
        orders += story.tell(InstanceLost, instance=instance, ended_at=ended_at, reason=LEASE_EXPIRED, overslept=True)
    assert story.state.fleet.failed_starts == 0
    orders += story.tell(Tick)
    assert story.state.outcome is None
    assert [order.instance for order in orders if isinstance(order, LaunchInstance)] == ["i-003", "i-004"]


@pytest.mark.parametrize(
    ("late_s", "reason", "overslept"),
    [(300.0, LEASE_EXPIRED, True), (5.0, LEASE_EXPIRED, False), (300.0, "process died", False)],
)
def test_only_a_lease_that_expired_long_ago_was_overslept(late_s: float, reason: str, overslept: bool) -> None:
    gone = InstanceDescription(
        instance="i-001", experiment="test", state="terminated", requested_at=0.0, ended_at=100.0, reason=reason
    )
    assert gone.overslept(100.0 + late_s) is overslept


def test_instances_held_after_a_pause_still_end_by_the_budget() -> None:
    story, _ = after_a_long_pause()
    assert story.state.outcome is None
    story.controller.handle(Tick(occurred_at=story.at))
    assert story.state.outcome == "budget"


def test_the_report_the_narration_and_the_page_mention_it() -> None:
    story, narrator = begun(), Narrator(JOB)
    story.at += PAUSE_S
    story.tell(Tick, paused_s=PAUSE_S)
    line = "the driver stood still for 2m, paused or with its machine asleep"
    assert line in narrator.lines(Tick(occurred_at=story.at, paused_s=PAUSE_S), story.controller)
    result = summarise(story.state, SETUP, story.at)
    assert f"{line}." in render(result)
    assert f"{line}." in render_html(result)
    assert line in [entry.text for entry in story_of(result)]
    assert result.to_json()["pauses"] == [{"at_s": pytest.approx(story.at - PAUSE_S - 101.0), "paused_s": PAUSE_S}]


class Nothing:
    """A provider of which nothing is asked."""

    remote = False
    is_borrowed = False
    look_s = 3600.0

    def close(self) -> None:
        """Nothing is held."""


def test_the_backend_mentions_it_before_what_it_finds_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = [1000.0]
    backend = RayBackend(
        cast(ClusterProvider, Nothing()),
        run_spec([], entrypoint=Entrypoint.parse("a:b")),
        store=open_store(str(tmp_path)),
        gpus_per_instance=1,
        clock=lambda: at[0],
    )

    def lose(instance: str) -> None:
        backend._mailbox.put(lambda at: InstanceLost(occurred_at=at, instance=instance, ended_at=1020.0, reason=""))

    monkeypatch.setattr(RayFleet, "look", lambda _: lose("b"))
    try:
        assert backend.next_events(at[0]) == []
        lose("a")
        at[0] += PAUSE_S
        woke: list[Event] = list(backend.next_events(at[0]))
        at[0] += 1.0
        assert backend.next_events(at[0]) == []
    finally:
        backend.close()
    assert [event.instance for event in woke if isinstance(event, InstanceLost)] == ["a", "b"]
    assert woke[1] == Tick(occurred_at=at[0] - 1.0, paused_s=PAUSE_S)
    assert [event.occurred_at for event in woke] == sorted(event.occurred_at for event in woke)


def test_a_pause_takes_no_patience_from_workers_that_get_warm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at, looks = [1000.0], iter([100 * PAUSE_S, 1.0, 1.0])

    def look(pending: list[object], **_: object) -> tuple[list[object], list[object]]:
        took_s = next(looks, None)
        at[0] += took_s or 0.0
        return ([], pending) if took_s is not None else (pending, [])

    monkeypatch.setattr("rubberband.executor.ray.workers.time", SimpleNamespace(monotonic=lambda: at[0]))
    monkeypatch.setattr("rubberband.executor.ray.workers.ray.wait", look)
    monkeypatch.setattr("rubberband.executor.ray.workers.ray.get", lambda _: None)
    workers = Workers(
        "i-001",
        1,
        Entrypoint.parse("a:b"),
        open_store(str(tmp_path)),
        device="cpu",
        slots_on_machine=1,
        timeout_s=60.0,
        on_sick=lambda *_: None,
    )
    worker = SimpleNamespace(warm_up=SimpleNamespace(remote=lambda *_: object()))
    workers.warm_up([worker], Patience(60.0))
    looks = iter([10.0] * 7)
    with pytest.raises(WorkersError, match="did not get warm within 60 s"):
        workers.warm_up([worker], Patience(60.0))
