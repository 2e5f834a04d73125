"""Files that trials give to be kept: from `rubberband.artifact` to the checkpoint store, the result and a folder."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

import rubberband
from rubberband.errors import InputError
from rubberband.executor import (
    CheckpointRef,
    CheckpointStore,
    DiscardCheckpoint,
    Result,
    SegmentEnded,
    SegmentFailure,
    SegmentReport,
    TrialArtifact,
    TrialStatus,
    decode_event,
    encode_event,
    open_store,
    summarise,
)
from rubberband.executor.core.trial_state import Artifact
from rubberband.executor.training import artifacts
from rubberband.executor.training.reporting import ARTIFACTS
from rubberband.executor.training.segment import SegmentArtifact
from tests.builders.segments import train
from tests.builders.stories import Story, begun
from tests.unit.test_controller_checkpoints import SETUP
from tests.unit.test_forked_trials import fork, three_paused


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointStore:
    if request.param == "s3":
        request.getfixturevalue("s3")
        return dataclasses.replace(open_store("s3://bucket/some/place"), run="run")
    return dataclasses.replace(open_store(str(tmp_path / "store")), run="run")


def given(items: list[Any]) -> list[tuple[str, int]]:
    return [(item.name, item.iterations) for item in items if isinstance(item, SegmentArtifact)]


def plots(config: dict[str, Any]) -> None:
    for iteration in range(1, 4):
        note = Path(config["folder"], "note.txt")
        note.write_text(f"{iteration}")
        rubberband.artifact(note)
        if iteration == 2:
            rubberband.artifact(note, name="plots/second.txt")
        rubberband.report({"loss": 1.0 / iteration}, checkpoint=iteration)
    note.write_text("the end")
    rubberband.artifact(note)


def test_files_are_saved_as_they_come_and_the_latest_of_a_name_comes_last(
    tmp_path: Path, store: CheckpointStore
) -> None:
    items = train(plots, store, config={"folder": str(tmp_path)})
    assert given(items) == [("note.txt", 1), ("note.txt", 2), ("plots/second.txt", 2), ("note.txt", 3), ("note.txt", 3)]
    assert isinstance(items[-1], SegmentEnded)
    files = [item.file for item in items if isinstance(item, SegmentArtifact)]
    assert [store.load(file) for file in files] == [b"1", b"2", b"2", b"3", b"the end"]
    kinds = [type(item) for item in items]
    assert kinds.index(SegmentArtifact) < kinds.index(SegmentReport)
    assert ARTIFACTS not in os.environ


def overwrites(config: dict[str, Any]) -> None:
    for iteration in range(1, 4):
        path = Path(os.environ[ARTIFACTS], "state.bin")
        path.write_bytes(bytes([iteration]))  # the same file, of the same size
        os.utime(path, ns=(iteration, iteration))
        rubberband.report({"loss": 1.0}, checkpoint=iteration)


def test_a_file_that_is_overwritten_by_as_many_bytes_is_saved_again(store: CheckpointStore) -> None:
    items = train(overwrites, store)
    assert [store.load(item.file) for item in items if isinstance(item, SegmentArtifact)] == [b"\1", b"\2", b"\3"]


def fails(config: dict[str, Any]) -> None:
    Path(os.environ[ARTIFACTS], "below").mkdir()
    Path(os.environ[ARTIFACTS], "below", "trace.txt").write_text("why")
    Path(os.environ[ARTIFACTS], "link").symlink_to("/etc/passwd")
    raise ValueError("boom")


def test_a_trial_that_fails_keeps_what_it_gave_and_links_are_left_out(store: CheckpointStore) -> None:
    items = train(fails, store)
    assert given(items) == [("below/trace.txt", 0)]
    assert isinstance(items[-1], SegmentFailure)


def two_ranks(config: dict[str, Any]) -> None:
    name = f"rank-{os.environ['TESTED_RANK']}.txt"
    Path(config["folder"], name).write_text(name)
    for iteration in (1, 2):
        rubberband.artifact(Path(config["folder"], name), name="same.txt")
        rubberband.artifact(Path(config["folder"], name))
        rubberband.report({"loss": 1.0}, checkpoint=iteration)


def test_the_file_of_rank_0_is_kept_where_two_ranks_give_one_name(
    tmp_path: Path, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    every: list[Any] = []
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    for rank in ("0", "1"):
        monkeypatch.setenv("TESTED_RANK", rank)
        every += train(two_ranks, store, config={"folder": str(tmp_path)}, rank=int(rank), until_iterations=2)
    files = {item.name: store.load(item.file) for item in every if isinstance(item, SegmentArtifact)}
    assert files == {"same.txt": b"rank-0.txt", "rank-0.txt": b"rank-0.txt"}
    why = "rank 1 of a gang gave it, and the files of rank 0 are"
    assert f"rubberband: artifact rank-1.txt is not kept: {why}" in capfd.readouterr().err
    assert not list((tmp_path / "tmp").glob("rubberband-artifacts-*"))


def test_processes_of_a_launcher_share_a_folder_in_which_only_rank_0_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in ((ARTIFACTS, str(tmp_path / "kept")), ("RUBBERBAND_LINE", "line")):
        monkeypatch.setenv(name, value)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        (tmp_path / "a.txt").write_text(rank)
        for _ in range(2):
            rubberband.artifact(tmp_path / "a.txt")
    assert (tmp_path / "kept" / "a.txt").read_text() == "0"
    assert capfd.readouterr().err.count("artifact a.txt is not kept: rank 1 of a gang gave it") == 1


def test_a_file_beyond_a_limit_is_left_out_with_a_line(
    tmp_path: Path, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(artifacts, "LARGEST_BYTES", 4)
    monkeypatch.setattr(artifacts, "MOST_FILES", 1)
    items = train(plots, store, config={"folder": str(tmp_path)})
    assert given(items) == [("note.txt", 1), ("note.txt", 2), ("note.txt", 3)]
    said = capfd.readouterr().err
    assert "rubberband: artifact plots/second.txt is not kept: a trial keeps at most 1 files" in said
    assert "rubberband: artifact note.txt is not kept: it has 7 bytes, the limit is 4 bytes" in said


@pytest.mark.parametrize("name", ["../a.txt", "/etc/a.txt", "a//b", "", "a/..", "a/../../b", "..\\b"])
def test_a_name_that_leaves_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ValueError, match="is no name below the trial's folder"):
        rubberband.artifact(tmp_path / "a.txt", name=name)


def test_a_missing_file_is_refused_also_outside_a_search(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is no file; give the path of a file"):
        rubberband.artifact(tmp_path / "missing.txt")
    with pytest.raises(FileNotFoundError):
        rubberband.artifact(tmp_path)
    (tmp_path / "a.txt").write_text("a")
    rubberband.artifact(tmp_path / "a.txt")


def give(story: Story, name: str, file: CheckpointRef, trial: int = 3) -> list[str]:
    attempt = story.state.trials[trial].attempt
    orders = story.tell(TrialArtifact, trial=trial, attempt=attempt, name=name, iterations=1, file=file)
    return [order.checkpoint.url for order in orders if isinstance(order, DiscardCheckpoint)]


def told(store: CheckpointStore, *names: str) -> Result:
    story = begun()
    story.report(3, 0.9)
    assert story.state.trials[3].status is TrialStatus.PAUSED
    for trial in (0, 1, 2):
        story.report(trial, 0.1 * trial)
    for at, name in enumerate(names):
        give(story, name, store.save(3, at, f"{name} {at}".encode()))
    return summarise(story.state, SETUP, story.at)


def test_the_latest_of_a_name_is_kept_and_the_earlier_one_is_deleted(store: CheckpointStore) -> None:
    story = begun()
    first, second = (store.save(3, 1, text) for text in (b"1", b"2"))
    assert give(story, "a.txt", first) == []
    assert give(story, "a.txt", second) == [first.url]
    trial = story.state.trials[3]
    assert [*trial.files()] == [second]
    event = TrialArtifact(occurred_at=1.0, trial=3, attempt=1, name="a.txt", iterations=1, file=second)
    assert decode_event(*encode_event(event)) == event


def test_a_fork_takes_the_files_over_and_each_is_deleted_with_the_last_trial_that_has_it(
    store: CheckpointStore,
) -> None:
    story = three_paused()
    names = {"own.txt": (0, 1), "both.txt": (0, 2), "note.txt": (2, 3), "late.txt": (2, 4)}
    refs = {name: store.save(trial, at, name.encode()) for name, (trial, at) in names.items()}
    parents = store.save(2, 3, b"both of the parent")

    def keep(trial: int, **given: tuple[CheckpointRef, int]) -> None:
        story.state.trials[trial].artifacts = {
            name: Artifact(name=name, file=file, iterations=at, saved_at=1.0) for name, (file, at) in given.items()
        }

    keep(0, own=(refs["own.txt"], 1), both=(refs["both.txt"], 2))
    keep(2, both=(parents, 3), note=(refs["note.txt"], 3), late=(refs["late.txt"], 4))
    gone = [order.checkpoint for order in fork(story, 0, 2) if isinstance(order, DiscardCheckpoint)]
    assert refs["both.txt"] in gone
    assert not {refs["own.txt"].url, parents.url} & {ref.url for ref in gone}
    trial = story.state.trials[0]
    assert {name: one.file for name, one in trial.artifacts.items()} == {
        "own": refs["own.txt"],
        "both": parents,
        "note": refs["note.txt"],
    }
    story.report(3, 3.3)  # the next stage begins
    assert give(story, "note", store.save(2, 5, b"newer"), trial=2) == []  # trial 0 still has the earlier one
    assert give(story, "note", store.save(0, 5, b"newer"), trial=0) == [refs["note.txt"].url]
    store.tidy([ref for one in story.state.trials for ref in one.files()])
    assert store.load(parents) == b"both of the parent"
    assert not store.holds(refs["both.txt"])


def test_the_artifacts_of_the_best_trial_are_written_into_a_folder(tmp_path: Path, store: CheckpointStore) -> None:
    result = told(store, "b.txt", "plots/a.txt", "b.txt")
    assert [(one.name, one.iterations) for one in result.trials[3].artifacts] == [("b.txt", 1), ("plots/a.txt", 1)]
    assert Result.from_json(result.to_json()) == result
    paths = result.save_artifacts(tmp_path / "out")
    assert {path.relative_to(tmp_path / "out").as_posix(): path.read_text() for path in paths} == {
        "b.txt": "b.txt 2",
        "plots/a.txt": "plots/a.txt 1",
    }
    with pytest.raises(InputError, match=r"b\.txt is there, and is not overwritten"):
        result.save_artifacts(tmp_path / "out")
    with pytest.raises(InputError, match="trial 0 has no artifacts"):
        result.save_artifacts(tmp_path / "other", trial=0)
    with pytest.raises(InputError, match="has no trial 9; it has 0 to 3"):
        result.save_artifacts(tmp_path / "other", trial=9)


def test_a_name_in_the_journal_that_leaves_the_folder_is_not_written(tmp_path: Path, store: CheckpointStore) -> None:
    result = told(store, "../out.txt")
    with pytest.raises(InputError, match=r"leaves .*, and is not written"):
        result.save_artifacts(tmp_path / "in")
    assert not (tmp_path / "out.txt").exists()
