"""Locks on files: one has a file to himself, and those who only look keep nobody out."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path

import pytest

from rubberband.executor.journal import folder
from rubberband.executor.journal.folder import EXCLUSIVE, SHARED, locked


def test_who_only_looks_is_waited_for_and_who_has_it_to_himself_is_not(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with open(path, "a") as ours, open(path) as other:
        assert locked(other, SHARED)
        leaving = threading.Timer(0.05, fcntl.flock, (other, fcntl.LOCK_UN))
        leaving.start()
        assert locked(ours, EXCLUSIVE)
        leaving.join()
        assert not locked(other, SHARED)
        assert not locked(other, EXCLUSIVE)


def test_who_looks_for_ever_is_not_waited_for_as_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "_GLANCE_S", 0.02)
    with open(tmp_path / "lock", "a") as ours, open(tmp_path / "lock") as other:
        assert locked(other, SHARED)
        assert not locked(ours, EXCLUSIVE)
        assert locked(ours, SHARED)
