"""Large files that go to a bucket from a process of their own."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from rubberband.cloud.aws.s3 import S3Folder
from rubberband.errors import CheckpointError
from rubberband.executor.checkpoints import uploads
from rubberband.executor.checkpoints.uploads import send
from tests.builders.waiting import PATIENCE_S, eventually

FOLDER = S3Folder.parse("s3://bucket/prefix")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(uploads, "LARGE_BYTES", 100)
    (path := tmp_path / "file").write_bytes(bytes(range(100)))
    return path


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A server that takes connections, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(PATIENCE_S)
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{server.getsockname()[1]}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "key")
        yield server


def test_a_large_file_arrives_and_an_error_keeps_its_words(s3: str, file: Path, capfd: pytest.CaptureFixture) -> None:
    folder = S3Folder.parse(f"s3://{s3}/large")
    assert send(folder, "name", file) == f"s3://{s3}/large/name"
    assert folder.get("name") == file.read_bytes()
    missing = S3Folder.parse("s3://no-such-bucket/large")
    with pytest.raises(CheckpointError) as here:
        missing.put("name", file)
    with pytest.raises(CheckpointError) as there:
        send(missing, "name", file)
    assert str(there.value) == str(here.value)
    assert capfd.readouterr() == ("", "")


def test_a_process_that_is_killed_makes_no_checkpoint(
    silent: socket.socket, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **words: Any) -> None:
            super().__init__(*args, **words)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(send, FOLDER, "name", file)
        connection, _ = silent.accept()
        started[0].kill()
        with pytest.raises(CheckpointError, match=r"^s3://bucket/prefix/name could not be written: .* exit code -9$"):
            sending.result()
    connection.close()


def test_no_process_outlives_the_one_that_trains(silent: socket.socket, file: Path) -> None:
    script = (
        "from pathlib import Path; from rubberband.cloud.aws.s3 import S3Folder; "
        "from rubberband.executor.checkpoints import uploads; uploads.LARGE_BYTES = 1; "
        f"uploads.send(S3Folder.parse('s3://bucket/prefix'), 'name', Path({str(file)!r}))"
    )
    with subprocess.Popen([sys.executable, "-c", script]) as trains:
        connection, _ = silent.accept()
        (child,) = psutil.Process(trains.pid).children()
        trains.kill()
    eventually(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, "the process ends")
    connection.close()
