"""Journals that were cut off, or lack events: what is left is told and shown, and nothing is written to them."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from rubberband.api.app import app_of
from rubberband.api.experiments import ExperimentRuns
from rubberband.api.plans.previews import Plans
from rubberband.api.routes import Service
from rubberband.api.routes.events import EventFeed
from rubberband.api.settings import Settings
from rubberband.api.store import open_store
from rubberband.cli import app
from rubberband.errors import DamagedJournalError
from rubberband.executor import ExperimentFolder, Journal, session
from rubberband.executor import read_journal as read
from rubberband.executor.journal.database import Database
from rubberband.executor.run.follower import salvage
from rubberband.running.run import run_experiment
from rubberband.states import ExperimentState
from tests.builders.service_client import served
from tests.builders.service_runs import DONE, count_of, experiment
from tests.builders.waiting import eventually

UNREADABLE = ExperimentState.UNREADABLE


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The journal of a whole run of `one`, in many pages."""
    folder = ExperimentFolder(home=tmp_path_factory.mktemp("whole"), name="one")
    run_experiment(experiment("one"), folder)
    with closing(sqlite3.connect(folder.journal)) as file:
        file.executescript("PRAGMA journal_mode=DELETE; PRAGMA page_size=512; VACUUM; PRAGMA journal_mode=WAL")
    return folder.journal.read_bytes()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ExperimentFolder:
    monkeypatch.setenv("RUBBERBAND_HOME", str(tmp_path))
    found = ExperimentFolder(home=tmp_path, name="one")
    found.make()
    run_experiment(experiment("two"), ExperimentFolder(home=tmp_path, name="two"))
    return found


def run(*words: str) -> Result:
    return CliRunner().invoke(app, words)


def refusal(result: Result) -> str:
    """The one line of a refusal."""
    assert isinstance(result.exception, DamagedJournalError), result.exception or result.output
    line = str(result.exception)
    assert "\n" not in line
    return line


@pytest.mark.by_default(2)
@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.9, 1.0])
def test_a_truncated_journal_is_reported_and_left_as_it_is(
    whole: bytes, folder: ExperimentFolder, share: float
) -> None:
    left = whole[: min(len(whole) - 1, round(share * len(whole)))]
    folder.journal.write_bytes(left)
    for command in ("resume", "status", "cancel", "logs"):
        line = refusal(run(command, "one"))
        assert line.startswith("the journal of 'one' is damaged (")
        assert f"restore {folder.journal} from a backup, or " in line
    found = salvage(folder)
    report = run("report", "one")
    if found is None or not found.events:
        assert "none of its events can be read" in refusal(report)
    else:
        assert report.exit_code == 0
        assert "warning: the journal of 'one' is damaged" in report.stderr
        assert f"its first {len(found.events)} events can be read, up to 2" in report.stderr
        assert "Best" in report.stdout or "best" in report.stdout
    listed = run("ps").stdout.splitlines()
    assert [line.split()[:2] for line in listed[1:]] == [["one", "unreadable"], ["two", "done"]]
    assert folder.journal.read_bytes() == left
    folder.journal.write_bytes(whole)
    assert run("report", "one").exit_code == 0


def test_the_more_is_left_the_more_can_be_read(whole: bytes, folder: ExperimentFolder) -> None:
    counts = []
    for end in range(len(whole) // 512):
        folder.journal.write_bytes(whole[: 512 * end])
        found = salvage(folder)
        counts.append(-1 if found is None else len(found.events))
    folder.journal.write_bytes(whole)
    assert counts == sorted(counts)
    assert counts[0] == -1
    assert 10 < counts[-1] <= count_of(folder.journal)


def test_a_broken_page_that_no_event_is_in_keeps_a_resume_from_writing(whole: bytes, folder: ExperimentFolder) -> None:
    folder.journal.write_bytes(whole)
    with closing(sqlite3.connect(folder.journal)) as file:
        file.execute("DELETE FROM events WHERE seq > 5")
        file.commit()
        (page,) = file.execute("SELECT rootpage FROM sqlite_master WHERE name = 'sqlite_autoindex_events_1'").fetchone()
    broken = bytearray(folder.journal.read_bytes())
    broken[512 * (page - 1) + 8 : 512 * page] = bytes(504)
    folder.journal.write_bytes(broken)
    assert "damaged" in refusal(run("resume", "one"))
    assert folder.journal.read_bytes() == bytes(broken)


def test_events_that_are_missing_are_reported_in_any_store(store_url: str, tmp_path: Path) -> None:
    folder = ExperimentFolder(home=tmp_path, name="one", store=store_url)
    run_experiment(experiment("one"), folder)
    with closing(Database(store_url, what="a test", remedy="none")) as database, database.writing() as connection:
        connection.exec_driver_sql("DELETE FROM events WHERE seq IN (7, 8)")
    with pytest.raises(DamagedJournalError, match=r"\(event 7 is missing.*first 7 events can be read, .* the database"):
        read(folder)
    with pytest.raises(DamagedJournalError, match="damaged"):
        session.run(folder)
    found = salvage(folder)
    assert found is not None
    assert found.result.outcome == "unfinished"


@pytest.mark.by_default(1)
@pytest.mark.parametrize("share", [0.0, 0.9])
def test_a_service_shows_what_is_left_and_is_well(whole: bytes, folder: ExperimentFolder, share: float) -> None:
    folder.journal.write_bytes(whole[: round(share * len(whole))])
    before = folder.journal.read_bytes()
    settings, store, feed = Settings(home=folder.home, hosts=("*",)), open_store(None, folder.home), EventFeed()
    runs = ExperimentRuns(settings, store, feed.wake)
    service = Service(settings=settings, store=store, plans=Plans(settings, store), runs=runs, feed=feed)
    with served(app_of(service)) as client:
        eventually(lambda: (row := store.submission("one")) and row.state is UNREADABLE)
        eventually(lambda: (row := store.submission("two")) and row.state is DONE)
        seen = client.get("/v1/experiments/one").json()
        assert seen["state"] == "unreadable"
        assert seen["reason"].startswith("its journal cannot be read: the journal of 'one' is damaged")
        assert (seen["summary"]["iterations"] > 0) is (share > 0)
        below = ["", "/report", "/trials", "/logs", "/stages"]
        pages = ["/", "/experiments/one", "/experiments/one/report", *(f"/v1/experiments/one{part}" for part in below)]
        assert max(client.get(page, headers={"accept": "text/html"}).status_code for page in pages) < 500
        for act in ("resume", "cancel", "extend"):
            answer = client.post(f"/v1/experiments/one/{act}", json={"deadline": "9h"} if act == "extend" else None)
            assert answer.status_code == 409, answer.text
            assert "damaged" in answer.json()["detail"]
        assert client.get("/readyz").status_code == 200
        assert folder.journal.read_bytes() == before
        folder.journal.write_bytes(whole)
        eventually(lambda: (row := store.submission("one")) and row.state is DONE)


def test_a_reader_keeps_the_log_that_others_in_its_process_follow(folder: ExperimentFolder, whole: bytes) -> None:
    folder.journal.write_bytes(whole)
    with closing(Journal(folder.journal_url, "one")) as followed:
        count = len(list(followed.events()))
        Journal(folder.journal_url, "one").close()
        assert salvage(folder) is not None
        for place in (count, count + 1):  # by drivers that end: the last to close takes the log away
            code = (
                "import sqlite3, sys; file = sqlite3.connect(sys.argv[1]); "
                "file.execute('INSERT INTO events (experiment, seq, occurred_at, kind, body) SELECT experiment, ?, "
                "occurred_at, kind, body FROM events WHERE seq = ?', (int(sys.argv[2]), int(sys.argv[2]) - 1)); "
                "file.commit(); file.close()"
            )
            subprocess.run([sys.executable, "-c", code, str(folder.journal), str(place)], check=True)
            assert len(list(followed.events())) == place + 1
        assert Path(f"{folder.journal}-wal").exists()
