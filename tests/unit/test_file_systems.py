"""The file system of a home: its locks, whether other machines share it, and access of other users."""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sql

from rubberband import files
from rubberband.api.app.serving import only_server
from rubberband.api.settings import Settings
from rubberband.api.store import open_store
from rubberband.cloud.ray_head.instance import lock
from rubberband.errors import InputError
from rubberband.executor import ExperimentFolder, Journal, sqlite_url
from rubberband.executor import begin_journal as begin
from rubberband.files import file_system, home_notes, is_remote, require_home
from rubberband.running.run import run_experiment
from tests.builders.jobs import EVENTS, JOB
from tests.builders.service_runs import experiment

MOUNTS = """22 1 254:0 / / rw - ext4 /dev/vda rw
23 22 0:40 / {home} rw shared:1 - nfs4 server:/export rw
24 22 0:41 / {home}/scratch\\040disk rw - xfs /dev/vdb rw
25 22 0:42 / {home}/files rw - fuse.sshfs host:/ rw
26 22 0:43 / {home}/layers rw - fuse.fuse-overlayfs none rw
"""


@pytest.fixture
def on_nfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that the mounts call NFS."""
    mounts, home = tmp_path / "mounts", tmp_path / "home"
    mounts.write_text(MOUNTS.format(home=home).replace("\\\\", "\\"))
    monkeypatch.setattr(files, "_MOUNTS", mounts)
    return home


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_refused_in_one_line_and_leaves_nothing(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(None, tmp_path)

    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    folder, home = ExperimentFolder(home=tmp_path, name="one"), "set RUBBERBAND_HOME to a folder on a local disk"
    with pytest.raises(InputError, match=f"{tmp_path} has no file locks .*{home}"):
        run_experiment(experiment("one"), folder)
    assert not (tmp_path / "experiments").exists()
    with (
        pytest.raises(InputError, match=rf"server\.lock has no file locks .*{home}"),
        only_server(Settings(home=tmp_path), store),
    ):
        pass
    with pytest.raises(InputError, match=rf"driver\.lock has no file locks .*{home}"), lock(tmp_path / "driver"):
        pass


def test_network_file_systems_are_recognised(on_nfs: Path) -> None:
    assert file_system(on_nfs / "experiments" / "one") == "nfs4"
    assert is_remote(on_nfs)
    assert is_remote(on_nfs / "files" / "x")
    assert not is_remote(on_nfs / "layers")
    assert file_system(on_nfs / "scratch disk") == "xfs"
    assert not is_remote(on_nfs.parent)


@pytest.mark.parametrize("kind", ["9p", "virtiofs", "vboxsf", "fuse.virtiofs", "nfs"])
def test_folders_of_the_host_of_a_virtual_machine_count_as_remote_and_the_latest_mount_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """SQLite's log fails on them, or damages the file: `/mnt/c` of WSL, and bind mounts of Docker Desktop."""
    automounter = f"1 0 0:1 / {tmp_path} rw - autofs x rw\n"
    (tmp_path / "mounts").write_text(f"{automounter}2 1 0:2 / {tmp_path} rw - {kind} host rw\n")
    monkeypatch.setattr(files, "_MOUNTS", tmp_path / "mounts")
    assert file_system(tmp_path / "home") == kind
    assert is_remote(tmp_path / "home")


def test_a_home_on_a_network_has_no_write_ahead_log_and_a_note_says_so(on_nfs: Path) -> None:
    """SQLite keeps the index of such a log in memory, which another machine does not see."""
    (note,) = require_home(on_nfs)
    assert "network file system (nfs4)" in note
    path = on_nfs / "journal.db"
    begin(path, "test", created_at=1.0, job=JOB, setup={"provider": "virtual"})
    opened: list[sqlite3.Connection] = []
    noted: Any = lambda connection, _: opened.append(connection)  # noqa: E731
    sql.event.listen(sql.Engine, "connect", noted)
    with closing(Journal(sqlite_url(path), "test")) as journal:
        sql.event.remove(sql.Engine, "connect", noted)
        journal.durable = False
        journal.append(EVENTS)
        found = [each.execute(f"PRAGMA {of}").fetchone() for each in opened for of in ("journal_mode", "synchronous")]
        assert found == [("truncate",), (2,)]
        assert [event for _, event in journal.events()] == EVENTS
        assert {child.name for child in on_nfs.iterdir()} <= {"journal.db", "journal.db-journal"}


def test_a_new_home_is_its_users_alone_and_a_note_names_a_wider_one(tmp_path: Path) -> None:
    folder = ExperimentFolder(home=tmp_path / "new" / "home", name="one")
    run_experiment(experiment("one"), folder)
    for path in (folder.home.parent, folder.home, folder.path, folder.journal):
        assert path.stat().st_mode & 0o077 == 0, path
    assert home_notes(folder.home) == []
    folder.home.chmod(0o755)
    assert home_notes(folder.home) == [
        f"home: other users can read {folder.home} (mode 0755), with its configurations, logs and checkpoints; run "
        f"`chmod 700 {folder.home}`"
    ]
