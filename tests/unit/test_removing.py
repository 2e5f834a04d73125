"""`rubberband rm`: deletes what has ended and is paid; all else is refused in a line with the way out."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from rubberband import cli
from rubberband.api.store import open_store
from rubberband.errors import InputError
from rubberband.executor import ExperimentFolder, Journal
from rubberband.executor import begin_journal as begin
from rubberband.executor.run.allowance import committed_usd
from rubberband.states import ExperimentState
from rubberband.units import month_begin, month_end
from rubberband.values.submission import Submission
from tests.builders.clocks import MID_MONTH
from tests.builders.journalled_runs import Recorded, recorded, words


@pytest.fixture(scope="module")
def run() -> Recorded:
    return replace(recorded(words(name="one")), created_at=MID_MONTH)


@pytest.fixture
def home(tmp_path: Path, run: Recorded, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RUBBERBAND_HOME", str(tmp_path))
    monkeypatch.setattr(time, "time", lambda: run.created_at)
    return tmp_path


def rm(*arguments: str, answer: str = "") -> Result:
    return CliRunner().invoke(cli.app, ["rm", *arguments], input=answer)


def refused(*arguments: str) -> str:
    error = rm(*arguments, "--yes").exception
    assert isinstance(error, InputError)
    return str(error)


def rented(run: Recorded, **changes: Any) -> Recorded:
    resources = run.setup["experiment"]["resources"] | {"provider": "aws", "checkpoints": "s3://bucket/x"}
    return replace(
        run, setup={**run.setup, "experiment": {**run.setup["experiment"], "resources": resources}}, **changes
    )


def test_an_ended_experiment_is_deleted_after_it_is_said_and_confirmed(home: Path, run: Recorded) -> None:
    folder, other = run.put(home), run.named("other").put(home)
    folder.checkpoints.joinpath("trial-0001.ckpt").write_bytes(bytes(100))
    said = rm("one", answer="n\n")
    assert "one: deletes its journal, logs, report and 1 checkpoint file" in said.stderr
    assert rm("one", "--dry-run").exit_code == 0
    assert folder.exists, "it was not confirmed"
    assert rm("one", "--yes").exit_code == 0
    assert not folder.path.exists()
    assert other.exists
    assert [path.name for path in home.iterdir() if path.name.startswith(".removed")] == []
    run.put(home)  # the name is free


def test_one_that_runs_or_may_hold_instances_stays(home: Path, run: Recorded) -> None:
    folder = run.put(home)
    run.named("cut").put(home, len(run.events) // 2)
    with folder.driving():
        assert "it is running; end it with `rubberband cancel one` first" in refused("one")
    assert "may still hold instances; run `rubberband resume cut`" in refused("one", "cut")
    assert folder.exists, "all or none"


def test_a_bill_of_this_month_counts_on_and_checkpoints_in_a_bucket_stay(home: Path, run: Recorded) -> None:
    now = run.created_at
    rented(run).put(home)
    rented(run.named("old"), created_at=month_begin(month_begin(now) - 1.0)).put(home)
    spent_usd = committed_usd(home, now)
    assert spent_usd > 0.0
    said = rm("one", "old", "--yes").stderr
    assert "one: deletes its journal" in said
    assert "its checkpoints in s3://bucket/x stay" in said
    assert list((home / "experiments").iterdir()) == []
    assert committed_usd(home, now) == pytest.approx(spent_usd)
    assert committed_usd(home, month_end(now) + 1.0) == 0.0


def test_one_that_a_service_lists_is_deleted_there(home: Path, run: Recorded) -> None:
    folder = run.put(home)
    store = open_store(None, home)
    store.add(Submission(name="one", state=ExperimentState.DONE, created_at=1.0, changed_at=1.0))
    store.close()
    assert "then `rubberband rm one --server URL` with the address that it prints" in refused("one")
    assert folder.exists


def test_a_journal_in_a_store_goes_with_the_files_of_its_home(
    home: Path, store_url: str, run: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUBBERBAND_STORE", store_url)
    folders = [ExperimentFolder(home=home, name=name, store=store_url) for name in ("one", "other", "far")]
    for folder in folders:
        if folder.name != "far":
            folder.make()
        setup = {"created_at": run.created_at, "job": run.named(folder.name).job, "setup": run.setup}
        begin(store_url, folder.name, **setup)
        with closing(Journal(store_url, folder.name)) as journal:
            journal.append(run.events)
        folder.driver_lock.touch() if folder.name != "far" else None
    listed = CliRunner().invoke(cli.app, ["ps"]).stdout.splitlines()
    assert sorted(line.split()[:2] for line in listed[1:]) == [[name, "done"] for name in ("far", "one", "other")]
    assert "s3cret" not in str(refused("far"))
    assert "it was started in another home; delete it there" in refused("far")
    assert rm("one", "--yes").exit_code == 0
    assert [folder.exists for folder in folders] == [False, True, True]
    assert not folders[0].path.exists()
    begin(store_url, "one", created_at=1.0, job=run.job, setup=run.setup)
    with closing(Journal(store_url, "one")) as journal:
        assert list(journal.events()) == [], "the name is free"


def test_an_unknown_name_is_refused_with_the_known_ones(home: Path, run: Recorded) -> None:
    run.put(home)
    assert "'two' not found" in refused("two")
    assert ExperimentFolder(home=home, name="one").exists
