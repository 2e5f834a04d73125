"""What a program saves, while it trains on: snapshots of its files, and reports whose checkpoint is on its way."""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rubberband.executor import CheckpointRef, CheckpointStore, Entrypoint, SegmentEnded, SegmentReport, run_segment
from rubberband.executor.checkpoints import LocalCheckpointStore, snapshots
from rubberband.executor.checkpoints.folders import Rewritten, read_manifest, unpack
from rubberband.executor.checkpoints.scratch import Scratch
from rubberband.executor.checkpoints.snapshots import Snapshot, Snapshots
from rubberband.executor.training.run import Reports
from rubberband.executor.training.runner import pack
from rubberband.executor.training.runner import unpack as unpacked
from rubberband.values.command import ProgramCommand
from tests.builders.segments import SEGMENT, reports
from tests.builders.waiting import eventually

LARGE, SMALL = b"l" * 64, b"s" * 8


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "LARGE_BYTES", 32)


@pytest.fixture
def scratch() -> Iterator[Scratch]:
    yield (made := Scratch())
    made.close()


@pytest.fixture
def folder(scratch: Scratch) -> Path:
    """A folder on the file system of the snapshots."""
    (scratch.path / "checkpoint").mkdir()
    return scratch.path / "checkpoint"


def packed(snapshot: Snapshot, to: Path) -> dict[str, bytes]:
    """The files that the snapshot's archive has."""
    snapshot.payload()(to / "archive")  # type: ignore[operator]
    unpack(to / "archive", there := to / "there")
    files = {str(path.relative_to(there)): path.read_bytes() for path in there.rglob("*") if path.is_file()}
    os.rename(there, to / os.urandom(4).hex())
    return files


def is_linked(snapshot: Snapshot, path: str) -> bool:
    return (snapshot.path / path).stat().st_nlink > 1


def replaced(path: Path, content: bytes) -> None:
    """Write a file as most libraries do: another one, which takes its place."""
    (draft := path.with_name("draft")).write_bytes(content)
    draft.replace(path)


def test_large_files_are_linked_also_those_that_are_written_again(
    folder: Path, scratch: Scratch, tmp_path: Path
) -> None:
    taken = Snapshots(scratch)
    for number in range(3):
        again, new = b"%d" % number + LARGE, b"new %d" % number + LARGE
        (folder / "again").write_bytes(again)
        replaced(folder / "new", new)
        (folder / "small").write_bytes(b"%d" % number)
        snapshot = taken.take(folder, {})
        assert [is_linked(snapshot, name) for name in ("again", "new", "small")] == [True, True, False]
        (folder / "small").write_bytes(b"next")  # the program goes on
        replaced(folder / "new", b"next" + LARGE)
        assert packed(snapshot, tmp_path) == {"again": again, "new": new, "small": b"%d" % number}


def test_a_linked_file_that_is_written_before_it_is_packed_is_no_checkpoint_and_is_copied_after_the_second_time(
    folder: Path, scratch: Scratch, tmp_path: Path
) -> None:
    taken = Snapshots(scratch)

    def saved(*, is_quick: bool) -> dict[str, bytes]:
        (folder / "model").write_bytes(b"saved" + LARGE)
        snapshot = taken.take(folder, {})
        if is_quick:
            (folder / "model").write_bytes(b"again" + LARGE)
        return packed(snapshot, tmp_path)

    for quick in (True, False, True, True):  # a checkpoint between them: the two are not in a row
        with pytest.raises(Rewritten) if quick else nullcontext():
            saved(is_quick=quick)
    assert saved(is_quick=True)["model"] == b"saved" + LARGE
    assert not is_linked(taken.take(folder, {}), "model")


def test_a_file_that_is_mapped_for_writing_is_copied_at_once(folder: Path, scratch: Scratch, tmp_path: Path) -> None:
    """Its time of change stays as it is while a program writes, as one with a numpy.memmap does."""
    (folder / "buffer").write_bytes(LARGE)
    with open(folder / "buffer", "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[:4] = b"old "
        snapshot = Snapshots(scratch).take(folder, {})
        mapped[:4] = b"next"
        assert packed(snapshot, tmp_path)["buffer"][:4] == b"old "


def test_a_linked_file_is_older_than_a_tick_of_the_clock_when_its_snapshot_is_there(
    folder: Path, scratch: Scratch
) -> None:
    taken = Snapshots(scratch)
    for _ in range(3):
        (folder / "model").write_bytes(LARGE)
        snapshot = taken.take(folder, {})
        assert time.time() - (snapshot.path / "model").stat().st_mtime >= snapshots._TICK_S


def test_a_folder_that_changes_while_it_is_taken_is_of_one_moment(
    folder: Path, scratch: Scratch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, is_first = snapshots._copy, True

    def late(source: str, to: Path) -> None:
        nonlocal is_first
        if is_first and to.name == "b":
            is_first = False
            (folder / "a").write_bytes(b"later")
            (folder / "b").write_bytes(b"later")
        copy(source, to)

    (folder / "a").write_bytes(b"first")
    (folder / "b").write_bytes(b"first")
    monkeypatch.setattr(snapshots, "_copy", late)
    assert packed(Snapshots(scratch).take(folder, {}), tmp_path) == {"a": b"later", "b": b"later"}


@settings(max_examples=60)
@given(data=st.data())
def test_a_snapshot_has_the_files_of_its_moment_or_says_that_it_has_not(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    top, scratch = tmp_path_factory.mktemp("snapshot"), Scratch()
    (folder := scratch.path / "checkpoint").mkdir()
    taken = Snapshots(scratch)
    names = st.sampled_from(["a", "b", "c"])

    def act() -> None:
        name, content = data.draw(names), os.urandom(4) * data.draw(st.sampled_from([1, 20]))
        how = data.draw(st.sampled_from(["write", "replace", "add", "remove", "rename"]))
        if how == "write":
            (folder / name).write_bytes(content)
        elif how == "replace":
            replaced(folder / name, content)
        elif how == "add":
            with open(folder / name, "ab") as file:
                file.write(content)
        elif (folder / name).exists():
            (folder / name).unlink() if how == "remove" else (folder / name).rename(folder / data.draw(names))

    for _ in range(data.draw(st.integers(1, 4))):
        for _ in range(data.draw(st.integers(0, 3))):
            act()
        expected = {path.name: path.read_bytes() for path in folder.iterdir()}
        snapshot = taken.take(folder, {})
        for _ in range(data.draw(st.integers(0, 2))):
            act()
        try:
            assert packed(snapshot, top) == expected
        except Rewritten:
            assert any(is_linked(snapshot, path) for path in snapshot.links)


def test_a_function_s_folder_is_kept_though_it_is_removed_or_written_again(
    folder: Path, scratch: Scratch, tmp_path: Path
) -> None:
    taken = Snapshots(scratch)
    for number in range(3):
        (folder / "model").write_bytes(b"%d" % number + LARGE)
        kept = taken.checkpoint(folder)
        (folder / "model").unlink()
        write = pack("function", number, {"state": None, "folders": [kept]})
        place = kept.path
        assert callable(write)
        write(tmp_path / str(number))
        found = unpacked(tmp_path / str(number), "function", number, None)["folders"][0]
        assert (found.path / "model").read_bytes() == b"%d" % number + LARGE
        del kept, write
        eventually(lambda gone=place: not gone.exists())
    (folder / "model").write_bytes(b"3" + LARGE)
    (folder / "other").write_bytes(b"4" + LARGE)
    write = pack("function", 3, {"state": None, "folders": [taken.checkpoint(folder)]})
    (folder / "other").write_bytes(b"5" + LARGE)
    assert callable(write)
    with pytest.raises(Rewritten):
        write(tmp_path / "last")


def report(iterations: int, saved: int | None = None) -> SegmentReport:
    return SegmentReport(iterations=iterations, metrics={"loss": 1.0}, checkpoint=None, saved_iterations=saved)


def test_a_report_whose_checkpoint_was_overtaken_goes_without_it(store: CheckpointStore) -> None:
    def overtaken(to: Path) -> None:
        raise Rewritten("the program has gone on")

    reports = Reports(store, 4)
    reports.begin(tuple, 0)
    reports.add(report(1), b"1")
    reports.add(report(2), overtaken)
    reports.add(report(3, saved=2), None)
    reports.add(report(4), b"4")
    found = list(reports.all())
    reports.close()
    assert [each.saved_iterations for each in found] == [None, 1, 1, None]
    assert [each.checkpoint is not None for each in found] == [True, False, False, True]


def test_a_checkpoint_is_writing_until_it_is_durable_with_its_parts(store: CheckpointStore) -> None:
    told = threading.Event()

    def parts() -> tuple[Any, ...]:
        assert told.wait(20)
        return (store.save(4, 1, b"part"),)

    reports = Reports(store, 4)
    reports.begin(parts, 0)
    reports.add(report(1), b"whole")
    assert reports.is_writing
    assert list(reports.ready()) == []
    told.set()
    [found] = reports.all()
    assert not reports.is_writing
    assert found.checkpoint is not None
    assert [store.load(each) for each in found.checkpoint.files()] == [b"whole", b"part"]
    assert replace(found.checkpoint, parts=()).files() == (replace(found.checkpoint, parts=()),)
    reports.close()


SAVES = """
import os, pathlib, rubberband
out = pathlib.Path(os.environ["RUBBERBAND_CHECKPOINT"])
for epoch in range(1, 9):
    (out / "n").write_text(str(epoch))
    pathlib.Path(f"at-{epoch}").touch()
    rubberband.report({"loss": 1 / epoch})
"""


def test_training_does_not_wait_for_a_slow_store(tmp_path: Path) -> None:
    class Slow(LocalCheckpointStore):
        def save(self, trial: int, iterations: int, payload: Any) -> CheckpointRef:
            if iterations == 1:
                eventually((tmp_path / "at-4").exists, "the fourth iteration, while the first is saved")
            return LocalCheckpointStore.save(self, trial, iterations, payload)

    (tmp_path / "train.py").write_text(SAVES)
    (tmp_path / "store").mkdir()
    command = ProgramCommand(words=(sys.executable, "train.py"))
    entrypoint = Entrypoint(module="", attribute="", search_path=(str(tmp_path),), command=command)
    segment = replace(SEGMENT, until_iterations=6, max_iterations=8)
    found = reports(list(run_segment(entrypoint, segment, Slow(tmp_path / "store"))))
    assert [each.iterations for each in found] == [1, 2, 3, 4, 5, 6]
    assert [each.checkpoint is not None for each in found[:3]] == [True, False, False]
    assert [each.saved_iterations for each in found[:3]] == [None, 1, 1], "later saves have overtaken them"
    assert found[-1].checkpoint is not None, "the last one always is"
    assert found[-1].saved_iterations is None


def test_a_checkpoint_that_has_waited_is_written_though_its_trial_ends_then(tmp_path: Path) -> None:
    class Slow(LocalCheckpointStore):
        def save(self, trial: int, iterations: int, payload: Any) -> CheckpointRef:
            if iterations == 1:
                eventually((tmp_path / "at-3").exists, "the last iteration, while the first is saved")
                time.sleep(0.5)
            return LocalCheckpointStore.save(self, trial, iterations, payload)

    (tmp_path / "train.py").write_text(SAVES.replace("range(1, 9)", "range(1, 4)"))
    (tmp_path / "store").mkdir()
    store = Slow(tmp_path / "store")
    command = ProgramCommand(words=(sys.executable, "train.py"))
    entrypoint = Entrypoint(module="", attribute="", search_path=(str(tmp_path),), command=command)
    *found, ended = run_segment(entrypoint, replace(SEGMENT, until_iterations=6, max_iterations=8), store)
    assert isinstance(ended, SegmentEnded)
    last = reports(found)[-1]
    assert (last.iterations, last.saved_iterations) == (3, None)
    assert last.checkpoint is not None
    with store.file(last.checkpoint) as path:
        assert read_manifest(path)["iterations"] == 3


def test_a_report_that_has_waited_goes_without_what_its_trial_has_saved_since(store: CheckpointStore) -> None:
    held, dumped = 2, list[int]()

    def dump() -> bytes:
        dumped.append(held)
        return b"2"

    made = Reports(store, 4)
    made.begin(tuple, 0)
    made.add(report(1), b"1")
    made.add_later(report(2), dump, lambda: held)
    held = 3  # within the next iteration
    assert [each.saved_iterations for each in made.all()] == [None, 1]
    assert dumped == []
    made.add(report(3), b"3")
    made.add_later(report(4, saved=3), dump, lambda: held)
    assert [each.saved_iterations for each in made.all()] == [None, 3]
    assert dumped == [3]
    made.close()
