"""What an instance knows of itself: its lease, its folder, and the metadata service, which only speaks version 2."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rubberband.cloud import node
from tests.builders.metadata_service import metadata_service


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """What the metadata service says, however long it takes."""
    monkeypatch.setattr(node, "_TIMEOUT_S", 60.0)
    with metadata_service() as (address, said):
        monkeypatch.setenv(node.METADATA_VARIABLE, address)
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
        yield said


def test_it_is_reported_what_the_metadata_service_says(said: dict[str, str]) -> None:
    said["local-ipv4"] = "10.0.0.5"
    assert node.metadata("local-ipv4") == "10.0.0.5"
    assert node.metadata("mac") is None


def test_a_notice_of_interruption_is_an_instant(said: dict[str, str]) -> None:
    assert node.interruption() is None
    said["spot/instance-action"] = '{"action": "terminate", "time": "2026-11-21T17:00:00Z"}'
    assert node.interruption() == 1795280400.0
    said["spot/instance-action"] = "<html>"
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
