"""Databases for tests: a PostgreSQL server of the tests' own, and a new empty database for each test, or a SQLite file.

The server is the one at RUBBERBAND_TEST_POSTGRES, a URL whose user may create databases; without it one is started
from what Debian's package `postgresql` brings, on a socket in a folder of its own. Without either, tests are skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import sqlalchemy as sql

from rubberband.executor.journal.database import parse_url

NONE = "there is no PostgreSQL: install Debian's package postgresql, or set RUBBERBAND_TEST_POSTGRES to a server's URL"
UNSAFE_BUT_FAST = "-c fsync=off -c full_page_writes=off -c autovacuum=off -c shared_buffers=16MB"
DURABLE = ""


def programs() -> Path | None:
    """The folder with PostgreSQL's programs, the newest that is installed; None if there is none."""
    found = shutil.which("initdb")
    if found is not None:
        return Path(found).resolve().parent
    debian = Path("/usr/lib/postgresql").glob("*/bin/initdb")
    return max((path.parent for path in debian), key=lambda path: int(path.parent.name), default=None)


@dataclass(frozen=True, kw_only=True)
class Server:
    """A private server."""

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
        _run(
            *as_user,
            str(bin / "initdb"),
            "-D",
            str(folder / "data"),
            "-U",
            "postgres",
            "-A",
            "trust",
            "-N",
            "-E",
            "UTF8",
        )
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


@pytest.fixture
def postgresql_url(postgresql: sql.URL) -> Iterator[str]:
    """The URL of a new empty database on a PostgreSQL server."""
    with database(postgresql) as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a new empty database: a SQLite file, and one on a PostgreSQL server."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/store.db"
    url: str = request.getfixturevalue("postgresql_url")
    return url


def cut_off(url: str) -> None:
    """End all other connections to the database, as a restart of the server does, and see them gone."""
    engine = sql.create_engine(url, poolclass=sql.NullPool)
    with engine.connect() as connection:
        connection.exec_driver_sql(
            "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
