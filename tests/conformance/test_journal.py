"""What the driver loop needs of a journal, on every kind: in memory, in a SQLite file, on a PostgreSQL server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rubberband.errors import JournalError, NameTakenError
from rubberband.executor import Controller, EventLog, Journal, VirtualBackend, replay
from tests.builders.jobs import EVENTS, JOB
from tests.builders.memory import MemoryJournal
from tests.builders.virtual_runs import run_until_killed, run_virtual

Opens = Callable[[], Journal]


@pytest.fixture(params=["sqlite", "postgresql"])
def opens(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opens]:
    """Opens the journal of one experiment that was begun in a store, as another process would."""
    store_url = url_of(request, tmp_path)
    first = Journal(store_url, "test", create=True)
    first.create(created_at=1.5, job=JOB, setup={"configurations": [{"ü": "a\0b"}]})
    opened = [first]

    def again() -> Journal:
        opened.append(Journal(store_url, "test"))
        return opened[-1]

    yield again
    for journal in opened:
        journal.close()


def url_of(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a new store of the kind that the parameter says."""
    url: str = (
        request.getfixturevalue("postgresql_url") if request.param == "postgresql" else f"sqlite:///{tmp_path}/j.db"
    )
    return url


@pytest.fixture(params=["memory", "sqlite", "postgresql"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EventLog]:
    """An empty journal."""
    if request.param == "memory":
        yield MemoryJournal()
        return
    journal = Journal(url_of(request, tmp_path), "test", create=True)
    journal.create(created_at=1.0, job=JOB, setup={})
    yield journal
    journal.close()


@pytest.mark.parametrize("cuts", [(), (2,), (1, 2, 5), (0, 3, 3)])
def test_events_come_back_in_order_however_they_were_appended(log: EventLog, cuts: tuple[int, ...]) -> None:
    assert list(log.events()) == []
    for begin, end in zip((0, *cuts), (*cuts, len(EVENTS)), strict=True):
        log.append(EVENTS[begin:end])
    assert list(log.events()) == list(enumerate(EVENTS))
    assert list(log.events(after=2)) == list(enumerate(EVENTS))[3:]
    assert list(log.events(after=len(EVENTS) - 1)) == []


def test_a_run_that_was_cut_off_resumes_and_its_replay_ends_as_it_did(log: EventLog) -> None:
    backend = VirtualBackend(JOB.name, JOB.offer, JOB.profile, metric=JOB.metric)
    run_until_killed(Controller(JOB), backend, log, 5)
    after, _, finish = run_virtual(JOB, journal=log, backend=backend)
    assert finish.outcome == "done"
    again = Controller(JOB)
    replay(again, log)
    assert again.state == after.state


def test_the_header_and_the_events_outlive_the_process(opens: Opens) -> None:
    opens().append(EVENTS)
    later = opens()
    header = later.header()
    assert header is not None
    assert (header.created_at, header.job, header.setup) == (1.5, JOB, {"configurations": [{"ü": "a\0b"}]})
    assert [event for _, event in later.events()] == EVENTS
    assert later.last_event_at() == 10.0


def test_a_second_writer_resumes_where_the_first_stopped(opens: Opens) -> None:
    opens().append(EVENTS[:3])
    opens().append(EVENTS[3:])
    assert [event for _, event in opens().events()] == EVENTS


def test_a_writer_that_lost_its_place_is_refused_and_loses_nothing(opens: Opens) -> None:
    one, other = opens(), opens()
    one.append(EVENTS[:1])
    with pytest.raises(JournalError, match=r"journal of 'test' cannot be written: .*rubberband resume test") as refused:
        other.append(EVENTS[1:])
    assert "s3cret" not in str(refused.value)
    assert [event for _, event in one.events()] == EVENTS[:1]


def test_a_taken_name_is_refused_with_the_ways_out(opens: Opens) -> None:
    with pytest.raises(NameTakenError, match=r"is taken .* `rubberband resume test`, or use another name"):
        opens().create(created_at=2.0, job=JOB, setup={})
