"""Locks on files: one has a file to himself, and those who only look keep nobody out."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path

import pytest

from rubberband import files
from rubberband.files import EXCLUSIVE, SHARED, locked


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
