"""Where an experiment stands by what its folder shows, and how it is told in the feed and in lists."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rubberband.api.experiments.recording import MISREADS, ExperimentSnapshot, Recorder, Sight, standing
from rubberband.api.store import open_store
from rubberband.errors import InputError
from rubberband.executor.journal.folder import ExperimentFolder
from rubberband.executor.journal.hosting import (
    Ending,
    HostedRun,
    HostMark,
    read_ending,
    read_order,
    write_ending,
    write_order,
)
from rubberband.executor.run.follower import JournalFollower
from rubberband.states import ExperimentState
from rubberband.values.submission import Submission
from tests.builders.power_cut import PowerCut
from tests.builders.service_runs import template

QUEUED, STARTING, RUNNING = ExperimentState.QUEUED, ExperimentState.STARTING, ExperimentState.RUNNING
INTERRUPTED, REFUSED, CANCELLED = ExperimentState.INTERRUPTED, ExperimentState.REFUSED, ExperimentState.CANCELLED
DONE = ExperimentState.DONE

NOTHING = Sight(at_work=False, mark=None, ending=None, outcome=None, reason="", has_begun=False)
AT_WORK = replace(NOTHING, at_work=True)
SIGNED = replace(NOTHING, mark=HostMark(pid=1, attempt=1, started_at=0.0))
BEGUN = replace(SIGNED, has_begun=True)


def row(state: ExperimentState, attempt: int = 1) -> Submission:
    words = {"name": "one"}
    return Submission(name="one", state=state, created_at=0.0, changed_at=0.0, words=words, attempt=attempt)


def told(exit_code: int, attempt: int = 1) -> Ending:
    return Ending(attempt=attempt, exit_code=exit_code, error="this went wrong", at=0.0)


@pytest.mark.parametrize(
    ("state", "sight", "expected"),
    [
        (STARTING, AT_WORK, STARTING),
        (STARTING, replace(BEGUN, at_work=True), RUNNING),
        (STARTING, replace(BEGUN, at_work=True, outcome=DONE), DONE),
        (STARTING, replace(SIGNED, ending=told(2)), REFUSED),
        (STARTING, replace(SIGNED, ending=told(3)), REFUSED),
        (STARTING, replace(SIGNED, ending=told(130)), CANCELLED),
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
    found = standing(row(state), sight)
    assert found is not None
    assert found.state is expected


@pytest.mark.parametrize("sight", [NOTHING, SIGNED, replace(BEGUN, outcome=CANCELLED)])
def test_a_process_that_never_signed_was_never_started(sight: Sight) -> None:
    assert standing(row(STARTING, attempt=2), sight) is None


def test_a_resumed_run_keeps_waiting_while_its_journal_shows_the_earlier_end() -> None:
    sight = replace(BEGUN, at_work=True, mark=HostMark(pid=1, attempt=2, started_at=0.0), outcome=CANCELLED)
    assert standing(row(STARTING, attempt=2), sight) == ExperimentSnapshot(state=STARTING)
    by_hand = replace(row(STARTING, attempt=1), words={})
    assert standing(by_hand, replace(sight, mark=SIGNED.mark)) == ExperimentSnapshot(state=STARTING)


def test_an_ending_of_an_earlier_process_is_not_that_of_this_one() -> None:
    sight = replace(BEGUN, mark=HostMark(pid=1, attempt=2, started_at=0.0), ending=told(1, attempt=1))
    found = standing(row(RUNNING, attempt=2), sight)
    assert found is not None
    assert "ended unexpectedly" in found.reason


def test_the_last_words_of_its_process_are_the_reason() -> None:
    found = standing(row(RUNNING), replace(BEGUN, ending=told(1)))
    assert found == ExperimentSnapshot(state=INTERRUPTED, reason="this went wrong; resume it to continue")


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
    recorder, seen = Recorder(folder, store, lambda: None), []
    for _ in range(2 * MISREADS + 1):
        step = recorder.step(found)
        assert step is not None
        found = step
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
    write_ending(folder, told(3))
    power.cut()
    assert read_ending(folder) == told(3)
