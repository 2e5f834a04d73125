"""A gang's checkpoint is loaded once per machine, and its file goes with the last worker that needs it."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from io import BufferedIOBase
from pathlib import Path

import pytest

from rubberband.errors import CheckpointLostError
from rubberband.executor import CheckpointRef, LocalCheckpointStore
from rubberband.executor.checkpoints import scratch
from rubberband.executor.checkpoints.scratch import on_machine


@dataclass(frozen=True, slots=True)
class Counting(LocalCheckpointStore):
    """Calls `loading` for each load."""

    loading: Callable[[], None] = lambda: None

    def fetch(self, ref: CheckpointRef, file: BufferedIOBase) -> None:
        self.loading()
        LocalCheckpointStore.fetch(self, ref, file)


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Path:
    (folder := tmp_path / "machine").mkdir()
    monkeypatch.setattr(scratch, "machine_folder", lambda: folder)
    return folder / "checkpoints"


@pytest.fixture
def store(tmp_path) -> Counting:
    (folder := tmp_path / "store").mkdir()
    return Counting(folder)


def test_workers_that_come_at_once_load_it_once_and_leave_nothing(store, machine):
    ref, loads, found = store.save(1, 1, b"weights"), [], []
    counting = replace(store, loading=lambda: loads.append(1))
    together = threading.Barrier(8)

    def worker() -> None:
        together.wait()
        with on_machine(counting, ref) as path:
            assert isinstance(path, Path)
            found.append(path.read_bytes())
            together.wait()

    threads = [threading.Thread(target=worker) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [b"weights"] * 8
    assert len(loads) == 1
    assert list(machine.iterdir()) == []


def test_files_of_killed_workers_are_removed_or_made_whole(store, machine):
    machine.mkdir()
    ref = store.save(1, 1, b"weights")
    (machine / "of-another").write_bytes(b"left")
    (machine / ref.digest).write_bytes(b"wei")
    with on_machine(store, ref) as path:
        assert isinstance(path, Path)
        assert path.read_bytes() == b"weights"
        assert [each.name for each in machine.iterdir()] == [ref.digest]


def test_a_changed_checkpoint_is_lost_and_leaves_no_file(store, machine):
    ref = store.save(1, 1, b"weights")
    next(store.directory.glob("*.ckpt")).write_bytes(b"changed")
    with pytest.raises(CheckpointLostError), on_machine(store, ref):
        pass
    assert list(machine.iterdir()) == []


def test_a_machine_without_room_loads_the_bytes(store, monkeypatch):
    def full() -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(scratch, "machine_folder", full)
    with on_machine(store, store.save(1, 1, b"weights")) as found:
        assert found == b"weights"


def test_a_process_forked_meanwhile_keeps_no_lock(store, machine):
    ref = store.save(1, 1, b"weights")
    going, done = os.pipe()
    with ExitStack() as first, on_machine(store, ref) as path:
        assert first.enter_context(on_machine(store, ref)) == path
        child = os.fork()
        if child == 0:
            os.close(done)
            os.read(going, 1)  # until the test is through
            os._exit(0)
        first.close()
    left = list(machine.iterdir())
    os.close(done)
    os.close(going)
    os.waitpid(child, 0)
    assert left == []


def test_a_file_that_its_last_user_removes_meanwhile_is_loaded_again(store, machine, monkeypatch):
    ref, real, removed = store.save(1, 1, b"weights"), fcntl.flock, []

    def flock(descriptor: int, how: int) -> None:
        if not removed:
            (machine / ref.digest).unlink()
            removed.append(ref.digest)
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with on_machine(store, ref) as path:
        assert isinstance(path, Path)
        assert path.read_bytes() == b"weights"
