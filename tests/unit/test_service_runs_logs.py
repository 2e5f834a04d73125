"""The logs of an experiment, page by page."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubberband.errors import InputError
from rubberband.executor.logs.pages import (
    LINE_BYTES,
    MAX_FILES,
    PAGE_BYTES,
    TAIL,
    LogPlace,
    PrintedLine,
    page,
    read_cursor,
    trial_files,
    write_cursor,
)
from rubberband.executor.run.follower import Failure

FAILED = (Failure(seq=7, trial=1, lines=("attempt 1 raised: no", "Traceback")),)


def texts(lines: list[PrintedLine]) -> list[str]:
    return [line.text for line in lines]


def follow(path: Path, cursor: str | None, *, limit: int = 1000, is_whole: bool = False) -> tuple[list[str], str]:
    lines, after = page({None: path}, (), cursor=cursor, limit=limit, is_whole=is_whole)
    return texts(lines), after


def test_a_log_that_grows_is_read_once(tmp_path: Path) -> None:
    log = tmp_path / "process.log"
    assert follow(log, None)[0] == []
    log.write_text("one\ntwo\nthr")
    first, cursor = follow(log, None)
    with open(log, "a") as file:
        file.write("ee\nfour\n")
    second, cursor = follow(log, cursor)
    assert (first, second) == (["one", "two"], ["three", "four"])
    assert follow(log, cursor) == ([], cursor)


def test_the_end_counts_once_when_all_writers_have_ended(tmp_path: Path) -> None:
    log = tmp_path / "process.log"
    log.write_text("one\nlast")
    assert follow(log, None, is_whole=True)[0] == ["one", "last"]


def test_pages_have_as_many_lines_as_were_asked_for(tmp_path: Path) -> None:
    log = tmp_path / "process.log"
    log.write_text("".join(f"{number}\n" for number in range(10)))
    found, cursor = [], None
    for _ in range(4):
        lines, cursor = follow(log, cursor, limit=3)
        found.append(lines)
    assert found == [["0", "1", "2"], ["3", "4", "5"], ["6", "7", "8"], ["9"]]


def test_a_log_that_was_replaced_is_read_from_its_begin(tmp_path: Path) -> None:
    log = tmp_path / "process.log"
    log.write_text("old\nold\nold\n")
    _, cursor = follow(log, None)
    log.write_text("new\n")
    assert follow(log, cursor)[0] == ["new"]


def test_a_huge_log_without_lines_is_reported_in_pieces(tmp_path: Path) -> None:
    log = tmp_path / "process.log"
    log.write_bytes(b"\xff\x00x" * PAGE_BYTES)
    first, cursor = follow(log, None)
    assert sum(len(line) for line in first) == PAGE_BYTES
    assert max(len(line) for line in first) <= LINE_BYTES
    assert follow(log, cursor)[0]


def test_the_tail_is_the_last_lines_and_resumes_from_there(tmp_path: Path) -> None:
    log = tmp_path / "process.log"
    log.write_text("".join(f"line {number}\n" for number in range(100_000)))
    lines, cursor = follow(log, TAIL, limit=3)
    assert lines == ["line 99997", "line 99998", "line 99999"]
    with open(log, "a") as file:
        file.write("more\n")
    assert follow(log, cursor)[0] == ["more"]


def test_trials_and_their_failures_are_reported_with_their_numbers(tmp_path: Path) -> None:
    for trial in (0, 1, 12, 1234):
        (tmp_path / f"trial-{trial:03d}.log").write_text(f"hello from {trial}\n")
    (tmp_path / "trial-x.log").write_text("none of ours\n")
    lines, cursor = page(trial_files(tmp_path, None), FAILED, cursor=None, limit=100, is_whole=False)
    assert [line.trial for line in lines] == [0, 1, 12, 1234, 1, 1]
    assert lines[-1].text == "Traceback"
    assert page(trial_files(tmp_path, None), FAILED, cursor=cursor, limit=100, is_whole=False)[0] == []
    one, _ = page(trial_files(tmp_path, 12), (), cursor=None, limit=100, is_whole=False)
    assert texts(one) == ["hello from 12"]


def test_no_more_files_are_followed_than_a_cursor_holds(tmp_path: Path) -> None:
    for trial in range(MAX_FILES + 5):
        (tmp_path / f"trial-{trial:03d}.log").write_text("x" * (trial % 300) + "\n")
    lines, cursor = page(trial_files(tmp_path, None), (), cursor=None, limit=10_000, is_whole=False)
    assert len(lines) == MAX_FILES
    assert len(cursor) < 4000


@pytest.mark.parametrize("cursor", ["", "x", "ä", "eJwDAAAAAAE", "A" * 4000, "eJz_____", "\x00"])
def test_an_invalid_cursor_is_refused(cursor: str) -> None:
    with pytest.raises(InputError, match="cursor"):
        read_cursor(cursor)


@given(
    st.builds(
        lambda offsets, told: LogPlace(offsets=offsets, told=told),
        st.dictionaries(st.integers(0, 10**6), st.integers(0, 2**50), max_size=20),
        st.integers(-1, 2**40),
    )
)
def test_a_place_survives_its_cursor(place: LogPlace) -> None:
    assert read_cursor(write_cursor(place)) == place


@given(st.text(max_size=60))
def test_no_text_breaks_the_reading_of_cursors(text: str) -> None:
    try:
        read_cursor(text)
    except InputError:
        return
