"""Experiments that were run by hand in a service's home: all are taken in, as each would be by itself."""

from __future__ import annotations

import dataclasses
import sqlite3
from pathlib import Path

import pytest

from rubberband.api.experiments.recording import Newcomers, Recorder, taken_in
from rubberband.api.store import Store, open_store
from rubberband.executor import ExperimentFolder, read_at_once
from rubberband.values.submission import Labels
from tests.builders.clocks import MID_MONTH
from tests.builders.service_runs import DONE, INTERRUPTED, UNREADABLE, House, count_of, cut_off
from tests.builders.waiting import eventually

DAY_S = 24 * 3600.0


def copied(journal: Path, home: Path, name: str, *, age_s: float = 0.0, events: int | None = None) -> ExperimentFolder:
    """The run under another name, as if it was begun so long ago; with `events`, its first ones only."""
    folder = ExperimentFolder(home=home, name=name)
    folder.make()
    folder.journal.write_bytes(journal.read_bytes())
    (folder.path / "driver.lock").touch()
    connection = sqlite3.connect(folder.journal)
    connection.execute("UPDATE experiments SET name = ?, created_at = created_at - ?", (name, age_s))
    connection.execute("UPDATE events SET experiment = ?", (name,))
    connection.commit()
    connection.close()
    if events is not None:
        cut_off(folder.journal, at=events)
    return folder


@pytest.mark.parametrize("events", [None, 3, 0])
def test_reading_at_once_gives_the_same_as_following(done_run: Path, tmp_path: Path, events: int | None) -> None:
    folder = copied(done_run, tmp_path, "one", events=events)
    store = open_store(None, tmp_path)
    followed = Recorder(folder, store, lambda: None, clock=lambda: 5.0).first_row()
    found = taken_in(read_at_once(folder), at=5.0, events_s=30 * DAY_S, labels=Labels())
    assert found.submission == followed
    assert [(one.seq, one.kind, one.occurred_at, one.data) for one in found.entries] == [
        (one.seq, one.kind, one.occurred_at, one.data) for one in store.feed()
    ]
    assert found.last_seq == len(found.entries) - 1
    store.close()


def test_many_are_taken_in_together_with_their_events_unless_they_are_old(house: House, done_run: Path) -> None:
    for number in range(30):
        copied(done_run, house.home, f"old-{number:02}", age_s=60 * DAY_S)
    copied(done_run, house.home, "new", age_s=DAY_S)
    copied(done_run, house.home, "stopped", age_s=60 * DAY_S, events=3)
    newcomers = Newcomers(house.settings, house.store, lambda: None)
    newcomers.look(set())
    taken = []
    while newcomers.found:
        taken += newcomers.take(lambda name: name == "old-07")
    assert newcomers.others == []
    assert sorted(row.name for row, _ in taken) == sorted(
        {f"old-{number:02}" for number in range(30)} - {"old-07"} | {"new", "stopped"}
    )
    assert {name: house.row(name).state for name in ("old-00", "new", "stopped")} == {
        "old-00": DONE,
        "new": DONE,
        "stopped": INTERRUPTED,
    }
    count = count_of(done_run)
    assert (house.seqs("old-00"), house.seqs("new"), house.seqs("stopped")) == ([], list(range(count)), [])
    assert house.states("old-00") == ["done"]
    assert house.store.last_seqs(["old-00", "new", "stopped"]) == {"old-00": count - 1, "new": count - 1, "stopped": 2}
    assert house.store.last_pruned_id() == 0


def test_an_old_run_that_resumes_says_from_where(house: House, done_run: Path) -> None:
    copied(done_run, house.home, "stopped", age_s=60 * DAY_S, events=5)
    with house.open() as runs:
        house.wait("stopped", INTERRUPTED)
        house.tell(stopped="run")
        runs.resume("stopped")
        house.wait("stopped", DONE)
    assert house.seqs("stopped") == list(range(5, count_of(done_run)))


def test_events_of_long_ended_runs_leave_the_feed_and_restarts_go_on_from_there(house: House, done_run: Path) -> None:
    count = count_of(done_run)
    copied(done_run, house.home, "stopped", events=5)
    copied(done_run, house.home, "recent")
    with house.open():
        house.wait("stopped", INTERRUPTED)
        house.wait("recent", DONE)
    assert house.seqs("stopped") == list(range(5))
    house.store.change("stopped", at=house.clock() - 31 * DAY_S)
    with house.open() as runs:
        eventually(lambda: house.feed("stopped") == [])
        house.tell(stopped="run")
        runs.resume("stopped")
        house.wait("stopped", DONE)
    assert house.seqs("stopped") == list(range(5, count))
    assert house.seqs("recent") == list(range(count))


def test_one_that_cannot_be_read_is_reported_and_keeps_no_other_out(house: House, done_run: Path) -> None:
    copied(done_run, house.home, "good", age_s=60 * DAY_S)
    for name, content in (("broken", b"no database" * 1000), ("empty", b"")):
        folder = house.folder(name)
        folder.make()
        folder.journal.write_bytes(content)
    with house.open():
        assert house.wait("broken", UNREADABLE).reason.startswith("its journal cannot be read")
        house.wait("empty", UNREADABLE)
        house.wait("good", DONE)


def test_one_that_is_known_by_now_is_left_as_it_is(house: House, done_run: Path) -> None:
    folder = copied(done_run, house.home, "one")
    found = taken_in(read_at_once(folder), at=MID_MONTH, events_s=30 * DAY_S, labels=Labels())
    assert set(house.store.take_in([found])) == {"one"}
    before = house.store.feed()
    again = dataclasses.replace(found, submission=dataclasses.replace(found.submission, reason="another"))
    assert set(house.store.take_in([again])) == set()
    assert house.store.take_in([]) == []
    assert house.row("one").reason == found.submission.reason
    assert house.store.feed() == before


def test_a_server_database_takes_them_in_as_well(store_url: str, done_run: Path, tmp_path: Path) -> None:
    store = Store(store_url)
    found = [
        taken_in(
            read_at_once(copied(done_run, tmp_path, name, age_s=age_s)),
            at=MID_MONTH,
            events_s=30 * DAY_S,
            labels=Labels(),
        )
        for name, age_s in (("old", 60 * DAY_S), ("new", DAY_S))
    ]
    assert set(store.take_in(found)) == {"old", "new"}
    last = count_of(done_run) - 1
    assert store.last_seqs() == {"old": last, "new": last}
    assert [event.kind for event in store.feed(experiment="old")] == ["state"]
    assert [event.seq for event in store.feed(experiment="new")] == [*range(last + 1), None]
    store.close()
