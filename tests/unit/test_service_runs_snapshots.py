"""What a service tells of its runs: where they stand, and their logs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rubberband.api.experiments.recording import MISREADS, ExperimentSnapshot, Recorder, Sight, snapshot_of
from rubberband.api.store import open_store
from rubberband.errors import InputError
from rubberband.executor import (
    LINE_BYTES,
    MAX_FILES,
    PAGE_BYTES,
    TAIL,
    Ending,
    ExperimentFolder,
    HostedRun,
    HostMark,
    JournalFollower,
    LogPlace,
    PrintedLine,
    read_cursor,
    read_ending,
    read_order,
    trial_files,
    write_cursor,
    write_ending,
    write_order,
)
from rubberband.executor.logs.pages import Wanted, page
from rubberband.executor.run.follower import Failure
from rubberband.states import ExperimentState
from rubberband.values.submission import Submission
from tests.builders.clocks import Clock
from tests.builders.power_cut import PowerCut
from tests.builders.service_runs import CANCELLED, DONE, INTERRUPTED, REFUSED, RUNNING, STARTING, template

NOTHING = Sight(at_work=False, mark=None, ending=None, outcome=None, reason="", has_begun=False)
AT_WORK = replace(NOTHING, at_work=True)
SIGNED = replace(NOTHING, mark=HostMark(pid=1, attempt=1, started_at=0.0))
BEGUN = replace(SIGNED, has_begun=True)


def row(state: ExperimentState, attempt: int = 1) -> Submission:
    words = {"name": "one"}
    return Submission(name="one", state=state, created_at=0.0, changed_at=0.0, words=words, attempt=attempt)


def ending(exit_code: int, attempt: int = 1) -> Ending:
    return Ending(attempt=attempt, exit_code=exit_code, error="this went wrong", at=0.0)


@pytest.mark.parametrize(
    ("state", "sight", "expected"),
    [
        (STARTING, AT_WORK, STARTING),
        (STARTING, replace(BEGUN, at_work=True), RUNNING),
        (STARTING, replace(BEGUN, at_work=True, outcome=DONE), DONE),
        (STARTING, replace(SIGNED, ending=ending(2)), REFUSED),
        (STARTING, replace(SIGNED, ending=ending(3)), REFUSED),
        (STARTING, replace(SIGNED, ending=ending(130)), CANCELLED),
        (STARTING, SIGNED, INTERRUPTED),
        (STARTING, BEGUN, INTERRUPTED),
        (STARTING, replace(BEGUN, outcome=DONE), DONE),
        (RUNNING, replace(BEGUN, at_work=True), RUNNING),
        (RUNNING, replace(BEGUN, at_work=True, outcome=DONE), DONE),
        (RUNNING, BEGUN, INTERRUPTED),
        (CANCELLED, replace(BEGUN, at_work=True), RUNNING),
        (CANCELLED, NOTHING, CANCELLED),
        (INTERRUPTED, replace(BEGUN, outcome=DONE), DONE),
    ],
)
def test_states_follow_from_what_is_seen(state: ExperimentState, sight: Sight, expected: ExperimentState) -> None:
    found = snapshot_of(row(state), sight)
    assert found is not None
    assert found.state is expected


@pytest.mark.parametrize("sight", [NOTHING, SIGNED, replace(BEGUN, outcome=CANCELLED)])
def test_a_process_that_never_signed_was_never_started(sight: Sight) -> None:
    assert snapshot_of(row(STARTING, attempt=2), sight) is None


def test_a_resumed_run_keeps_waiting_while_its_journal_shows_the_earlier_end() -> None:
    sight = replace(BEGUN, at_work=True, mark=HostMark(pid=1, attempt=2, started_at=0.0), outcome=CANCELLED)
    assert snapshot_of(row(STARTING, attempt=2), sight) == ExperimentSnapshot(state=STARTING)
    by_hand = replace(row(STARTING, attempt=1), words={})
    assert snapshot_of(by_hand, replace(sight, mark=SIGNED.mark)) == ExperimentSnapshot(state=STARTING)


def test_the_last_words_of_its_own_process_are_the_reason() -> None:
    found = snapshot_of(row(RUNNING), replace(BEGUN, ending=ending(1)))
    assert found == ExperimentSnapshot(state=INTERRUPTED, reason="this went wrong; resume it to continue")
    sight = replace(BEGUN, mark=HostMark(pid=1, attempt=2, started_at=0.0), ending=ending(1, attempt=1))
    found = snapshot_of(row(RUNNING, attempt=2), sight)
    assert found is not None
    assert "ended unexpectedly" in found.reason


def test_a_journal_that_is_read_in_between_is_not_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one on a disk that is slow now and then: the experiment is given up after several failures in a row."""
    store, folder = open_store(None, tmp_path), ExperimentFolder(home=tmp_path, name="template")
    template(tmp_path)
    found = replace(row(RUNNING), name="template")
    assert store.add(found)
    really, is_slow = JournalFollower.refresh, iter([*[True] * (MISREADS - 1), False] * 2 + [True])

    def refresh(follower: JournalFollower, *, live: bool) -> Any:
        if next(is_slow):
            raise OSError("Input/output error")
        return really(follower, live=live)

    monkeypatch.setattr(JournalFollower, "refresh", refresh)
    recorder, seen = Recorder(folder, store, lambda: None, clock=Clock()), []
    for _ in range(2 * MISREADS + 1):
        step = recorder.look(found)
        assert step is not None
        found = recorder.keep(found, step)
        seen.append(found.state)
    recorder.close()
    store.close()
    assert seen == [RUNNING] * (MISREADS - 1) + [DONE] * (MISREADS + 2)


def test_an_order_and_how_its_process_ended_outlive_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the order nothing is started again; without the ending what was refused is."""
    power, folder = PowerCut(tmp_path, monkeypatch), ExperimentFolder(home=tmp_path, name="one")
    order = HostedRun(attempt=1, resume=False, words={"name": "one"})
    write_order(folder, order)
    power.cut()
    assert read_order(folder) == order
    folder.order.write_bytes(folder.order.read_bytes().replace(b"{", b'{"most_hours":1,', 1))
    with pytest.raises(InputError, match=r"order\.json has 'most_hours', unknown to this version .* install"):
        read_order(folder)
    write_ending(folder, ending(3))
    power.cut()
    assert read_ending(folder) == ending(3)


FAILED = (Failure(seq=7, trial=1, lines=("attempt 1 raised: no", "Traceback")),)


def texts(lines: list[PrintedLine]) -> list[str]:
    return [line.text for line in lines]


def follow(path: Path, cursor: str | None, *, limit: int = 1000, is_whole: bool = False) -> tuple[list[str], str]:
    lines, after = page({None: path}, (), cursor=cursor, limit=limit, is_whole=is_whole)
    return texts(lines), after


def test_a_log_that_grows_or_is_replaced_is_read_once_in_pages(tmp_path: Path) -> None:
    log = tmp_path / "process.log"
    assert follow(log, None)[0] == []
    log.write_text("one\ntwo\nthr")
    first, cursor = follow(log, None)
    assert follow(log, None, is_whole=True)[0] == ["one", "two", "thr"], "the end counts once all writers have ended"
    with open(log, "a") as file:
        file.write("ee\nfour\n")
    second, cursor = follow(log, cursor)
    assert (first, second) == (["one", "two"], ["three", "four"])
    assert follow(log, cursor) == ([], cursor)
    log.write_text("new\n")
    assert follow(log, cursor)[0] == ["new"], "it was replaced"
    log.write_text("".join(f"{number}\n" for number in range(10)))
    found, at = [], None
    for _ in range(4):
        lines, at = follow(log, at, limit=3)
        found.append(lines)
    assert found == [["0", "1", "2"], ["3", "4", "5"], ["6", "7", "8"], ["9"]]


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


@pytest.mark.parametrize("search", ["hello", "HELLO", "traceback", "TRACEBACK", "Traceback"])
def test_output_and_reasons_of_failures_are_found_in_upper_and_lower_case(tmp_path: Path, search: str) -> None:
    for trial in (0, 1):
        (tmp_path / f"trial-{trial:03d}.log").write_text(f"Hello from {trial}\nother\n")
    lines, _ = page(
        trial_files(tmp_path, None), FAILED, cursor=None, limit=100, is_whole=True, wanted=Wanted(text=search)
    )
    assert texts(lines) == (["Hello from 0", "Hello from 1"] if search.lower() == "hello" else ["Traceback"])


def test_no_more_files_are_followed_than_a_cursor_holds(tmp_path: Path) -> None:
    for trial in range(MAX_FILES + 5):
        (tmp_path / f"trial-{trial:03d}.log").write_text("x" * (trial % 300) + "\n")
    lines, cursor = page(trial_files(tmp_path, None), (), cursor=None, limit=10_000, is_whole=False)
    assert len(lines) == MAX_FILES
    assert len(cursor) < 4000


@given(st.text(max_size=60))
@example("eJwDAAAAAAE")
@example("eJz_____")
@example("A" * 4000)
@example("\x00")
def test_an_invalid_cursor_is_refused(cursor: str) -> None:
    with pytest.raises(InputError, match="cursor"):
        read_cursor(cursor)


@given(
    st.builds(
        lambda offsets, seq: LogPlace(offsets=offsets, failure_seq=seq),
        st.dictionaries(st.integers(0, 10**6), st.integers(0, 2**50), max_size=20),
        st.integers(-1, 2**40),
    )
)
def test_a_place_survives_its_cursor(place: LogPlace) -> None:
    assert read_cursor(write_cursor(place)) == place
