"""A mirror of the hub: who fills it, when it counts, and that what comes from it is verified."""

from __future__ import annotations

import hashlib
import threading
import time
from pathlib import Path

import pytest

from rubberband.cloud.aws.s3 import S3Folder
from rubberband.cloud.fetch import __main__ as process
from rubberband.cloud.fetch.cache import Place
from rubberband.cloud.fetch.hub import File
from rubberband.cloud.fetch.mirror import Mirror
from rubberband.spec.fetching import Source

COMMIT = "ab" * 20


def place_in(root: Path, **contents: bytes) -> tuple[Place, tuple[File, ...]]:
    """A commit in a cache, and the list of its files."""
    place = Place(root, Source("model", "org/base", "main"), COMMIT)
    place.snapshot.mkdir(parents=True)
    for name, content in contents.items():
        (place.snapshot / name).write_bytes(content)
    return place, tuple(
        File(path=name, size=len(content), digest=hashlib.sha256(content).hexdigest())
        for name, content in contents.items()
    )


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_pause", lambda attempt: None)


def test_wrong_bytes_of_a_mirror_are_never_given_to_trials(tmp_path: Path, s3: str) -> None:
    full, files = place_in(tmp_path / "full", weights=b"right")
    url = f"s3://{s3}/{tmp_path.name}"
    Mirror.of(url, full).fill(full, files)
    S3Folder.parse(f"{url}/{full.repo.name}/{COMMIT}").put("files/weights", b"wrong")
    empty, _ = place_in(tmp_path / "empty")
    with pytest.raises(process.FetchError, match="not as the hub's digests say, such as weights"):
        process._fetch_one(empty, url, None, [])
    assert empty.fetched() is None
    assert not (empty.snapshot / "weights").exists()


def test_a_mirror_counts_once_all_files_are_there(tmp_path: Path, s3: str) -> None:
    place, files = place_in(tmp_path, weights=b"right", config=b"{}")
    mirror = Mirror.of(f"s3://{s3}/{tmp_path.name}", place)
    (place.snapshot / "config").unlink()
    with pytest.raises(Exception, match="config"):
        mirror.fill(place, files)
    assert mirror.files() is None


def test_another_instance_fills_a_mirror_whose_claim_is_an_hour_old(
    tmp_path: Path, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror, now = Mirror.of(f"s3://{s3}/{tmp_path.name}", place_in(tmp_path)[0]), time.time()
    claims = []
    for later_s in (0.0, 3500.0, 3700.0, 3800.0):
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda later_s=later_s: now + later_s)
            claims.append(mirror.claim())
    assert claims == [True, False, True, False]


def test_attempts_that_get_a_further_file_are_not_counted(tmp_path: Path) -> None:
    names = [f"part-{number}" for number in range(process.ATTEMPTS + 5)]
    place, files = place_in(tmp_path, **dict.fromkeys(names, b"content"))
    for name in names:
        (place.snapshot / name).unlink()
    lacking = list(names)

    def get() -> None:
        (place.snapshot / lacking.pop()).write_bytes(b"content")
        if lacking:
            raise ConnectionError("broken")

    process._until_right(place, files, get)
    assert not place.wrong(files)


def test_one_process_at_a_time_fetches_a_source(tmp_path: Path) -> None:
    place, _ = place_in(tmp_path)
    entered = threading.Event()

    def other() -> None:
        with place.locked():
            entered.set()

    thread = threading.Thread(target=other)
    with place.locked():
        thread.start()
        assert not entered.wait(0.2)
    thread.join(10)
    assert entered.is_set()
