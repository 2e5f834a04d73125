"""What the machines of a program's gang save together: the files of one moment, and no checkpoint without a part."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rubberband.errors import CheckpointError
from rubberband.executor import CheckpointRef, CheckpointStore, Entrypoint, SegmentReport
from rubberband.executor.checkpoints import LocalCheckpointStore, Payload, make_store, reopen_store
from rubberband.executor.checkpoints.folders import Rewritten, pack, unpack, write_archive
from rubberband.executor.checkpoints.scratch import Scratch
from rubberband.executor.core.trial_state import TrialState
from rubberband.executor.training.failures import GangBroken, TrialFailure
from rubberband.executor.training.programs.runner import make_runner
from rubberband.executor.training.programs.saves import Saves
from rubberband.executor.training.run import Reports
from rubberband.executor.training.runner import Runner
from rubberband.values.command import ProgramCommand
from tests.builders.segments import SEGMENT
from tests.builders.waiting import eventually


class Two:
    """The first workers of two machines; the second one answers when rank 0 waits for it."""

    def __init__(self, store: CheckpointStore) -> None:
        self.store = store
        self._asked, self._answered = deque[str](), deque[str]()
        place = SimpleNamespace(machines=2)
        first: Any = SimpleNamespace(place=place, leaders=(1,), ask=self._asked.append, answers=self._answers)
        second: Any = SimpleNamespace(place=place, leaders=(), asked=self._next, answer=self._answered.append)
        self.scratches = [Scratch(), Scratch()]
        self.folders = [scratch.path / "checkpoint" for scratch in self.scratches]
        for folder in self.folders:
            folder.mkdir()
        self.first, self.second = (
            Saves(gang, folder, scratch)
            for gang, folder, scratch in zip((first, second), self.folders, self.scratches, strict=True)
        )
        self.save: Callable[[int, Payload], CheckpointRef] = lambda iterations, payload: store.save(4, 1, payload)
        """That of the second machine."""

    def _next(self) -> str | None:
        return self._asked.popleft() if self._asked else None

    def _answers(self, start: str) -> list[str]:
        self.second.answer(lambda iterations, payload: self.save(iterations, payload))
        eventually(lambda: any(each.startswith(start) for each in self._answered), f"an answer to {start}")
        found = next(each for each in self._answered if each.startswith(start))
        self._answered.remove(found)
        return [found.removeprefix(start)]

    def write(self, name: str, *contents: str) -> None:
        for folder, content in zip(self.folders, contents, strict=True):
            (folder / name).write_text(content)

    def take(self, iterations: int) -> None:
        self.first.take(self.folders[0], kind="program", iterations=iterations)

    def saved(self) -> CheckpointRef:
        payload = self.first.payload()
        assert payload is not None
        return replace(self.store.save(4, 1, payload), parts=self.first.parts())

    def files(self, ref: CheckpointRef) -> dict[str, str]:
        there = self.scratches[0].path / os.urandom(4).hex()
        with self.store.file(ref) as path:
            unpack(path, there)
        return {path.name: path.read_text() for path in there.iterdir()}

    def close(self) -> None:
        for each in (self.first, self.second, *self.scratches):
            each.close()


@pytest.fixture
def two(store: CheckpointStore) -> Iterator[Two]:
    yield (made := Two(store))
    made.close()


def test_the_files_of_all_machines_are_of_the_moment_at_which_rank_0_took_its(two: Two) -> None:
    two.write("n", "1", "1")
    two.write("part", "of 0", "of 1")
    two.take(1)
    two.write("part", "later", "later")
    (two.folders[1] / "own").write_text("later")
    assert two.files(two.saved()) == {"n": "1", "part": "of 0"}
    (two.folders[0] / "part").unlink()
    two.take(2)
    assert two.files(two.saved()) == {"n": "1", "part": "later", "own": "later"}


def refuse(*_: Any, **__: Any) -> Any:
    raise CheckpointError("no more")


@pytest.mark.parametrize("fault", ["writing", "taking"])
def test_a_checkpoint_that_lacks_a_machine_s_part_is_none_and_the_next_one_is_whole(
    two: Two, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    two.write("n", "1", "1")
    (two.folders[1] / "own").write_text("1")
    with monkeypatch.context() as patch:
        if fault == "writing":
            patch.setattr(two, "save", refuse)
        else:
            patch.setattr(two.second._snapshots, "take", refuse)
        two.take(1)
        with pytest.raises(CheckpointError, match="no more"):
            two.saved()
    two.take(2)
    assert two.files(two.saved()) == {"n": "1", "own": "1"}


def test_a_machine_that_has_nothing_to_save_adds_no_part_also_after_a_fault(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    (two.folders[0] / "n").write_text("1")
    two.take(1)
    assert two.saved().parts == ()
    with monkeypatch.context() as patch:
        patch.setattr(two.second._snapshots, "take", refuse)
        two.take(2)
        with pytest.raises(CheckpointError, match="no more"):
            two.saved()
    two.take(3)
    assert two.saved().parts == ()


def test_a_part_of_a_checkpoint_that_was_overtaken_is_in_no_other(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    two.write("n", "1", "1")
    (two.folders[1] / "own").write_text("1")
    two.take(1)

    def overtaken(*_: Any, **__: Any) -> None:
        raise Rewritten("the program has gone on")

    with monkeypatch.context() as patch:
        patch.setattr("rubberband.executor.checkpoints.snapshots.write_archive", overtaken)
        payload = two.first.payload()
        assert payload is not None
        with pytest.raises(Rewritten):
            two.store.save(4, 1, payload)
    (two.folders[1] / "own").write_text("2")
    two.take(2)
    assert two.files(two.saved()) == {"n": "1", "own": "2"}


@pytest.mark.parametrize("name", ["__0_0.distcp", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"])
def test_a_part_in_a_folder_that_other_machines_do_not_know_is_refused(two: Two, tmp_path: Path, name: str) -> None:
    two.first.take(tmp_path, kind="program", iterations=1)
    (tmp_path / name).touch()
    with pytest.raises(TrialFailure, match="whose other parts are on other machines: save all in"):
        two.first.take(tmp_path, kind="program", iterations=2)


def test_the_copies_of_files_go_once_they_are_packed(two: Two) -> None:
    for number in range(1, 5):
        two.write("n", str(number), str(number))
        two.take(number)
        two.saved()
    assert [len([*(scratch.path / "saved").iterdir()]) for scratch in two.scratches] == [1, 1]


@pytest.fixture
def archive(tmp_path: Path) -> Callable[..., Path]:
    def made(name: str, **files: str) -> Path:
        (folder := tmp_path / f"{name}-files").mkdir()
        for path, content in files.items():
            (folder / path).write_text(content)
        pack(folder, tmp_path / name, iterations=1, metrics={})
        return tmp_path / name

    return made


def begun(tmp_path: Path, resources: list[Any], first: Path, part: Path) -> Runner:
    """The runner of a program that goes on from a checkpoint in two parts, on one machine."""
    command = ProgramCommand(words=("true",))
    entrypoint = Entrypoint(module="", attribute="", search_path=(str(tmp_path),), command=command)
    runner = make_runner(entrypoint, command, replace(SEGMENT, from_iterations=1), resources)
    resources.append(runner)
    runner.parts_held = [part]
    assert runner.begin(first) == 1
    return runner


def test_a_segment_in_which_nothing_is_saved_keeps_the_files_of_all_machines(
    tmp_path: Path, archive: Callable[..., Path]
) -> None:
    resources: list[Any] = []
    runner = begun(tmp_path, resources, archive("first", n="1"), archive("second", own="2"))
    payload = runner.dump(2, {})
    assert callable(payload)
    payload(tmp_path / "again")
    unpack(tmp_path / "again", tmp_path / "there")
    while resources:
        resources.pop().close()
    assert {path.name: path.read_text() for path in (tmp_path / "there").iterdir()} == {"n": "1", "own": "2"}


def test_a_failure_leaves_though_the_part_of_another_worker_does_not_come(store: CheckpointStore) -> None:
    def parts() -> Any:
        raise GangBroken("the process of worker 1 is gone")

    reports = Reports(store, 4)
    reports.begin(parts, 0)
    reports.add(SegmentReport(iterations=1, metrics={"loss": 1.0}, checkpoint=None), b"1")
    assert list(reports.rest()) == []
    reports.close()


def test_links_and_empty_folders_of_all_machines_are_in_a_checkpoint_in_parts(
    store: CheckpointStore, tmp_path: Path
) -> None:
    def saved(name: str, number: int) -> CheckpointRef:
        (there := tmp_path / name / f"step-{number}").mkdir(parents=True)
        (there / "part").write_bytes(name.encode())
        (there.parent / f"empty-{number}").mkdir()
        (there.parent / f"latest-{number}").symlink_to(there.name)
        return store.save(3, 12, lambda to: write_archive({"": there.parent}, to))

    with store.file(replace(saved("first", 1), parts=(saved("second", 2),))) as path:
        unpack(path, there := tmp_path / "there")
    for number, name in ((1, "first"), (2, "second")):
        assert (there / f"latest-{number}" / "part").read_text() == name
        assert (there / f"latest-{number}").is_symlink()
        assert (there / f"empty-{number}").is_dir()


def test_a_checkpoint_that_a_trial_may_go_on_from_is_kept_with_all_parts(store: CheckpointStore) -> None:
    assert isinstance(store, LocalCheckpointStore)
    store = replace(store, run="0a1b2c")
    newest, before, best = (
        replace(store.save(0, number, b"first"), parts=(store.save(0, number, b"second"),)) for number in (3, 2, 1)
    )
    trial = TrialState(trial=0, checkpoint=newest, before=before, best=best)
    store.tidy([*trial.files()])
    assert [store.load(each) for ref in (newest, before, best) for each in ref.files()] == [b"first", b"second"] * 3


def test_a_store_is_asked_for_the_room_of_the_largest_checkpoint_with_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, sizes, save = make_store(str(tmp_path)), list[int](), LocalCheckpointStore.save

    def watched(self: LocalCheckpointStore, trial: int, iterations: int, payload: Any) -> CheckpointRef:
        sizes.append(len(payload))
        return save(self, trial, iterations, payload)

    monkeypatch.setattr(LocalCheckpointStore, "save", watched)
    small, large = (CheckpointRef(url=f"{tmp_path}/{size}", digest="", size_bytes=size) for size in (10, 100_000))
    reopen_store(str(tmp_path), made.mark, [small, replace(large, parts=(large, small)), small])
    assert sizes == [200_010]
