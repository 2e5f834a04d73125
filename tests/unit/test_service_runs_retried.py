"""A request that is sent again since its answer was lost has no second effect, and is not refused for its first one."""

from __future__ import annotations

import pytest

from rubberband.api.problems import HttpProblem
from rubberband.api.settings import ServiceLimits, Settings
from rubberband.executor.journal.folder import ExperimentFolder
from rubberband.executor.journal.inbox import Inbox
from rubberband.states import ExperimentState
from tests.builders.service_runs import DONE, House, cut_off, experiment, extend, template

QUEUED, RUNNING, INTERRUPTED = ExperimentState.QUEUED, ExperimentState.RUNNING, ExperimentState.INTERRUPTED
CANCELLED = ExperimentState.CANCELLED


def pending(house: House, name: str) -> list[str]:
    return [asked.kind for asked in Inbox(ExperimentFolder(home=house.home, name=name).inbox).pending()]


def test_resuming(house: House) -> None:
    cut_off(template(house.home), at=3)
    with house.open() as runs:
        house.wait("template", INTERRUPTED)
        runs.resume("template", request="r1")
    with house.open() as runs:  # the server died before it answered
        assert runs.resume("template", request="r1").name == "template"
        house.wait("template", DONE)
        assert runs.resume("template", request="r1").state is DONE
        with pytest.raises(HttpProblem, match="it is over"):
            runs.resume("template", request="r2")
    assert len(house.starts()) == 1


def test_cancelling_a_queued_experiment(house: House) -> None:
    house.settings = Settings(home=house.home, limits=ServiceLimits(max_running=0))
    with house.open() as runs:
        runs.submit(experiment())
        assert runs.cancel("one", request="c1").state is CANCELLED
        assert runs.resume("one").state is QUEUED
        assert runs.cancel("one", request="c1").state is QUEUED
        assert runs.cancel("one", request="c2").state is CANCELLED


def test_cancelling_a_running_experiment(house: House) -> None:
    house.tell(one="hold")
    with house.open() as runs:
        runs.submit(experiment())
        house.wait("one", RUNNING)
        runs.cancel("one", request="c1")
        inbox = Inbox(ExperimentFolder(home=house.home, name="one").inbox)
        inbox.withdraw_cancels()  # as its driver does once it is journalled, or whoever resumes it
        assert runs.cancel("one", request="c1").state is RUNNING
        assert pending(house, "one") == []
        house.go()
        house.wait("one", DONE)
        assert runs.cancel("one", request="c1").state is DONE


def test_extending_a_queued_experiment_that_has_begun_since(house: House) -> None:
    house.settings = Settings(home=house.home, limits=ServiceLimits(max_running=0))
    with house.open() as runs:
        runs.submit(experiment(max_cost=5.0))
        for _ in range(2):
            found = extend(runs, house.home, "one", max_cost_usd=6.0, request="e1")
            assert (found.applied, found.after.max_cost_usd) == (True, 6.0)
        words = house.row("one").words
    house.settings = Settings(home=house.home)
    with house.open() as runs:
        house.wait("one", DONE)
        assert extend(runs, house.home, "one", max_cost_usd=6.0, request="e1").applied
        with pytest.raises(HttpProblem, match="it is over"):
            extend(runs, house.home, "one", max_cost_usd=6.0, request="e2")
    assert house.row("one").words == words
    assert pending(house, "one") == []


def test_extending_a_begun_experiment(house: House) -> None:
    house.tell(one="hold")
    with house.open() as runs:
        runs.submit(experiment())
        house.wait("one", RUNNING)
        for _ in range(2):
            assert extend(runs, house.home, "one", deadline="2h", request="e1").applied
        assert pending(house, "one") == ["extend"]
        house.go()
        house.wait("one", DONE)
