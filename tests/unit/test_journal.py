"""What a journal keeps of each kind of event and of a job, and where it may lie; bad records are refused."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import rubberband
from rubberband.errors import JournalError
from rubberband.executor import (
    Journal,
    RestPlanned,
    TrialFailed,
    TrialReported,
    UnknownWordsError,
    decode_event,
    decode_job,
    describe,
    encode_event,
    encode_job,
    from_elsewhere,
    sqlite_url,
    written_by,
)
from rubberband.executor import begin_journal as begin
from rubberband.values.balance import BalanceUse
from tests.builders.jobs import EVENTS, JOB
from tests.builders.power_cut import PowerCut


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    opened = Journal(sqlite_url(tmp_path / "journal.db"), "test", create=True)
    yield opened
    opened.close()


def edit(folder: Path, statement: str, value: str) -> None:
    """Change a journal by hand."""
    with closing(sqlite3.connect(folder / "journal.db")) as file:
        file.execute(statement, [value])
        file.commit()


def test_a_decision_of_an_older_version_knows_of_no_trials_own_speed() -> None:
    kind, body = encode_event(EVENTS[-1])
    older = {name: value for name, value in json.loads(body).items() if name != "own"}
    decision = decode_event(kind, json.dumps(older))
    assert isinstance(decision, RestPlanned)
    assert decision.own == {}


def test_a_report_of_an_older_version_knows_of_no_unequal_workers() -> None:
    use = BalanceUse(shares=(3, 1), compute_s=(0.1, 0.1), step_s=0.11, equal_step_s=0.2, steps=9, stragglers=(1,))
    event = TrialReported(occurred_at=1.0, trial=0, attempt=1, iterations=1, metrics={}, checkpoint=None, balance=use)
    kind, body = encode_event(event)
    assert decode_event(kind, body) == event
    older = {name: value for name, value in json.loads(body).items() if name != "balance"}
    assert decode_event(kind, json.dumps(older)) == dataclasses.replace(event, balance=None)


def test_any_path_will_do(tmp_path: Path) -> None:
    for name in ("a b", "a?b", "a%20b", "a#b"):
        (tmp_path / name).mkdir()
        Journal(sqlite_url(tmp_path / name / "journal.db"), "test", create=True).close()
        assert (tmp_path / name / "journal.db").exists()


def test_an_unwritable_place_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match="cannot be opened"):
        Journal(sqlite_url(tmp_path / "file" / "journal.db"), "test", create=True)


def test_a_reader_creates_nothing(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="cannot be opened"):
        Journal(sqlite_url(tmp_path / "journal.db"), "test")
    assert list(tmp_path.iterdir()) == []


def test_broken_and_unknown_records_are_refused(journal: Journal) -> None:
    with pytest.raises(UnknownWordsError, match="an event 'FromTheFuture'"):
        decode_event("FromTheFuture", "{}")
    with pytest.raises(JournalError, match=r"broken InstanceRunning: instance: "):
        decode_event("InstanceRunning", '{"occurred_at": 1.0}')
    with pytest.raises(JournalError, match="its Job does not begin with the version that wrote it"):
        decode_job(encode_job(JOB).replace('"version":1,', ""))


def test_a_field_of_a_newer_version_is_refused_and_names_the_version(journal: Journal, tmp_path: Path) -> None:
    """It would have been dropped: a limit that the resumed run no longer keeps."""
    journal.create(created_at=1.0, job=JOB, setup={"provider": "virtual"})
    journal.append(EVENTS[:3])
    newer = encode_job(JOB).replace(f'"written_by":"{rubberband.__version__}",', '"written_by":"9.1","most_usd":5,')
    edit(tmp_path, "UPDATE experiments SET job = ?", newer)
    with pytest.raises(JournalError, match=r"version 9\.1 of rubberband and has job\.most_usd=5 in its Job, unknown"):
        journal.header()
    newer = json.dumps(json.loads(encode_event(EVENTS[2])[1]) | {"most_usd": 5})
    edit(tmp_path, "UPDATE events SET body = ? WHERE seq = 2", newer)
    with pytest.raises(JournalError, match=r"written by version 9\.1 .* most_usd=5 in its .*; install that version"):
        list(journal.events())
    with pytest.raises(JournalError, match=r"version 2 \(this one reads up to 1\)"):
        raise from_elsewhere("x", unknown(encode_job(JOB).replace('"version":1', '"version":2')), "9.1")


def unknown(job: str) -> UnknownWordsError:
    """Return the error of a job that this version does not read."""
    with pytest.raises(UnknownWordsError) as caught:
        decode_job(job)
    return caught.value


def test_a_journal_is_signed_by_the_version_that_writes_to_it_next(journal: Journal, tmp_path: Path) -> None:
    journal.create(created_at=1.0, job=JOB, setup={"provider": "virtual"})
    edit(tmp_path, "UPDATE experiments SET job = ?", encode_job(JOB).replace(rubberband.__version__, "0.2.9", 1))
    header = journal.header()
    assert header is not None
    assert header.job == JOB
    journal.sign(header.job)
    with closing(sqlite3.connect(tmp_path / "journal.db")) as file:
        assert written_by(file.execute("SELECT job FROM experiments").fetchone()[0]) == rubberband.__version__
    assert journal.header() == header


def test_a_log_that_an_earlier_journal_left_is_not_taken_for_this_ones(tmp_path: Path) -> None:
    """SQLite would add its events to the new file: those of a run that was deleted, but for its log."""
    path, log = tmp_path / "journal.db", tmp_path / "journal.db-wal"
    begin(path, "test", created_at=1.0, job=JOB, setup={})
    with closing(Journal(sqlite_url(path), "test")) as earlier:
        earlier.append(EVENTS)
        left = log.read_bytes()
    path.unlink()
    log.write_bytes(left)
    begin(path, "test", created_at=2.0, job=JOB, setup={})
    with closing(Journal(sqlite_url(path), "test")) as journal:
        assert list(journal.events()) == []
        header = journal.header()
        assert header is not None
        assert header.created_at == 2.0


def test_a_journal_that_was_begun_is_there_after_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir()
    power = PowerCut(home, monkeypatch)
    begin(home / "journal.db", "test", created_at=1.0, job=JOB, setup={})
    assert (power.survivors(tmp_path / "after") / "journal.db").exists()


def test_invalid_utf_8_is_made_printable_before_it_gets_here() -> None:
    failure = describe(ValueError("cannot decode picture-\udcff.png"), in_gang=False)
    event = TrialFailed(
        occurred_at=1.0, trial=0, attempt=1, kind="raised", message=failure.message, details=failure.details
    )
    assert decode_event(*encode_event(event)) == event
    assert "picture-\\udcff.png" in failure.message
