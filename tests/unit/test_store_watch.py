"""Whether a checkpoint that failed is the trial's fault or the store's."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import NoReturn

import pytest

from rubberband.errors import StoreAwayError
from rubberband.executor import (
    CheckpointLost,
    CheckpointRef,
    Event,
    FailureKind,
    TrialFailed,
    TrialReported,
    make_store,
    open_store,
)
from rubberband.executor.ray.backend import StoreWatch


def failed(kind: FailureKind) -> Event:
    return TrialFailed(occurred_at=1.0, trial=3, attempt=1, kind=kind, message="the checkpoint of trial 3 is bad")


def no_space(*_: object, **__: object) -> NoReturn:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_store_that_takes_checkpoints_lets_the_trial_fail(tmp_path: Path) -> None:
    StoreWatch(open_store(str(tmp_path))).check([failed("checkpoint")])
    assert list(tmp_path.iterdir()) == []


def test_a_full_store_ends_the_run_and_not_the_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = StoreWatch(open_store(str(tmp_path)))
    monkeypatch.setattr("rubberband.executor.checkpoints.write_atomically", no_space)
    watch.check([failed("raised"), failed("died")])
    with pytest.raises(StoreAwayError, match=r"does not accept checkpoints \(No space left on device\); make room"):
        watch.check([failed("checkpoint")])


LOST = CheckpointLost(occurred_at=1.0, trial=3, attempt=1, message="the checkpoint is gone")


def test_a_checkpoint_that_is_lost_in_a_store_that_is_well_is_lost(tmp_path: Path) -> None:
    StoreWatch(make_store(str(tmp_path))).check([LOST])


@pytest.mark.parametrize("event", [LOST, failed("checkpoint")])
def test_an_empty_directory_where_the_store_was_mounted_ends_the_run_and_not_the_trial(
    tmp_path: Path, event: Event
) -> None:
    watch = StoreWatch(make_store(str(tmp_path / "disk")))
    (tmp_path / "disk").rename(tmp_path / "unmounted")
    with pytest.raises(StoreAwayError, match="No such file"):
        watch.check([event])
    (tmp_path / "disk").mkdir()
    with pytest.raises(StoreAwayError, match=r"found no file rubberband-store; mount or restore it"):
        watch.check([event])
    assert list((tmp_path / "disk").iterdir()) == []


@pytest.mark.parametrize(("written", "probed"), [(0, 2**16), (10**6, 10**6), (10**9, 2**26)])
def test_as_much_is_tried_as_was_written_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int, probed: int
) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(
        "rubberband.executor.checkpoints.write_atomically", lambda path, payload, **_: sizes.append(len(payload))
    )
    ref = CheckpointRef(url="", digest="", size_bytes=written)
    reported = TrialReported(occurred_at=0.0, trial=1, attempt=1, iterations=1, metrics={}, checkpoint=ref)
    StoreWatch(open_store(str(tmp_path))).check([reported, failed("checkpoint")])
    assert sizes == [probed]
