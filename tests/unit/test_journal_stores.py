"""Journals in one database, SQLite or PostgreSQL: experiments are begun, driven, cut off, followed and read there."""

from __future__ import annotations

import contextlib
import dataclasses
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sql

from rubberband.cloud.ray_head.ray_node import environment
from rubberband.errors import InputError, JournalError, NameTakenError
from rubberband.executor import (
    CancelRequested,
    Controller,
    Event,
    ExperimentFolder,
    Journal,
    JournalFollower,
    TrialReported,
    folders,
    journalled,
    open_folder,
    session,
)
from rubberband.executor import read_journal as read
from rubberband.executor.journal.database import Database
from rubberband.installation import default_store
from tests.builders.jobs import EVENTS, JOB
from tests.builders.sessions import Killed, dying_after, run_spec
from tests.builders.virtual_runs import run_virtual

PATIENCE_S = 60.0


@pytest.fixture
def make(store_url: str, tmp_path: Path) -> Callable[[str], ExperimentFolder]:
    """Begins an experiment of a name."""

    def begin(name: str) -> ExperimentFolder:
        folder = ExperimentFolder(home=tmp_path / "a home", name=name, store=store_url)
        session.create(folder, dataclasses.replace(JOB, name=name), run_spec(checkpoints=str(folder.checkpoints)))
        return folder

    return begin


def test_experiments_in_one_store_do_not_see_each_other(
    make: Callable[[str], ExperimentFolder], store_url: str
) -> None:
    first, second = make("first"), make("second")
    result = session.run(first)
    assert result.outcome == "done"
    assert read(first) == result
    assert read(second).outcome == "unfinished"
    assert [found.name for found in folders(first.home, store_url)] == ["first", "second"]
    assert folders(first.home) == []
    assert not first.journal.exists()


@pytest.mark.parametrize("num_events", [1, 6])
def test_a_run_that_was_cut_off_resumes(make: Callable[[str], ExperimentFolder], num_events: int) -> None:
    folder = make("test")
    with contextlib.suppress(Killed):
        session.run(folder, view=dying_after(num_events))
    assert read(folder).outcome == "unfinished"
    result = session.run(folder)
    assert (result.outcome, result.resumes) == ("done", 1)


def test_a_name_that_is_taken_twice_at_once_is_given_to_one(store_url: str) -> None:
    outcomes: list[str] = []
    together = threading.Barrier(4)

    def begin(number: int) -> None:
        together.wait()
        try:
            journal = Journal(store_url, "test", create=True)
            try:
                journal.create(created_at=float(number), job=JOB, setup={})
                outcomes.append("taken")
            finally:
                journal.close()
        except NameTakenError:
            outcomes.append("refused")

    threads = [threading.Thread(target=begin, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sorted(outcomes) == ["refused", "refused", "refused", "taken"]


def test_a_folder_with_a_journal_of_its_own_is_not_free_for_one_in_a_store(store_url: str, tmp_path: Path) -> None:
    alone = ExperimentFolder(home=tmp_path, name="test")
    session.create(alone, JOB, run_spec(checkpoints=str(alone.checkpoints)))
    with pytest.raises(NameTakenError, match=r"not in .*; run this one under another name"):
        session.create(dataclasses.replace(alone, store=store_url), JOB, run_spec())


def test_an_unknown_name_is_reported_with_the_known_ones(make: Callable[[str], ExperimentFolder]) -> None:
    folder = make("test")
    with pytest.raises(
        InputError, match=r"experiment 'nosuch' not found in (sqlite|postgresql).*; known: test$"
    ) as refused:
        read(dataclasses.replace(folder, name="nosuch"))
    assert "s3cret" not in str(refused.value)


def test_looking_into_an_empty_store_makes_nothing(store_url: str, tmp_path: Path) -> None:
    assert not ExperimentFolder(home=tmp_path, name="test", store=store_url).exists
    assert folders(tmp_path, store_url) == []
    engine = sql.create_engine(store_url.replace("postgresql:", "postgresql+psycopg:"))
    assert sql.inspect(engine).get_table_names() == []
    engine.dispose()


@pytest.mark.parametrize("durable", [True, False])
def test_durable_events_are_on_the_disk_before_they_count(store_url: str, durable: bool) -> None:
    """As the database is told to; what power failures leave cannot be tried here."""
    database = Database(store_url, what="a test", remedy="none")
    with database.writing(durable=durable) as connection:
        asked = "PRAGMA synchronous" if database.is_sqlite else "SHOW synchronous_commit"
        found = connection.exec_driver_sql(asked).scalar_one()
    assert found == ((2 if durable else 1) if database.is_sqlite else ("on" if durable else "off"))
    database.close()


def test_a_crash_of_the_database_takes_no_event_of_a_driver_that_goes_on(postgresql_url: str) -> None:
    """Nor of a simulated run: its next event would come after a gap."""
    journal, lines = Journal(postgresql_url, "test", create=True), []
    journal.create(created_at=1.0, job=JOB, setup={})
    journal.durable = False

    def look(connection: sql.Connection, *_: object) -> None:
        lines.append(connection.connection.cursor().execute("SHOW synchronous_commit").fetchone())

    sql.event.listen(sql.Engine, "before_cursor_execute", look)
    journal.append(EVENTS[:1])
    sql.event.remove(sql.Engine, "before_cursor_execute", look)
    journal.close()
    assert set(lines) == {("on",)}


def test_the_remedy_of_a_locked_journal_is_to_end_what_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal.db"
    monkeypatch.setattr("rubberband.executor.journal.database._SQLITE_WAIT_S", 0.05)
    journal = Journal(f"sqlite:///{path}", "test", create=True)
    journal.create(created_at=1.0, job=JOB, setup={})
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as browser:
        browser.execute("BEGIN IMMEDIATE")
        with pytest.raises(
            JournalError, match=r"database is locked; end the program that holds it, which `fuser /.* names"
        ):
            journal.append(EVENTS[:1])
    journal.close()


def test_a_driver_whose_place_was_taken_does_nothing_more(store_url: str) -> None:
    """As one that was paused for so long that its run was gone on with elsewhere."""
    journal, other = Journal(store_url, "test", create=True), Journal(store_url, "test", create=True)
    journal.create(created_at=1.0, job=JOB, setup={})
    taken_over: list[Event] = []

    def take_over(event: Event, _controller: Controller) -> None:
        if isinstance(event, TrialReported) and not taken_over:
            successor = Journal(store_url, "test")
            taken_over.append(CancelRequested(occurred_at=event.occurred_at))
            successor.append(taken_over)
            successor.close()

    with pytest.raises(JournalError, match="cannot be written"):
        run_virtual(JOB, journal=journal, observers=[take_over])
    kept = [event for _, event in journal.events()]
    assert kept[-1:] == taken_over
    with pytest.raises(JournalError, match="cannot be written"):
        other.append(EVENTS[:1])
    assert [event for _, event in journal.events()] == kept
    journal.close()
    other.close()


@pytest.mark.parametrize("in_store", [True, False])
def test_a_follower_reads_a_run_and_shows_each_event_once(store_url: str, tmp_path: Path, in_store: bool) -> None:
    folder = ExperimentFolder(home=tmp_path, name="test", store=store_url if in_store else None)
    with pytest.raises(InputError, match="not found"):
        JournalFollower(folder)
    session.create(folder, JOB, run_spec(checkpoints=str(folder.checkpoints)))
    follower = JournalFollower(folder)
    assert follower.refresh(live=False) == []
    assert follower.result().outcome == "unfinished"
    seen = []
    with contextlib.suppress(Killed):
        session.run(folder, view=dying_after(5))
    seen += follower.refresh(live=False)
    assert seen
    assert follower.result() == read(folder)
    assert follower.refresh(live=False) == []
    result = session.run(folder)
    seen += follower.refresh(live=False)
    assert [seq for seq, _ in seen] == list(range(len(seen)))
    assert follower.result() == result
    assert follower.header.name == "test"
    follower.close()
    follower.close()


def test_a_follower_folds_nothing_of_what_it_cannot_read_whole(make: Callable[[str], ExperimentFolder]) -> None:
    folder = make("test")
    session.run(folder)
    follower = JournalFollower(folder)
    with (
        contextlib.closing(Database(folder.journal_url, what="a test", remedy="none")) as database,
        database.writing() as connection,
    ):
        connection.exec_driver_sql("UPDATE events SET kind = 'FromTheFuture' WHERE seq = 3")
    for _ in range(2):
        with pytest.raises(JournalError, match="unknown to this version"):
            follower.refresh(live=False)
    assert follower.seq == -1
    follower.close()


def test_a_run_is_gone_on_with_where_it_was_begun(make: Callable[[str], ExperimentFolder], tmp_path: Path) -> None:
    elsewhere = dataclasses.replace(make("test"), home=tmp_path / "elsewhere")
    with pytest.raises(InputError, match=r"started in another home.*RUBBERBAND_HOME"):
        session.run(elsewhere)
    assert read(elsewhere).outcome == "unfinished"


def test_the_store_shows_which_experiments_it_has(make: Callable[[str], ExperimentFolder], store_url: str) -> None:
    make("b")
    make("a")
    assert journalled(store_url) == ["a", "b"]
    assert journalled(store_url, "a") == ["a"]
    assert journalled(store_url, "c") == []


def test_the_environment_names_the_store_and_trials_do_not_see_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert default_store({}) is default_store({"RUBBERBAND_STORE": ""}) is None
    named = {"RUBBERBAND_STORE": "postgresql://ann:s3cret@host/x", "RUBBERBAND_HOME": str(tmp_path)}
    assert default_store(named) == "postgresql://ann:s3cret@host/x"
    for name, value in named.items():
        monkeypatch.setenv(name, value)
    assert open_folder("a") == ExperimentFolder(home=tmp_path, name="a", store=named["RUBBERBAND_STORE"])
    assert open_folder("a", tmp_path / "b").home == tmp_path / "b"
    assert "s3cret" not in str(environment(named, tmp_path / "token", {}, ()))
