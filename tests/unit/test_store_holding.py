"""One service at a time changes a PostgreSQL store, also where that is restarted; each has its own experiments."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sql

from rubberband.api.experiments import ExperimentRuns
from rubberband.api.problems import HttpProblem
from rubberband.api.settings import Settings
from rubberband.api.store import Store
from rubberband.api.store.schema import Promise
from rubberband.errors import InputError, JournalError
from rubberband.executor import ExperimentFolder, HostedRun, Inbox, holding, write_order
from rubberband.running.run import run_experiment
from rubberband.states import ExperimentState
from rubberband.values.submission import Submission
from tests.builders.databases import BOTH, cut_off, held_at_commit, run_sql, until_it_waits
from tests.builders.fake_runs import fake_service
from tests.builders.service_runs import experiment
from tests.builders.waiting import eventually

QUEUED, RUNNING = ExperimentState.QUEUED, ExperimentState.RUNNING
ANN, BEN = "1a gpu-1:/home/ann", "2b gpu-2:/home/ben"


def submission(name: str, state: ExperimentState = QUEUED) -> Submission:
    return Submission(name=name, state=state, created_at=1.0, changed_at=1.0, words={"name": name})


@pytest.fixture
def stores(postgresql_url: str) -> Iterator[tuple[Store, Store]]:
    """Those of two services; the first one has the right to change them."""
    first, second = Store(postgresql_url), Store(postgresql_url)
    first.take(ANN)
    yield first, second
    first.close()
    second.close()


def test_a_restart_of_the_database_frees_the_store_and_its_server_takes_it_again(
    stores: tuple[Store, Store], postgresql_url: str
) -> None:
    first, second = stores
    cut_off(postgresql_url)
    first.keep()
    with pytest.raises(InputError, match=r"another server uses the store postgresql.*; stop that one"):
        second.take(BEN)
    assert first.add(submission("a"))


def test_a_server_whose_lock_a_pooler_has_freed_notices_that_another_has_the_store(stores: tuple[Store, Store]) -> None:
    """Its connection still answers, but is another one of the database: PgBouncer with pool_mode=transaction."""
    first, second = stores
    freed: Any = lambda _, cursor, *__: cursor.execute("SELECT pg_advisory_unlock_all()")  # noqa: E731
    sql.event.listen(sql.Engine, "before_cursor_execute", freed)
    first.keep()
    sql.event.remove(sql.Engine, "before_cursor_execute", freed)
    second.take(BEN)
    with pytest.raises(JournalError, match="another server uses this service's store"):
        first.keep()
    assert first.is_taken
    second.keep()


def test_a_server_that_was_replaced_changes_nothing_until_it_has_the_store_again(
    stores: tuple[Store, Store], postgresql_url: str
) -> None:
    first, second = stores
    first.add(submission("a"))
    cut_off(postgresql_url)
    second.take(BEN)
    for _ in range(2):  # before and after it has looked
        with pytest.raises(JournalError, match="another server uses this service's store"):
            first.add(submission("b"))
        with pytest.raises(JournalError, match="another server"):
            first.change("a", at=2.0, state=ExperimentState.INTERRUPTED)
        with pytest.raises(JournalError, match="another server"):
            first.keep()
    assert first.is_taken
    assert [event.data["state"] for event in second.feed()] == ["queued"]
    second.close()
    first.keep()
    assert not first.is_taken
    assert first.add(submission("b"))


def test_no_write_ends_after_another_server_has_begun(stores: tuple[Store, Store], postgresql_url: str) -> None:
    first, second = stores
    taker = threading.Thread(target=second.take, args=(BEN,))
    with held_at_commit(lambda: first.add(submission("a"))):
        end_holder(postgresql_url)
        taker.start()
        until_it_waits(taker, postgresql_url)
        assert taker.is_alive()
    taker.join()
    assert second.submission("a") is not None
    with pytest.raises(JournalError, match="another server"):
        first.add(submission("b"))


def end_holder(url: str) -> None:
    """End the connection that holds the lock, and no other."""
    ours = "locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    run_sql(url, f"SELECT pg_terminate_backend(pid, 60000) FROM pg_locks WHERE {ours}")


@BOTH
def test_an_experiment_belongs_to_the_home_that_accepted_it(store_url: str) -> None:
    store = Store(store_url)
    for name, state in (("old", RUNNING), ("waits", QUEUED), ("elsewhere", RUNNING)):
        store.add(submission(name, state))  # as a version did that noted no home
    store.take(ANN, {"old"}.__contains__)
    store.add(submission("a", RUNNING))
    store.add(submission("over", ExperimentState.DONE))
    store.close()
    for place, ours in ((BEN, False), ("1a gpu-3:/restored", True)):
        store = Store(store_url)
        store.take(place)
        rows = {row.name: row for row in store.submissions().items}
        assert rows.pop("elsewhere").reason.startswith("it belongs to the home where it began: only the service there")
        assert {name: row.home for name, row in rows.items()} == dict.fromkeys(rows, "" if ours else "gpu-1:/home/ann")
        expected = "it belongs to the home gpu-1:/home/ann: only the service there"
        assert [rows[name].reason.startswith(expected) for name in ("old", "waits", "a")] == [not ours] * 3
        assert not rows["over"].reason
        store.close()
    store = Store(store_url)
    store.take(BEN)
    assert store.submission("a").home == "gpu-3:/restored"  # type: ignore[union-attr]
    store.close()


def test_a_service_that_takes_a_store_over_leaves_the_experiments_of_the_other_home_alone(
    tmp_path: Path, postgresql_url: str
) -> None:
    ann, ben = (
        Settings(home=tmp_path / "ann", store=postgresql_url),
        Settings(home=tmp_path / "ben", store=postgresql_url),
    )
    folder = ExperimentFolder(home=ann.home, name="one", store=postgresql_url)
    with ExitStack() as stack:
        first, second = Store(postgresql_url), Store(postgresql_url)
        stack.callback(first.close)
        stack.callback(second.close)
        run_experiment(experiment("one"), folder)
        run_sql(postgresql_url, "DELETE FROM events WHERE seq > 3")
        stack.enter_context(folder.driving())
        first.take(ANN)
        first.add(submission("one", RUNNING))
        first.add(submission("waits"))
        cut_off(postgresql_url)
        second.take(BEN)
        nothing = ("/nonexistent/command",)
        runs = [ExperimentRuns(*parts, lambda: None, command=nothing) for parts in ((ann, first), (ben, second))]
        for each in runs:
            stack.callback(each.close)
            each.start()
        runs[1].submit(experiment("own"))
        eventually(lambda: second.submission("own").state is ExperimentState.REFUSED)  # type: ignore[union-attr]
        assert second.submission("waits").state is QUEUED  # type: ignore[union-attr]
        assert [event.data["state"] for event in second.feed(experiment="one")] == ["running"]
        assert not runs[0].alive
        row = second.submission("one")
        assert row is not None
        assert runs[1].possible(row) == frozenset()
        for act in (runs[1].cancel, runs[1].resume):
            with pytest.raises(HttpProblem, match="it belongs to the home gpu-1:/home/ann") as refused:
                act("one")
            assert refused.value.kind.status == 409
        with pytest.raises(HttpProblem, match="another server uses this service's store") as away:
            runs[0].submit(experiment("two"))
        assert away.value.kind.status == 503
        assert away.value.headers["Retry-After"]
        runs[0].cancel("one")  # its user stops paying, whoever has the store
        assert [request.kind for request in Inbox(folder.inbox).pending()] == ["cancel"]
        assert runs[1].cancel("waits").state is ExperimentState.CANCELLED
        runs[1].close()
        second.close()
        eventually(lambda: runs[0].alive)


def test_readiness_says_that_another_server_has_the_store(tmp_path: Path, postgresql_url: str) -> None:
    with fake_service(tmp_path, store=postgresql_url) as service, closing(Store(postgresql_url)) as second:
        service.store.take(ANN)
        assert service.client.get("/readyz").json()["checks"]["store"] == "ok"
        cut_off(postgresql_url)
        second.take(BEN)
        with pytest.raises(JournalError):
            service.store.keep()
        assert service.client.get("/readyz").json()["checks"]["store"] == "another server uses it"


def test_a_pool_of_another_home_promises_nothing_here(store_url: str) -> None:
    for home, promised in ((ANN, 1), (BEN, 0), (ANN, 1)):
        store = Store(store_url)
        store.take(home)
        store.add(submission("a"), Promise(experiment="a", start_at=1.0, spans=[(2, 3.0)]))
        assert len(store.promises()) == promised
        store.close()


def test_neither_a_user_nor_a_service_drives_what_another_home_began(tmp_path: Path, postgresql_url: str) -> None:
    begun = ExperimentFolder(home=tmp_path / "ann", name="one", store=postgresql_url)
    run_experiment(experiment("one"), begun)
    elsewhere = ExperimentFolder(home=tmp_path / "ben", name="one", store=postgresql_url)
    with pytest.raises(InputError, match="started in another home"), elsewhere.driving():
        pass
    with holding(elsewhere):  # as a service does before it starts a process
        write_order(elsewhere, HostedRun(attempt=2, resume=True, words={}))
        with pytest.raises(InputError, match="started in another home"), elsewhere.driving():
            pass
    with begun.driving():
        pass
