"""Databases for tests: a PostgreSQL server of the tests' own, and a new empty database for each test, or a SQLite file.

The server is the one at RUBBERBAND_TEST_POSTGRES, a URL whose user may create databases; without it one is started
from what Debian's package `postgresql` brings, on a socket in a folder of its own. Without either, tests are skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import sqlalchemy as sql

from rubberband.executor.journal.database import parse_url
from tests.builders.waiting import PATIENCE_S, eventually

NONE = "there is no PostgreSQL: install Debian's package postgresql, or set RUBBERBAND_TEST_POSTGRES to a server's URL"
UNSAFE_BUT_FAST = "-c fsync=off -c full_page_writes=off -c autovacuum=off -c shared_buffers=16MB"


def programs() -> Path | None:
    """The folder with PostgreSQL's programs, the newest that is installed; None if there is none."""
    found = shutil.which("initdb")
    if found is not None:
        return Path(found).resolve().parent
    debian = Path("/usr/lib/postgresql").glob("*/bin/initdb")
    return max((path.parent for path in debian), key=lambda path: int(path.parent.name), default=None)


@dataclass(frozen=True, kw_only=True)
class Server:
    url: sql.URL
    control: Sequence[str]
    """The command that controls it."""
    started: Sequence[str]
    """How it is started."""

    def restart(self, mode: str) -> None:
        """Stop it (`fast`: it ends its connections; `immediate`: as a crash) and start it again."""
        _run(*self.control, "-m", mode, "stop")
        _run(*self.control, *self.started)


@contextmanager
def server(bin: Path, settings: str = UNSAFE_BUT_FAST) -> Iterator[Server]:
    """A private server, for as long as this lasts; it listens on no port. PostgreSQL does not run as root."""
    folder = Path(tempfile.mkdtemp(prefix="rb-pg-", dir="/tmp"))
    as_user = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
    control = [*as_user, str(bin / "pg_ctl"), "-D", str(folder / "data"), "-w"]
    try:
        if as_user:
            shutil.chown(folder, "postgres")
        initdb = f"{bin}/initdb -D {folder}/data -U postgres -A trust -N -E UTF8"
        _run(*as_user, *initdb.split())
        options = f"-c listen_addresses= -c unix_socket_directories={folder} {settings}"
        started = ["-l", str(folder / "log"), "-o", options, "start"]
        _run(*control, *started)
        try:
            url = sql.URL.create(
                "postgresql+psycopg", "postgres", "s3cret", database="postgres", query={"host": str(folder)}
            )
            yield Server(url=url, control=control, started=started)
        finally:
            _run(*control, "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder)


def _run(*command: str) -> None:
    done = subprocess.run(
        command, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, f"{command}: {done.stdout}"


@contextmanager
def database(at: sql.URL, encoding: str = "UTF8") -> Iterator[str]:
    """The URL of a new empty database on the server, for as long as this lasts; the password is in it."""
    name = f"rubberband_{uuid.uuid4().hex}"
    engine = sql.create_engine(at, isolation_level="AUTOCOMMIT", poolclass=sql.NullPool)
    with engine.connect() as connection:
        locale = "" if encoding == "UTF8" else "LOCALE 'C'"
        connection.exec_driver_sql(f"CREATE DATABASE {name} ENCODING '{encoding}' {locale} TEMPLATE template0")
    try:
        yield at.set(database=name).render_as_string(hide_password=False)
    finally:
        with engine.connect() as connection:
            connection.exec_driver_sql(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(scope="session")
def postgresql() -> Iterator[sql.URL]:
    """A PostgreSQL server; the tests that need it are skipped where there is none."""
    given, bin = os.environ.get("RUBBERBAND_TEST_POSTGRES"), programs()
    if given:
        yield parse_url(given)
    elif bin is not None:
        with server(bin) as made:
            yield made.url
    else:
        pytest.skip(NONE)


@pytest.fixture(scope="session")
def one_database(postgresql: sql.URL) -> Iterator[str]:
    """The URL of a database for all tests of this process."""
    with database(postgresql) as url:
        yield url


@pytest.fixture
def postgresql_url(one_database: str) -> Iterator[str]:
    """The URL of a database on a PostgreSQL server, with a new schema."""
    schema = f"s{uuid.uuid4().hex}"
    run_sql(one_database, f"CREATE SCHEMA {schema}")
    url = sql.make_url(one_database).update_query_dict({"options": f"-csearch_path={schema}"})
    yield url.render_as_string(hide_password=False)
    cut_off(one_database)
    run_sql(one_database, f"DROP SCHEMA {schema} CASCADE")


BOTH = pytest.mark.parametrize("store_url", ["sqlite", "postgresql"], indirect=True)
"""What differs between the two databases is tested on both by default, and not only before a release."""


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.long)])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a new empty database: a SQLite file, and in long tests one on a PostgreSQL server."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/store.db"
    url: str = request.getfixturevalue("postgresql_url")
    return url


def run_sql(url: str, *statements: str) -> None:
    """Change a database beside all that has it open."""
    engine = sql.create_engine(url, poolclass=sql.NullPool)
    with engine.begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)


def until_it_waits(thread: threading.Thread, url: str) -> None:
    """Wait until a thread waits for another connection to the database, or has ended."""
    if url.startswith("sqlite"):
        thread.join(0.3)  # SQLite does not report a connection that waits for a lock
        return
    engine = sql.create_engine(url, poolclass=sql.NullPool)
    waiting = "FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"

    def waits() -> bool:
        with engine.connect() as connection:  # each time a new one: a transaction sees one state of that view
            return bool(connection.exec_driver_sql(f"SELECT pid {waiting}").all())

    eventually(lambda: not thread.is_alive() or waits())


def cut_off(url: str) -> None:
    """End all other connections to the database, as a restart of the server does, and see them gone."""
    end = "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity"
    run_sql(url, f"{end} WHERE datname = current_database() AND pid <> pg_backend_pid()")


@contextmanager
def held_at_commit(write: Callable[[], object]) -> Iterator[None]:
    """A thread that writes stands before its commit for as long as this lasts, and has ended afterwards."""
    is_there, go = threading.Event(), threading.Event()
    thread = threading.Thread(target=write)

    def hold(_connection: sql.Connection) -> None:
        if threading.current_thread() is thread:
            is_there.set()
            assert go.wait(PATIENCE_S)

    sql.event.listen(sql.Engine, "commit", hold)
    thread.start()
    try:
        assert is_there.wait(PATIENCE_S)
        yield
    finally:
        go.set()
        thread.join(PATIENCE_S)
        sql.event.remove(sql.Engine, "commit", hold)
