"""Checkpoint stores in buckets, each of which leads to an emulator, to memory or to a directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from rubberband import installation
from rubberband.executor import CheckpointStore, open_store

BUCKETS = ("s3", "gcs", "memory", "a directory by fsspec")


def bucket(kind: str, request: pytest.FixtureRequest, folder: Path) -> CheckpointStore:
    """Return an empty store of a kind of BUCKETS."""
    if kind == "s3":
        return open_store(f"s3://{request.getfixturevalue('s3')}/{folder.name}/some/prefix/")
    if kind == "gcs":
        return open_store(f"gs://{request.getfixturevalue('gcs')}/{folder.name}/prefix/")
    if kind == "memory":
        return open_store(f"memory://{folder.name}/prefix")
    request.getfixturevalue("monkeypatch").setitem(installation.STORE_DRIVERS, "local", "fsspec")
    (folder / "by fsspec").mkdir()
    return open_store(f"local://{folder / 'by fsspec'}")
