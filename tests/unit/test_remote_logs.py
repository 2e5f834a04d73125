"""What trials print on other machines, and what of it the driver takes."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from rubberband.executor.logs.trial_log import Appender, TrialLog, left_out_line
from rubberband.executor.ray import connection
from rubberband.executor.ray.connection import LogPart, append, read_new


def _take(there: Path, here: Path, taken: dict[str, int]) -> None:
    for part in read_new(there, taken):
        append(here, part, 1_000_000)
        taken[part.name] = part.end


@pytest.fixture
def there(tmp_path: Path) -> Path:
    folder = tmp_path / "there"
    folder.mkdir()
    return folder


def test_only_what_is_new_is_taken(there: Path, tmp_path: Path) -> None:
    log, here, taken = there / "trial-007.log", tmp_path / "here", dict[str, int]()
    log.write_text("one\n")
    _take(there, here, taken)
    _take(there, here, taken)
    with log.open("a") as file:
        file.write("two\n")
    _take(there, here, taken)
    assert (here / "trial-007.log").read_text() == "one\ntwo\n"


def test_the_next_driver_resumes_where_the_last_one_was_heard(there: Path, tmp_path: Path) -> None:
    (there / "trial-001.log").write_text("one\n")
    first: dict[str, int] = {}
    _take(there, tmp_path / "here", first)
    _take(there, tmp_path / "here", first)
    (there / "trial-001.log").write_text("one\ntwo\n")
    _take(there, tmp_path / "here", {})
    assert (tmp_path / "here" / "trial-001.log").read_text() == "one\ntwo\n"


def test_long_answers_come_in_parts(there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_PART_BYTES", 4)
    monkeypatch.setattr(connection, "_PARTS_BYTES", 6)
    for name in ("a.log", "b.log"):
        (there / name).write_text("0123456789")
    assert [part.content for part in read_new(there, {})] == [b"0123", b"01"]
    taken: dict[str, int] = {}
    for _ in range(6):
        _take(there, tmp_path / "here", taken)
    assert [(tmp_path / "here" / name).read_text() for name in ("a.log", "b.log")] == ["0123456789"] * 2


def test_a_log_that_was_cut_is_taken_with_a_line_that_says_so(there: Path, tmp_path: Path) -> None:
    log, here = TrialLog(path=there / "trial-000.log", limit_bytes=800), tmp_path / "here"
    with closing(Appender(log)) as appender:
        appender.write(b"x" * 2000 + b"the end")
    taken: dict[str, int] = {}
    for _ in range(3):
        _take(there, here, taken)
    assert (here / "trial-000.log").read_text() == (
        f"{'x' * 400}\n{left_out_line(2007 - 400 - 307)}\n{'x' * 300}the end"
    )


def test_the_last_that_is_taken_is_the_end(there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_PART_BYTES", 10)
    monkeypatch.setattr(connection, "_PARTS_BYTES", 14)
    for name in ("a.log", "b.log"):
        (there / name).write_text("first, and much more: the end")
    taken: dict[str, int] = {}
    _take(there, tmp_path / "here", taken)
    for part in read_new(there, taken, is_last=True):
        append(tmp_path / "here", part, 1_000_000)
    assert (tmp_path / "here" / "a.log").read_text() == f"first, and\n{left_out_line(12)}\nthe end"
    assert (tmp_path / "here" / "b.log").read_text() == f"firs\n{left_out_line(18)}\nthe end"


def test_accepted_bodies_are_capped_as_well(there: Path, tmp_path: Path) -> None:
    taken: dict[str, int] = {}
    for turn in range(30):
        (there / "trial-000.log").write_text("x" * 200 * turn)
        for part in read_new(there, taken):
            append(tmp_path / "here", part, 800)
            taken[part.name] = part.end
    assert sum(file.stat().st_size for file in (tmp_path / "here").rglob("*.log")) <= 800


def test_no_name_leads_out_of_the_folder(tmp_path: Path) -> None:
    append(tmp_path / "here", LogPart(name="../trial.log", offset=0, content=b"x"), 1_000_000)
    assert list(tmp_path.rglob("*.log")) == []
