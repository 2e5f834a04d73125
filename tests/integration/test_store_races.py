"""The store among many writers, writers that die, servers that go away: nothing is lost, doubled or reordered."""

from __future__ import annotations

import re
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sql

from rubberband.api.settings import Settings
from rubberband.api.store import Store, open_store
from rubberband.api.store.schema import NUMBERS, Entry
from rubberband.errors import InputError, JournalError
from rubberband.executor import Event, ExperimentFolder, Journal, encode_event
from rubberband.states import ExperimentState
from rubberband.values.submission import Submission
from tests.builders.databases import BOTH, cut_off, database, held_at_commit, run_sql, until_it_waits
from tests.builders.jobs import EVENTS, JOB
from tests.builders.waiting import eventually

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120.0


def entry(experiment: str, seq: int | None) -> Entry:
    return Entry(experiment=experiment, seq=seq, kind="Tick", occurred_at=1.0, data={})


def submission(name: str, state: ExperimentState = ExperimentState.QUEUED) -> Submission:
    return Submission(name=name, state=state, created_at=1.0, changed_at=1.0)


def writer(url: str, what: str, experiment: str, count: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.builders.processes.store_writer", url, what, experiment, str(count)]
    return subprocess.Popen(command, cwd=ROOT)


def at_once(url: str, number: int, ask: Callable[[Store, int], object]) -> list[object]:
    """Return the answers of `number` threads that call `ask` at once, each with a store of its own."""
    together = threading.Barrier(number)

    def work(place: int) -> object:
        with closing(Store(url)) as store:
            together.wait(PATIENCE_S)
            return ask(store, place)

    with ThreadPoolExecutor(number) as pool:
        return list(pool.map(work, range(number)))


def test_the_feed_has_every_event_once_during_any_writing(store_url: str) -> None:
    count, names = 60, ("a", "b", "common")
    store = Store(store_url)
    writers = [writer(store_url, "append", name, count) for name in ("a", "b")]
    lines: list[tuple[int, str, int | None]] = []

    def read() -> bool:
        lines.extend(
            (event.id, event.experiment, event.seq) for event in store.feed(after=lines[-1][0] if lines else 0)
        )
        return len(lines) >= count * len(names)

    eventually(read, "all events")
    assert [process.wait(PATIENCE_S) for process in writers] == [0, 0]
    assert all(a[0] < b[0] for a, b in pairwise(lines))
    for name in names:
        assert [seq for _, experiment, seq in lines if experiment == name] == list(range(count))
    assert [(event.id, event.experiment, event.seq) for event in store.feed()] == lines
    store.close()


@BOTH
def test_an_event_with_a_smaller_id_never_appears_later(store_url: str) -> None:
    """The one who took the smaller id is slow to commit; the other one must not be visible before it."""
    slow, fast = Store(store_url), Store(store_url)
    second = threading.Thread(target=fast.append, args=([entry("b", 0)],))
    with held_at_commit(lambda: slow.append([entry("a", 0)])):
        second.start()
        until_it_waits(second, store_url)
        assert fast.feed() == []
    second.join(PATIENCE_S)
    assert [event.experiment for event in slow.feed()] == ["a", "b"]
    slow.close()
    fast.close()


@BOTH
def test_a_key_is_claimed_by_one_of_many(store_url: str) -> None:
    answers = at_once(store_url, 6, lambda store, _: store.claim_key("k", owner="a", request_hash="h", at=1.0))
    assert sorted(map(str, answers)) == ["None", *["busy"] * 5]


@BOTH
def test_a_name_is_given_to_one_of_many(store_url: str) -> None:
    answers = at_once(store_url, 6, lambda store, _: store.add(submission("a")))
    assert sorted(map(str, answers)) == [*["False"] * 5, "True"]
    store = Store(store_url)
    assert len(store.feed()) == 1
    store.close()


@BOTH
def test_a_state_is_left_by_one_of_many(store_url: str) -> None:
    store = Store(store_url)
    store.add(submission("a"))
    queued, starting = ExperimentState.QUEUED, ExperimentState.STARTING
    answers = at_once(store_url, 6, lambda one, at: one.change("a", at=at, state=starting, expected=[queued]))
    assert sorted(map(str, answers)) == [*["False"] * 5, "True"]
    assert [event.data["state"] for event in store.feed()] == ["queued", "starting"]
    store.close()


@BOTH
def test_several_may_open_a_new_store_at_once(store_url: str) -> None:
    together = threading.Barrier(6)

    def work(_: int) -> None:
        together.wait(PATIENCE_S)
        Store(store_url).close()

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(work, range(6))) == [None] * 6


def test_threads_may_share_a_store(store_url: str) -> None:
    store = Store(store_url)

    def work(name: str) -> None:
        for seq in range(20):
            store.append([entry(name, seq)])
            assert store.last_seqs([name]) == {name: seq}

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, [f"x{number}" for number in range(6)]))
    assert store.last_seqs() == {f"x{number}": 19 for number in range(6)}
    store.close()


@pytest.mark.long
def test_a_killed_writer_leaves_nothing_and_blocks_no_other(store_url: str) -> None:
    store = Store(store_url)
    store.append([entry("a", 0)])
    dead = writer(store_url, "die", "a", 100)
    assert dead.wait(PATIENCE_S) == -signal.SIGKILL
    store.append([entry("a", 1)])
    assert [event.seq for event in store.feed()] == [0, 1]
    store.close()


@BOTH
def test_a_store_of_a_newer_version_is_refused_and_left_as_it_is(store_url: str) -> None:
    store = Store(store_url)
    run_sql(store_url, f"UPDATE {NUMBERS.name} SET value = 99 WHERE name = 'version'")
    with pytest.raises(InputError, match=r"newer version of rubberband .* 99") as refused:
        Store(store_url)
    assert "s3cret" not in str(refused.value)
    store.close()


@BOTH
def test_a_store_of_an_older_version_is_migrated_once(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Store(store_url).close()

    def migrate(connection: sql.Connection) -> None:
        connection.execute(sql.text("CREATE TABLE migrated (once INTEGER)"))

    monkeypatch.setattr("rubberband.api.store.schema.MIGRATIONS", (migrate,))
    monkeypatch.setattr("rubberband.api.store.schema.VERSION", 2)
    for _ in range(2):  # the second time it would fail
        Store(store_url).close()
    monkeypatch.undo()
    with pytest.raises(InputError, match=r"newer version of rubberband .* 2;"):
        Store(store_url)


def test_without_a_url_the_store_is_a_private_file_in_the_home(tmp_path: Path) -> None:
    store = open_store(None, tmp_path / "new home")
    store.add(submission("a"))
    kept = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new home").iterdir()}
    assert kept == {"server.db": 0o600, "server.db-shm": 0o600, "server.db-wal": 0o600}
    store.close()


def test_a_place_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match=r"cannot be made .*; make room or give access"):
        open_store(None, tmp_path / "file")
    (tmp_path / "server.db").write_bytes(b"no store " * 1000)
    with pytest.raises(JournalError, match="not a database"):
        open_store(None, tmp_path)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("sqlite://", "a store in memory is lost"),
        ("sqlite:///:memory:", "a store in memory is lost"),
        ("sqlite:///store.db", "is a relative path; use an absolute one: sqlite:////folder"),
        ("mysql://ann:s3cret@host/x", r"mysql://ann:\*\*\*@host/x is of an unknown kind; use sqlite"),
        ("s3cret", "cannot be read; write it as sqlite"),
        ("postgresql://ann:s3cret@host:port/x", "cannot be read; write it as sqlite"),
        ("postgresql+nosuch://ann:s3cret@host/x", r"ann:\*\*\*@host/x cannot be used"),
        ("postgresql+psycopg2://ann:s3cret@host/x?password=s3cret", "install it, or begin with postgresql://"),
    ],
)
def test_a_url_of_no_use_is_one_clear_line_without_the_password(url: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said) as refused:
        Store(url)
    assert "s3cret" not in str(refused.value)
    folder = ExperimentFolder(home=tmp_path, name="test", store=url)
    settings = Settings(home=tmp_path, store=url)
    assert "s3cret" not in repr(folder) + repr(settings)


def test_a_driver_that_is_not_installed_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(InputError, match=r"psycopg.*pip install 'rubberband-tune\[postgres\]'") as refused:
        Store("postgres://ann:s3cret@host/x")
    assert "s3cret" not in str(refused.value)


def test_a_server_that_is_not_there_is_one_clear_line_without_the_password(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"postgresql://ann:s3cret@127.0.0.1:{closed.getsockname()[1]}/x"
        with pytest.raises(JournalError, match="check that the server runs") as refused:
            Store(url)
        with pytest.raises(JournalError, match="check that the server runs") as read:
            ExperimentFolder(home=tmp_path, name="test", store=url).require()
    assert "s3cret" not in str(refused.value) + str(read.value)


def test_a_database_that_does_not_keep_utf_8_is_refused_with_the_remedy(postgresql: sql.URL) -> None:
    with (
        database(postgresql, encoding="SQL_ASCII") as url,
        pytest.raises(InputError, match=r"stores text as SQL_ASCII; .*createdb --encoding=UTF8"),
    ):
        Store(url)


def test_a_server_that_was_restarted_is_connected_to_again(postgresql_url: str) -> None:
    store = Store(postgresql_url)
    journal = Journal(postgresql_url, "test", create=True)
    journal.create(created_at=1.0, job=JOB, setup={})
    for seq in range(2):
        cut_off(postgresql_url)
        store.append([entry("a", seq)])
        cut_off(postgresql_url)
        assert store.last_seqs() == {"a": seq}
        cut_off(postgresql_url)
        journal.append([EVENTS[seq]])
    assert [event for _, event in journal.events()] == EVENTS[:2]
    journal.close()
    store.close()


def test_a_driver_waits_for_a_server_that_is_being_restarted(postgresql: sql.URL, postgresql_url: str) -> None:
    journal = Journal(postgresql_url, "test", create=True)
    journal.create(created_at=1.0, job=JOB, setup={})
    driver = threading.Thread(target=journal.append, args=(EVENTS[:1],))
    let_in(postgresql, postgresql_url, False)
    tries: list[str] = []
    noted: Any = lambda *_: tries.append(threading.current_thread().name)  # noqa: E731
    sql.event.listen(sql.Engine, "do_connect", noted)
    driver.start()
    eventually(lambda: not driver.is_alive() or tries.count(driver.name) >= 2, "a second attempt")
    sql.event.remove(sql.Engine, "do_connect", noted)
    assert driver.is_alive()
    with pytest.raises(JournalError, match="check that the server runs"):
        journal.header()
    let_in(postgresql, postgresql_url, True)
    driver.join(PATIENCE_S)
    assert [event for _, event in journal.events()] == EVENTS[:1]
    journal.close()


@pytest.mark.parametrize("there", [[], EVENTS[:3], EVENTS[1:2]], ids=["nothing", "all", "another's"])
def test_a_driver_whose_connection_is_lost_writes_what_is_not_there_yet(
    postgresql_url: str, there: list[Event]
) -> None:
    journal = Journal(postgresql_url, "test", create=True)
    journal.create(created_at=1.0, job=JOB, setup={})
    failures: list[JournalError] = []

    def drive() -> None:
        try:
            journal.append(EVENTS[:3])
        except JournalError as error:
            failures.append(error)

    driver = threading.Thread(target=drive)
    engine = sql.create_engine(postgresql_url, poolclass=sql.NullPool)
    with engine.connect() as connection:
        connection.exec_driver_sql("LOCK TABLE events IN SHARE ROW EXCLUSIVE MODE")
        driver.start()
        eventually(lambda: end_who_waits(postgresql_url))
        for seq, event in enumerate(there):
            kind, body = encode_event(event)
            row = {"experiment": "test", "seq": seq, "occurred_at": event.occurred_at, "kind": kind, "body": body}
            connection.execute(sql.text(INSERT), row)
        connection.commit()
    driver.join(PATIENCE_S)
    assert not driver.is_alive()
    assert [event for _, event in journal.events()] == (there or EVENTS[:3])
    assert bool(failures) == (there == EVENTS[1:2])
    journal.close()


INSERT = "INSERT INTO events VALUES (:experiment, :seq, :occurred_at, :kind, :body)"


def end_who_waits(url: str) -> bool:
    """End the connections to the database that wait for a lock, and see them gone; whether there were any."""
    engine = sql.create_engine(url, poolclass=sql.NullPool)
    waiting = "FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with engine.connect() as connection:  # each time a new one: a transaction sees one state of that view
        return bool(connection.exec_driver_sql(f"SELECT pg_terminate_backend(pid, 60000) {waiting}").all())


def let_in(server: sql.URL, url: str, allowed: bool) -> None:
    """Let the database take connections, or no more."""
    engine = sql.create_engine(server, isolation_level="AUTOCOMMIT", poolclass=sql.NullPool)
    with engine.connect() as connection:
        name = sql.make_url(url).database
        connection.exec_driver_sql(f"ALTER DATABASE {name} WITH ALLOW_CONNECTIONS {allowed}")
        connection.exec_driver_sql(
            f"SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE datname = '{name}'"
        )


def test_a_truncated_write_is_reported_and_leaves_nothing(postgresql_url: str) -> None:
    store, errors = Store(postgresql_url), list[str]()

    def write() -> None:
        try:
            store.append([entry("a", 0)])
        except JournalError as error:
            errors.append(str(error))

    with held_at_commit(write):
        cut_off(postgresql_url)
    (error,) = errors
    assert re.search(r"cannot be written: .*check that the server runs", error)
    assert "s3cret" not in error
    assert store.feed() == []
    store.close()


def test_one_pool_of_connections_serves_all_that_is_open_in_a_process(postgresql_url: str) -> None:
    store = Store(postgresql_url)
    journals = [Journal(postgresql_url, f"x{number}", create=True) for number in range(20)]
    for journal in journals:
        journal.create(created_at=1.0, job=JOB, setup={})
        assert list(journal.events()) == []
    with sql.create_engine(postgresql_url, poolclass=sql.NullPool).connect() as connection:
        theirs = "datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()"
        assert connection.exec_driver_sql(f"SELECT count(*) FROM pg_stat_activity WHERE {theirs}").scalar_one() == 1
    store.close()
    assert journals[0].header() is not None
    for journal in journals:
        journal.close()
