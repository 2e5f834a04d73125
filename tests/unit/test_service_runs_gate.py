"""What the operator does not allow any more is not started, and what was killed goes on by itself: once."""

from __future__ import annotations

import inspect
import json
import os
from contextlib import ExitStack

import pytest

from rubberband.api.experiments import watcher
from rubberband.api.experiments.watcher import Stamp, stamp_of
from rubberband.api.problems import Problem
from rubberband.api.settings import ServiceLimits, Settings
from rubberband.executor.journal.folder import ExperimentFolder
from rubberband.executor.journal.inbox import DriverRequest, Inbox
from rubberband.states import ExperimentState
from tests.builders.service_runs import DONE, House, count_of, cut_off, experiment, template, until

QUEUED, RUNNING, INTERRUPTED = ExperimentState.QUEUED, ExperimentState.RUNNING, ExperimentState.INTERRUPTED
STARTING, REFUSED = ExperimentState.STARTING, ExperimentState.REFUSED
NARROW = {
    "provider": {"providers": ("local",)},
    "cost": {"limits": ServiceLimits(max_cost_usd=3.0)},
}


@pytest.mark.parametrize(("narrow", "told"), [("provider", "virtual is not allowed"), ("cost", "5.00 USD is more")])
def test_what_waits_is_refused_by_a_server_that_allows_less(house: House, narrow: str, told: str) -> None:
    house.settings = Settings(home=house.home, limits=ServiceLimits(max_running=0))
    with house.open() as runs:
        runs.submit(experiment("waits", max_cost=5.0))
        runs.submit(experiment("ordered", max_cost=5.0))
    assert house.store.change("ordered", at=0.0, state=STARTING, attempt=1)  # and the server died before it started it
    house.settings = Settings(home=house.home, **NARROW[narrow])  # type: ignore[arg-type]
    with house.open():
        for name in ("waits", "ordered"):
            reason = house.wait(name, REFUSED).reason
            assert "the operator changed what may be run" in reason
            assert told in reason
    assert house.starts() == []


def test_what_had_begun_and_is_not_allowed_any_more_is_as_it_was_before_it_waited(house: House) -> None:
    house.tell(one="cut")
    with house.open() as runs:
        runs.submit(experiment(max_cost=5.0))
        house.wait("one", INTERRUPTED)
    house.settings = Settings(home=house.home, limits=ServiceLimits(max_running=0))
    with house.open() as runs:
        assert runs.resume("one").state is QUEUED
    house.settings = Settings(home=house.home, limits=ServiceLimits(max_cost_usd=3.0))
    with house.open() as runs:
        assert "constraints.max_cost" in house.wait("one", INTERRUPTED).reason
        with pytest.raises(Problem, match="max_cost"):
            runs.resume("one")
    assert len(house.starts()) == 1


def resuming(house: House) -> Settings:
    return Settings(home=house.home, auto_resume=True)


def test_what_was_killed_goes_on_by_itself_and_is_done(house: House, caplog: pytest.LogCaptureFixture) -> None:
    house.settings = resuming(house)
    house.tell(one="cut")  # amid its events; whoever goes on with it does so to the end
    with house.open() as runs:
        runs.submit(experiment())
        assert house.wait("one", DONE, REFUSED).attempt == 2
    assert house.seqs("one") == list(range(count_of(house.journal)))
    assert house.states("one").count("interrupted") == 1
    assert [start[2] for start in house.starts()] == ["1", "2"]
    assert (
        len(
            [
                record
                for record in caplog.messages
                if record.startswith("experiment one: its process ended unexpectedly")
            ]
        )
        == 1
    )


def interrupted(house: House, name: str, *, attempt: int) -> bool:
    row = house.row(name)
    return row.state is INTERRUPTED and row.attempt == attempt


def test_what_gets_no_further_goes_on_by_itself_once_whoever_restarts(house: House) -> None:
    house.settings = resuming(house)
    house.tell(one="silent")
    with house.open() as runs:
        runs.submit(experiment())
        until(lambda: interrupted(house, "one", attempt=2))
    with house.open() as runs:
        runs.resume("one")  # a person may, as often as that person likes
        until(lambda: interrupted(house, "one", attempt=3))
    assert len(house.starts()) == 3


def test_what_ended_by_its_own_words_or_was_run_by_hand_waits_for_a_person(house: House) -> None:
    cut_off(template(house.home), at=3)
    house.tell(one="cut")
    house.settings = Settings(home=house.home)
    with house.open() as runs:
        runs.submit(experiment())
        house.wait("one", INTERRUPTED)
        folder = ExperimentFolder(home=house.home, name="one")
        told = {"attempt": 1, "exit_code": 1, "error": "no", "at": 0.0}
        folder.ending.write_text(json.dumps(told))
        house.wait("template", INTERRUPTED)
    for name in ("one", "template"):
        assert house.store.change(name, at=0.0, state=RUNNING)
    house.settings = resuming(house)
    with house.open():
        for name in ("one", "template"):
            house.wait(name, INTERRUPTED)
    assert len(house.starts()) == 1


def test_what_a_person_went_on_with_by_hand_is_that_persons(house: House) -> None:
    house.tell(one="cut")
    with house.open() as runs:
        runs.submit(experiment())
        house.wait("one", INTERRUPTED)
    house.settings = resuming(house)
    folder = ExperimentFolder(home=house.home, name="one")
    with house.open():
        with folder.driving():
            os.utime(folder.journal)
            house.wait("one", RUNNING)
        house.wait("one", INTERRUPTED)
    assert house.row("one").state is INTERRUPTED
    assert len(house.starts()) == 1


def test_what_is_gone_on_with_at_the_moment_at_which_it_was_looked_at_is_looked_at_again(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.tell(one="cut")
    with house.open() as runs:
        runs.submit(experiment())
        house.wait("one", INTERRUPTED)
    folder = ExperimentFolder(home=house.home, name="one")
    os.utime(folder.journal)
    with ExitStack() as driver:

        def begun_first(seen: ExperimentFolder) -> Stamp:
            if "_settle" in {frame.function for frame in inspect.stack(0)} and not folder.driven:
                driver.enter_context(folder.driving())
                os.utime(folder.journal)
            return stamp_of(seen)

        monkeypatch.setattr(watcher, "stamp_of", begun_first)
        with house.open():
            house.wait("one", RUNNING)


def test_what_another_home_started_does_not_go_on_here(house: House) -> None:
    house.tell(one="cut")
    with house.open() as runs:
        runs.submit(experiment())
        house.wait("one", INTERRUPTED)
    ExperimentFolder(home=house.home, name="one").process_lock.unlink()
    assert house.store.change("one", at=0.0, state=RUNNING)
    house.settings = resuming(house)
    with house.open():
        house.wait("one", INTERRUPTED)
    assert len(house.starts()) == 1


def test_who_cancels_as_it_is_about_to_go_on_by_itself_keeps_it_from_that(house: House) -> None:
    house.tell(one="silent")
    with house.open() as runs:
        runs.submit(experiment())
        house.wait("one", INTERRUPTED)
    house.settings = resuming(house)
    with house.open() as runs, pytest.raises(Problem, match="it is not running"):
        runs.cancel("one")
    assert house.store.change("one", at=0.0, state=STARTING)
    with house.open() as runs:
        house.wait("one", INTERRUPTED)
        assert len(house.starts()) == 1
        runs.resume("one")
        until(lambda: len(house.starts()) > 1)


@pytest.mark.parametrize("why", ["cancelled", "late"])
def test_what_was_to_end_anyway_does_not_go_on(house: House, why: str) -> None:
    house.tell(one="silent")
    with house.open() as runs:
        runs.submit(experiment())
        house.wait("one", INTERRUPTED)
    if why == "cancelled":
        inbox = Inbox(ExperimentFolder(home=house.home, name="one").inbox)
        inbox.put(DriverRequest(id="c1", kind="cancel", asked_at=0.0))
    words = dict(house.row("one").words)
    if why == "late":
        words["constraints"] = {"deadline": "2020-01-01T00:00:00Z"}
    assert house.store.change("one", at=0.0, state=STARTING, words=words)
    house.settings = resuming(house)
    with house.open():
        house.wait("one", INTERRUPTED)
    assert len(house.starts()) == 1
