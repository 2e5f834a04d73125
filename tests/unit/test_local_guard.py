"""How long an instance of the local cloud lives without its driver, on a clock that jumps."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from rubberband import files
from rubberband.cloud import node
from rubberband.cloud.ray_head import ray_node
from rubberband.cloud.ray_head.instance import Guard, Record, load, save
from rubberband.cloud.ray_head.ray_node import Guards, RayHead
from rubberband.files import EXCLUSIVE, SHARED, locked
from tests.builders.fake_launches import START, Rental, spot
from tests.ec2.server import FakeServer

LEASE_S = 30.0


class Node:
    """A Ray node that lives."""

    returncode = None

    def poll(self) -> None:
        """It does."""


class Waiting(threading.Event):
    """Time passes while it is waited for, now and then much of it: the machine sleeps."""

    def __init__(self, sleeps: dict[float, float]) -> None:
        super().__init__()
        self.now = 1000.0
        self._sleeps = sleeps

    def wait(self, timeout: float | None = None) -> bool:
        """No time for others."""
        self.now += timeout or 0.0
        for at in [at for at in self._sleeps if at <= self.now]:
            self.now += self._sleeps.pop(at)
        return False


def _recorded(folder: Path, leased_until: float = 9000.0, **facts: Any) -> Path:
    """Write the record of an instance that was requested at 1000 s, and return its path."""
    path, lease = folder / "a.json", folder / "lease"
    lease.touch()
    os.utime(lease, (leased_until, leased_until))
    record = Record(
        name="a",
        experiment="x",
        directory=str(folder),
        command=(),
        temp_dir=str(folder / "none"),
        devices=(),
        address="",
        requested_at=1000.0,
        **facts,
    )
    save(path, record, 1000.0)
    return path


@pytest.mark.parametrize(
    ("sleeps", "ends_at"),
    [
        ({}, 1000.0 + LEASE_S),
        ({1010.0: 5.0}, 1000.0 + LEASE_S),
        ({1010.0: 500.0}, 1510.0 + LEASE_S),
        ({1010.0: 500.0, 1520.0: 500.0}, 2020.0 + LEASE_S),
    ],
)
def test_a_driver_that_slept_with_its_machine_has_a_lease_of_time_to_put_the_end_off(
    tmp_path: Path, sleeps: dict[float, float], ends_at: float
) -> None:
    path, lease = _recorded(tmp_path, 1000.0 + LEASE_S, running_at=1000.0), tmp_path / "lease"
    stop = Waiting(sleeps)
    node: subprocess.Popen[bytes] = Node()  # type: ignore[assignment]
    guard = Guard(path, load(path), lease, LEASE_S, stop, lambda: stop.now)
    assert guard.watch(node) == "lease expired"
    assert stop.now == pytest.approx(ends_at, abs=2.0)


def test_an_instance_whose_process_was_killed_ended_at_its_last_sign_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _recorded(tmp_path, running_at=1000.0, pid=1)
    stop = Waiting({})
    guard = Guard(path, load(path), tmp_path / "lease", LEASE_S, stop, lambda: stop.now)
    while stop.now < 1600.0:
        assert guard.ends() is None
        stop.wait(10.0)
    monkeypatch.setattr(ray_node, "time_of", lambda _folder: 5000.0)
    seen = ray_node.observe(path)
    assert (seen.ended_at, seen.reason) == (1590.0, "its process died"), (
        "nobody looked for an hour, which costs nothing"
    )
    assert ray_node.observe(path) == seen


def test_an_instance_whose_driver_died_before_it_was_started_is_given_up_in_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _recorded(tmp_path)
    monkeypatch.setattr(ray_node, "time_of", lambda _folder: 1060.0)
    assert ray_node.observe(path).ended_at is None, "a busy machine may take a minute to start a process"
    monkeypatch.setattr(ray_node, "time_of", lambda _folder: 1300.0)
    seen = ray_node.observe(path)
    assert (seen.ended_at, seen.reason) == (1300.0, "its process never started")


def test_a_cluster_that_is_named_and_not_used_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(Guards, "spawn", lambda self, path: None)
    monkeypatch.setattr(ray_node, "answers", lambda _: True)
    monkeypatch.setenv("RAY_ADDRESS", "ray://cluster:10001")
    heads = [RayHead(name, tmp_path / name, token_path=tmp_path / "token") for name in ("one", "other")]
    for head in heads:
        head.ensure()
        head.close()
    (record,) = caplog.records
    assert record.message == "RAY_ADDRESS=ray://cluster:10001 is ignored: RubberBand starts a Ray cluster of its own"


def test_readers_wait_for_readers_and_not_for_an_exclusive_holder(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with open(path, "a") as ours, open(path) as other:
        assert locked(other, SHARED)
        leaving = threading.Timer(0.05, fcntl.flock, (other, fcntl.LOCK_UN))
        leaving.start()
        assert locked(ours, EXCLUSIVE)
        leaving.join()
        assert not locked(other, SHARED)
        assert not locked(other, EXCLUSIVE)


def test_an_endless_reader_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_GLANCE_S", 0.02)
    with open(tmp_path / "lock", "a") as ours, open(tmp_path / "lock") as other:
        assert locked(other, SHARED)
        assert not locked(ours, EXCLUSIVE)
        assert locked(ours, SHARED)


@pytest.mark.usefixtures("zone")
def test_an_instance_hears_of_itself_and_of_its_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rental = Rental("admin", pending_s=0.0)
    instance = rental.launch(InstanceMarketOptions=spot())
    monkeypatch.setattr(node, "_TIMEOUT_S", 60.0)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with FakeServer(rental.fake, tmp_path, address="10.0.0.5") as server:
        monkeypatch.setenv(node.METADATA_VARIABLE, f"{server.metadata_url(instance)}/")
        assert node.metadata("local-ipv4") == "10.0.0.5"
        assert (node.metadata("nothing"), node.interruption()) == (None, None)
        rental.fake.reclaim(instance, notice_s=120.0)
        assert node.interruption() == START + 120.0
    monkeypatch.setattr(node, "metadata", lambda _path: "<html>")
    assert node.interruption() is None


def test_a_machine_that_is_no_instance_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(node.METADATA_VARIABLE, "http://127.0.0.1:1")
    assert node.metadata("local-ipv4") is None
    assert node.interruption() is None


def test_an_address_where_something_else_answers_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv(node.METADATA_VARIABLE, f"http://127.0.0.1:{listener.getsockname()[1]}")

        def greet() -> None:
            connection, _ = listener.accept()
            connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
            connection.close()

        thread = threading.Thread(target=greet)
        thread.start()
        assert node.metadata("local-ipv4") is None
        thread.join()


def test_a_lease_is_the_time_of_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(node.LEASE_VARIABLE, raising=False)
    node.extend_lease(1.0)
    lease = tmp_path / "lease"
    lease.touch()
    monkeypatch.setenv(node.LEASE_VARIABLE, str(lease))
    for until in (2e9, 1e9):
        node.extend_lease(until)
        assert lease.stat().st_mtime == until


def test_files_of_an_experiment_are_private_to_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(node.LEASE_VARIABLE, str(tmp_path / "lease"))
    folder = node.machine_folder()
    assert folder == node.machine_folder()
    assert folder.parent == tmp_path
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()
    folder.symlink_to("/tmp")
    with pytest.raises(PermissionError, match="belongs to another user"):
        node.machine_folder()
