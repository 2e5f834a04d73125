"""What the operator does not allow any more is not started, and what was killed goes on by itself: once."""

from __future__ import annotations

import json
import os
import time
from contextlib import ExitStack, suppress

import pytest

from rubberband.api.experiments import watcher
from rubberband.api.problems import HttpProblem
from rubberband.api.settings import ServiceLimits, Settings
from rubberband.executor import DriverRequest, ExperimentFolder, Stamp, stamp_of
from tests.builders.receiver import receiving
from tests.builders.service_runs import (
    DONE,
    INTERRUPTED,
    QUEUED,
    REFUSED,
    RUNNING,
    STARTING,
    House,
    count_of,
    experiment,
)
from tests.builders.waiting import eventually

NARROW = {"provider": {"providers": ("local",)}, "cost": {"limits": ServiceLimits(max_cost_usd=3.0)}}


@pytest.mark.parametrize(("narrow", "text"), [("provider", "virtual is not allowed"), ("cost", "5.00 USD is more")])
def test_narrowing_the_allowed_code_refuses_queued_runs(house: House, narrow: str, text: str) -> None:
    house.set(limits=ServiceLimits(max_running=0))
    with house.open() as runs:
        runs.submit(experiment("waits", max_cost=5.0))
        runs.submit(experiment("ordered", max_cost=5.0))
    assert house.store.change("ordered", at=0.0, state=STARTING, attempt=1)  # and the server died before it started it
    house.set(**NARROW[narrow])  # type: ignore[arg-type]
    with house.open():
        for name in ("waits", "ordered"):
            reason = house.wait(name, REFUSED).reason
            assert "the operator changed what may be run" in reason
            assert text in reason
    assert house.starts() == []


def test_a_refusal_in_the_queue_is_a_notice(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    house.set(limits=ServiceLimits(max_running=0))
    with house.open() as runs:
        runs.submit(experiment("waits"))
    with receiving() as receiver:
        monkeypatch.setenv("HOOK", receiver.url)
        house.set(providers=("local",), notify=("HOOK",))
        with house.open():
            reason = house.wait("waits", REFUSED).reason
            eventually(lambda: receiver.bodies != [])
    (body,) = receiver.bodies
    assert body["text"].startswith("rehearsal: waits did not start: the operator changed what may be run")
    assert (body["kind"], body["state"]) == ("failed", "refused")
    assert reason.startswith(body["reason"].rstrip("…"))


def test_a_begun_run_that_is_no_longer_allowed_returns_to_its_earlier_state(house: House) -> None:
    house.tell(one="cut")
    with house.open() as runs:
        runs.submit(experiment(max_cost=5.0))
        house.wait("one", INTERRUPTED)
    house.set(limits=ServiceLimits(max_running=0))
    with house.open() as runs:
        assert runs.resume("one").state is QUEUED
    house.set(limits=ServiceLimits(max_cost_usd=3.0))
    with house.open() as runs:
        assert "constraints.max_cost" in house.wait("one", INTERRUPTED).reason
        with pytest.raises(HttpProblem, match="max_cost"):
            runs.resume("one")
    assert len(house.starts()) == 1


def resuming(house: House) -> Settings:
    return Settings(home=house.home, auto_resume=True)


def test_a_killed_run_restarts_automatically_and_is_done(house: House, caplog: pytest.LogCaptureFixture) -> None:
    house.settings = resuming(house)
    house.tell(one="cut")  # amid its events; whoever goes on with it does so to the end
    with house.open() as runs:
        runs.submit(experiment())
        assert house.wait("one", DONE, REFUSED).attempt == 2
    assert house.seqs("one") == list(range(count_of(house.journal)))
    assert "interrupted" not in house.states("one")  # a client that waits for its end would resume it, too
    assert [start[2] for start in house.starts()] == ["1", "2"]
    assert sum(line.startswith("experiment one: its process ended unexpectedly") for line in caplog.messages) == 1


def interrupted(house: House, name: str, *, attempt: int) -> bool:
    row = house.row(name)
    return row.state is INTERRUPTED and row.attempt == attempt


def test_a_run_without_progress_restarts_automatically_only_once(house: House) -> None:
    house.settings = resuming(house)
    house.tell(one="silent")
    with house.open() as runs:
        runs.submit(experiment())
        eventually(lambda: interrupted(house, "one", attempt=2))
    with house.open() as runs:
        runs.resume("one")  # a person may, as often as that person likes
        eventually(lambda: interrupted(house, "one", attempt=3))
    assert len(house.starts()) == 3


def test_runs_that_failed_by_themselves_or_run_by_hand_are_not_restarted(house: House) -> None:
    house.cut_template()
    house.tell(one="cut")
    house.set()
    with house.open() as runs:
        runs.submit(experiment())
        house.wait("one", INTERRUPTED)
        folder = house.folder()
        found = {"attempt": 1, "exit_code": 1, "error": "no", "at": 0.0}
        folder.ending.write_text(json.dumps(found))
        house.wait("template", INTERRUPTED)
    for name in ("one", "template"):
        assert house.store.change(name, at=0.0, state=RUNNING)
    house.settings = resuming(house)
    with house.open():
        for name in ("one", "template"):
            house.wait(name, INTERRUPTED)
    assert len(house.starts()) == 1


def test_a_run_resumed_by_hand_stays_with_its_user(house: House) -> None:
    house.tell(one="cut")
    with house.open() as runs:
        runs.submit(experiment())
        house.wait("one", INTERRUPTED)
    house.settings = resuming(house)
    folder = house.folder()
    with house.open():
        with folder.driving():
            # A driver writes again and again: a watcher that looked just before it began sees the next time.
            eventually(lambda: os.utime(folder.journal) or house.row("one").state is RUNNING)
        house.wait("one", INTERRUPTED)
    assert house.row("one").state is INTERRUPTED
    assert len(house.starts()) == 1


def test_a_run_resumed_while_it_is_examined_is_examined_again(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    house.tell(one="cut")
    with house.open() as runs:
        runs.submit(experiment())
        house.wait("one", INTERRUPTED)
    folder = house.folder()
    later = time.time() + 1.0  # times of files lag behind the clock by up to a tick of the kernel
    os.utime(folder.journal, (later, later))
    with ExitStack() as driver:

        def begun_first(seen: ExperimentFolder) -> Stamp:
            if not folder.driven:
                driver.enter_context(folder.driving())
                os.utime(folder.journal)
            return stamp_of(seen)

        monkeypatch.setattr(watcher, "stamp_of", begun_first)
        with house.open():
            house.wait("one", RUNNING)


def test_runs_started_in_another_home_are_not_resumed_here(house: House) -> None:
    house.tell(one="cut")
    with house.open() as runs:
        runs.submit(experiment())
        house.wait("one", INTERRUPTED)
    house.folder().process_lock.unlink()
    assert house.store.change("one", at=0.0, state=RUNNING)
    house.settings = resuming(house)
    with house.open() as runs:
        house.wait("one", INTERRUPTED)
        (house.folder().path / "driver.lock").unlink()
        with pytest.raises(HttpProblem, match="another home"):
            runs.resume("one")
    assert len(house.starts()) == 1


def test_a_cancel_before_an_automatic_restart_prevents_it(house: House) -> None:
    house.tell(one="silent")
    with house.open() as runs:
        runs.submit(experiment())
        house.wait("one", INTERRUPTED)
    house.settings = resuming(house)
    with house.open() as runs, pytest.raises(HttpProblem, match="it is not running"):
        runs.cancel("one")
    assert house.store.change("one", at=0.0, state=STARTING)
    with house.open() as runs:
        house.wait("one", INTERRUPTED)
        assert len(house.starts()) == 1
        with suppress(HttpProblem):  # the watcher may be about to ask whether it was cancelled, and resume it by itself
            runs.resume("one")
        eventually(lambda: len(house.starts()) > 1)


@pytest.mark.parametrize("why", ["cancelled", "late"])
def test_a_run_that_was_about_to_end_is_not_restarted(house: House, why: str) -> None:
    house.tell(one="silent")
    with house.open() as runs:
        runs.submit(experiment())
        house.wait("one", INTERRUPTED)
    if why == "cancelled":
        inbox = house.inbox()
        inbox.put(DriverRequest(id="c1", kind="cancel", asked_at=0.0))
    words = dict(house.row("one").words)
    if why == "late":
        words["constraints"] = {"deadline": "2020-01-01T00:00:00Z"}
    assert house.store.change("one", at=0.0, state=STARTING, words=words)
    house.settings = resuming(house)
    with house.open():
        house.wait("one", INTERRUPTED)
    assert len(house.starts()) == 1
