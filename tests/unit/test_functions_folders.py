"""Functions and plain trials whose checkpoints have folders: their files go by path, and none stays on the machine."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rubberband
from rubberband.errors import CheckpointError
from rubberband.executor import CheckpointStore, FolderCheckpoint, SegmentReport, is_archive, read_manifest
from rubberband.executor.checkpoints import scratch
from rubberband.executor.checkpoints.scratch import Scratch
from rubberband.executor.training.runner import pack, unpack
from tests.builders import segments


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (folder := tmp_path / "machine").mkdir()
    monkeypatch.setattr(scratch, "machine_folder", lambda: folder)
    return folder / "scratch"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "one" / "below" / "empty").mkdir(parents=True)
    (tmp_path / "one" / "below" / "weights").write_bytes(b"\0\1")
    (tmp_path / "one" / "config.json").write_text("{}")
    return tmp_path / "one"


def texts(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_a_copy_of_a_folder_is_independent_of_it_and_goes_with_its_object(
    folder: Path, tmp_path: Path, machine: Path
) -> None:
    kept = FolderCheckpoint.from_directory(folder)
    (folder / "config.json").write_text("changed")
    assert texts(kept.to_directory(tmp_path / "other")) == {"below/weights": "\0\1", "config.json": "{}"}
    assert (tmp_path / "other" / "below" / "empty").is_dir()
    assert FolderCheckpoint.taking(folder).to_directory(tmp_path / "third").is_dir()
    assert not folder.exists()
    del kept
    assert list(machine.iterdir()) == []


def test_a_folder_that_another_library_pickles_has_its_files(folder: Path, tmp_path: Path) -> None:
    kept = pickle.loads(pickle.dumps(FolderCheckpoint.from_directory(folder)))
    assert texts(kept.to_directory(tmp_path / "other")) == texts(folder)


def count(config: dict[str, Any]) -> None:
    """Count in a file, beside an object, and remove the folder that was passed."""
    state = rubberband.get_checkpoint()
    done = 0 if state is None else int((state["files"].path / "count").read_text())
    assert state is None or state["done"] == done
    while True:
        done += 1
        place = Path(config["place"], str(done))
        place.mkdir()
        (place / "count").write_text(str(done))
        kept = FolderCheckpoint.from_directory(place)
        (place / "count").write_text("something else")
        rubberband.report({"loss": done}, checkpoint={"files": kept, "done": done, "same": kept})


def test_a_function_goes_on_from_its_folder_and_leaves_none_here(
    store: CheckpointStore, tmp_path: Path, machine: Path
) -> None:
    config = {"place": str(tmp_path)}
    first = segments.reports(segments.train(count, store, config=config, until_iterations=2))
    payload = store.load(first[-1].checkpoint)
    assert is_archive(payload)
    assert (read_manifest(payload)["kind"], read_manifest(payload)["iterations"]) == ("function", 2)
    rest = segments.train(
        count, store, config=config, from_iterations=2, until_iterations=4, checkpoint=first[-1].checkpoint
    )
    assert [item.metrics["loss"] for item in rest if isinstance(item, SegmentReport)] == [3, 4]
    assert list(machine.iterdir()) == []


def sometimes(config: dict[str, Any]) -> None:
    """Pass a folder with every second report."""
    state = rubberband.get_checkpoint()
    done = 0 if state is None else int((state.path / "count").read_text())
    while True:
        done += 1
        place = Path(config["place"], f"{done}-{os.urandom(4).hex()}")
        place.mkdir()
        (place / "count").write_text(str(done))
        rubberband.report({"loss": done}, checkpoint=None if done % 2 else FolderCheckpoint.taking(place))


def test_a_folder_is_stored_again_with_reports_that_have_none(store: CheckpointStore, tmp_path: Path) -> None:
    config = {"place": str(tmp_path)}
    first = segments.reports(segments.train(sometimes, store, config=config, until_iterations=3))
    assert first[-1].saved_iterations == 2
    rest = segments.train(
        sometimes, store, config=config, from_iterations=3, until_iterations=4, checkpoint=first[-1].checkpoint
    )
    assert [item.metrics["loss"] for item in rest if isinstance(item, SegmentReport)] == [4]


class InFiles(rubberband.Trial):
    """Counts, and keeps a folder in what `save` returns."""

    def setup(self, config: Any, context: Any) -> None:
        self.place, self.count = Path(config["place"]), 0

    def iterate(self) -> dict[str, float]:
        self.count += 1
        return {"loss": self.count}

    def save(self) -> Any:
        (self.place / "count").write_text(str(self.count))
        return [FolderCheckpoint.from_directory(self.place)]

    def load(self, state: Any) -> None:
        self.count = int((state[0].path / "count").read_text())


def test_a_trial_goes_on_from_its_folder(store: CheckpointStore, tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()
    config = {"place": str(tmp_path / "place")}
    first = segments.reports(segments.train(InFiles, store, config=config, until_iterations=2))
    (tmp_path / "place" / "count").unlink()
    rest = segments.train(InFiles, store, config=config, from_iterations=2, checkpoint=first[-1].checkpoint)
    assert [item.metrics["loss"] for item in rest if isinstance(item, SegmentReport)] == [3, 4]


def test_a_checkpoint_of_another_kind_is_refused_before_it_is_unpacked(
    folder: Path, tmp_path: Path, machine: Path
) -> None:
    write = pack("function", 3, {"state": None, "folders": [FolderCheckpoint.from_directory(folder)]})
    assert callable(write)
    write(tmp_path / "packed")
    del write
    with pytest.raises(CheckpointError, match="is of a function trial"):
        unpack(tmp_path / "packed", "trial", 3, "cpu")
    with pytest.raises(CheckpointError, match="holds 3 iterations, not 2"):
        unpack(tmp_path / "packed", "function", 2, "cpu")
    assert list(machine.iterdir()) == []


def test_the_folders_of_a_killed_process_go_with_the_next(machine: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from rubberband.executor.checkpoints import scratch\n"
        f"scratch.machine_folder = lambda: Path({str(machine.parent)!r})\n"
        "made = scratch.Scratch(); (made.path / 'large').write_text('x'); print(made.path, flush=True)\n"
        "sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        left = Path(process.stdout.readline().decode().strip())
        mine = Scratch()
        assert sorted(machine.iterdir()) == sorted([left, mine.path])
        process.send_signal(signal.SIGKILL)
    other = Scratch()
    assert sorted(machine.iterdir()) == sorted([mine.path, other.path])


def test_a_fork_leaves_the_folders_of_its_parent(machine: Path) -> None:
    made = Scratch()
    child = os.fork()
    if child == 0:
        made.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert list(machine.iterdir()) == [made.path]
