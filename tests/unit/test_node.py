"""What an instance knows of itself: its lease, its folder, and the metadata service, which only speaks version 2."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rubberband.cloud import node

SAID: dict[str, str] = {}


class _Metadata(BaseHTTPRequestHandler):
    def do_PUT(self) -> None:
        """Give a token."""
        assert self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self._answer(200, "token")

    def do_GET(self) -> None:
        """Answer who shows the token."""
        if self.headers["X-aws-ec2-metadata-token"] != "token":
            self._answer(401, "")
        elif (name := self.path.removeprefix("/machine/latest/meta-data/")) in SAID:
            self._answer(200, SAID[name])
        else:
            self._answer(404, "")

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """What the metadata service says."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Metadata)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setenv(node.METADATA_VARIABLE, f"http://127.0.0.1:{server.server_port}/machine/")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    SAID.clear()
    yield SAID
    server.shutdown()
    thread.join()
    server.server_close()


def test_it_is_told_what_the_metadata_service_says(said: dict[str, str]) -> None:
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


def test_a_lease_is_the_time_of_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(node.LEASE_VARIABLE, raising=False)
    node.extend_lease(1.0)
    lease = tmp_path / "lease"
    lease.touch()
    monkeypatch.setenv(node.LEASE_VARIABLE, str(lease))
    for until in (2e9, 1e9):
        node.extend_lease(until)
        assert lease.stat().st_mtime == until


def test_what_an_experiment_keeps_on_a_machine_is_for_this_user_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(node.LEASE_VARIABLE, str(tmp_path / "lease"))
    folder = node.machine_folder()
    assert folder == node.machine_folder()
    assert folder.parent == tmp_path
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()
    folder.symlink_to("/tmp")
    with pytest.raises(PermissionError, match="somebody else"):
        node.machine_folder()
